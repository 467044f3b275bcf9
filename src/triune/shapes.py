"""Array types with their shapes, and the one legend of axis letters.

B sequences of a micro-batch, T tokens of a sequence, V vocabulary, G rollouts of a group, E experiences of a
group, P pairs, k alternatives per token. A suffix on a name (`logprobs_BT`) spells its axes.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32

TokensT = Int32[np.ndarray, " T"]
MaskT = Bool[np.ndarray, " T"]
LogprobsT = Float32[np.ndarray, " T"]
VersionsT = Int32[np.ndarray, " T"]
StreamT = Float32[np.ndarray, "T *k"]
RewardsG = Float64[np.ndarray, " G"]

__all__ = ["LogprobsT", "MaskT", "RewardsG", "StreamT", "TokensT", "VersionsT"]
