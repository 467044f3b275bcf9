"""What a workflow talks to: `Model` and `Chat`, the same in process, in a runner and in a plain thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from triune.explorer.session import Answer
from triune.explorer.tools import Tool, read_calls, run_call
from triune.records import Stop

T = TypeVar("T")
Message = Mapping[str, Any]

_SEQUENCES = (list, tuple)
_NOT_PARSED = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError)


class Caller(Protocol):
    """Where calls are recorded: a session, or its proxy in a runner process."""

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Message], options: Mapping[str, Any] | None, key: str
    ) -> Answer: ...

    async def generate(self, prompt: Any, options: Mapping[str, Any] | None, key: str) -> Answer: ...

    def note_turn(self, *, reward: float | None = None, state_key: str | None = None) -> None: ...

    def note(self, **metrics: float) -> None: ...

    def end(self, stop: Stop) -> None: ...


class Model:
    """The policy, as one rollout sees it. Every token it samples is recorded; none is lost, none is made up."""

    __slots__ = ("_caller",)

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def chat(self, system: str | None = None, *, tools: Sequence[Callable[..., Any]] = (), **sampling: Any) -> Chat:
        """Start a conversation.

        Args:
            system: System message.
            tools: Functions the model may call; their signatures and docstrings become schemas.
            sampling: Fields of `Sampling` for all its calls (`temperature`, `max_tokens`, `stop` …).
        """
        messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        return Chat(self._caller, messages, [Tool.of(tool) for tool in tools], sampling)

    async def generate(self, prompt: Sequence[Message] | Any, **sampling: Any) -> Answer:
        """Sample once from chat messages, token ids or raw text; ids go to the engine exactly as given."""
        if isinstance(prompt, _SEQUENCES) and prompt and isinstance(prompt[0], dict):
            return await self._caller.chat(prompt, (), sampling or None, "")
        return await self._caller.generate(prompt, sampling or None, "")

    def note(self, **metrics: float) -> None:
        """Add numbers to this rollout's metrics.

        A step's row has their means over rollouts. A name that Triune uses itself (`reward`, `turns`) or adds up
        (`num_…`) stands there under `user/`.
        """
        self._caller.note(**metrics)

    def note_turn(self, *, reward: float | None = None, state_key: str | None = None) -> None:
        """Give the latest model call a reward of its own, or name the state it acted in."""
        self._caller.note_turn(reward=reward, state_key=state_key)

    def end(self, stop: Stop) -> None:
        """Say why the rollout ends where the last answer does not tell, for example `Stop.MAX_TURNS`."""
        self._caller.end(stop)


class Chat:
    """A conversation: what was said is never changed, only continued.

    Attributes:
        messages: The conversation so far.
        last: The model's latest answer with its ids and stop reason; None before the first.
    """

    __slots__ = ("_caller", "_sampling", "_schemas", "_tools", "last", "messages")

    def __init__(
        self, caller: Caller, messages: list[Message], tools: Sequence[Tool], sampling: dict[str, Any]
    ) -> None:
        self._caller, self.messages, self._sampling = caller, messages, sampling
        self._tools = {tool.name: tool for tool in tools}
        self._schemas: Sequence[Message] = [tool.schema for tool in tools] if tools else ()
        self.last: Answer | None = None

    async def ask(
        self, text: str | None = None, *, parse: Callable[[str], T] | None = None, max_calls: int = 8, **sampling: Any
    ) -> Any:
        """Say something as the user and return the model's answer.

        With tools, calls are run and their results shown to the model until it answers without one.

        Args:
            text: The user's message; None goes on from the conversation as it is.
            parse: Applied to the stripped answer; where it raises, the result is None and `parse_errors` counts.
            max_calls: Model calls of this question at most, when there are tools.
            sampling: Fields of `Sampling` for this question.
        """
        if text is not None:
            self.say(text)
        options = {**self._sampling, **sampling} if sampling else self._sampling
        for _ in range(max_calls if self._tools else 1):
            answer = await self._caller.chat(self.messages, self._schemas, options or None, "")
            self.last = answer
            self.messages.append({"role": "assistant", "content": answer.text})
            if not self._tools or not await self._use_tools(answer.text):
                return self._parsed(answer.text, parse)
        self._caller.end(Stop.MAX_TURNS)
        assert self.last is not None
        return self._parsed(self.last.text, parse)

    def say(self, text: str, role: str = "user") -> None:
        """Add a message without asking the model."""
        self.messages.append({"role": role, "content": text})

    def observe(self, output: str, name: str = "") -> None:
        """Add what a tool returned."""
        self.messages.append({"role": "tool", "content": output, **({"name": name} if name else {})})

    def _parsed(self, text: str, parse: Callable[[str], T] | None) -> Any:
        if parse is None:
            return text
        try:
            return parse(text.strip())
        except _NOT_PARSED:
            self._caller.note(parse_errors=1.0)
            return None

    async def _use_tools(self, text: str) -> bool:
        """Run the calls in an answer and add what they returned; whether there were any."""
        calls, problems = read_calls(text)
        for problem in problems:
            self._caller.note(malformed_tool_calls=1.0)
            self.observe(problem)
        for call in calls:
            output, is_error = await run_call(self._tools, call)
            self._caller.note(tool_calls=1.0, tool_errors=float(is_error))
            self.observe(output, call.name)
        return bool(calls or problems)


class BlockingModel:
    """`Model` for plain functions that run in a thread: the same methods, which wait for the answer."""

    def __init__(self, model: Model, loop: asyncio.AbstractEventLoop) -> None:
        self._model, self._loop = model, loop

    def chat(
        self, system: str | None = None, *, tools: Sequence[Callable[..., Any]] = (), **sampling: Any
    ) -> BlockingChat:
        """Start a conversation; see `Model.chat`."""
        return BlockingChat(self._model.chat(system, tools=tools, **sampling), self._loop)

    def generate(self, prompt: Any, **sampling: Any) -> Answer:
        """Sample once; see `Model.generate`."""
        return _wait(self._model.generate(prompt, **sampling), self._loop)

    def note(self, **metrics: float) -> None:
        """See `Model.note`."""
        self._model.note(**metrics)

    def note_turn(self, *, reward: float | None = None, state_key: str | None = None) -> None:
        """See `Model.note_turn`."""
        self._model.note_turn(reward=reward, state_key=state_key)

    def end(self, stop: Stop) -> None:
        """See `Model.end`."""
        self._model.end(stop)


class BlockingChat:
    """`Chat` for plain functions."""

    def __init__(self, chat: Chat, loop: asyncio.AbstractEventLoop) -> None:
        self._chat, self._loop = chat, loop

    @property
    def messages(self) -> list[Message]:
        """The conversation so far."""
        return self._chat.messages

    @property
    def last(self) -> Answer | None:
        """The model's latest answer."""
        return self._chat.last

    def ask(self, text: str | None = None, **options: Any) -> Any:
        """See `Chat.ask`."""
        return _wait(self._chat.ask(text, **options), self._loop)

    def say(self, text: str, role: str = "user") -> None:
        """See `Chat.say`."""
        self._chat.say(text, role)

    def observe(self, output: str, name: str = "") -> None:
        """See `Chat.observe`."""
        self._chat.observe(output, name)


def _wait(call: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    return asyncio.run_coroutine_threadsafe(call, loop).result()
