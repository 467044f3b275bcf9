"""The gradient of every loss, KL, entropy and critic brick is the slope of its value, in every setting.

A brick that shows one value and descends another says so (`surrogate`), and is held to that.
"""

import numpy as np
import pytest

from triune.testing import layouts
from triune.testing.bandit import weight_of
from triune.testing.finite_differences import slopes
from triune.testing.proofs import KINDS, cases

CASES = {str(case): case for case in cases(*KINDS)}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def places_of(rows, kind):
    """Every third trained token's log-prob, and some entropies and values."""
    trained = np.flatnonzero(np.concatenate([row.action_mask for row in rows]))
    width, chosen = sum(map(len, rows)), trained[::3]
    if kind in ("policy_loss", "kl"):
        return chosen
    return np.concatenate([chosen[:3], chosen[:8] + width, chosen[:8] + 2 * width])


@every_case
def test_case_31_the_gradient_is_the_slope_of_the_value(case):
    rows = layouts.rows(is_paired=case.is_paired, streams=case.streams | {"values"}, missing=0.0)
    found = slopes(case, rows, places_of(rows, case.kind), state=case.algorithm.state0())
    wrong = found.wrong()
    assert not wrong, (
        f"{case}: {wrong[0]} ({len(wrong)} of {len(found.smooth)}); a brick that means this declares `surrogate`"
    )
    assert len(found.smooth) > 0.8 * len(found.gradient), f"{case}: most numbers lie at a kink"
    assert any(found.gradient) or case.claim == "nothing" or (case.kind != "policy_loss" and not weight_of(case))


@pytest.mark.parametrize("name", sorted({f"{case.kind}-{case.name}" for case in CASES.values()}))
def test_every_brick_with_a_claim_has_a_setting_in_which_it_pulls(name):
    settings = [case for case in CASES.values() if name == f"{case.kind}-{case.name}" and case.claim != "nothing"]
    assert not settings or name.startswith("policy_loss") or any(weight_of(case) for case in settings), (
        f"{name}: declare `variants` with a weight above 0"
    )
