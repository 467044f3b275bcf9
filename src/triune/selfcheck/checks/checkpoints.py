"""What a checkpoint brings back."""

from __future__ import annotations

from triune.models import weight_digest
from triune.selfcheck.report import Verdict, check, failed, passed, skipped
from triune.selfcheck.rig import Rig
from triune.selfcheck.stand_ins import Given, Kept
from triune.trainer import Checkpoints

FIX = "look at what is saved and what is loaded: a resume must go on exactly where the run stopped"


@check("checkpoint", "a resumed trainer has the same weights, optimiser and position")
async def checkpoint(rig: Rig) -> Verdict:
    """Save a real step as a run does, resume another trainer from it, and compare what both would save."""
    if not await rig.trainable():
        return skipped("no group passed the pipeline, so there is nothing to save")
    step = await rig.trained("plain")
    saved = step.kept
    assert saved.state is not None, "a trainer saves at its end"
    folder = rig.new_folder()
    checkpoints = Checkpoints(folder / "checkpoints")
    await rig.lane.run(checkpoints.save, saved.state, *saved.parts)
    resumed = await rig.build_trainer(Given(), config=step.config, folder=folder)
    await resumed.loop.begin()
    found = Kept()
    resumed.loop.checkpoints = found  # type: ignore[assignment]  # in memory
    await resumed.loop.save()
    assert found.state is not None, "it was just saved"
    if found.state.step != saved.state.step or found.state.updates != saved.state.updates:
        return failed(f"resumed at step {found.state.step}, saved at step {saved.state.step}", FIX)
    for what, before, after in zip(("weights", "the optimiser"), saved.parts, found.parts, strict=False):
        lost = sorted(before.keys() ^ after.keys())
        if lost:
            return failed(f"{what}: {lost[0]} is on one side of the checkpoint only", FIX)
        digests = await rig.lane.run(lambda one=before, other=after: (weight_digest(one), weight_digest(other)))
        if digests[0] != digests[1]:
            odd = next(name for name in sorted(before) if not bool((before[name] == after[name]).all()))
            return failed(f"{what}: {odd} is not what was saved", FIX)
    trained = step.side.policy
    digests = await rig.lane.run(lambda: (weight_digest(trained.state()), weight_digest(resumed.policy.state())))
    if digests[0] != digests[1]:
        return failed("the resumed model differs from the one that was trained, outside the trained parameters", FIX)
    return passed(
        f"step {found.state.step}: {len(saved.parts[0])} tensors of weights and {len(saved.parts[1])} of the "
        "optimiser, bit for bit"
    )
