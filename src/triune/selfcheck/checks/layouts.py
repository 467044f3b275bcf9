"""The trainer's forward and backward pass, the same in every layout and every time."""

from __future__ import annotations

import numpy as np

from triune.selfcheck.probe import compare
from triune.selfcheck.report import Verdict, check, failed, passed, skipped
from triune.selfcheck.rig import Rig, experiences_of
from triune.selfcheck.scores import Key, gradient_of, layouts, score

SAME = 1e-6
"""Two passes of the same kernels over the same numbers may differ by so much (a GPU adds in any order)."""


@check("repeatable", "two passes over the same tokens give the same log-probs")
async def repeatable(rig: Rig) -> Verdict:
    """Look for dropout and other chance in the forward pass: ratios would not be 1 on an unchanged policy."""
    groups = await rig.trainable()
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
    """Lay the same rollouts out in three ways."""
    groups = await rig.trainable()
    ways = layouts(rig.policy)
    truth = await rig.lane.run(lambda: score(rig.policy, groups, ways["alone"]))
    if not truth:
        return skipped("the groups hold no experience to score")
    bound, worst = rig.tolerance.layout, 0.0
    for name, way in ways.items():
        found = await rig.lane.run(lambda way=way: score(rig.policy, groups, way))
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
    alone = await rig.lane.run(lambda: gradient_of(rig.policy, groups, layout=ways["alone"]))
    together = await rig.lane.run(lambda: gradient_of(rig.policy, groups, layout=ways["as a run does"]))
    difference = compare(alone, together)
    if not difference.relative <= rig.tolerance.gradient:
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
