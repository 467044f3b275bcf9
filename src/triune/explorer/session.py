"""The recorder: whatever reaches the engine for a rollout goes through its session and is written down here, once.

A session lives beside the engine, never in the user's process. It keeps ids, log-probs and versions of every token,
merges turns whose prompt extends the recorded ids and starts a new branch where one does not. After `close` it
refuses every call, so that a late answer can never end up in a record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from triune.errors import RolloutError
from triune.explorer.faults import Aborted, ContextFull, SessionClosed
from triune.explorer.seeds import turn_seed
from triune.models import ChatTokenizer
from triune.ports import Completion, Engine, GenerateRequest, Sampling
from triune.records import RolloutId, Stop
from triune.shapes import TokensT

Message = Mapping[str, Any]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the model said.

    Attributes:
        text: Without the stop token; special tokens inside it are spelled out.
        tokens: int32[n], as sampled.
        stop: Why it ended.
        turn: Number of the model call inside the rollout.
    """

    text: str
    tokens: TokensT
    stop: Stop
    turn: int


class Shared(msgspec.Struct, kw_only=True):
    """What all sessions of a group have in common."""

    engine: Engine
    tokenizer: ChatTokenizer
    sampling: Sampling
    seed: int
    prefix: str
    max_context: int
    merge_turns: bool = True
    oldest_version: int = -1


class Branch:
    """Ids of one token sequence: parts in order, each either read by the model or sampled."""

    __slots__ = ("ids", "length", "messages", "parts", "text", "tools", "turns")

    def __init__(self) -> None:
        self.parts: list[tuple[TokensT, Completion | None]] = []  # no part is empty
        self.turns: list[tuple[int, int, int, Stop, float]] = []  # number of the call, start, stop, why, temperature
        self.ids: TokensT | None = None
        self.length = 0
        self.text: str | None = None
        self.messages: Sequence[Message] = ()
        self.tools: Sequence[Message] = ()

    @property
    def tokens(self) -> TokensT:
        """int32[T], read and sampled; joined when first asked for."""
        if self.ids is None:
            self.ids = np.concatenate([part for part, _ in self.parts])
        return self.ids

    def add(self, part: TokensT, completion: Completion | None) -> None:
        """Append a part."""
        if len(part):
            self.parts.append((part, completion))
            self.length += len(part)
            self.ids = None


class Session:
    """Everything that one attempt of one rollout said and heard.

    Args:
        rollout: Its identity.
        shared: Engine, tokenizer and settings of its group.
        name: `str(rollout)` where the caller has it.
    """

    __slots__ = (
        "branches",
        "calls",
        "is_closed",
        "metrics",
        "name",
        "num_turns",
        "rollout",
        "shared",
        "stop",
        "turn_rewards",
    )

    def __init__(self, rollout: RolloutId, shared: Shared, name: str = "") -> None:
        self.rollout, self.shared, self.name = rollout, shared, name or str(rollout)
        self.branches: list[Branch] = []
        self.calls: dict[str, Answer] | None = None
        self.metrics: dict[str, float] | None = None
        self.num_turns = 0
        self.stop: Stop | None = None
        self.is_closed = False
        self.turn_rewards: dict[int, tuple[float | None, str | None]] | None = None

    # ------------------------------------------------------------------------------------------------ calls

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        options: Mapping[str, Any] | None = None,
        key: str = "",
    ) -> Answer:
        """Sample the next message of a conversation.

        Args:
            messages: The whole conversation so far.
            tools: Schemas shown to the model.
            options: Fields of `Sampling` that differ from the run's.
            key: Idempotency key; a call whose key was answered before gets the same answer and records nothing.

        Raises:
            SessionClosed: The rollout has ended.
            ContextFull: No room for one more token.
            Aborted: The engine gave the completion up.
        """
        if key and self.calls and key in self.calls:
            return self.calls[key]
        tokenizer = self.shared.tokenizer
        if not self.branches:
            prompt = tokenizer.prompt(messages, tools)
            answer = await self._sample(prompt.ids, prompt.text, None, prompt.ids, options, messages, tools)
        else:
            rendered = tokenizer.render(messages, tools)
            branch, added = self._find_branch(rendered)
            if branch is None:
                ids = tokenizer.encode(rendered)
                answer = await self._sample(ids, rendered, None, ids, options, messages, tools)
            else:
                assert added is not None
                ids = np.concatenate([branch.tokens, added])
                answer = await self._sample(ids, rendered, branch, added, options, messages, tools)
        return self._answered(key, answer)

    async def generate(self, prompt: Any, options: Mapping[str, Any] | None = None, key: str = "") -> Answer:
        """Sample a continuation of ids, or of raw text; ids that extend a recorded branch go on with it."""
        if key and self.calls and key in self.calls:
            return self.calls[key]
        ids = self.shared.tokenizer.encode(prompt) if isinstance(prompt, str) else np.asarray(prompt, dtype=np.int32)
        if ids.ndim != 1 or len(ids) == 0:
            raise RolloutError(self.name, f"a prompt of shape {ids.shape}", "int32[P] with at least one id")
        for branch in reversed(self.branches) if self.shared.merge_turns else ():
            if ChatTokenizer.extends(branch.tokens, ids):
                added = ids[len(branch.tokens) :]
                return self._answered(key, await self._sample(ids, None, branch, added, options))
        return self._answered(key, await self._sample(ids, None, None, ids, options))

    def note_turn(self, *, reward: float | None = None, state_key: str | None = None) -> None:
        """Give the latest model call a reward of its own, or name the state it acted in."""
        if self.num_turns == 0:
            raise RolloutError(self.name, "a note about a turn before the first model call", "at least one call")
        if self.turn_rewards is None:
            self.turn_rewards = {}
        self.turn_rewards[self.num_turns - 1] = (reward, state_key)

    def note(self, **metrics: float) -> None:
        """Add to this rollout's metrics."""
        if self.metrics is None:
            self.metrics = {}
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + float(value)

    def end(self, stop: Stop) -> None:
        """Say why the rollout ends, where the last completion does not tell (`max_turns`, `parse_error`)."""
        self.stop = stop

    def close(self) -> None:
        """Refuse every later call."""
        self.is_closed = True

    # ---------------------------------------------------------------------------------------------- private

    def _find_branch(self, rendered: str) -> tuple[Branch | None, TokensT | None]:
        """The newest branch that the conversation extends, with the ids that come on top."""
        for branch in reversed(self.branches):
            if branch.text is not None:
                added = self.shared.tokenizer.extend(branch.text, int(branch.tokens[-1]), rendered)
                if added is not None:
                    return branch, added
        return None, None

    def _answered(self, key: str, answer: Answer) -> Answer:
        if key:
            if self.calls is None:
                self.calls = {}
            self.calls[key] = answer
        return answer

    def _limits(self, num_prompt: int, options: Mapping[str, Any] | None) -> tuple[Sampling, bool]:
        """The one place where lengths are decided: sampling of a call, and whether the context bounds it."""
        sampling = self.shared.sampling
        if options:
            sampling = _changed(sampling, options, self.name)
        room = self.shared.max_context - num_prompt
        if room >= sampling.max_tokens:
            return sampling, False
        if room <= 0:
            self.stop = Stop.CONTEXT
            self.note(context_full=1.0)
            raise ContextFull(
                self.name,
                f"a prompt of {num_prompt} tokens",
                f"fewer than the model's {self.shared.max_context} positions",
                "shorten tool output, or end the rollout earlier (max_turns)",
            )
        return msgspec.structs.replace(sampling, max_tokens=room), True

    async def _sample(
        self,
        ids: TokensT,
        text: str | None,
        branch: Branch | None,
        added: TokensT,
        options: Mapping[str, Any] | None,
        messages: Sequence[Message] = (),
        tools: Sequence[Message] = (),
    ) -> Answer:
        """Ask the engine and record; everything that is ever recorded passes here."""
        if self.is_closed:
            raise SessionClosed(self.name, "a call after the rollout ended", "no calls", "await every call you start")
        shared, turn = self.shared, self.num_turns
        sampling, is_bounded = self._limits(len(ids), options)
        self.num_turns = turn + 1
        if shared.oldest_version < 0:
            shared.oldest_version = shared.engine.version
        expected = len(branch.parts) if branch is not None else 0
        completion = await shared.engine.generate(
            GenerateRequest(
                id=f"{self.name}/{turn}",
                prompt=ids,
                sampling=sampling,
                seed=turn_seed(shared.seed, self.rollout.member, self.rollout.attempt, turn),
                prefix=shared.prefix if turn == 0 else "",
            )
        )
        if self.is_closed:
            raise SessionClosed(self.name, "an answer after the rollout ended", "nothing")
        stop = Stop.CONTEXT if is_bounded and completion.stop is Stop.LENGTH else completion.stop
        if self.stop is Stop.CONTEXT:
            self.stop = None  # an earlier prompt was too long; this one was not
        said = shared.tokenizer.answer(completion.tokens)
        if branch is None or not shared.merge_turns or len(branch.parts) != expected:
            branch, added = Branch(), ids
            self.branches.append(branch)
        branch.add(added, None)
        branch.add(completion.tokens, completion)
        spoken = branch.length - len(completion.tokens)
        branch.turns.append((turn, spoken, branch.length, stop, sampling.temperature))
        branch.text = None if text is None else text + said
        if messages:
            branch.messages, branch.tools = [*messages, {"role": "assistant", "content": said}], tools
        if stop is Stop.ABORTED:
            raise Aborted(f"{self.name}/{turn}", "the engine aborted the completion")
        return Answer(text=said, tokens=completion.tokens, stop=stop, turn=turn)


def _changed(sampling: Sampling, options: Mapping[str, Any], where: str) -> Sampling:
    """The run's sampling with what one call asks for."""
    unknown = options.keys() - set(Sampling.__struct_fields__)
    if unknown:
        known = ", ".join(Sampling.__struct_fields__)
        raise RolloutError(where, f"no sampling option is called {', '.join(sorted(unknown))}", f"some of {known}")
    asked = {name: value.item() if isinstance(value, np.generic) else value for name, value in options.items()}
    if isinstance(asked.get("stop"), str):
        asked["stop"] = (asked["stop"],)  # one text, not its letters
    try:
        changed = msgspec.convert({**msgspec.structs.asdict(sampling), **asked}, Sampling)
    except msgspec.ValidationError as error:
        names, do = ", ".join(sorted(options)), "for example max_tokens=64, temperature=0.7, stop=('Observation:',)"
        raise RolloutError(
            where, f"sampling options ({names}): {error}", "numbers and texts of their types", do
        ) from None
    if changed.temperature <= 0.0 < sampling.temperature:
        raise RolloutError(
            where, "temperature 0 in a call that is trained on", "above 0", "greedy tokens have no log-prob"
        )
    if "stop_ids" in options:
        extra = (i for i in changed.stop_ids if i not in sampling.stop_ids)
        changed = msgspec.structs.replace(changed, stop_ids=(*sampling.stop_ids, *extra))
    return changed
