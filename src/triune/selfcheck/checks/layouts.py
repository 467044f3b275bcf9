"""The trainer's forward and backward pass, the same in every layout and every time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from triune.records import Group
from triune.selfcheck.probe import compare
from triune.selfcheck.report import Verdict, check, failed, passed, skipped
from triune.selfcheck.rig import Rig, experiences_of
from triune.selfcheck.scores import Key, gradient_of, layouts, score
from triune.selfcheck.tolerance import exact

SAME = 1e-6
"""Two passes of the same kernels over the same numbers may differ by so much (a GPU adds in any order)."""


GRADIENT = 5e-3
"""Norm of the difference of two gradients, as a share of their norm, with exact products."""


@check("repeatable", "two passes over the same tokens give the same log-probs")
async def repeatable(rig: Rig) -> Verdict:
    """Look for dropout and other chance in the forward pass: ratios would not be 1 on an unchanged policy."""
    groups = await rig.few()
    if not any(experiences_of(group) for group in groups):
        return skipped("the groups hold no experience to score")
    once, again = [await rig.lane.run(score, rig.policy, groups) for _ in range(2)]
    gap = _gap(once, again)
    if not gap <= SAME:
        return failed(
            f"two passes over the same tokens are {gap:.3g} nats apart: dropout or another random layer is on",
            "switch it off in the model's configuration; the trainer keeps models in evaluation mode for this reason",
            gap=gap,
        )
    return passed("twice the same" if gap == 0 else f"{gap:.1g} nats apart at most", gap=gap)


@check("layout", "padding, shared beginnings and packing change neither log-probs nor gradients")
async def layout(rig: Rig) -> Verdict:
    """Lay the same rollouts out in three ways, with exact products."""
    groups = await rig.few()
    if not any(experiences_of(group) for group in groups):
        return skipped("the groups hold no experience to score")
    return await rig.lane.run(_compared, rig, groups)


def _compared(rig: Rig, groups: Sequence[Group]) -> Verdict:
    policy, ways, worst = rig.policy, layouts(rig.policy), 0.0
    with exact(policy, rig.config.trainer.float32_matmul) as bound:
        truth = score(policy, groups, ways["alone"])
        for name in ("as a run does", "padded"):
            found = score(policy, groups, ways[name])
            if found.keys() != truth.keys():
                return failed(f"laid out {name}, other tokens are trained than one row at a time", "look at the layout")
            gap = _gap(truth, found, mean=True)
            worst = max(worst, gap)
            if not gap <= bound:
                return failed(
                    f"laid out {name}, log-probs are {gap:.3g} nats per token from those of each row alone, {bound:g} "
                    f"allowed: {_what(name)}",
                    "look at the trainer's layout: positions, the mask between answers, and what stands on padding",
                    gap=gap,
                )
        alone = gradient_of(policy, groups, layout=ways["alone"])
        together = gradient_of(policy, groups, layout=ways["as a run does"])
    difference = compare(alone, together)
    if not difference.relative <= (GRADIENT if bound < 0.1 else rig.tolerance.gradient):
        return failed(
            f"laid out as a run does, the gradient differs by {difference.relative:.2g} of its norm from that of each "
            f"row alone, most in {difference.worst}",
            "look at the backward pass of the trainer's attention and head",
            gradient=difference.relative,
        )
    return passed(
        f"log-probs {worst:.2g} nats apart, gradients by {difference.relative:.2g} of their norm",
        gap=worst,
        gradient=difference.relative,
    )


def _what(name: str) -> str:
    if name == "padded":
        return "padding or other rows leak into the attention"
    return "tokens see other answers of their group, or have wrong positions"


def _gap(one: dict[Key, np.ndarray], other: dict[Key, np.ndarray], *, mean: bool = False) -> float:
    """Largest difference over all tokens, or the mean one; NaN when something is not finite."""
    gaps = np.concatenate([np.abs(one[key] - other[key]) for key in one]) if one else np.zeros(1)
    return float(gaps.mean() if mean else gaps.max())
