"""Decay with chance."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from triune.buffer.candidates import Candidate
from triune.registry import brick


@brick("priority")
@dataclass(frozen=True, kw_only=True)
class DecayRandom:
    """Draw entries with probabilities that fall with age and use, instead of always taking the first.

    Like `linear_decay`, plus Gumbel noise: leasing the highest is then drawing without replacement, an entry with
    probability proportional to exp(score / temperature). So old entries are trained on now and then, none starves
    for sure, and a batch is less alike. The draw depends on the seed, the entry and the step only. Chosen from the
    highest stored priorities, the newest versions and the earliest admitted.

    Attributes:
        temperature: Units of priority that one entry must be ahead for odds of e to 1; near 0 it is `linear_decay`.
        per_version: Taken off for every published step of staleness.
        per_use: Taken off for every earlier use by this run.
        seed: Another seed, another draw.

    Source: Gumbel top-k, arXiv:1903.06059.
    """

    temperature: Annotated[float, Field(gt=0)] = 1.0
    per_version: Annotated[float, Field(ge=0)] = 1.0
    per_use: Annotated[float, Field(ge=0)] = 1.0
    seed: int = 0
    windows: ClassVar[tuple[str, ...]] = ("priority", "newest", "age")

    def __call__(self, candidate: Candidate) -> float:
        """Decayed priority plus temperature times a Gumbel number."""
        decayed = candidate.priority - self.per_version * candidate.staleness - self.per_use * candidate.uses
        return decayed - self.temperature * math.log(-math.log(self._uniform(candidate)))

    def _uniform(self, candidate: Candidate) -> float:
        """A number in (0, 1), the same for the same seed, entry and step."""
        text = f"{self.seed}/{candidate.step}/{candidate.entry}"
        drawn = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return ((int.from_bytes(drawn, "little") >> 12) + 0.5) / 2**52
