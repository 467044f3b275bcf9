"""An agent in an environment: reset, then act and observe until it is done."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import msgspec
from pydantic import Field

from triune import registry
from triune.errors import EnvironmentFault
from triune.explorer.faults import ContextFull
from triune.explorer.model import Model
from triune.ports import Reward
from triune.records import Stop, Task
from triune.registry import brick


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment answers to an action.

    Attributes:
        observation: Shown to the model.
        reward: Of this action.
        is_done: Whether the episode is over.
        state_key: Name of the state that was reached, where two steps may share one. It is noted with the next turn,
            which acts in it; the first turn of an environment that names states acts in `start`.
    """

    observation: str
    reward: float = 0.0
    is_done: bool = False
    state_key: str | None = None


class Environment(Protocol):
    """An episode. Methods may be plain or async; `close` is optional and is always called."""

    def reset(self, task: Task) -> Any:
        """The first observation, as text."""
        ...

    def step(self, action: str) -> Any:
        """Act; returns a `Step`."""
        ...


@brick("workflow")
@dataclass(frozen=True, kw_only=True)
class MultiTurn:
    """Let the model act in an environment; the reward is the sum over its steps, each kept with its turn.

    Attributes:
        environment: Import path `module:Class` of the environment; made anew for every rollout.
        fields: Arguments of the class.
        system: System message, for example the rules.
        max_turns: Model calls at most; a longer episode ends with stop `max_turns`.
    """

    environment: str
    fields: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    max_turns: Annotated[int, Field(ge=1)] = 8

    async def __call__(self, task: Task, model: Model) -> Reward:
        make = registry.find("workflow", self.environment, "workflow.environment")
        environment = make(**self.fields)
        try:
            return await self._episode(environment, task, model)
        finally:
            if hasattr(environment, "close"):
                await _maybe_async(environment.close())

    async def _episode(self, environment: Environment, task: Task, model: Model) -> Reward:
        chat = model.chat(system=self.system)
        observation = await _act(environment, "reset", task)
        total, turns = 0.0, 0
        state: str | None = "start"
        while True:
            try:
                action = await chat.ask(observation)
            except ContextFull:
                break  # the session has noted the stop; what was reached so far counts
            step = await _act(environment, "step", action)
            turns += 1
            total += step.reward
            names_states = turns > 1 or step.state_key is not None
            model.note_turn(reward=step.reward, state_key=state if names_states else None)
            state = step.state_key
            if step.is_done:
                break
            if turns == self.max_turns:
                model.end(Stop.MAX_TURNS)
                break
            observation = step.observation
        return Reward(total=total)


async def _act(environment: Any, method: str, argument: Any) -> Any:
    """Call the environment; what it raises is the environment's fault, not the workflow's."""
    try:
        return await _maybe_async(getattr(environment, method)(argument))
    except EnvironmentFault:
        raise
    except Exception as error:
        where = f"{type(environment).__name__}.{method}"
        raise EnvironmentFault(where, f"{type(error).__name__}: {error}") from error


async def _maybe_async(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
