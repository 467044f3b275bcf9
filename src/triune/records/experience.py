"""One token sequence with what was recorded about each token: the unit that is stored and trained on.

Every array has the sequence's length T as its first axis, and entry t speaks of token t:
`logprobs[t] = log p(tokens[t] | tokens[:t])`, `values[t]` = value before token t. Only the trainer shifts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from triune.errors import RecordError
from triune.records.ids import ExperienceId
from triune.shapes import LogprobsT, MaskT, StreamT, TokensT, VersionsT


class Stop(StrEnum):
    """Why a rollout, a turn or a completion ended."""

    DONE = "done"
    LENGTH = "length"
    MAX_TURNS = "max_turns"
    CONTEXT = "context"
    TIMEOUT = "timeout"
    PARSE_ERROR = "parse_error"
    ENVIRONMENT_ERROR = "environment_error"
    ABORTED = "aborted"

    @property
    def is_truncated(self) -> bool:
        """Whether the sequence ended before the policy chose to end it."""
        return self in (Stop.LENGTH, Stop.CONTEXT, Stop.MAX_TURNS, Stop.TIMEOUT, Stop.ABORTED)


class Source(StrEnum):
    """Who made the action tokens."""

    POLICY = "policy"
    EXPERT = "expert"
    HUMAN = "human"
    TEACHER = "teacher"
    REPAIRED = "repaired"
    SYNTHETIC = "synthetic"
    IMPORTED = "imported"


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One model call: the action tokens `[start, stop)` of its experience."""

    start: int
    stop: int
    reward: float | None = None
    state_key: str | None = None
    stop_reason: Stop = Stop.DONE


class Media(msgspec.Struct, frozen=True, kw_only=True):
    """A picture, sound or film by reference; the tokens `[start, stop)` stand for it."""

    sha256: str
    mime: str
    uri: str
    start: int
    stop: int


class Experience(msgspec.Struct, frozen=True, kw_only=True):
    """One token sequence.

    Attributes:
        id: Identity; `str(id)` is its key in the buffer.
        tokens: int32[T], prompt, observations and sampled tokens in the order the model saw them.
        action_mask: bool[T], True exactly on sampled tokens, the sampled stop token included.
        logprobs: float32[T] in nats, of the distribution that was sampled from; NaN where unknown, never 0.
        versions: int32[T], version of the weights that made each token's logits; -1 where not an action.
        temperature: Sampling temperature, one number or float32[T].
        raw_logprobs: float32[T], with temperature but without truncation or grammar; None when equal to `logprobs`.
        streams: Further float32 or int32 arrays [T, …] by name: `advantages`, `token_rewards`, `values`,
            `teacher_ids`, `teacher_logprobs`, `old_logprobs`, `ref_logprobs`.
        turns: Spans over the action tokens.
        reward: Total reward of the rollout; None = not known yet.
        reward_parts: Name → raw, unweighted value.
        is_valid: False when the verifier or the rollout failed; never enters statistics.
        stop: Why the rollout ended.
        source: Who made the action tokens.
        parents: Ids this was made from.
        operators: Names of the operators that touched it, in order.
        priority: Larger is leased earlier within a class.
        metrics: To the monitor, averaged over the step.
        info: Free, JSON-like.
        messages: The conversation as chat messages, for people and teachers; never tokenised again.
        tools: Tool schemas shown to the model.
        media: Pictures, sounds and films, by reference.
        unknown: Fields written by a newer version, kept so that decode → encode loses nothing.
    """

    id: ExperienceId
    tokens: TokensT
    action_mask: MaskT
    logprobs: LogprobsT
    versions: VersionsT
    temperature: float | LogprobsT = 1.0
    raw_logprobs: LogprobsT | None = None
    streams: Mapping[str, StreamT] = {}
    turns: tuple[Turn, ...] = ()
    reward: float | None = None
    reward_parts: Mapping[str, float] = {}
    is_valid: bool = True
    stop: Stop = Stop.DONE
    source: Source = Source.POLICY
    parents: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    priority: float = 0.0
    metrics: Mapping[str, float] = {}
    info: Mapping[str, Any] = {}
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    media: tuple[Media, ...] = ()
    unknown: Mapping[str, Any] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def member(self) -> int:
        """Number of the rollout inside its group."""
        return self.id.rollout.member

    @property
    def num_actions(self) -> int:
        """How many tokens were sampled."""
        return int(np.count_nonzero(self.action_mask))

    @property
    def advantages(self) -> StreamT | None:
        """float32[T], or None before an advantage was computed."""
        return self.streams.get("advantages")

    @property
    def behaviour_logprobs(self) -> LogprobsT:
        """What ratios divide by: `raw_logprobs` where recorded, else `logprobs`."""
        return self.logprobs if self.raw_logprobs is None else self.raw_logprobs

    @property
    def oldest_version(self) -> int:
        """Smallest version on action tokens; -1 when the policy sampled none."""
        versions = self.versions[self.action_mask]
        return int(versions.min()) if versions.size else -1

    def replace(self, **changes: Any) -> Experience:
        """Copy with some fields changed; arrays are shared, so treat them as read-only."""
        return msgspec.structs.replace(self, **changes)

    def with_streams(self, **streams: StreamT) -> Experience:
        """Copy with streams added or replaced."""
        return msgspec.structs.replace(self, streams={**self.streams, **streams})

    def check(self) -> None:
        """Raise RecordError where an array's first axis is not T, a dtype is wrong, or a mask lies.

        Checked at the buffer's door, not at every construction.
        """
        where, length = str(self.id), len(self.tokens)
        arrays: dict[str, tuple[Any, Any]] = {
            "tokens": (self.tokens, np.int32),
            "action_mask": (self.action_mask, np.bool_),
            "logprobs": (self.logprobs, np.float32),
            "versions": (self.versions, np.int32),
        }
        if self.raw_logprobs is not None:
            arrays["raw_logprobs"] = (self.raw_logprobs, np.float32)
        if isinstance(self.temperature, np.ndarray):
            arrays["temperature"] = (self.temperature, np.float32)
        for name, stream in self.streams.items():
            arrays[f"streams.{name}"] = (stream, None)
        for name, (array, dtype) in arrays.items():
            if not isinstance(array, np.ndarray) or array.ndim == 0 or array.shape[0] != length:
                shape = getattr(array, "shape", type(array).__name__)
                raise RecordError(where, f"{name} has shape {shape}", f"first axis {length}, the length of tokens")
            if dtype is not None and array.dtype != dtype:
                raise RecordError(where, f"{name} is {array.dtype}", np.dtype(dtype).name)
        outside = ~self.action_mask
        if not np.isnan(self.logprobs[outside]).all():
            raise RecordError(where, "a log-prob outside the action mask", "NaN there")
        if (self.versions[outside] != -1).any():
            raise RecordError(where, "a version outside the action mask", "-1 there")
        if (self.logprobs[self.action_mask] > 1e-4).any():
            raise RecordError(where, "a log-prob above 0", "log-probabilities in nats")
        if self.reward is not None and not np.isfinite(self.reward):
            raise RecordError(where, f"reward is {self.reward}", "a finite number or None")
        if not np.isfinite(self.priority):
            raise RecordError(where, f"priority is {self.priority}", "a finite number")
        for turn in self.turns:
            if not 0 <= turn.start <= turn.stop <= length or not self.action_mask[turn.start : turn.stop].all():
                raise RecordError(where, f"turn [{turn.start}, {turn.stop})", "a span of action tokens")
