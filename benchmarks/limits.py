"""What this machine can do, so that a bench can say how much of it a baseline uses.

    python -m benchmarks.limits

A ratio is only worth something when the opponent ran as fast as it can. `check_baseline` refuses a baseline that is
below 85 % of what was measured for it once on the reference machine (two x86-64 cores with AVX512-bf16), where this one
is comparable.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

REFERENCE = {"bf16_gflops": 1000.0, "fp32_medium_gflops": 480.0, "read_gb_s": 77.0}
"""The machine on which the baselines were measured."""

COMPARABLE = 0.75
"""A machine whose every figure reaches this share of the reference is comparable."""

REQUIRED = 0.85
"""Share of its recorded figure that a baseline has to reach there."""


class SlowBaseline(Exception):
    """The opponent was slower than it can be; the ratio would be won unfairly."""


@dataclass(frozen=True)
class Machine:
    """Limits of the machine with two OpenMP threads or as many as torch takes."""

    bf16_gflops: float
    fp32_medium_gflops: float
    read_gb_s: float
    threads: int

    @property
    def is_comparable(self) -> bool:
        """Whether recorded figures can be expected here."""
        return all(getattr(self, name) >= COMPARABLE * value for name, value in REFERENCE.items())

    def describe(self) -> str:
        """One line."""
        word = "comparable with" if self.is_comparable else "slower than"
        return (
            f"machine: bf16 {self.bf16_gflops:.0f} GFLOP/s, fp32 medium {self.fp32_medium_gflops:.0f} GFLOP/s, "
            f"reads {self.read_gb_s:.0f} GB/s, {self.threads} threads; {word} the reference"
        )

    def to_json(self) -> dict[str, float | bool]:
        """For the last line of a bench."""
        return {**{name: round(value, 1) for name, value in asdict(self).items()}, "is_comparable": self.is_comparable}


def measure() -> Machine:
    """About a second of large matrix products and of reading."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    size = 1536
    left, right = torch.randn(size, size), torch.randn(size, size)
    left16, right16 = left.bfloat16(), right.bfloat16()
    big = torch.ones(256 << 20, dtype=torch.uint8).view(torch.float32)
    flops = 2 * size**3 / 1e9
    found = Machine(
        bf16_gflops=flops / _fastest(lambda: left16 @ right16),
        fp32_medium_gflops=flops / _fastest(lambda: left @ right),
        read_gb_s=0.268435456 / _fastest(big.sum),
        threads=torch.get_num_threads(),
    )
    torch.set_float32_matmul_precision(before)
    return found


def _fastest(work: Callable[[], object], seconds: float = 0.3) -> float:
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def check_baseline(name: str, measured: float, recorded: float, machine: Machine) -> float:
    """The share of its recorded figure that a baseline reached.

    Raises:
        SlowBaseline: Below 85 % on a comparable machine.
    """
    share = measured / recorded
    if machine.is_comparable and share < REQUIRED:
        raise SlowBaseline(
            f"baseline {name}: {measured:.2f}, which is {share:.0%} of the {recorded:g} recorded for it; "
            f"expected at least {REQUIRED:.0%} on a comparable machine; is something else running?"
        )
    return share


if __name__ == "__main__":
    found = measure()
    print(found.describe())
    print(json.dumps(found.to_json()))
