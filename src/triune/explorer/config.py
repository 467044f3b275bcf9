"""Settings of the section `explorer` of a run file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from triune.ports import Sampling
from triune.settings import BrickOf, Settings


class ExplorerSettings(Settings):
    """How experience is made: the engine, how tokens are chosen, and what happens to rollouts that fail."""

    engine: Annotated[Any, BrickOf("engine")] = "embedded"
    """What samples tokens: `{use: embedded, slots: 64, dtype: auto}`."""

    max_rollouts: Annotated[int, Field(ge=1)] = 256
    """Rollouts that run at the same time."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature in training; 0 would leave nothing to learn from."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the most likely tokens up to this mass; 1 = all. Needs `record_truncation`."""

    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep so many of the most likely tokens; 0 = all. Needs `record_truncation`."""

    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 = none. Needs `record_truncation`."""

    max_tokens: Annotated[int, Field(ge=1)] = 256
    """Tokens of one answer at most."""

    stop: tuple[str, ...] = ()
    """Texts that end an answer, besides the model's own end tokens."""

    record_truncation: bool = False
    """Allow truncated sampling in training; untruncated log-probs are recorded beside the sampled ones."""

    merge_turns: bool = True
    """Keep turns whose prompt extends the recorded tokens in one experience; false = one experience per turn."""

    rollout_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds a rollout may take, all its attempts together; then it ends as stop `timeout`."""

    grace_s: Annotated[float, Field(ge=0)] = 2.0
    """Seconds a rollout has to clean up after its deadline; then its runner process is killed."""

    retries: Annotated[int, Field(ge=0)] = 1
    """Further attempts of a rollout that failed, inside its deadline."""

    min_group: Annotated[int, Field(ge=1)] | None = None
    """Valid rollouts that make a group worth keeping; null = all of `algorithm.group_size`."""

    quarantine_after: Annotated[int, Field(ge=1)] = 3
    """Failed groups of one task in a row after which it is not tried again in this run; a resume gives it one more."""

    max_dropped: Annotated[int, Field(ge=1)] = 1024
    """Groups in a row that operators may drop (`drop_flat_groups`) before the run ends: nothing would be trained on."""

    runner: Literal["auto", "inline", "process"] = "auto"
    """Where workflows run: `process` = in processes that can be killed; `auto` = ours inline, other code there."""

    runners: Annotated[int, Field(ge=1)] = 2
    """Runner processes; each runs many async rollouts or one blocking rollout."""

    def sampling(self) -> Sampling:
        """How training rollouts choose tokens."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_tokens=self.max_tokens,
            stop=self.stop,
        )
