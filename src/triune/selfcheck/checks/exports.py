"""The exported folder, loaded as anybody would."""

from __future__ import annotations

from typing import Any

import numpy as np

from triune.launcher.explorer_side import build_engine, load_tokenizer, with_engine_dtype
from triune.launcher.trainer_side import load_policy
from triune.models import export_model, weight_digest
from triune.ports import Engine, WeightUpdate
from triune.selfcheck.checks.weights import answer
from triune.selfcheck.perturb import perturb, restored
from triune.selfcheck.probe import compare
from triune.selfcheck.report import Verdict, check, failed, passed, skipped
from triune.selfcheck.rig import Rig
from triune.selfcheck.stand_ins import copies
from triune.sync.snapshot import snapshot, torch_dtype

ASKED = 3
"""Prompts that both models answer."""


@check("export", "the exported folder holds the trained model: same tensors, same tokenizer, same greedy text")
async def export(rig: Rig) -> Verdict:
    """Move the weights (an adapter begins as nothing), export, load the folder anew, and let both answer."""
    rows = [row for row in await rig.experiences() if row.num_actions]
    if not rows:
        return skipped("the groups hold no experience to take prompts from")
    policy, target = rig.policy, rig.folder / "export"
    with restored(policy):
        await rig.lane.run(perturb, policy)
        state = await rig.lane.run(lambda: copies(policy.state()))
        await rig.lane.run(
            lambda: export_model(policy.model, target, tokenizer=rig.tokenizer.hf, source_name=rig.config.model.path)
        )
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    settings = {"path": str(target), "lora": None, "dtype": dtype, "chat_template": None}
    config = rig.config.model_copy(update={"model": rig.config.model.model_copy(update=settings)})
    reloaded = await rig.lane.run(load_policy, config)
    found = await rig.lane.run(lambda: copies(reloaded.state()))
    problem = _tensors(state, found) or _tokenizers(rig, load_tokenizer(config, target), rows)
    if problem is not None:
        return problem
    prompts = [row.tokens[: int(np.flatnonzero(row.action_mask)[0])] for row in rows]
    prompts = list({prompt.tobytes(): prompt for prompt in prompts if len(prompt)}.values())[:ASKED]
    engine = await rig.engine()
    ours = await _greedy(rig, engine, state, prompts)
    await engine.swap(rig.first, await rig.side.channel.fetch(rig.first))
    other = build_engine(with_engine_dtype(config, rig.first.dtype), rig.tokenizer, rig.lane)
    try:
        theirs = await _greedy(rig, other, found, prompts)
    finally:
        await other.close()
    for one, two in zip(ours, theirs, strict=True):
        if one != two:
            return failed(f"the trained model says {one!r} and the exported one {two!r}", "look at the export")
    return passed(f"{len(found)} tensors bit for bit, and the same greedy text on {len(prompts)} prompts")


def _tensors(state: dict[str, Any], found: dict[str, Any]) -> Verdict | None:
    lost = sorted(state.keys() ^ found.keys())
    if lost:
        return failed(
            f"{lost[0]} is {'not in the exported model' if lost[0] in state else 'new in the exported model'}: "
            "a tied head must be tied again, or written",
            "look at tie_word_embeddings in config.json, and at what the export leaves out",
        )
    if weight_digest(state) == weight_digest(found):
        return None
    odd = next(name for name in sorted(state) if not _same(state[name], found[name]))
    one, other = state[odd], found[odd]
    if one.dtype != other.dtype:
        return failed(f"{odd} is exported as {other.dtype}, trained as {one.dtype}", "export the masters' own dtype")
    apart = compare({odd: one}, {odd: other})
    return failed(
        f"{odd} differs in the exported model by {apart.relative:.2g} of its norm: an adapter that was not merged, a "
        "scale, or a dtype that rounds",
        "export the merged weights in the masters' own dtype",
        relative=apart.relative,
    )


def _same(one: Any, other: Any) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())


def _tokenizers(rig: Rig, loaded: Any, rows: list[Any]) -> Verdict | None:
    messages = next((row.messages for row in rows if row.messages), None)
    if messages and loaded.prompt(messages[:1]).ids.tolist() != rig.tokenizer.prompt(messages[:1]).ids.tolist():
        return failed(
            f"the exported tokenizer writes {loaded.prompt(messages[:1]).text!r}, the run's "
            f"{rig.tokenizer.prompt(messages[:1]).text!r}",
            "export tokenizer and chat template with the weights",
        )
    if set(loaded.stop_ids) != set(rig.tokenizer.stop_ids):
        return failed(
            f"the exported model ends with tokens {loaded.stop_ids}, the run's with {rig.tokenizer.stop_ids}",
            "export generation_config.json with every end token",
        )
    return None


async def _greedy(rig: Rig, engine: Engine, weights: dict[str, Any], prompts: list[np.ndarray]) -> list[str]:
    """What an engine says with these weights."""
    tensors, digest, dtype = await rig.lane.run(snapshot, weights, torch_dtype(rig.first.dtype))
    await engine.swap(WeightUpdate(version=rig.first.version, step=0, digest=digest, dtype=dtype), tensors)
    said = [await answer(engine, prompt, f"export {number}") for number, prompt in enumerate(prompts)]
    return [rig.tokenizer.decode(one.tokens) for one in said]
