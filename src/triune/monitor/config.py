"""Settings of the monitor."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from triune.settings import BrickOf, Settings


class MonitorSettings(Settings):
    """What is recorded about a run, and when a run stops itself."""

    sinks: tuple[Annotated[Any, BrickOf("sink")], ...] = ({"use": "console"}, {"use": "jsonl"})
    """Where metric rows go. `jsonl` writes `metrics.jsonl`, `console` the screen, `tensorboard` event files."""

    alarms: tuple[Annotated[Any, BrickOf("alarm")], ...] = (
        {"use": "entropy_collapse"},
        {"use": "logprob_gap"},
        {"use": "kl_growth"},
        {"use": "length_drift"},
        {"use": "reward_hacking"},
    )
    """Watches over the metric stream, each with `policy: warn` (default) or `policy: stop`."""

    heartbeat_s: float = Field(default=10.0, gt=0)
    """Seconds between two lines that say who waits for what and since when."""

    on_sink_failure: Literal["disable", "stop"] = "disable"
    """A sink that fails (disk full, folder gone): name it and go on without it, or end the run at the next step."""

    curve: bool = True
    """Draw `curve.png` (reward and evaluation accuracy over steps) when the run ends."""
