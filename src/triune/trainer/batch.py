"""From leases to laid-out micro-batches, and the streams that are computed once per step without gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from triune.algorithms import Algorithm
from triune.errors import ConfigError, TrainingError
from triune.ports import Lane, Lease
from triune.records import Group
from triune.trainer.critic import Critic
from triune.trainer.derived import DERIVED, with_derived
from triune.trainer.layout import MAX_TREE, Micro, lay_out, plan_mini_batches
from triune.trainer.policy import Policy
from triune.trainer.rows import Rows, build_rows
from triune.trainer.untrained import build_untrained

COMPUTED = frozenset({"old_logprobs", "ref_logprobs", "entropy", "behaviour_logprobs", "values", "returns"}) | DERIVED
"""Streams the trainer makes itself; others must be stored with the experience."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """What one step trains on.

    Attributes:
        rows: All valid sequences.
        minis: Micro-batches of each mini-batch; empty when there is no token to train on.
        groups: What was leased.
        derived: Names of the streams that were derived.
    """

    rows: Rows
    minis: list[list[Micro]]
    groups: Sequence[Group] = ()
    derived: Sequence[str] = ()

    @property
    def micros(self) -> list[Micro]:
        """All micro-batches of the step."""
        return [micro for mini in self.minis for micro in mini]

    @property
    def is_flat(self) -> bool:
        """Whether there are tokens, and their advantages say that there is nothing to learn from them: all are 0."""
        found = [micro.batch.streams.get("advantages") for micro in self.micros]
        return bool(found) and all(one is not None and not bool(one.any()) for one in found)


def stored_streams(algorithm: Algorithm, *, has_teacher: bool = False) -> tuple[str, ...]:
    """Names of the streams that an algorithm reads from the experience.

    Args:
        algorithm: Names the bricks.
        has_teacher: Whether there is a model to compute `teacher_logprobs` with.

    Raises:
        ConfigError: It needs values and has no critic.
    """
    if "values" in algorithm.needs and not algorithm.critic.makes_values:
        found = "found none, and the advantage needs values"
        raise ConfigError("algorithm.critic", found, "a critic", "write `critic: value_model`")
    # An advantage that is no operator is made by the trainer alone; others left their part with the experience.
    made = set() if callable(algorithm.advantage) else {"advantages"}
    if has_teacher:
        made |= {"teacher_logprobs"}
    return tuple(sorted(algorithm.needs - COMPUTED - made))


def build_batch(
    leases: Sequence[Lease],
    *,
    streams: Sequence[str],
    derived: Sequence[str] = (),
    mini_batches: int,
    budget: int,
    seed: Sequence[int],
    device: torch.device | str,
    widest: int = MAX_TREE,
) -> Batch:
    """Lay out a step: deal rollouts to mini-batches, share common beginnings or sort by length, pad.

    Args:
        leases: What the step consumes.
        streams: From `stored_streams`.
        derived: From `derived_streams`.
        mini_batches: Updates per epoch.
        budget: Tokens of a micro-batch, padding included.
        seed: Of the deal.
        device: Where tensors go.
        widest: Columns of the widest tree; 0 = no trees.
    """
    rows = with_derived(build_rows(leases, streams), derived)
    minis = [
        lay_out(rows, numbers, budget, device=device, widest=widest)
        for numbers in plan_mini_batches(rows, mini_batches, seed)
    ]
    return Batch(rows=rows, minis=minis, groups=[lease.group for lease in leases], derived=derived)


async def prepare(
    batch: Batch,
    policy: Policy,
    algorithm: Algorithm,
    lane: Lane,
    *,
    recomputes_old: bool,
    critic: Critic | None = None,
    teacher: Policy | None = None,
    state: Mapping[str, Any] | None = None,
) -> Batch:
    """Add what needs a forward pass, then what follows from it: a KL penalty in the reward, and batch advantages.

    Every micro-batch is a job of its own on the lane, so that decode steps run in between.

    Args:
        batch: As it was laid out.
        policy: Gives old log-probs and, through its reference, those of the reference.
        algorithm: Says which streams it needs.
        lane: Where torch runs.
        recomputes_old: Whether old log-probs are computed.
        critic: Gives values.
        teacher: Gives teacher log-probs.
        state: Of the algorithm's bricks.

    Raises:
        TrainingError: The batch holds pairs and the algorithm compares none, or the other way round.
    """
    if (batch.rows.unit_size == 2) != (algorithm.unit == "pair"):
        found = "pairs" if batch.rows.unit_size == 2 else "single sequences"
        raise TrainingError("batch", f"found {found}", f"what the algorithm reads: {algorithm.reads}", "lease others")
    scorer = _Scorer(
        policy=policy,
        is_old=recomputes_old,
        is_reference="ref_logprobs" in algorithm.needs,
        critic=critic,
        teacher=teacher if "teacher_logprobs" in algorithm.needs else None,
    )
    if scorer.makes_any:
        minis = [[await lane.run(scorer, micro) for micro in mini] for mini in batch.minis]
        batch = replace(batch, minis=minis)
    if batch.micros and is_kl_in_reward(algorithm):
        batch = await lane.run(_with_penalty, batch, algorithm.kl, (state or {}).get("kl", {}))
    if batch.micros and getattr(algorithm.advantage, "where", "pipeline") != "pipeline":
        batch = await lane.run(_with_advantages, batch, algorithm)
    return batch


@dataclass(frozen=True, kw_only=True)
class _Scorer:
    """Streams that are forward passes, all with the kernels and the temperature of the update."""

    policy: Policy
    is_old: bool
    is_reference: bool
    critic: Critic | None
    teacher: Policy | None

    @property
    def makes_any(self) -> bool:
        return self.is_old or self.is_reference or self.critic is not None or self.teacher is not None

    def __call__(self, micro: Micro) -> Micro:
        made: dict[str, Tensor] = {}
        with torch.no_grad():
            if self.is_old:
                made["old_logprobs"] = self.policy.logprobs(micro)[0]
            if self.is_reference:
                with self.policy.reference() as reference:
                    made["ref_logprobs"] = reference.logprobs(micro)[0]
            if self.teacher is not None:
                made["teacher_logprobs"] = self.teacher.logprobs(micro)[0]
            if self.critic is not None:
                made["values"] = self.critic.values(micro)
        return micro.with_streams(**made)


def is_kl_in_reward(algorithm: Algorithm) -> bool:
    """Whether the KL brick takes its part from the reward at every token, not from the loss."""
    return getattr(algorithm.kl, "place", "loss") == "reward"


def _with_penalty(batch: Batch, kl: Any, state: Mapping[str, Any]) -> Batch:
    """Take the KL brick's penalty from the reward at every token."""

    def penalised(micro: Micro) -> Micro:
        penalty = kl.token_penalty(micro.batch, state)
        return micro.with_streams(token_rewards=micro.batch.streams["token_rewards"] - penalty)

    with torch.no_grad():
        return replace(batch, minis=[[penalised(micro) for micro in mini] for mini in batch.minis])


def _with_advantages(batch: Batch, algorithm: Algorithm) -> Batch:
    seen = [micro.batch for micro in batch.micros]
    more = build_untrained(batch.groups, batch.rows, algorithm.advantage, batch.derived, seen[0].tokens.device)
    with torch.no_grad():
        found = algorithm.batch_advantages(
            seen if more is None else [*seen, more], num_rollouts=batch.rows.num_rollouts
        )
    assert found is not None, "the caller looked at `where`"
    values = iter(found[: len(seen)])
    return replace(batch, minis=[[micro.with_streams(**next(values)) for micro in mini] for mini in batch.minis])
