"""A loss in a user's file is proven like a built-in one, and one that says something wrong is found out."""

import math

import numpy as np
import pytest

from triune import registry
from triune.config.plugins import load_plugins
from triune.testing import layouts
from triune.testing.bandit import Bandit
from triune.testing.finite_differences import slopes
from triune.testing.proofs import Case, cases, settings_of

PLUGIN = '''
from dataclasses import dataclass
from typing import ClassVar, Literal

from triune.algorithms import Term
from triune.registry import brick


@brick("policy_loss")
@dataclass(frozen=True, kw_only=True)
class PluggedIn:
    """Reinforce with a choice of how the advantage is squashed."""

    shape: Literal["plain", "twice"] = "plain"
    needs: ClassVar[frozenset[str]] = frozenset({"advantages"})
    expected_gradient: ClassVar[str] = "policy_gradient"

    @property
    def gradient_scale(self):
        return 1.0 if self.shape == "plain" else 2.0

    def __call__(self, batch, state, progress):
        value = -self.gradient_scale * batch.advantages * batch.logprobs
        return [Term("policy_loss", value, batch.action_mask)]


@brick("policy_loss")
@dataclass(frozen=True, kw_only=True)
class Undeclared:
    """Says nothing of its gradient, and hides a part of it."""

    needs: ClassVar[frozenset[str]] = frozenset({"advantages"})

    def __call__(self, batch, state, progress):
        value = -batch.advantages * batch.logprobs * batch.logprobs.detach()
        return [Term("policy_loss", value, batch.action_mask)]


@brick("policy_loss")
@dataclass(frozen=True, kw_only=True)
class PerMicroBatch:
    """Divides by what its micro-batch holds."""

    needs: ClassVar[frozenset[str]] = frozenset({"advantages"})
    expected_gradient: ClassVar[str] = "policy_gradient"

    def __call__(self, batch, state, progress):
        value = -batch.advantages * batch.logprobs / batch.action_mask.sum()
        return [Term("policy_loss", value, batch.action_mask, per="sum")]


@brick("policy_loss")
@dataclass(frozen=True, kw_only=True)
class SeesPadding:
    """Takes a mean over a tensor instead of over its trained tokens."""

    needs: ClassVar[frozenset[str]] = frozenset({"advantages"})
    expected_gradient: ClassVar[str] = "policy_gradient"

    def __call__(self, batch, state, progress):
        value = -(batch.advantages - batch.advantages.mean()) * batch.logprobs
        return [Term("policy_loss", value, batch.action_mask)]
'''


@pytest.fixture(scope="module")
def plugged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "losses_of_a_user.py").write_text(PLUGIN, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_marked", dict(registry._marked))
        load_plugins(["losses_of_a_user.py"], folder)
        yield {str(case): case for case in cases("policy_loss")}


def rows_of(case):
    return layouts.rows(streams=case.streams, missing=0.0)


def slopes_of(case):
    trained = np.flatnonzero(np.concatenate([row.action_mask for row in rows_of(case)]))[::4]
    return slopes(case, rows_of(case), trained, state=case.algorithm.state0())


def test_a_loss_from_a_plug_in_file_is_covered_in_each_of_its_settings(plugged):
    found = [plugged["policy_loss-plugged_in"], plugged["policy_loss-plugged_in-shape=twice"]]
    for scale, case in zip((1.0, 2.0), found, strict=True):
        assert case.claim == "policy_gradient"
        assert not slopes_of(case).wrong()
        expected = layouts.update(case.algorithm, rows_of(case))
        for layout in (layouts.split(2), layouts.packed, layouts.shuffled, layouts.stuffed(float("nan"))):
            layouts.agree(layouts.update(case.algorithm, rows_of(case), layout), expected)
        bandit = Bandit.random(1)
        assert np.allclose(bandit.gradient(case), -scale * bandit.policy_gradient(), rtol=1e-9)


def test_a_brick_without_a_claim_is_told_what_to_declare(plugged):
    with pytest.raises(AssertionError, match=r"undeclared: expected_gradient is None; expected one of policy_gradient"):
        _ = plugged["policy_loss-undeclared"].claim


def test_a_hidden_part_of_a_gradient_is_found(plugged):
    assert slopes_of(plugged["policy_loss-undeclared"]).wrong()


@pytest.mark.parametrize(
    ("name", "layout"), [("per_micro_batch", layouts.split(2)), ("sees_padding", layouts.stuffed(math.nan))]
)
def test_a_loss_that_depends_on_its_layout_is_found(plugged, name, layout):
    case = plugged[f"policy_loss-{name}"]
    expected = layouts.update(case.algorithm, rows_of(case))
    with pytest.raises(AssertionError):
        layouts.agree(layouts.update(case.algorithm, rows_of(case), layout), expected)


def test_what_a_brick_refuses_is_no_setting():
    names = [str(case) for case in settings_of("policy_loss", "ppo_clip")]
    assert names[0] == "policy_loss-ppo_clip"
    assert "policy_loss-ppo_clip-average=constant,length=16" in names
    assert "policy_loss-ppo_clip-dual_clip=1.5,clip_high=0.28" in names


def test_a_kink_is_left_out_and_a_slope_of_one_side_is_not_taken_for_the_gradient():
    from triune.testing.finite_differences import Slopes

    found = Slopes(gradient=[1.0, 0.5, 3.0], left=[1.0, 0.0, 2.0], right=[1.0, 1.0, 2.0])
    assert found.smooth == [0, 2]
    assert found.wrong() == ["number 2: gradient 3, slope 2"]


def test_a_wrong_claim_is_seen_on_the_bandit():
    reverse, forward = Case("kl", "k3"), Case("kl", "k3", (("gradient", "forward"),))
    bandit = Bandit.random(1)
    assert not np.allclose(bandit.gradient(reverse), bandit.gradient(forward), rtol=1e-3)
