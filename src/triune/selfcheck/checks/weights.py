"""Versions of weights: named right, and really served."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from triune.models import weight_digest
from triune.ports import Completion, Engine, GenerateRequest, Sampling, WeightUpdate
from triune.records import Experience, GroupId, RolloutId, Source
from triune.selfcheck.perturb import perturb, restored
from triune.selfcheck.report import Verdict, check, failed, passed, skipped
from triune.selfcheck.rig import Rig
from triune.selfcheck.scores import key_of, score, trained_part
from triune.selfcheck.stand_ins import copies

SAME = 1e-3
"""Nats per token by which an engine may differ from itself."""

SCORED = 4
"""Sequences that are scored under each version."""


@check("versions", "every sampled token carries the version of the weights that made it")
async def versions(rig: Rig) -> Verdict:
    """All rollouts were made by version 0."""
    if rig.is_imitation:
        return skipped("nothing is sampled: demonstrations have no version")
    wanted = rig.first.version
    for row in await rig.experiences():
        found = set(row.versions[row.action_mask].tolist()) - {wanted}
        if found and row.source is Source.POLICY:
            return failed(
                f"{row.id}: tokens are labelled with version {min(found)}, and version {wanted} was served",
                "the label must be of the weights that made the logits; staleness and replay depend on it",
            )
        if (row.versions[~row.action_mask] != -1).any():
            return failed(f"{row.id}: tokens that were not sampled carry a version", "-1 belongs there")
    return passed(f"version {wanted} throughout")


@check("weight_swap", "the engine serves the weights that were published, and says which")
async def weight_swap(rig: Rig) -> Verdict:
    """Publish a perturbed copy and the original again; hold the engine's scores against the trainer's each time."""
    rows = [row for row in await rig.experiences() if row.num_actions][:SCORED]
    if not rows:
        return skipped("the groups hold no experience to score")
    engine, policy = await rig.engine(), rig.policy
    asked = [row.tokens[: engine.max_context] for row in rows]
    before = await _scores(engine, asked)
    greedy = await answer(engine, rows[0].tokens[: _prompt_end(rows[0])], "before")
    weights = await rig.lane.run(lambda: copies(policy.state()))
    version = rig.first.version
    with restored(policy):
        await rig.lane.run(perturb, policy)
        held = await rig.lane.run(weight_digest, await rig.side.channel.fetch(rig.first))
        if held != rig.first.digest:
            return failed(
                f"version {version} changed after it was published: digest {held}, {rig.first.digest} at first",
                "publish a copy, never a view of the weights that the optimiser changes",
            )
        moved, problem = await _publish(rig, engine)
        if problem is not None:
            return problem
        after = await _scores(engine, asked)
        problem = await _served(rig, engine, moved, rows, (before, after))
        if problem is not None:
            return problem
    back, problem = await _publish(rig, engine)
    if problem is not None:
        return problem
    same = await rig.lane.run(lambda: weight_digest(policy.state()) == weight_digest(weights))
    assert same, "the weights were restored"
    again = await _scores(engine, asked)
    repeat = await answer(engine, rows[0].tokens[: _prompt_end(rows[0])], "after")
    if _far(before, again) > SAME or not np.array_equal(greedy.tokens, repeat.tokens):
        return failed(
            f"with the first weights again, log-probs are {_far(before, again):.3g} nats from what they were: "
            f"the engine serves other weights than version {back.version}",
            "the engine must serve exactly what it confirmed; look at its swap",
        )
    return passed(
        f"versions {version}, {moved.version}, {back.version}: seen by digest, label and log-probs (moved by "
        f"{_far(before, after):.2g} nats, and back)",
        moved=_far(before, after),
    )


async def _publish(rig: Rig, engine: Engine) -> tuple[WeightUpdate, Verdict | None]:
    """Publish the policy's weights and swap the engine; what the labels say."""
    channel = rig.side.channel
    state = await rig.lane.run(rig.policy.state)
    update = await channel.publish(state, step=0)
    tensors = await channel.fetch(update)
    digest = await rig.lane.run(weight_digest, tensors)
    if digest != update.digest:
        return update, failed(
            f"version {update.version} was published with digest {update.digest} and arrives with {digest}",
            "the channel must hand out a copy that nobody changes",
        )
    wanted = await rig.lane.run(lambda: weight_digest(copies(_in_dtype(state, tensors))))
    if digest != wanted:
        return update, failed(
            f"version {update.version} holds other weights than the trainer has: a stale copy was published",
            "publish a snapshot of the present weights",
        )
    await engine.swap(update, tensors)
    channel.release(update.version)
    if engine.version != update.version:
        return update, failed(
            f"after the swap to version {update.version} the engine says that it serves {engine.version}",
            "a swap that was not confirmed must raise",
        )
    return update, None


def _in_dtype(state: Any, tensors: Any) -> dict[str, Any]:
    return {name: value.to(tensors[name].dtype) for name, value in state.items()}


async def _served(
    rig: Rig, engine: Engine, update: WeightUpdate, rows: list[Any], scores: tuple[list[np.ndarray], list[np.ndarray]]
) -> Verdict | None:
    """Whether the perturbed weights are those that answer."""
    before, after = scores
    group = (await rig.groups())[0].raw
    ours = await rig.lane.run(score, rig.policy, [group.with_records([warm(row) for row in rows])])
    gaps = []
    for row, served in zip(rows, after, strict=True):
        key = key_of(warm(row))
        if key is not None and key in ours:
            theirs = trained_part(row, np.pad(served, (0, len(row) - len(served)), constant_values=np.nan))
            gaps.append(np.abs(theirs - ours[key]))
    gap = float(np.nanmean(np.concatenate(gaps))) if gaps else 0.0
    moved, bound = _far(before, after), rig.tolerance.logprob
    if moved == 0.0:
        return failed(
            f"version {update.version} was confirmed and log-probs did not move: the swap is ignored, old weights "
            "go on answering",
            "the engine must serve exactly what it confirmed; look at its swap",
        )
    if gap > bound:
        return failed(
            f"under version {update.version} engine and trainer are {gap:.3g} nats apart per token, {bound:g} allowed: "
            "the engine serves other weights (those of an older version, or packed wrongly)",
            "the engine must serve exactly what it confirmed; look at its swap",
            gap=gap,
        )
    done = await answer(engine, rows[0].tokens[: _prompt_end(rows[0])], "moved")
    labels = set(done.versions.tolist())
    if labels != {update.version}:
        return failed(
            f"tokens sampled under version {update.version} are labelled {sorted(labels)}",
            "the label must be of the weights that made the logits",
        )
    return None


def warm(row: Experience) -> Experience:
    """Copy that counts, at temperature 1."""
    return row.replace(is_valid=True, temperature=1.0)


async def answer(engine: Engine, prompt: np.ndarray, name: str, num: int = 16) -> Completion:
    """The greedy continuation of a prompt."""
    group = GroupId("selfcheck", "selfcheck", name, 0)
    sampling = Sampling(temperature=0.0, max_tokens=max(1, min(num, engine.max_context - len(prompt))))
    request = GenerateRequest(id=f"{RolloutId(group, 0)}/0", prompt=prompt.astype(np.int32), sampling=sampling)
    return await asyncio.wait_for(engine.generate(request), 120)


async def _scores(engine: Engine, asked: list[np.ndarray]) -> list[np.ndarray]:
    return [await engine.logprobs(ids, temperature=1.0) for ids in asked]


def _far(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    """Mean absolute difference over all tokens, in nats."""
    return float(np.nanmean(np.abs(np.concatenate(one) - np.concatenate(other))))


def _prompt_end(row: Any) -> int:
    return max(int(np.flatnonzero(row.action_mask)[0]), 1)
