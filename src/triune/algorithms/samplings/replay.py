"""Train on some entries more than once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from triune.algorithms.shares import whole_shares
from triune.errors import ConfigError
from triune.ports import Buffer, Leases
from triune.registry import brick


@brick("sampling")
@dataclass(frozen=True, kw_only=True)
class Replay:
    """Fill a part of every step with entries that were trained on before.

    Rollouts cost more than updates; using each `max_uses` times makes more of them, off-policy. Every use is counted by
    itself, and a replayed entry takes no admission slot. While there is nothing to replay yet, steps are smaller
    (`num_replayed` says by how much). Advantages are those of the first use; ratios are to the version that sampled.

    Source: replay of verified successes beside fresh rollouts, arXiv:2507.07451.

    Attributes:
        ratio: Share of a step's entries that is replayed, at most 1 - 1 / max_uses.
        max_uses: How often an entry is used in all.
        cooldown: Steps that must lie between two uses of an entry.
        max_age: Published steps a replayed entry may be behind the newest version; null = any number.
        order: Which entries are replayed first: of the `newest` version, with the highest `reward` or `priority`.
    """

    ratio: Annotated[float, Field(gt=0, lt=1)] = 0.5
    max_uses: Annotated[int, Field(ge=2)] = 2
    cooldown: Annotated[int, Field(ge=0)] = 0
    max_age: Annotated[int, Field(ge=1)] | None = None
    order: Literal["newest", "reward", "priority"] = "newest"
    buffers: ClassVar[tuple[str, ...]] = ("main",)

    @property
    def fresh_ratio(self) -> float:
        """What is not replayed is sampled."""
        return 1.0 - self.ratio

    async def __call__(
        self, buffer: Buffer, num: int, *, step: int = 0, max_staleness: int | None = None, ahead: int | None = None
    ) -> Leases:
        """Lease the fresh part, waiting for it, and what there is of the other."""
        num_fresh, num_again = whole_shares((self.fresh_ratio, self.ratio), num, step)
        fresh = await buffer.lease(
            num_fresh, max_staleness=max_staleness, ahead=ahead, order="age", step=step, max_uses=self.max_uses
        )
        if not fresh:
            return fresh
        old = await buffer.lease(
            num_again, max_staleness=self.max_age, order=self.order, step=step, max_uses=self.max_uses, again=True,
            cooldown=self.cooldown,
        )  # fmt: skip
        return Leases([*fresh, *old], {**fresh.metrics, "num_replayed": float(len(old))})

    def check(self, where: str) -> None:
        """Raise ConfigError when there are not enough uses for so large a share."""
        largest = 1 - 1 / self.max_uses
        if self.ratio > largest + 1e-9:
            found = f"found {self.ratio} with `max_uses: {self.max_uses}`: there would never be enough to replay"
            do = f"write `ratio: {largest:.3g}`, or raise max_uses"
            raise ConfigError(f"{where}.ratio", found, f"at most {largest:.3g}", do)

    def check_step(self, where: str, num: int) -> None:
        """Raise ConfigError when a share of a step of `num` entries rounds to zero."""
        if min(self.ratio, self.fresh_ratio) * num < 1:
            found = f"found {self.ratio}, and a step has {num} entries: one of both parts would get none"
            raise ConfigError(f"{where}.ratio", found, "at least one entry of each", "enlarge the step")
