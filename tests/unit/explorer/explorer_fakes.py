"""What the explorer's tests share: an engine that says what it is told, and a scheduler around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache

import numpy as np

from triune.explorer import ExplorerSettings, Scheduler, bind_workflow
from triune.models import ChatTokenizer
from triune.ports import Completion, GenerateRequest
from triune.records import GroupId, Stop, Task
from triune.testing import chats


class Talker:
    """An engine that answers each request with a text (or a completion, or an error) chosen by a function."""

    max_context = 4096

    def __init__(self, tokenizer: ChatTokenizer, say: Callable[[GenerateRequest, str], object]) -> None:
        self.tokenizer, self.say, self.version = tokenizer, say, 0
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        said = self.say(request, self.tokenizer.decode(request.prompt))
        if isinstance(said, Exception):
            raise said
        if asyncio.iscoroutine(said):
            said = await said
        if isinstance(said, Completion):
            return said
        ids = self.tokenizer.encode(str(said))
        stop = Stop.DONE if len(ids) and int(ids[-1]) in self.tokenizer.stop_ids else Stop.LENGTH
        if len(ids) > request.sampling.max_tokens:
            ids, stop = ids[: request.sampling.max_tokens], Stop.LENGTH
        return completion(ids, self.version, stop)


def completion(ids: np.ndarray, version: int = 0, stop: Stop = Stop.DONE) -> Completion:
    """A completion whose log-probs name their position."""
    n = len(ids)
    return Completion(
        tokens=np.asarray(ids, dtype=np.int32),
        logprobs=-np.arange(1, n + 1, dtype=np.float32),
        versions=np.full(n, version, dtype=np.int32),
        stop=stop,
    )


@cache
def tokenizer(kind: str = "append_only") -> ChatTokenizer:
    """One of the three kinds."""
    match kind:
        case "append_only":
            return ChatTokenizer(chats.byte_tokenizer())
        case "strips":
            return ChatTokenizer(chats.byte_tokenizer(chats.STRIPS_THINKING))
        case _:
            return ChatTokenizer(chats.byte_tokenizer(eos="<|endoftext|>"))


def make_scheduler(
    workflow, say="7<|im_end|>", reward=None, *, kind="append_only", runners=None, engine=None, greedy_member=False,
    **settings,
):  # fmt: skip
    """A scheduler whose engine says `say` (text, or a function of request and prompt text) to everything."""
    chosen = tokenizer(kind)
    engine = engine or Talker(chosen, say if callable(say) else lambda request, text: say)
    bound = bind_workflow(workflow, reward)
    defaults = {"engine": engine, "runner": "inline", "max_tokens": 256, "rollout_timeout_s": 10.0, "grace_s": 0.05}
    options = ExplorerSettings(**{**defaults, **settings})
    return Scheduler(
        engine=engine, tokenizer=chosen, workflows=lambda task: bound, settings=options, seed=1, runners=runners,
        greedy_member=greedy_member,
    )  # fmt: skip


def group_id(key: str = "k", visit: int = 0) -> GroupId:
    """A group of taskset `train`."""
    return GroupId("run", "train", key, visit)


def task(key: str = "k", **data) -> Task:
    """A task with data."""
    return Task(key=key, data=data or {"question": "3+4=", "answer": "7"})


def run_group(scheduler: Scheduler, num: int = 2, **data):
    """Run one group in a loop of its own."""
    return asyncio.run(scheduler.run(group_id(), task(**data), num=num))
