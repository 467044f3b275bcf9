"""Policy losses at numbers worked out by hand: which side clips for which sign of A, and what a state learns."""

import math

import numpy as np
import pytest
import torch

from triune.algorithms import Algorithm, Divider, Progress
from triune.algorithms.policy_losses.cispo import CISPO
from triune.algorithms.policy_losses.clip_cov import ClipCov
from triune.algorithms.policy_losses.corrected import Corrected
from triune.algorithms.policy_losses.decoupled_ppo import DecoupledPPO
from triune.algorithms.policy_losses.gpg import GPG
from triune.algorithms.policy_losses.gspo import GSPO
from triune.algorithms.policy_losses.kl_cov import KLCov
from triune.algorithms.policy_losses.m2po import M2PO
from triune.algorithms.policy_losses.opmd import OPMD
from triune.algorithms.policy_losses.ppo_clip import PPOClip
from triune.algorithms.policy_losses.rec import REC
from triune.algorithms.policy_losses.reinforce import Reinforce
from triune.algorithms.policy_losses.sapo import SAPO
from triune.algorithms.policy_losses.sft import SFT
from triune.algorithms.policy_losses.sppo import SPPO
from triune.algorithms.policy_losses.topr import TOPR
from triune.algorithms.zoo.grpo import GRPO
from triune.errors import ConfigError
from triune.testing.batches import Leaf, Row


def answer(*ratios, a=1.0, new=0.25, old=None, behaviour=True):
    """One sequence whose tokens the policy gives 1/4 each, at these ratios to the policy that sampled them."""
    logprobs = np.full(len(ratios), math.log(new))
    streams = {
        "behaviour_logprobs": logprobs - np.log(ratios) if behaviour else np.full(len(ratios), np.nan),
        "advantages": np.full(len(ratios), a),
    }
    if old is not None:
        streams["old_logprobs"] = logprobs - np.log(old)
    return Row(np.ones(len(ratios), bool), streams, logprobs, np.ones(len(ratios)))


def slopes(brick, *rows, state=None):
    """Loss, and its derivative by every new log-prob."""
    leaf = Leaf(rows, torch.float64)
    algorithm, batch = Algorithm(policy_loss=brick), leaf.padded(range(len(rows)))
    state = {"policy_loss": state} if state else algorithm.state0()
    divider = Divider(algorithm, [batch], state=state, progress=Progress())
    loss = divider.loss(batch)
    loss.backward()
    return loss.item(), leaf.logprobs.grad.tolist()


# (loss, sign of A, ratio, value, derivative by the new log-prob) of a single token that has probability 1/4
LOG4 = math.log(4)
TOKENS = [
    (PPOClip(), 1, 1.5, -1.2, 0.0),
    (PPOClip(), 1, 0.5, -0.5, -0.5),
    (PPOClip(), -1, 0.5, 0.8, 0.0),
    (PPOClip(), -1, 1.5, 1.5, 1.5),
    (PPOClip(dual_clip=1.2), -1, 1.5, 1.2, 0.0),
    (GSPO(), 1, 1.001, -1.0004, 0.0),
    (GSPO(), 1, 0.999, -0.999, -0.999),
    (GSPO(), -1, 0.999, 0.9997, 0.0),
    (GSPO(), -1, 1.001, 1.001, 1.001),
    (CISPO(), 1, 2.0, 2.0 * LOG4, -2.0),
    (CISPO(), 1, 10.0, 5.0 * LOG4, -5.0),
    (CISPO(), -1, 10.0, -5.0 * LOG4, 5.0),
    (CISPO(), -1, 0.01, -0.01 * LOG4, 0.01),
    (CISPO(clip_low=0.2), 1, 0.01, 0.8 * LOG4, -0.8),
    (SAPO(), 1, 1.0, -2.0, -1.0),
    (SAPO(), -1, 1.0, 2.0 / 1.05, 1.0),
    (SAPO(), 1, 2.0, -4 / (1 + math.exp(-1)), -2.0 / math.cosh(0.5) ** 2),
    (SAPO(tau_negative=4.0), -1, 0.5, 1 / (1 + math.exp(2)), 0.5 / math.cosh(1) ** 2),
    (TOPR(), 1, 0.5, LOG4, -1.0),
    (TOPR(), 1, 2.0, LOG4, -1.0),
    (TOPR(), -1, 0.5, -0.5 * LOG4, 0.5),
    (TOPR(), -1, 2.0, -LOG4, 1.0),
    (OPMD(tau=0.5), 1, 2.0, LOG4 + 0.25 * math.log(2) ** 2, -1 + 0.5 * math.log(2)),
    (OPMD(tau=0.5, regulariser="absorbed"), 1, 2.0, LOG4 / 1.5, -1 / 1.5),
    (SPPO(), 1, 1.2, -math.log(1.2), -1.0),
    (SPPO(), 1, 1.5, -math.log(1.3), 0.0),
    (SPPO(), 1, 0.5, math.log(1.3), 0.0),
    (SPPO(), -1, 1.5, math.log(1.3), 0.0),
    (REC(), 1, 1.3, 0.0, 0.0),
    (REC(), 1, 0.1, LOG4, -1.0),
    (REC(), -1, 0.7, 0.0, 0.0),
    (REC(), -1, 9.0, -LOG4, 1.0),
    (REC(importance=True), -1, 9.0, -9 * LOG4, 9.0),
    (REC(clip="two_side"), 1, 0.7, 0.0, 0.0),
    (REC(clip="ring"), 1, 0.7, 0.0, 0.0),
    (REC(clip="ring"), 1, 0.3, LOG4, -1.0),
    (REC(clip="ring"), -1, 0.3, 0.0, 0.0),
    (REC(clip="ring"), -1, 3.1, -LOG4, 1.0),
    (GPG(), -1, 5.0, -LOG4, 1.0),
    (M2PO(), 1, 2.0, -2.0, -2.0),
    (M2PO(), 1, 2.5, 0.0, 0.0),
    (M2PO(), 1, 0.1, -0.1, -0.1),
    (M2PO(), -1, 0.1, 0.0, 0.0),
    (M2PO(), -1, 2.5, 2.5, 2.5),
    (KLCov(), -1, 9.0, 9.0, 9.0),
]


@pytest.mark.parametrize(("brick", "sign", "ratio", "value", "slope"), TOKENS, ids=str)
def test_one_token_has_the_value_and_slope_worked_out_by_hand(brick, sign, ratio, value, slope):
    loss, gradient = slopes(brick, answer(ratio, a=float(sign)))
    assert loss == pytest.approx(value, abs=1e-12)
    assert gradient == pytest.approx([slope], abs=1e-12)


EVERY = [
    PPOClip(), PPOClip(sequence_mask=0.0), DecoupledPPO(), GSPO(), GSPO(token_level=True), CISPO(), SAPO(), TOPR(),
    OPMD(), SPPO(), REC(), REC(importance=True), REC(clip="ring"), GPG(), M2PO(), ClipCov(), KLCov(), Reinforce(),
    Corrected(), Corrected(mode="mask", low=0.5), Corrected(ratio="new", loss=Reinforce()),
]  # fmt: skip


@pytest.mark.parametrize("brick", EVERY, ids=lambda brick: str(brick)[:60])
def test_on_policy_every_loss_has_the_gradient_of_reinforce(brick):
    rows = [answer(1.0, 1.0, a=0.7), answer(1.0, 1.0, a=-1.3)]
    plain = Reinforce(average=getattr(brick, "average", "token"))
    assert slopes(brick, *rows)[1] == pytest.approx(slopes(plain, *rows)[1])


# ------------------------------------------------------------------------------------------- whole sequences


def test_gspo_clips_by_the_mean_log_ratio_and_spreads_its_gradient_over_the_tokens():
    brick, ratios = GSPO(clip_low=0.2, clip_high=0.2), (2.0, 0.5, 1.1**3)
    assert slopes(brick, answer(*ratios))[0] == pytest.approx(-1.1)
    assert slopes(brick, answer(*ratios))[1] == pytest.approx([-1.1 / 3] * 3)
    assert slopes(brick, answer(1.5, 1.5, 1.0, a=-1.0))[1] == pytest.approx([1.5 ** (2 / 3) / 3] * 3)
    assert slopes(brick, answer(1.5, 1.5, 1.5))[1] == [0.0] * 3
    token_level = GSPO(clip_low=0.2, clip_high=0.2, token_level=True)
    assert slopes(token_level, answer(*ratios))[0] == pytest.approx(-1.1)
    assert slopes(token_level, answer(*ratios))[1] == pytest.approx([-1.1 / 3] * 3)


def test_gspo_token_gives_every_token_its_own_advantage():
    row = answer(1.1, 1.1)
    row.streams["advantages"] = np.array([1.0, -3.0])
    wide = {"clip_low": 0.5, "clip_high": 0.5}
    assert slopes(GSPO(**wide), row)[1] == pytest.approx([1.1 / 2, 1.1 / 2])
    assert slopes(GSPO(**wide, token_level=True), row)[1] == pytest.approx([-1.1 / 2, 3 * 1.1 / 2])


def test_topr_tapers_by_the_product_over_the_sequence():
    assert slopes(TOPR(), answer(0.5, 0.5, 0.5, a=-1.0))[1] == pytest.approx([0.125] * 3)
    assert slopes(TOPR(), answer(4.0, 0.5, a=-1.0))[1] == [1.0, 1.0]
    assert slopes(TOPR(), answer(0.01, 0.01))[1] == [-1.0, -1.0]


def test_the_sequence_mask_drops_only_bad_sequences_that_the_policy_left():
    brick, left, kept = PPOClip(sequence_mask=math.log(2)), (0.4, 0.6), (0.9, 0.4)  # geometric means 0.49 and 0.6
    assert slopes(brick, answer(*left, a=-1.0))[1] == [0.0, 0.0]
    assert slopes(brick, answer(*kept, a=-1.0))[1] == pytest.approx([0.45, 0.0])
    assert slopes(brick, answer(*left))[1] == pytest.approx([-0.2, -0.3])
    assert slopes(brick, answer(4.0, 4.0, a=-1.0))[1] == pytest.approx([2.0, 2.0])


def test_a_dropped_sequence_stays_in_the_count():
    brick, good = PPOClip(sequence_mask=0.1), answer(1.0, 1.0)
    assert slopes(brick, good)[0] == -1.0
    assert slopes(brick, good, answer(0.5, 0.5, a=-1.0))[0] == -0.5


def test_gpg_counts_only_tokens_with_an_advantage():
    flat = answer(1.0, 1.0, 1.0, a=0.0)
    assert slopes(GPG(), answer(1.0), flat)[1][0] == -1.0
    assert slopes(GPG(count_flat=True), answer(1.0), flat)[1][0] == -0.25
    assert slopes(GPG(), flat) == (0.0, [0.0] * 3)


def test_opmd_holds_the_sequence_and_not_its_tokens():
    drifted = answer(2.0, 0.5, a=0.0)
    assert slopes(OPMD(tau=1.0), drifted)[1] == pytest.approx([0.0, 0.0], abs=1e-12)
    assert slopes(OPMD(tau=1.0), answer(2.0, 2.0, a=0.0))[1] == pytest.approx([2 * math.log(2)] * 2)


# ------------------------------------------------------------------------------------------- three policies


def test_decoupled_ppo_clips_around_old_and_weighs_by_old_over_behaviour():
    # new / old 1.1 and old / behaviour 3: PPO around the behaviour would have clipped at 1.2
    row = answer(3.3, old=1.1)
    assert slopes(DecoupledPPO(), row)[1] == pytest.approx([-3.3])
    assert slopes(DecoupledPPO(cap=2.0), row)[1] == pytest.approx([-2.2])
    assert slopes(PPOClip(), row)[1] == pytest.approx([-1.1])
    assert slopes(DecoupledPPO(), answer(0.3, old=1.5, a=-1.0))[1] == pytest.approx([0.2 * 1.5])
    assert slopes(DecoupledPPO(), answer(0.3, old=1.5))[1] == [0.0]


def test_without_recomputed_log_probs_decoupled_ppo_is_ppo():
    for ratio in (0.5, 1.1, 1.5):
        assert slopes(DecoupledPPO(), answer(ratio)) == slopes(PPOClip(), answer(ratio))


def test_a_token_of_unknown_behaviour_is_not_corrected():
    row = answer(1.0, old=1.1, behaviour=False)
    for brick in (DecoupledPPO(missing_behaviour="use_old"), Corrected(loss=PPOClip(missing_behaviour="use_old"))):
        assert slopes(brick, row)[1] == pytest.approx([-1.1])


def test_tis_bounds_icepop_drops_and_rejection_does_not_count():
    # old / behaviour: 4 and 1; the policy did not move since
    row = answer(4.0, 1.0, old=1.0)
    row.streams["old_logprobs"] = row.logprobs.copy()
    loss = Reinforce()
    assert slopes(Corrected(loss=loss, high=2.0), row)[1] == [-1.0, -0.5]
    assert slopes(Corrected(loss=loss, mode="mask", low=0.5, high=5.0), row)[1] == pytest.approx([-2.0, -0.5])
    assert slopes(Corrected(loss=loss, mode="mask", high=2.0), row)[1] == [0.0, -0.5]
    assert slopes(Corrected(loss=loss, mode="reject", high=2.0), row)[1] == [0.0, -1.0]
    assert slopes(Corrected(loss=loss, mode="reject", level="geometric", high=2.1), row)[1] == [-0.5, -0.5]
    assert slopes(Corrected(loss=loss, level="sequence", high=3.0), row)[1] == [-1.5, -1.5]
    assert slopes(Corrected(loss=loss, level="geometric", high=3.0), row)[1] == pytest.approx([-1.0, -1.0])
    assert slopes(Corrected(loss=loss, low=2.0, high=9.0), row)[1] == pytest.approx([-2.0, -1.0])


def test_a_token_that_the_correction_masks_stays_in_the_count_of_a_loss_that_counts_advantages():
    row = answer(4.0, 4.0, 1.0, 1.0, old=1.0)
    row.streams["old_logprobs"] = row.logprobs.copy()
    flat = answer(4.0, a=0.0, old=1.0)
    for ratio in ("old", "new"):
        brick = Corrected(loss=GPG(), mode="mask", low=0.5, high=2.0, ratio=ratio)
        assert slopes(brick, row, flat)[1] == [0.0, 0.0, -0.25, -0.25, 0.0]
    assert slopes(Corrected(loss=GPG(), mode="reject", high=2.0), row, flat)[1] == [0.0, 0.0, -0.5, -0.5, 0.0]


def test_corrected_by_the_new_policy_reinforce_is_the_off_policy_gradient():
    brick = Corrected(loss=Reinforce(), ratio="new", high=9.0)
    assert slopes(brick, answer(3.0, old=1.0))[1] == pytest.approx([-3.0])
    assert brick.needs == {"advantages"}
    assert Corrected(loss=Reinforce()).needs == {"advantages", "old_logprobs"}


def test_corrected_keeps_the_state_of_the_loss_inside():
    brick, inner = Corrected(loss=M2PO()), M2PO()
    assert brick.state0() == inner.state0()
    stats = {"excess": 1.0, "excess_double": 1.0}
    assert brick.update(brick.state0(), stats) == inner.update(inner.state0(), stats) != inner.state0()
    assert Corrected().state0() == Corrected().update({}, stats) == {}


def test_an_overflowing_ratio_leaves_finite_gradients():
    row = answer(1.0, 1.0, a=-1.0)
    row.streams["behaviour_logprobs"] = row.logprobs - np.array([800.0, 0.0])
    row.streams["old_logprobs"] = row.logprobs.copy()
    for brick in (Corrected(), Corrected(mode="mask"), Corrected(mode="reject"), DecoupledPPO(), TOPR(), REC()):
        assert np.isfinite(slopes(brick, row)[1]).all(), brick


REFUSED = [
    (Corrected(loss=SFT()), "policy_loss.loss: found sft, which has no advantages"),
    (Corrected(loss=DecoupledPPO()), "policy_loss.loss: found decoupled_ppo, which is corrected already"),
    (Corrected(low=2.0, high=2.0), "policy_loss.low: found 2.0"),
    (Corrected(mode="reject", ratio="new"), "policy_loss.ratio: found 'new' with `mode: reject`"),
    (Corrected(loss=PPOClip(average="constant")), "policy_loss.loss.length: found None"),
    (REC(clip="ring", ring_low=0.2), "policy_loss.ring_low: found 0.2 with `clip_low: 0.2`"),
    (REC(clip="ring", clip_high=3.0), "policy_loss.ring_high: found 2.0 with `clip_high: 3.0`"),
    (ClipCov(covariance_low=6.0), "policy_loss.covariance_low: found 6.0"),
    (CISPO(average="constant"), "policy_loss.length: found None"),
]


@pytest.mark.parametrize(("brick", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_fields_that_exclude_each_other_are_refused_with_what_to_write(brick, message):
    with pytest.raises(ConfigError, match=message):
        brick.check("policy_loss")


@pytest.mark.parametrize("brick", [DecoupledPPO(), Corrected()], ids=lambda brick: type(brick).__name__)
def test_a_correction_is_refused_where_old_log_probs_are_never_computed(brick):
    with pytest.raises(ConfigError, match=r"old_logprobs: found 'never', but policy_loss \w+ needs them"):
        GRPO(policy_loss=brick, old_logprobs="never").check()
    GRPO(policy_loss=Corrected(ratio="new"), old_logprobs="never").check()


# ------------------------------------------------------------------------------------------- what a state learns


def learn(brick, rows, num, state=None):
    """State and metrics after `num` updates on the same rows, in micro-batches of one."""
    algorithm = Algorithm(policy_loss=brick)
    found, metrics = {"policy_loss": state} if state else algorithm.state0(), {}
    for _ in range(num):
        batches = [Leaf(rows, torch.float64).padded([number]) for number in range(len(rows))]
        divider = Divider(algorithm, batches, state=found, progress=Progress())
        for batch in batches:
            divider.loss(batch)
        metrics = divider.metrics()
        found = algorithm.update(found, metrics)
    return found["policy_loss"], metrics


def exact_cut(squares, threshold):
    """The paper's loop: drop the largest until the mean of the rest is small enough; the largest that is kept."""
    left = sorted(squares)
    while left and sum(left) / len(left) > threshold:
        left.pop()
    return left[-1]


@pytest.mark.parametrize("scale", [0.1, 0.3, 0.6])
def test_the_cut_of_m2po_settles_within_a_factor_of_two_below_the_papers(scale):
    log_ratios = np.abs(np.random.default_rng(5).normal(0, scale, 200))
    rows = [answer(*np.exp(log_ratios[:100])), answer(*np.exp(-log_ratios[100:]), a=-1.0), answer(0.01, 0.02)]
    state, metrics = learn(M2PO(), rows, 9)
    kept = log_ratios**2 <= state["cut"]
    assert (log_ratios[kept] ** 2).mean() <= 0.04
    assert metrics["excess"] <= 0
    if state["cut"] < 256 * 0.04:
        beyond = log_ratios**2 <= 2 * state["cut"]
        assert (log_ratios[beyond] ** 2).mean() > 0.04
        assert state["cut"] / 2 <= exact_cut(log_ratios**2, 0.04) <= 2 * state["cut"]


def test_the_cut_of_m2po_never_leaves_its_range():
    assert learn(M2PO(), [answer(1.0, 1.01)], 12)[0] == {"cut": pytest.approx(256 * 0.04)}
    assert learn(M2PO(), [answer(1.25, 1.25)], 12)[0] == {"cut": pytest.approx(0.04)}


def test_clip_cov_takes_the_wanted_share_of_gradient_from_what_it_measured():
    # covariance of tokens: A - 0 = ±2 times log p - mean: 4 of 8 tokens have (2)(+log 2) = 1.386
    rows = [answer(*[1.0] * 4, a=2.0, new=0.5), answer(*[1.0] * 4, a=-2.0, new=0.125)]
    brick = ClipCov(share=0.125, covariance_low=1.5)
    state, _ = learn(brick, rows, 1)
    assert state == {"mean_advantage": 0.0, "mean_logprob": pytest.approx(-2 * math.log(2)), "eligible": None}
    assert slopes(brick, *rows, state=state)[1] == pytest.approx([-2 / 8] * 4 + [2 / 8] * 4)
    state, metrics = learn(brick, rows, 1, state)
    assert metrics["eligible_ratio"] == state["eligible"] == 0.0
    brick = ClipCov(share=0.125, covariance_low=1.0)
    state, metrics = learn(brick, rows, 2)
    assert metrics["eligible_ratio"] == state["eligible"] == 1.0
    assert slopes(brick, *rows, state=state)[1] == pytest.approx([-2 / 8 * 0.875] * 4 + [2 / 8 * 0.875] * 4)


def test_kl_cov_settles_at_the_wanted_share():
    chance = np.random.default_rng(2)
    rows = []
    for _ in range(4):
        row = answer(*[1.0] * 500, a=1.0)
        row.logprobs = -chance.exponential(1.0, 500)
        row.streams = {"advantages": chance.normal(size=500), "behaviour_logprobs": row.logprobs.copy()}
        rows.append(row)
    first, _ = learn(KLCov(share=0.02), rows, 1)
    assert first["bound"] is None
    state, metrics = learn(KLCov(share=0.02), rows, 60)
    assert metrics["held_ratio"] == pytest.approx(0.02, abs=0.004)
    a, logprobs = (np.concatenate(parts) for parts in zip(*((r.streams["advantages"], r.logprobs) for r in rows)))  # noqa: B905
    found = (a - a.mean()) * (logprobs - logprobs.mean())
    assert state["bound"] == pytest.approx(np.quantile(found, 0.98), rel=0.15)


def test_kl_cov_pulls_held_tokens_towards_the_old_policy():
    state = {"mean_advantage": 0.0, "mean_logprob": -2.0, "bound": 0.1}
    brick = KLCov(coefficient=0.5)
    assert slopes(brick, answer(2.0, a=1.0), state=state)[1] == pytest.approx([-2.0 + 0.5])
    assert slopes(brick, answer(0.5, a=1.0), state=state)[1] == pytest.approx([-0.5 - 0.5])
    assert slopes(brick, answer(2.0, a=-1.0), state=state)[1] == pytest.approx([2.0])
