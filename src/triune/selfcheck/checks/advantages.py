"""Who is credited, and whether the first step moves that way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from triune.records import Experience, Group
from triune.selfcheck.probe import cosine
from triune.selfcheck.report import Verdict, check, failed, passed, skipped
from triune.selfcheck.rig import Rig, experiences_of, with_rewards
from triune.selfcheck.scores import gradient_of

FIX = "look at the advantage brick of the algorithm"


@check("advantages", "better rollouts are credited more, and groups without a difference nothing")
async def advantages(rig: Rig) -> Verdict:
    """Hold advantages of real groups against their rewards, then those of the same groups with rewards dealt out."""
    brick: Any = rig.algorithm.advantage
    if rig.is_imitation or not getattr(brick, "makes_advantages", True):
        return skipped("the algorithm imitates, and credits nothing")
    if not callable(brick):
        return skipped("the trainer makes the advantages of a whole batch; see `direction`")
    groups = await rig.groups()
    full = next((one.raw for one in groups if len(one.raw.members) > 1), None)
    is_half = getattr(brick, "where", "pipeline") != "pipeline"
    if full is not None and is_half and _says_nothing(credited(brick, full, DEALS["one better"])):
        return skipped("the trainer makes the advantages of a whole batch; see `direction`")
    num_mixed = 0
    for one in groups:
        if one.shaped is not None and is_plain(one.raw, one.shaped):
            problem = judge(one.shaped, rig)
            if problem is not None:
                return problem
            num_mixed += len(set(one.shaped.rewards.tolist())) > 1
    if full is None:
        return passed("groups of one: the advantage is a function of the rollout's own reward")
    for name, deal in DEALS.items():
        problem = judge(credited(brick, full, deal), rig, f" (rewards dealt out: {name})")
        if problem is not None:
            return problem
    scaled = "; the trainer goes on with them" if is_half else ""
    return passed(f"{num_mixed} sampled groups with different rewards, and {len(DEALS)} dealt ones{scaled}")


DEALS: dict[str, Callable[[Experience], float]] = {
    "all 1": lambda row: 1.0,
    "all 0": lambda row: 0.0,
    "one better": lambda row: float(row.member == 0),
    "one worse": lambda row: float(row.member != 0),
}
"""Rewards by rollout, for groups whose own may all be the same."""


def credited(brick: Any, group: Group, deal: Callable[[Experience], float]) -> Group:
    """What an advantage makes of a group whose rewards were dealt out."""
    return brick(with_rewards(group, deal))


def _says_nothing(group: Group) -> bool:
    """Whether no rollout is credited, though their rewards differ."""
    return not any(row.advantages is not None and row.advantages.any() for row in experiences_of(group))


def is_plain(raw: Group, shaped: Group) -> bool:
    """Whether operators left rewards as they were."""
    rewards = {str(row.id): row.reward for row in experiences_of(raw)}
    return all(rewards.get(str(row.id)) == row.reward for row in experiences_of(shaped))


def judge(group: Group, rig: Rig, where: str = "") -> Verdict | None:
    """What is wrong with the advantages of a group; None when nothing is."""
    rewards, credits = [], []
    for rows in group.valid_members.values():
        reward = rows[0].reward
        assert reward is not None, "a valid member has one"
        values = _of(rows)
        if values is None:
            return failed(f"{rows[0].id} has no advantage{where}", FIX)
        if not np.isfinite(values).all():
            return failed(f"{rows[0].id} has an advantage that is not finite{where}", FIX)
        for row in rows:
            outside = row.advantages[~row.action_mask] if row.advantages is not None else np.zeros(1)
            if outside.any():
                return failed(f"{row.id} has advantages on tokens that were not sampled{where}", FIX)
        rewards.append(reward)
        credits.append(float(values.mean()) if values.size else 0.0)
    if len(rewards) < 2:
        return None
    return _judge(group, np.array(rewards), np.array(credits), rig, where)


def _judge(group: Group, rewards: np.ndarray, credits: np.ndarray, rig: Rig, where: str) -> Verdict | None:
    if np.ptp(rewards) == 0.0:
        if zero_on_flat(rig.algorithm.advantage) and np.abs(credits).max() != 0.0:
            return failed(
                f"group {group.id}: all rewards are {rewards[0]:g} and advantages are {credits[0]:.3g}, not 0{where}: "
                "they are not centred",
                f"{FIX}; subtract the group's mean",
            )
        return None
    best, worst = credits[rewards == rewards.max()].mean(), credits[rewards == rewards.min()].mean()
    if best < worst:
        return failed(
            f"group {group.id}: the best rollouts have advantage {best:.3g} and the worst {worst:.3g}{where}: "
            "the sign is flipped",
            f"{FIX}; a positive advantage makes a rollout likelier",
        )
    if best == worst:
        return failed(f"group {group.id}: rewards differ and advantages do not{where}", FIX)
    return None


def zero_on_flat(brick: Any) -> bool:
    """Whether a group whose rewards are all equal gets exactly 0: so for those that compare, unless they say no."""
    return getattr(brick, "zero_on_flat", getattr(brick, "least_group", 1) > 1)


def _of(rows: Sequence[Experience]) -> np.ndarray | None:
    found = [row.advantages[row.action_mask] for row in rows if row.advantages is not None]
    return np.concatenate(found) if len(found) == len(rows) else None


@check("direction", "the first step makes better answers likelier")
async def direction(rig: Rig) -> Verdict:
    """Angle between the step's gradient and that of the rewards, made here from nothing but rewards and log-probs."""
    if rig.algorithm.needs & {"values", "teacher_logprobs"}:
        return skipped("a critic or a teacher decides what is better, not the reward alone")
    groups = await rig.trainable()
    if getattr(rig.algorithm, "unit", "") == "pair":
        weights = {str(record.chosen.id): 1.0 for group in groups for record in group.records}  # type: ignore[union-attr]
        weights |= {str(record.rejected.id): -1.0 for group in groups for record in group.records}  # type: ignore[union-attr]
    elif rig.algorithm.reads == "labels":
        rows = [row for group in groups for row in experiences_of(group)]
        weights = {str(row.id): 1.0 if (row.reward or 0.0) > 0 else -1.0 for row in rows}
    elif rig.is_imitation:
        weights = {str(row.id): 1.0 for group in groups for row in experiences_of(group)}
    else:
        weights = _reward_weights(groups, rig)
    if not any(weights.values()):
        return skipped("no group has rollouts of different worth")
    step = await rig.trained("plain")
    if not step.gradient:
        return skipped("the step left no gradient; see `first_update`")
    wanted = await rig.lane.run(gradient_of, rig.policy, groups, weights)
    angle = -cosine(wanted, step.gradient)
    if not angle > 0:
        return failed(
            f"the step's gradient points away from better answers (cosine {angle:.2f}): they would become rarer",
            "look at the signs of advantage and loss: a loss is minimised",
            cosine=angle,
        )
    return passed(f"cosine {angle:.2f} between the step and the direction of better answers", cosine=angle)


def _reward_weights(groups: Sequence[Group], rig: Rig) -> dict[str, float]:
    """Reward above the group's mean where rollouts are compared, else the reward."""
    compares = getattr(rig.algorithm.advantage, "least_group", 1) > 1
    weights: dict[str, float] = {}
    for group in groups:
        mean = float(group.rewards.mean()) if compares and len(group.rewards) else 0.0
        for row in experiences_of(group):
            weights[str(row.id)] = 0.0 if row.reward is None or not row.is_valid else row.reward - mean
    return weights
