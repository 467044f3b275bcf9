"""Stop strings: found in the decoded tail of what was sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

_SLACK = 8  # tokens that may decode to nothing: special ones, parts of a character


def ends_with_stop(tokens: np.ndarray, stops: Sequence[str], decode: Callable[[list[int]], str]) -> bool:
    """Whether one of the strings stands in the text of the last tokens.

    Only a tail is decoded: every ordinary token adds at least one byte, so a string of n bytes lies within the last
    n tokens, and had it been there earlier the request would have ended then.
    """
    longest = max(len(stop.encode()) for stop in stops)
    text = decode(tokens[-(longest + _SLACK) :].tolist())
    return any(stop in text for stop in stops)
