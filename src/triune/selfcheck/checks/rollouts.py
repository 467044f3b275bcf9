"""Whether rollouts come to an end at all."""

from __future__ import annotations

from triune.selfcheck.report import Verdict, check, failed, passed
from triune.selfcheck.rig import Rig


@check("rollouts", "the workflow plays the user's tasks to the end, with the run's engine")
async def rollouts(rig: Rig) -> Verdict:
    """Every member of every group ended with a record; what failed is named with the boundary it crossed."""
    sampled = await rig.groups()
    rows = await rig.experiences()
    lost = [failure for failure in rig.failures if not failure.startswith("reward:")]
    if lost:
        return failed(
            f"{len(lost)} attempts failed, the first with {lost[0]}",
            "mend the workflow or its environment; `explorer.rollout_timeout_s` bounds how long a rollout may take",
            num_failed=len(lost),
        )
    empty = [one.raw.id for one in sampled if not len(one.raw)]
    if empty:
        return failed(f"group {empty[0]} holds no record", "return a reward from the workflow for every rollout")
    what = "rows" if rig.is_imitation else "rollouts"
    num = sum(len(one.raw) for one in sampled) if rig.is_imitation else len({row.id.rollout for row in rows})
    return passed(
        f"{num} {what} of {len(sampled)} tasks, {sum(row.num_actions for row in rows)} tokens to train on, "
        f"{rig.sampling_s:.1f} s",
        num_groups=len(sampled),
        num_rollouts=num,
        seconds=rig.sampling_s,
    )
