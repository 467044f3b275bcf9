"""Make long answers cost something."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from triune.errors import ConfigError
from triune.pipelines.rewards import with_reward
from triune.records import Group
from triune.registry import brick


@brick("operator")
@dataclass(frozen=True, kw_only=True)
class LengthPenalty:
    """Subtract from the reward what an answer's length costs; length = sampled tokens of the rollout, over all turns.

    `soft_overlong` costs nothing up to `max_tokens - margin`, then rises linearly to 1 at `max_tokens` and stays there:
    it warns before the limit cuts. `linear` costs length / max_tokens from the first token on. The cost, unweighted and
    negative, is the reward part `length_penalty`; the task's reward stays visible as metric `raw_reward`.

    Source: soft overlong punishment, DAPO, arXiv:2503.14476, eq. 13.

    Attributes:
        max_tokens: Where the full penalty is reached; usually `explorer.max_tokens`.
        margin: Tokens before `max_tokens` in which the soft penalty rises.
        style: How cost grows with length.
        weight: Reward lost at the full penalty.
    """

    max_tokens: Annotated[int, Field(gt=0)]
    margin: Annotated[int, Field(gt=0)] | None = None
    style: Literal["soft_overlong", "linear"] = "soft_overlong"
    weight: Annotated[float, Field(ge=0)] = 1.0

    def __call__(self, group: Group) -> Group:
        """Return the group with penalised rewards; rollouts without a known reward stay as they are."""
        changed = {}
        for rows in group.valid_members.values():
            penalty = self.penalty(sum(row.num_actions for row in rows))
            if penalty == 0.0:
                continue
            for row in rows:
                assert row.reward is not None, "valid members have a reward"
                reward = row.reward + self.weight * penalty
                changed[id(row)] = with_reward(row, reward, parts={"length_penalty": penalty})
        if not changed:
            return group
        return group.with_records([changed.get(id(row), row) for row in group.records])

    def penalty(self, num_tokens: int) -> float:
        """In [-1, 0] for `soft_overlong`; -num_tokens / max_tokens for `linear`."""
        if self.style == "linear":
            return -num_tokens / self.max_tokens
        margin = self.margin or max(self.max_tokens // 4, 1)
        return -min(max((num_tokens - (self.max_tokens - margin)) / margin, 0.0), 1.0)

    def check(self, where: str) -> None:
        """Raise ConfigError when the margin does not fit under the limit, or is given where it does nothing."""
        if self.margin is not None and self.style == "linear":
            raise ConfigError(
                f"{where}.margin", "found it with `style: linear`", "", "leave it out, it has no meaning there"
            )
        if self.margin is not None and self.margin > self.max_tokens:
            raise ConfigError(
                f"{where}.margin", f"found {self.margin}", f"at most max_tokens ({self.max_tokens})", "lower it"
            )
