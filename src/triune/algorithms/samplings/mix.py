"""Several buffers in one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from triune.algorithms.shares import whole_shares
from triune.errors import ConfigError
from triune.ports import Buffer, Leases
from triune.registry import brick

MAIN = "main"


@brick("sampling", "mix")
@dataclass(frozen=True, kw_only=True)
class MixSampling:
    """Fill every step from several buffers, each with its share of the entries.

    Whole numbers of entries that add up to the shares over the steps: a quarter of 10 is 2 and 3 in turn. Only what
    comes from `main` was sampled for this run, so only that counts against how far the explorer may run ahead. On a
    buffer that is filled during the run (`expert`) a step waits; of one that was filled before, it takes what is left
    (`num_from_NAME` says how many came from where).

    Attributes:
        shares: Buffer → its share of a step's entries; they sum to 1.
    """

    shares: dict[str, float] = field(default_factory=lambda: {MAIN: 0.75, "expert": 0.25})

    @property
    def fresh_ratio(self) -> float:
        """The share of what is sampled."""
        return self.shares[MAIN]

    @property
    def buffers(self) -> tuple[str, ...]:
        """Those it leases from, `main` first."""
        return (MAIN, *(name for name in self.shares if name != MAIN))

    async def __call__(
        self, buffer: Buffer, num: int, *, step: int = 0, max_staleness: int | None = None, ahead: int | None = None
    ) -> Leases:
        """Lease every buffer's part; nothing at all once `main` has ended."""
        parts = dict(
            zip(self.buffers, whole_shares([self.shares[name] for name in self.buffers], num, step), strict=True)
        )
        found = await buffer.lease(parts[MAIN], max_staleness=max_staleness, ahead=ahead, order="age", step=step)
        if not found:
            return found
        found.metrics["num_from_main"] = float(len(found))
        for name in self.buffers[1:]:
            part = await buffer.lease(parts[name], buffer=name, order="age", step=step)
            found.extend(part)
            found.metrics[f"num_from_{name}"] = float(len(part))
        return found

    def check(self, where: str) -> None:
        """Raise ConfigError for shares that are none."""
        wrong = [f"{name}: {share:g}" for name, share in self.shares.items() if not 0 < share < 1]
        if MAIN not in self.shares or wrong or abs(sum(self.shares.values()) - 1) > 1e-9:
            raise ConfigError(
                f"{where}.shares",
                f"found {_plain(self.shares)}",
                "a share between 0 and 1 for `main` and for each other buffer, 1 in all",
                "write `shares: {main: 0.75, expert: 0.25}`; a single buffer needs `use: fifo`",
            )

    def check_step(self, where: str, num: int) -> None:
        """Raise ConfigError when a share of a step of `num` entries rounds to zero."""
        for name, share in self.shares.items():
            if share * num < 1:
                found = f"found {share:g}, and a step has {num} entries: {name} would get none in most of them"
                do = f"write at least {1 / num:.2g}, or make a step of {-(-1 // share):.0f} entries"
                raise ConfigError(f"{where}.shares.{name}", found, "at least one entry a step", do)


def _plain(shares: Mapping[str, float]) -> str:
    return "{" + ", ".join(f"{name}: {share:g}" for name, share in shares.items()) + "}"
