"""Groups by hand, and micro-batches of the same sequences in every layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triune.algorithms.micro_batch import SOURCES, MicroBatch
from triune.records import Experience, ExperienceId, Group, GroupId, RolloutId, Source, Task


def experience(
    member: int = 0,
    *,
    reward: float | None = 0.0,
    prompt: int = 2,
    actions: int = 3,
    group: GroupId | None = None,
    **changes: Any,
) -> Experience:
    """An experience that passes `check`: `prompt` context tokens, then `actions` sampled ones."""
    length = prompt + actions
    mask = np.arange(length) >= prompt
    rollout = RolloutId(group or GroupId("run", "train", "task", 0), member)
    made = Experience(
        id=ExperienceId(rollout, branch=changes.pop("branch", 0)),
        tokens=np.arange(length, dtype=np.int32),
        action_mask=mask,
        logprobs=np.where(mask, -0.5, np.nan).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        reward=reward,
    )
    return made.replace(**changes)


def group(rewards: Sequence[float | None], **changes: Any) -> Group:
    """A group with one experience per reward."""
    rows = tuple(experience(member, reward=reward, **changes) for member, reward in enumerate(rewards))
    return Group(id=GroupId("run", "train", "task", 0), task=Task(key="task"), records=rows)


@dataclass
class Row:
    """One sequence as plain arrays; every stream has the sequence's length. `values` are the trained critic's."""

    action_mask: np.ndarray
    streams: dict[str, np.ndarray]
    logprobs: np.ndarray
    entropy: np.ndarray
    rollout: int = 0
    reward: float = 0.0
    source: Source = Source.POLICY
    pair: int = -1
    chosen: bool = False
    weight: float = 1.0
    margin: float = 0.0
    values: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.action_mask)


def random_rows(num: int, *, seed: int = 0, missing: float = 0.1, spread: float = 0.4) -> list[Row]:
    """Ragged sequences; two in a row share a rollout, some behaviour log-probs are unknown, one row trains nothing."""
    chance, rows = np.random.default_rng(seed), []
    for number in range(num):
        length = int(chance.integers(3, 14))
        mask = chance.random(length) < 0.6
        mask[0], mask[-1] = False, True
        if number == num // 2:
            mask[:] = False
        base = -chance.random(length) * 2 - 0.05
        near = lambda: base + chance.normal(0, spread, length)  # noqa: E731, B023
        behaviour = near()
        behaviour[(chance.random(length) < missing) | ~mask] = np.nan
        streams = {
            "behaviour_logprobs": behaviour,
            "ref_logprobs": near(),
            "advantages": np.full(length, chance.normal()),
        }
        source = Source.EXPERT if number % 4 == 3 else Source.POLICY
        rows.append(Row(mask, streams, base, chance.random(length) + 0.2, number // 2, float(chance.random()), source))
    return rows


def add_streams(rows: Sequence[Row], names: Iterable[str], *, seed: int = 0) -> None:
    """Give rows further streams of plausible numbers, and values of a critic; what rows have already stays."""
    for name in sorted(names):
        chance = np.random.default_rng([seed, *name.encode()])
        for row in rows:
            if name in row.streams:
                continue
            if name.endswith("_logprobs"):
                row.streams[name] = np.minimum(row.logprobs + chance.normal(0, 0.4, len(row)), -0.01)
            elif name == "truncated":
                row.streams[name] = np.full(len(row), float(chance.random() < 0.5))
            else:
                row.streams[name] = chance.normal(0, 0.5, len(row))
    chance = np.random.default_rng([seed, 1])
    for row in rows:
        row.values = chance.normal(0, 0.5, len(row))


def add_pairs(rows: Sequence[Row], *, seed: int = 0) -> None:
    """Make neighbours that train something the halves of pairs, with a weight and a margin each."""
    chance = np.random.default_rng(seed)
    able = [row for row in rows if row.action_mask.any()]
    for number, halves in enumerate(zip(able[::2], able[1::2], strict=False)):
        chosen, weight, margin = int(chance.integers(2)), float(chance.random() + 0.5), float(chance.random())
        for half, row in enumerate(halves):
            row.pair, row.chosen, row.weight, row.margin = number, half == chosen, weight, margin


@dataclass
class Leaf:
    """The new log-probs (entropies, values) of all rows as one vector with gradient, so that layouts can be compared.

    `padding` collects what stood in the padding of each batch made; its gradient must be 0.
    """

    rows: Sequence[Row]
    dtype: torch.dtype = torch.float32
    logprobs: Tensor = field(init=False)
    entropy: Tensor = field(init=False)
    values: Tensor | None = field(init=False)
    padding: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.logprobs = self._vector("logprobs")
        self.entropy = self._vector("entropy")
        self.values = None if self.rows[0].values is None else self._vector("values")
        self._starts = np.cumsum([0, *(len(row) for row in self.rows)])

    def _vector(self, name: str) -> Tensor:
        values = np.concatenate([getattr(row, name) for row in self.rows])
        return torch.tensor(values, dtype=self.dtype, requires_grad=True)

    def padded(
        self,
        chosen: Sequence[int],
        *,
        width: int = 0,
        extra_rows: int = 0,
        fill: float = 0.0,
        left_out: Sequence[str] = (),
    ) -> MicroBatch:
        """Rows `chosen`, right-padded to at least `width`, with rows of nothing behind; padding holds `fill`."""
        width = max(width, *(len(self.rows[number]) for number in chosen))
        lines = [[(number, len(self.rows[number]))] for number in chosen] + [[]] * extra_rows
        return self._batch(lines, width, chosen, fill, left_out, is_packed=False)

    def packed(self, chosen: Sequence[int], *, tail: int = 0, fill: float = 0.0) -> MicroBatch:
        """Rows `chosen` behind each other in one line, with `tail` padding tokens."""
        line = [(number, len(self.rows[number])) for number in chosen]
        return self._batch([line], sum(size for _, size in line) + tail, chosen, fill, (), is_packed=True)

    def _batch(
        self, lines: Sequence[Sequence[tuple[int, int]]], width: int, chosen: Sequence[int], fill: float,
        left_out: Sequence[str], *, is_packed: bool,
    ) -> MicroBatch:  # fmt: skip
        shape = (len(lines), width)
        mask, segments = np.zeros(shape, bool), np.full(shape, -1)
        where = np.full(shape, int(self._starts[-1]))  # one past the end: padding
        names = [name for name in self.rows[0].streams if name not in left_out]
        streams = {name: np.full(shape, fill) for name in names}
        for y, line in enumerate(lines):
            x = 0
            for number, size in line:
                row, span = self.rows[number], slice(x, x + size)
                mask[y, span], segments[y, span] = row.action_mask, list(chosen).index(number)
                where[y, span] = np.arange(size) + self._starts[number]
                for name in names:
                    streams[name][y, span] = row.streams[name]
                x += size
        rows = [self.rows[number] for number in chosen]
        spare = 0 if is_packed else len(lines) - len(rows)
        index = torch.tensor(where)
        numbers = {pair: number for number, pair in enumerate(dict.fromkeys(row.pair for row in rows if row.pair >= 0))}
        batch = MicroBatch(
            tokens=torch.zeros(shape, dtype=torch.long),
            action_mask=torch.tensor(mask),
            segments=torch.tensor(segments) if is_packed else None,
            streams={name: torch.tensor(value, dtype=self.dtype) for name, value in streams.items()},
            rollouts=torch.tensor([row.rollout for row in rows] + [0] * spare),
            rewards=torch.tensor([row.reward for row in rows] + [torch.nan] * spare, dtype=self.dtype),
            sources=torch.tensor([SOURCES.index(row.source) for row in rows] + [0] * spare),
            pairs=torch.tensor([numbers.get(row.pair, -1) for row in rows] + [-1] * spare),
            chosen=torch.tensor([row.chosen for row in rows] + [False] * spare),
            weights=torch.tensor([row.weight for row in rows] + [torch.nan] * spare, dtype=self.dtype),
            margins=torch.tensor([row.margin for row in rows] + [torch.nan] * spare, dtype=self.dtype),
        )
        end = torch.full((1,), fill, dtype=self.dtype, requires_grad=True)
        self.padding.append(end)
        logprobs, entropy = torch.cat([self.logprobs, end])[index], torch.cat([self.entropy, end])[index]
        made = batch.with_logprobs(logprobs, entropy=entropy)
        return made if self.values is None else made.with_values(torch.cat([self.values, end])[index])
