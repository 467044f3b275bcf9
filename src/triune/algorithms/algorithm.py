"""An algorithm names its bricks; everything it does is in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from triune.algorithms.advantages.none import NoAdvantage
from triune.algorithms.critics.none import NoCritic
from triune.algorithms.entropies.none import NoEntropy
from triune.algorithms.kls.none import NoKL
from triune.algorithms.policy_losses.reinforce import Reinforce
from triune.algorithms.progress import Progress
from triune.algorithms.samplings.fifo import Fifo
from triune.algorithms.terms import Term, metric
from triune.errors import ConfigError, TrainingError
from triune.registry import brick_field

if TYPE_CHECKING:
    from torch import Tensor

    from triune.algorithms.divider import AllSum
    from triune.algorithms.micro_batch import MicroBatch

LOSS_BRICKS = ("policy_loss", "kl", "entropy")
"""Fields whose bricks yield terms, in the order in which they are called."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Base of the zoo: bricks by kind, and what the explorer and the trainer must know of them.

    Attributes:
        group_size: Rollouts of every task.
        min_group: Fewest valid rollouts a group is trained with; null = `group_size`.
        advantage: Credits rollouts, either on each group in the pipeline or on the whole batch in the trainer.
        policy_loss: Yields the main terms.
        kl: Yields the term that holds the policy near the reference.
        entropy: Yields the term that keeps the policy from collapsing.
        critic: Estimates what is still to come, for advantages that need `values`.
        sampling: Chooses what a step trains on.
        old_logprobs: Whether log-probs of the policy that begins a step are recomputed before its first update: `auto`
            = when a step has several updates, a brick needs them, or the loss is decoupled and data may be stale.
    """

    group_size: Annotated[int, Field(ge=1)] = 8
    min_group: Annotated[int, Field(ge=1)] | None = None
    advantage: Any = brick_field("advantage", NoAdvantage())
    policy_loss: Any = brick_field("policy_loss", Reinforce())
    kl: Any = brick_field("kl", NoKL())
    entropy: Any = brick_field("entropy", NoEntropy())
    critic: Any = brick_field("critic", NoCritic())
    sampling: Any = brick_field("sampling", Fifo())
    old_logprobs: Literal["auto", "always", "never"] = "auto"

    @property
    def smallest_group(self) -> int:
        """`min_group`, or `group_size` when it is null."""
        return self.group_size if self.min_group is None else self.min_group

    @property
    def num_members(self) -> int:
        """Rollouts the explorer makes of a task: `group_size`, and one more where the advantage wants a greedy one."""
        return self.group_size + self.has_greedy_member

    @property
    def has_greedy_member(self) -> bool:
        """Whether the last member of a group answers greedily."""
        return getattr(self.advantage, "greedy_member", False)

    @property
    def needs(self) -> frozenset[str]:
        """Streams that advantage and loss read: `advantages`, `old_logprobs`, `ref_logprobs`, `entropy`, …."""
        names = ("advantage", *LOSS_BRICKS)
        return frozenset().union(*(getattr(self.brick(name), "needs", frozenset()) for name in names))

    @property
    def unit(self) -> str:
        """What a step is counted in: `task` (a group of rollouts), `sequence` or `pair`.

        The policy loss says it; one that says nothing takes groups when advantages are needed, else single sequences.
        """
        said = getattr(self.policy_loss, "unit", "")
        return said or ("task" if "advantages" in self.needs else "sequence")

    @property
    def reads(self) -> str:
        """What a step learns from: `groups` that are sampled, or rows with `answers`, `labels`, `pairs` or `texts`."""
        return "groups" if self.unit == "task" else getattr(self.policy_loss, "reads", "answers")

    def brick(self, name: str) -> Any:
        """The brick in a field."""
        return getattr(self, name)

    def recomputes_old(self, *, num_updates: int, max_staleness: int) -> bool:
        """Whether prepare computes `old_logprobs`, for this many updates per step and this staleness bound."""
        if self.old_logprobs != "auto":
            return self.old_logprobs == "always"
        is_decoupled = getattr(self.policy_loss, "is_decoupled", False)
        return num_updates > 1 or "old_logprobs" in self.needs or (is_decoupled and max_staleness > 0)

    def batch_advantages(
        self, batches: Sequence[MicroBatch], *, num_rollouts: int, all_sum: AllSum | None = None
    ) -> list[Mapping[str, Tensor]] | None:
        """Advantages that need the whole step, computed by the trainer's prepare after the other streams.

        Args:
            batches: All micro-batches of the step on this rank.
            num_rollouts: Rollouts of the step over all ranks, as numbered in `MicroBatch.rollouts`.
            all_sum: Sum over ranks; None on one rank.

        Returns:
            Streams [B, T] for each micro-batch (`advantages`, and `returns` with a critic), or None when the pipeline
            made them (`advantage.where` is `pipeline`).
        """
        if getattr(self.advantage, "where", "pipeline") == "pipeline":
            return None
        return self.advantage.over_batch(batches, all_sum or (lambda vector: vector), num_rollouts)

    def state0(self) -> dict[str, Any]:
        """State of all bricks at the start; msgpack-able, saved with every checkpoint."""
        return {name: _optional(self.brick(name), "state0", dict) for name in LOSS_BRICKS}

    def update(self, state: Mapping[str, Any], stats: Mapping[str, float]) -> dict[str, Any]:
        """State after an optimiser update, from its metrics over all ranks (`Divider.metrics`)."""
        return {name: _optional(self.brick(name), "update", lambda old, _: old, state[name], stats) for name in state}

    def terms(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """All terms of a micro-batch: the bricks', and what is always watched.

        The policy loss sees every token. Where groups are sampled, the answers of experts beside them are for it alone:
        divergence and entropy are those of what the policy samples.

        Raises:
            TrainingError: Two terms share a name, or a value and its mask differ in shape.
        """
        found: list[Term] = []
        sampled = batch.not_made_by("expert") if self.unit == "task" else batch
        for name in LOSS_BRICKS:
            seen_by_it = batch if name == "policy_loss" else sampled
            found += self.brick(name)(seen_by_it, state.get(name, {}), progress)
        found += _watched(batch, {term.name for term in found})
        seen: set[str] = set()
        for term in found:
            if term.name in seen:
                raise TrainingError("algorithm", f"two terms are called {term.name!r}", "one name each", "rename one")
            if term.value.shape != term.mask.shape:
                shapes = f"value {tuple(term.value.shape)} and mask {tuple(term.mask.shape)}"
                raise TrainingError(f"algorithm, term {term.name!r}", shapes, "one shape")
            seen.add(term.name)
        return found

    def check(self, where: str = "algorithm") -> None:
        """Raise ConfigError for a combination that cannot work, with what to write instead."""
        if self.smallest_group > self.group_size:
            found = f"found {self.min_group} with `group_size: {self.group_size}`"
            raise ConfigError(f"{where}.min_group", found, "at most the group size", "lower it")
        wanted = getattr(self.advantage, "least_group", 1)
        if self.smallest_group < wanted:
            key = "group_size" if self.group_size < wanted else "min_group"
            found = f"found {self.smallest_group}, but {_name(self.advantage)} compares the rollouts of a task"
            raise ConfigError(
                f"{where}.{key}",
                found,
                f"at least {wanted}",
                f"write `{key}: {max(wanted, 8)}`, or `advantage: reinforce`",
            )
        for name in LOSS_BRICKS:
            needs = getattr(self.brick(name), "needs", ())
            if "advantages" in needs and not getattr(self.advantage, "makes_advantages", True):
                found = f"{name} {_name(self.brick(name))} needs advantages and `advantage: none` makes none"
                raise ConfigError(f"{where}.advantage", found, "", "write `advantage: grpo`, or `policy_loss: sft`")
        if self.unit != "task" and getattr(self.advantage, "makes_advantages", True):
            found = (
                f"found {_name(self.advantage)}, and {_name(self.policy_loss)} learns from {self.reads}, not rewards"
            )
            raise ConfigError(f"{where}.advantage", found, "none", "write `advantage: none`, or another `policy_loss`")
        for name in ("advantage", *LOSS_BRICKS) if self.old_logprobs == "never" else ():
            brick = self.brick(name)
            if "old_logprobs" in getattr(brick, "needs", ()) or getattr(brick, "is_decoupled", False):
                found = f"found 'never', but {name} {_name(brick)} needs them"
                raise ConfigError(f"{where}.old_logprobs", found, "", "write `old_logprobs: auto`")
        in_reward = getattr(self.kl, "place", "loss") == "reward"
        if in_reward and not getattr(self.advantage, "takes_token_rewards", False):
            found = f"found 'reward', but {_name(self.advantage)} takes no rewards of tokens"
            raise ConfigError(f"{where}.kl.place", found, "", "write `place: loss`, or `advantage: reinforce_pp`")
        for name in ("advantage", *LOSS_BRICKS, "sampling"):
            check = getattr(self.brick(name), "check", None)
            if check is not None:
                check(f"{where}.{name}")


def _watched(batch: MicroBatch, taken: set[str]) -> list[Term]:
    """Metrics of every algorithm: sampler against trainer, tokens without behaviour, entropy."""
    known = batch.known_behaviour
    current = batch.streams.get("old_logprobs", batch.logprobs)
    by_policy = batch.from_sources("policy")
    found = [
        metric("logprob_gap", (current - batch.behaviour_logprobs).abs(), known & by_policy),
        metric("tokens_without_behaviour", (~known).to(batch.behaviour_logprobs.dtype), batch.action_mask, per="sum"),
    ]
    if "entropy" not in taken:  # the mean surprise of its own samples estimates a policy's entropy
        found.append(metric("entropy", -batch.logprobs, by_policy))
    return found


def _optional(target: Any, method: str, default: Any, *arguments: Any) -> Any:
    return getattr(target, method, default)(*arguments)


def _name(target: Any) -> str:
    return getattr(target, "__brick__", (None, type(target).__name__))[1]
