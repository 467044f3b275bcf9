"""One part of the reward rises while the task gets worse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from triune.monitor.alarm import State, counted, fast_and_slow
from triune.registry import brick


@brick("alarm")
@dataclass(frozen=True, kw_only=True)
class RewardHacking:
    """Goes off when a reward part rises while the metric that measures the task falls.

    Both are judged by a fast against a slow average, so that noise of single steps does not count. Without the task's
    metric in the stream it never goes off.
    """

    task: str | None = None
    """Metric that measures the task; null = `accuracy` where it is logged, else the evaluation's `eval/reward`."""

    parts: str = "reward/"
    """Prefix of the metrics that are parts of the reward."""

    margin: float = 0.05
    """How far fast and slow average must be apart."""

    patience: int = 5
    """Steps in a row."""

    policy: Literal["warn", "stop"] = "warn"
    """Say so, or end the run."""

    def __call__(self, metrics: Mapping[str, float], state: State) -> tuple[State, str]:
        task = self.task or ("accuracy" if "accuracy" in metrics else "eval/reward")
        if task not in metrics:
            return state, ""
        names = [name for name in metrics if name.startswith(self.parts) and name != task]
        for name in [task, *names]:
            state = fast_and_slow(metrics[name], state, name, 0.3, 0.05)
        rise = {name: state[f"{name}.fast"] - state[f"{name}.slow"] for name in [task, *names]}
        rising = [name for name in names if rise[name] > self.margin]
        state = counted(bool(rising) and rise[task] < -self.margin, state)
        if state["bad"] < self.patience:
            return state, ""
        return state, (
            f"{', '.join(rising)} rises while {task} falls to {state[f'{task}.fast']:.3f}; "
            "look at rollouts with `triune buffer show` and weigh the parts anew"
        )
