"""The sampler's log-probs against the trainer's, at the sampling settings of the run."""

from __future__ import annotations

import numpy as np

from triune.records import Experience, Source
from triune.selfcheck.report import Verdict, check, failed, passed, skipped
from triune.selfcheck.rig import Rig, experiences_of
from triune.selfcheck.scores import key_of, score, trained_part

ASKED = 6
"""Sequences that the engine scores once more, to tell which side is wrong."""


@check("logprobs", "what the sampler recorded is what the trainer computes for the same tokens and temperature")
async def logprobs(rig: Rig) -> Verdict:
    """Compare per token; where they differ, the engine scores the same ids again and tells whose fault it is."""
    if rig.is_imitation:
        return skipped("nothing is sampled: demonstrations have no log-probs of a sampler")
    rows = [row for row in await rig.experiences() if is_sampled(row)]
    if not rows:
        return skipped("no experience was sampled by the policy")
    raws = [
        one.raw.with_records([row.replace(is_valid=True) for row in experiences_of(one.raw) if is_sampled(row)])
        for one in await rig.groups()
    ]
    trained = await rig.lane.run(score, rig.policy, raws)
    pairs = [(row, trained.get(key)) for row in rows if (key := key_of(row)) is not None]
    known = [(row, values) for row, values in pairs if values is not None]
    if len(known) < len(pairs):
        return failed(
            f"{len(pairs) - len(known)} of {len(pairs)} experiences do not reach the trainer as they were recorded",
            "look at the layout of the trainer: tokens, mask or temperature differ from the record",
        )
    sampled = np.concatenate([trained_part(row, row.behaviour_logprobs) for row, _ in known])
    ours = np.concatenate([values for _, values in known])
    if not np.isfinite(ours).all():
        return failed(
            f"{int((~np.isfinite(ours)).sum())} of {ours.size} log-probs of the trainer are not finite: "
            "something overflows in its forward pass",
            "look at the weights and the dtype (float16 overflows above 65504; use float32 or bfloat16)",
        )
    if np.isnan(sampled).any():
        return failed(
            f"{int(np.isnan(sampled).sum())} sampled tokens have no recorded log-prob", "the engine must return them"
        )
    gap, worst = float(np.abs(sampled - ours).mean()), float(np.abs(sampled - ours).max())
    ratio = float(np.exp(np.clip(ours - sampled, -20, 20)).mean())
    numbers = {"gap": gap, "worst": worst, "ratio_mean": ratio, "num_tokens": float(ours.size)}
    bound = rig.tolerance.logprob
    if gap <= bound and abs(ratio - 1) <= max(rig.tolerance.ratio, 0.0):
        return passed(
            f"{gap:.2g} nats apart per token on average ({worst:.2g} at most) over {ours.size} tokens "
            f"in {rig.tolerance.name}",
            **numbers,
        )
    cause, fix = await _blame(rig, known, gap)
    return failed(f"{gap:.3g} nats apart per token on average, {bound:g} allowed: {cause}", fix, **numbers)


def is_sampled(row: Experience) -> bool:
    """Whether the policy drew it; a greedy member (a baseline) has no log-probs to train."""
    return row.source is Source.POLICY and row.num_actions > 0 and bool(np.all(row.temperature))


async def _blame(rig: Rig, known: list[tuple[Experience, np.ndarray]], gap: float) -> tuple[str, str]:
    """Which of recorder, sampler and trainer is wrong, in words."""
    engine = await rig.engine()
    longest = sorted(known, key=lambda pair: -pair[0].num_actions)[:ASKED]
    parts: list[tuple[np.ndarray, ...]] = []
    for row, ours in longest:
        heat = row.temperature if isinstance(row.temperature, float | int) else float(row.temperature[-1])
        warm = await engine.logprobs(row.tokens, temperature=float(heat))
        cold = warm if heat == 1.0 else await engine.logprobs(row.tokens, temperature=1.0)
        sampled = trained_part(row, row.behaviour_logprobs)
        parts.append((sampled, ours, trained_part(row, warm), trained_part(row, cold), trained_part(row, row.logprobs)))
    sampled, ours, warm, cold, cut = (np.concatenate(column) for column in zip(*parts, strict=True))
    near = max(rig.tolerance.logprob, 0.1 * gap)

    def agree(one: np.ndarray, other: np.ndarray) -> bool:
        return float(np.abs(one - other).mean()) <= near

    heat = rig.config.explorer.temperature
    if agree(sampled, warm) and not agree(ours, warm):
        if heat != 1.0 and agree(ours, cold):
            return (
                f"the trainer ignores the temperature: its log-probs are those at 1, answers were sampled at {heat:g}",
                "the trainer must divide logits by the temperature that stands with each experience",
            )
        return (
            "the engine's own score of the same ids agrees with what was recorded, so the trainer is wrong",
            "look at the trainer's layout (positions, masks between answers, padding); see the check `layout`",
        )
    if agree(ours, warm) and not agree(sampled, warm):
        if rig.config.explorer.sampling().is_truncated and agree(sampled, cut):
            return (
                "log-probs of the truncated distribution (top_p, top_k, min_p) were recorded where the untruncated "
                "ones belong, so every ratio is off by the mass that was cut",
                "the engine must return `raw_logprobs`; set explorer.record_truncation, or sample without truncation",
            )
        if heat != 1.0 and agree(sampled, cold):
            return (
                f"the sampler recorded log-probs at temperature 1 and sampled at {heat:g}",
                "log-probs are of the distribution that was sampled from",
            )
        is_shifted = agree(sampled[1:], warm[:-1]) or agree(sampled[:-1], warm[1:])
        where = ", shifted by one token" if is_shifted else ""
        return (
            f"trainer and engine agree on these ids, so what was recorded while sampling is wrong{where}",
            "look at the engine's sampler and at the recorder: entry t of log-probs speaks of token t",
        )
    return (
        "trainer and engine differ on the same ids, so they compute with other weights or another precision",
        "compare explorer.engine.dtype, trainer.precision and trainer.float32_matmul; see the check `weight_swap`",
    )
