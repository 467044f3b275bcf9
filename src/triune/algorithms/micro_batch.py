"""What terms see of one micro-batch: token streams and sums over sequences, however they are laid out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from triune.errors import TrainingError
from triune.records import Source

SOURCES = tuple(Source)
"""The code of a source in `MicroBatch.sources` is its position here."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """Whole sequences of one update, right-padded rows or packed into rows with segment numbers.

    Entry t of every stream speaks of token t: `logprobs[b, t] = log p(tokens[b, t] | tokens[b, :t])`; the trainer
    did the shift. What stands outside the action mask is replaced by 0 on construction, so padding can hold anything.
    Bricks never sum over an axis themselves: `segment_sum` and `segment_mean` know which layout it is.

    Axes: B rows, T tokens of a row, S sequences (S = B when padded), P pairs.

    Attributes:
        tokens: int64[B, T].
        action_mask: bool[B, T], True exactly on the tokens that are trained.
        segments: int64[B, T], number of the sequence each token belongs to, -1 on padding; None = one sequence per row.
        streams: Float tensors [B, T, …] by name: `behaviour_logprobs` (NaN where unknown), `advantages`,
            `old_logprobs` (when recomputed), `ref_logprobs`, `values`, ….
        rollouts: int64[S], number of each sequence's rollout *in the update*, the same on all ranks.
        rewards: float32[S], NaN where unknown.
        sources: int64[S], position of the source in `SOURCES`.
        temperature: float32[S].
        pairs: int64[S], number of each sequence's pair in this micro-batch, -1 for none.
        chosen: bool[S], which half of its pair a sequence is.
        weights: float32[S], weight of each sequence's pair; None = all 1.
        margins: float32[S], how much better the chosen half of each sequence's pair is; None = all 0.
        policy_values: float32[B, T] with gradient, set by `with_values`.
        policy_logprobs: float32[B, T] with gradient, set by `with_logprobs`.
        policy_entropy: float32[B, T] with gradient, set by `with_logprobs` when a brick needs `entropy`.
    """

    tokens: Tensor
    action_mask: Tensor
    segments: Tensor | None = None
    streams: Mapping[str, Tensor] = field(default_factory=dict)
    rollouts: Tensor | None = None
    rewards: Tensor | None = None
    sources: Tensor | None = None
    temperature: Tensor | None = None
    pairs: Tensor | None = None
    chosen: Tensor | None = None
    weights: Tensor | None = None
    margins: Tensor | None = None
    policy_values: Tensor | None = None
    policy_logprobs: Tensor | None = None
    policy_entropy: Tensor | None = None

    def __post_init__(self) -> None:
        if self.policy_logprobs is None and self.policy_values is None:
            object.__setattr__(self, "streams", {name: self._inside(value) for name, value in self.streams.items()})

    @classmethod
    def blank(cls, *, streams: tuple[str, ...] = (), device: str | torch.device = "cpu") -> MicroBatch:
        """One padding token and nothing to train: for a rank that got no rows but must still enter every collective."""
        empty = torch.zeros(1, 1, device=device)
        return cls(
            tokens=torch.zeros(1, 1, dtype=torch.long, device=device),
            action_mask=torch.zeros(1, 1, dtype=torch.bool, device=device),
            streams=dict.fromkeys(streams, empty),
            rewards=torch.full((1,), torch.nan, device=device),
        )

    def with_logprobs(self, logprobs: Tensor, *, entropy: Tensor | None = None) -> MicroBatch:
        """Copy that holds the current policy's log-probs (and entropy) of every action token: [B, T] with gradient."""
        inside = None if entropy is None else self._inside(entropy)
        return replace(self, policy_logprobs=self._inside(logprobs), policy_entropy=inside)

    def with_values(self, values: Tensor) -> MicroBatch:
        """Copy that holds the critic's estimates for every action token: [B, T] with gradient.

        Entry t is the expected return *before* token t is chosen, as in the stream `values` of the critic that began
        the step.
        """
        return replace(self, policy_values=self._inside(values))

    def with_streams(self, **streams: Tensor) -> MicroBatch:
        """Copy with streams [B, T, …] added or replaced, before `with_logprobs`."""
        assert self.policy_logprobs is None, "streams are complete when the forward pass begins"
        assert self.policy_values is None, "streams are complete when the forward pass begins"
        return replace(self, streams={**self.streams, **streams})

    # ------------------------------------------------------------------------------------------- streams

    def stream(self, name: str) -> Tensor:
        """A stream by name.

        Raises:
            TrainingError: The batch does not hold it.
        """
        if name not in self.streams:
            have = ", ".join(sorted(self.streams)) or "none"
            raise TrainingError(
                "algorithm", f"the batch holds no stream {name!r} (it has {have})", "", "name it in the brick's `needs`"
            )
        return self.streams[name]

    @property
    def logprobs(self) -> Tensor:
        """float32[B, T] with gradient: log-probs under the weights being trained."""
        assert self.policy_logprobs is not None, "with_logprobs was not called"
        return self.policy_logprobs

    @property
    def entropy(self) -> Tensor:
        """float32[B, T] with gradient: entropy of the distribution each action token was drawn from.

        Raises:
            TrainingError: The forward pass did not compute it, because no brick `needs` it.
        """
        if self.policy_entropy is None:
            raise TrainingError(
                "algorithm", "the entropy was not computed", "", "name `entropy` in the brick's `needs`"
            )
        return self.policy_entropy

    @property
    def new_values(self) -> Tensor:
        """float32[B, T] with gradient: the estimates of the critic being trained."""
        assert self.policy_values is not None, "with_values was not called"
        return self.policy_values

    @property
    def values(self) -> Tensor:
        """float32[B, T]: the estimates of the critic that began this step."""
        return self.stream("values")

    @property
    def returns(self) -> Tensor:
        """float32[B, T]: what the critic is to estimate."""
        return self.stream("returns")

    @property
    def teacher_logprobs(self) -> Tensor:
        """float32[B, T]: log-probs under the teacher."""
        return self.stream("teacher_logprobs")

    @property
    def advantages(self) -> Tensor:
        """float32[B, T]."""
        return self.stream("advantages")

    @property
    def ref_logprobs(self) -> Tensor:
        """float32[B, T]: log-probs under the reference policy."""
        return self.stream("ref_logprobs")

    @cached_property
    def known_behaviour(self) -> Tensor:
        """bool[B, T]: action tokens whose behaviour log-prob was recorded."""
        if "behaviour_logprobs" not in self.streams:
            return torch.zeros_like(self.action_mask)
        return self.action_mask & ~self.streams["behaviour_logprobs"].isnan()

    @cached_property
    def behaviour_logprobs(self) -> Tensor:
        """float32[B, T]: log-probs under the policy that sampled; `logprobs` without gradient where unknown."""
        if "behaviour_logprobs" not in self.streams:
            return self.logprobs.detach()
        return self.streams["behaviour_logprobs"].where(self.known_behaviour, self.logprobs.detach())

    @cached_property
    def old_logprobs(self) -> Tensor:
        """float32[B, T]: log-probs under the policy that began this step; what ratios divide by.

        Recomputed by the trainer when the algorithm asks for it, else the behaviour log-probs.
        """
        if "old_logprobs" in self.streams:
            return self.streams["old_logprobs"]
        return self.behaviour_logprobs

    def ratio_mask(self, missing_behaviour: Literal["exclude", "use_old"] = "exclude") -> Tensor:
        """bool[B, T]: tokens that may enter a term with an importance ratio."""
        return self.action_mask if missing_behaviour == "use_old" else self.known_behaviour

    def from_sources(self, *names: str) -> Tensor:
        """bool[B, T]: action tokens made by one of these sources (all, when none is named)."""
        if not names or self.sources is None:
            return self.action_mask
        is_named = torch.zeros_like(self.sources, dtype=torch.bool)
        for name in names:
            is_named |= self.sources == SOURCES.index(Source(name))
        return self.action_mask & self.spread(is_named)

    def made_by(self, *names: str) -> MicroBatch:
        """The batch as if these sources had made all there is to train; as it is when sources are unknown.

        For a part of a loss that is about some tokens alone: what it counts and averages over are those.
        """
        return self if self.sources is None else replace(self, action_mask=self.from_sources(*names))

    def not_made_by(self, *names: str) -> MicroBatch:
        """The other half of `made_by`."""
        if self.sources is None:
            return self
        return replace(self, action_mask=self.action_mask & ~self.from_sources(*names))

    @cached_property
    def sampled_rewards(self) -> Tensor:
        """float32[S]: `rewards`, and NaN where an expert wrote the answer: it earned none."""
        assert self.rewards is not None, "a batch without rewards"
        if self.sources is None:
            return self.rewards
        return self.rewards.masked_fill(self.sources == SOURCES.index(Source.EXPERT), torch.nan)

    # ------------------------------------------------------------------------------------------- sequences

    @cached_property
    def num_sequences(self) -> int:
        """S."""
        if self.segments is None:
            return self.tokens.shape[0]
        for per_sequence in (self.rollouts, self.rewards, self.sources, self.temperature, self.pairs):
            if per_sequence is not None:
                return per_sequence.shape[0]
        return int(self.segments.max()) + 1

    @cached_property
    def rollout_numbers(self) -> Tensor:
        """int64[S]: `rollouts`, or one rollout per sequence."""
        if self.rollouts is not None:
            return self.rollouts
        return torch.arange(self.num_sequences, device=self.tokens.device)

    def segment_sum(self, value: Tensor, mask: Tensor) -> Tensor:
        """[S]: sum of value[B, T] over the tokens of each sequence where the mask holds, accumulated in float64."""
        inside = value.where(mask, value.new_zeros(())).double()
        if self.segments is None:
            return inside.sum(dim=1).to(value.dtype)
        owner = self.segments.where(self.segments >= 0, self.num_sequences).reshape(-1)
        sums = inside.new_zeros(self.num_sequences + 1).index_add(0, owner, inside.reshape(-1))
        return sums[:-1].to(value.dtype)

    def segment_count(self, mask: Tensor) -> Tensor:
        """float32[S]: number of tokens of each sequence where the mask holds."""
        return self.segment_sum(mask.float(), mask)

    def segment_mean(self, value: Tensor, mask: Tensor) -> Tensor:
        """[S]: mean over the same tokens; 0 for a sequence that has none."""
        return self.segment_sum(value, mask) / self.segment_count(mask).clamp(min=1)

    def segment_any(self, mask: Tensor) -> Tensor:
        """bool[S]: whether a sequence has such a token."""
        return self.segment_count(mask) > 0

    def spread(self, per_sequence: Tensor) -> Tensor:
        """[B, T]: give every token the value of its sequence."""
        if self.segments is None:
            return per_sequence.unsqueeze(1).expand(self.tokens.shape)
        return per_sequence[self.segments.clamp(min=0)]

    def halves(self, per_sequence: Tensor) -> tuple[Tensor, Tensor]:
        """([P], [P]): values of the chosen and of the rejected half of each pair, in the order of their numbers.

        P is 0 in a batch without pairs, as on a rank that got no rows.
        """
        if self.pairs is None or self.chosen is None:
            return per_sequence[:0], per_sequence[:0]
        paired, order = self.pairs >= 0, self.pairs.argsort(stable=True)
        order = order[paired[order]]
        is_chosen = self.chosen[order]
        return per_sequence[order[is_chosen]], per_sequence[order[~is_chosen]]

    # ------------------------------------------------------------------------------------------- inside

    def _inside(self, value: Tensor) -> Tensor:
        """0 outside the action mask: gradients and garbage (NaN too) end here."""
        mask = self.action_mask
        while mask.dim() < value.dim():
            mask = mask.unsqueeze(-1)
        return value.where(mask, value.new_zeros(()))
