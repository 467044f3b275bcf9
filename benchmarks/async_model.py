"""A discrete-event model of exploring and training side by side. It imports nothing of Triune.

Rollouts with log-normal latencies run on a fixed number of lanes; a group is ready when its last member is; a trainer
takes `groups` of them per step and needs `train` time units. What differs is when rollouts may start and with which
weights:

* `drain`: a group may start while fewer than `(version + staleness + 1) x groups` were admitted, and never while newer
  weights wait: then running rollouts finish first.
* `inflight`: weights are swapped under running rollouts. A group whose oldest weights fell more than `staleness`
  versions behind is ended and replaced, while it runs or before it is trained on.

`python benchmarks/async_model.py` prints the speed-up over strictly synchronous exploring next to the closed form
`(kR + T + S) / max(R, T)` and to the figures of a published toy simulation.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to run.

    Attributes:
        style: `drain` or `inflight`.
        staleness: Versions an experience may be behind when it is trained on.
        groups: Groups per step.
        size: Rollouts per group.
        lanes: Rollouts at the same time.
        sigma: Of the log-normal latency; its median is 1 time unit.
        train: Time units of a step; None = R, what a batch takes when it is spread evenly.
        sync: Time units for which starts wait while weights are swapped.
        overhead: Time units between a rollout's end and the next one's start on its lane.
    """

    style: str = "drain"
    staleness: int = 0
    groups: int = 24
    size: int = 32
    lanes: int = 128
    sigma: float = 1.0
    train: float | None = None
    sync: float = 0.0
    overhead: float = 0.0

    @property
    def spread(self) -> float:
        """R: time units of a batch spread evenly over the lanes."""
        return self.groups * self.size * math.exp(self.sigma**2 / 2) / self.lanes

    @property
    def step(self) -> float:
        """T: time units of training one batch."""
        return self.spread if self.train is None else self.train


SETTINGS = {
    "sync drain": Setting(),
    "one step off": Setting(staleness=1),
    "in flight, staleness 1": Setting(style="inflight", staleness=1),
    "in flight, staleness 2": Setting(style="inflight", staleness=2),
    "in flight, staleness 4": Setting(style="inflight", staleness=4),
}
"""The settings that are compared, fastest last."""

PUBLISHED = {
    "one step off": 1.3,
    "in flight, staleness 1": 2.3,
    "in flight, staleness 2": 3.7,
    "in flight, staleness 4": 4.0,
}
"""Speed-ups of an earlier toy simulation (sigma 1, 128 lanes, R = T)."""


def latencies(sigma: float, seed: int) -> Iterator[float]:
    """Latencies in the order in which rollouts start."""
    draw = random.Random(seed)
    while True:
        yield draw.lognormvariate(0.0, sigma)


@dataclass
class _Group:
    open: int
    running: int = 0
    oldest: int = -1


class Model:
    """One simulated run."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting = setting
        self.latency = latencies(setting.sigma, seed)
        self.now, self.version, self.served = 0.0, 0, 0
        self.free, self.admitted, self.refunded, self.running = setting.lanes, 0, 0, 0
        self.queue: deque[int] = deque()
        self.open: dict[int, _Group] = {}
        self.ready: deque[int] = deque()  # oldest version of each finished group
        self.is_training, self.swaps_until = False, 0.0
        self.events: list[tuple[float, int, str, int]] = []
        self.num_events = 0
        self.published: list[float] = []
        self.trained_staleness: list[int] = []

    def run(self, steps: int) -> list[float]:
        """Times at which versions 1 … `steps` were published."""
        self.admit()
        while len(self.published) < steps:
            self.now, _, kind, group = heapq.heappop(self.events)
            if kind == "end":
                self.end(group)
            elif kind == "trained":
                self.publish()
            self.train()
            self.admit()
        return self.published

    def later(self, delay: float, kind: str, group: int = -1) -> None:
        """Put an event."""
        self.num_events += 1
        heapq.heappush(self.events, (self.now + delay, self.num_events, kind, group))

    def admit(self) -> None:
        """Admit groups while there are slots and nothing waits for a lane."""
        chosen = self.setting
        while not self.queue and self.free:
            if self.admitted - self.refunded >= (self.version + chosen.staleness + 1) * chosen.groups:
                return
            if chosen.style == "drain" and self.served != self.version:
                if self.running:
                    return
                self.swap()
            if self.now < self.swaps_until:
                return
            self.open[self.admitted] = _Group(chosen.size)
            self.queue.extend([self.admitted] * chosen.size)
            self.admitted += 1
            self.fill()

    def swap(self) -> None:
        """Serve the newest version from now on; starts wait while weights are loaded."""
        self.served = self.version
        if self.setting.sync:
            self.swaps_until = self.now + self.setting.sync
            self.later(self.setting.sync, "swapped")

    def fill(self) -> None:
        """Give free lanes to members that wait."""
        while self.free and self.queue:
            number = self.queue.popleft()
            group = self.open.get(number)
            if group is None:
                continue
            self.free -= 1
            self.running += 1
            group.running += 1
            if group.oldest < 0:
                group.oldest = self.served
            self.later(next(self.latency) + self.setting.overhead, "end", number)

    def end(self, number: int) -> None:
        """A rollout ends; its group is ready with its last member."""
        group = self.open.get(number)
        if group is None:  # it was ended before
            return
        self.free += 1
        self.running -= 1
        group.running -= 1
        group.open -= 1
        if group.open == 0:
            self.ready.append(group.oldest)
            del self.open[number]
        self.fill()

    def train(self) -> None:
        """Take a batch when there is one; what is too old gives its slot back."""
        if self.is_training:
            return
        floor = self.version - self.setting.staleness
        fresh = deque(oldest for oldest in self.ready if oldest >= floor)
        self.refunded += len(self.ready) - len(fresh)
        self.ready = fresh
        if len(self.ready) >= self.setting.groups:
            batch = [self.ready.popleft() for _ in range(self.setting.groups)]
            self.trained_staleness += [self.version - oldest for oldest in batch]
            self.is_training = True
            self.later(self.setting.step, "trained")

    def publish(self) -> None:
        """A step is done: a new version; in flight it is served at once and what is too old ends."""
        self.is_training = False
        self.version += 1
        self.published.append(self.now)
        if self.setting.style == "inflight":
            floor = self.version - self.setting.staleness
            for number in [n for n, group in self.open.items() if 0 <= group.oldest < floor]:
                group = self.open.pop(number)
                self.free += group.running
                self.running -= group.running
                self.refunded += 1
            self.swap()
            self.fill()


def step_time(setting: Setting, *, steps: int = 60, skip: int = 10, seeds: int = 3) -> float:
    """Mean time units per step in the steady state, over several seeds."""
    found = []
    for seed in range(seeds):
        times = Model(setting, seed).run(steps)
        found.append((times[-1] - times[skip]) / (len(times) - 1 - skip))
    return statistics.fmean(found)


def speed_ups(steps: int = 60, seeds: int = 3, **changes: float) -> dict[str, float]:
    """How much faster each setting is than `sync drain`."""
    base = step_time(replace(SETTINGS["sync drain"], **changes), steps=steps, seeds=seeds)
    return {
        name: base / step_time(replace(setting, **changes), steps=steps, seeds=seeds)
        for name, setting in SETTINGS.items()
        if name != "sync drain"
    }


def limit(setting: Setting, sync_step: float) -> float:
    """The closed form (kR + T + S) / max(R, T), with kR + T + S measured as the synchronous step."""
    return sync_step / max(setting.spread, setting.step)


def main() -> None:
    """Print the table."""
    base = SETTINGS["sync drain"]
    sync_step = step_time(base)
    print(f"{base.groups} groups x {base.size}, {base.lanes} lanes, sigma {base.sigma}, R = T = {base.spread:.2f}")
    print(f"k = {(sync_step - base.step) / base.spread:.2f}, limit {limit(base, sync_step):.2f}")
    for name, found in speed_ups().items():
        print(f"{name:26s} {found:5.2f}x   published {PUBLISHED[name]:.1f}x")


if __name__ == "__main__":
    main()
