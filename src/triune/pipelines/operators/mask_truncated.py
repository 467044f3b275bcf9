"""Take truncated answers out of the loss, not out of the statistics."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from triune.records import Experience, Stop
from triune.registry import brick


@brick("operator")
@dataclass(frozen=True, kw_only=True)
class MaskTruncated:
    """Train no token of a rollout that was cut off; its reward still counts in the statistics of group and step.

    An answer cut at a limit is not wrong in what it said; punishing its tokens teaches noise. The tokens become
    context: mask False, log-probs NaN, version -1, as the record's contract wants it. The raw group keeps them; the
    stream `untrained` tells which they were, so that statistics over the tokens of a whole step weigh them as before.

    Source: overlong filtering, DAPO, arXiv:2503.14476, section 3.4.

    Attributes:
        stops: Stop reasons that count as cut off; empty = every truncating one (length, context, max_turns, timeout,
            aborted).
    """

    stops: tuple[Stop, ...] = ()

    def __call__(self, experience: Experience) -> Experience:
        """Return the experience, masked when it was cut off."""
        is_cut = experience.stop in self.stops if self.stops else experience.stop.is_truncated
        if not is_cut or not experience.action_mask.any():
            return experience
        length = len(experience)
        nothing = np.full(length, np.nan, np.float32)
        marked = experience.with_streams(untrained=experience.action_mask.astype(np.float32))
        return marked.replace(
            action_mask=np.zeros(length, np.bool_),
            logprobs=nothing,
            raw_logprobs=None if experience.raw_logprobs is None else nothing,
            versions=np.full(length, -1, np.int32),
            turns=(),
        )
