"""Every policy loss of the RL family, value and gradient, against a slow float64 reference on off-policy rows.

A reference sees the new log-probs twice: `new` is what finite differences move, `fixed` what the loss holds constant.
"""

import math
from types import SimpleNamespace

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
from triune.algorithms.policy_losses.sppo import SPPO
from triune.algorithms.policy_losses.topr import TOPR
from triune.testing.batches import Leaf, random_rows


def made_rows():
    """Advantages of their own for every token, some exactly 0; old log-probs between behaviour and new."""
    rows, chance = random_rows(9, seed=3), np.random.default_rng(8)
    for number, row in enumerate(rows):
        row.streams["advantages"] = row.streams["advantages"] + chance.normal(0, 0.4, len(row))
        row.streams["old_logprobs"] = row.logprobs + chance.normal(0, 0.3, len(row))
        if number == 1:
            row.streams["advantages"][:] = 0.0
    return rows


ROWS = made_rows()
CONSTANT = {"average": "constant", "length": 7}


def clip(value, low, high):
    return min(max(value, low), high)


def sequence(row, new, fixed, missing="exclude", decoupled=True):
    """One row as the references read it: trained tokens only, behaviour and old with their stand-ins."""
    known = ~np.isnan(row.streams["behaviour_logprobs"])
    counted = row.action_mask & (known if missing == "exclude" else True)
    behaviour = np.where(known, row.streams["behaviour_logprobs"], fixed)
    old = row.streams["old_logprobs"] if decoupled else behaviour
    names = {"new": new, "fixed": fixed, "behaviour": behaviour, "old": old, "a": row.streams["advantages"]}
    return SimpleNamespace(**{name: value[counted] for name, value in names.items()}, known=known[counted])


# Each reference takes a brick, a sequence and a state, and gives {token: loss}, or {None: loss} of the sequence.


def ppo(brick, s, state):
    found, drift = {}, np.mean(s.behaviour - s.fixed)
    for t, a in enumerate(s.a):
        ratio = math.exp(s.new[t] - s.old[t])
        loss = -min(ratio * a, clip(ratio, 1 - brick.clip_low, 1 + brick.clip_high) * a)
        if brick.dual_clip and a < 0:
            loss = min(loss, -brick.dual_clip * a)
        if brick.sequence_mask is not None and a < 0 and drift > brick.sequence_mask:
            loss = 0.0
        found[t] = loss
    return found


def decoupled_ppo(brick, s, state):
    weights = [min(math.exp(s.old[t] - s.behaviour[t]), brick.cap) if s.known[t] else 1.0 for t in range(len(s.a))]
    return {t: weights[t] * loss for t, loss in ppo(brick, s, state).items()}


def gspo(brick, s, state):
    ratio, fixed = math.exp(np.mean(s.new - s.old)), math.exp(np.mean(s.fixed - s.old))
    low, high = 1 - brick.clip_low, 1 + brick.clip_high
    if not brick.token_level:
        a = np.mean(s.a)
        return {None: -min(ratio * a, clip(ratio, low, high) * a)}
    ratios = [fixed * math.exp(s.new[t] - s.fixed[t]) for t in range(len(s.a))]
    return {None: np.mean([-min(r * a, clip(r, low, high) * a) for r, a in zip(ratios, s.a, strict=True)])}


def cispo(brick, s, state):
    weights = np.clip(np.exp(s.fixed - s.old), 1 - brick.clip_low, 1 + brick.clip_high)
    return dict(enumerate(-weights * s.a * s.new))


def sapo(brick, s, state):
    found = {}
    for t, a in enumerate(s.a):
        tau = brick.tau_positive if a > 0 else brick.tau_negative
        gate = 4 / tau / (1 + math.exp(-tau * (math.exp(s.new[t] - s.old[t]) - 1)))
        found[t] = -gate * a
    return found


def topr(brick, s, state):
    taper = min(1.0, math.exp(np.sum(s.fixed - s.behaviour)))
    return {t: -(taper if a < 0 else 1.0) * a * s.new[t] for t, a in enumerate(s.a)}


def opmd(brick, s, state):
    total = brick.tau / 2 * np.sum(s.new - s.old) ** 2 if brick.regulariser == "squared" else 0.0
    scale = 1.0 if brick.regulariser == "squared" else 1 / (1 + brick.tau)
    return {None: total - scale * np.sum(s.a * s.new)}


def sppo(brick, s, state):
    return {
        t: -a * math.log(clip(math.exp(s.new[t] - s.old[t]), 1 / (1 + brick.clip), 1 + brick.clip))
        for t, a in enumerate(s.a)
    }


def rec(brick, s, state):
    found, low, high = {}, 1 - brick.clip_low, 1 + brick.clip_high
    for t, a in enumerate(s.a):
        ratio = math.exp(s.fixed[t] - s.behaviour[t])
        one_side = ratio <= high if a > 0 else ratio >= low
        again = ratio <= 1 - brick.ring_low if a > 0 else ratio >= 1 + brick.ring_high
        inside = low <= ratio <= high
        kept = {"none": True, "one_side": one_side, "two_side": inside, "ring": inside or again}[brick.clip]
        found[t] = -a * s.new[t] * kept * (ratio if brick.importance else 1.0)
    return found


def gpg(brick, s, state):
    return {t: -a * s.new[t] for t, a in enumerate(s.a) if brick.count_flat or a != 0}


def m2po(brick, s, state):
    found = {}
    for t, a in enumerate(s.a):
        log_ratio = s.fixed[t] - s.behaviour[t]
        in_region = (a > 0 and log_ratio > 0) or (a < 0 and log_ratio < 0)
        ratio = math.exp(s.new[t] - s.behaviour[t])
        found[t] = 0.0 if in_region and log_ratio**2 > state["cut"] else -ratio * a
    return found


def covariance(s, state):
    return (s.a - state["mean_advantage"]) * (s.fixed - state["mean_logprob"])


def clip_cov(brick, s, state):
    found = {}
    for t, a in enumerate(s.a):
        ratio = math.exp(s.new[t] - s.old[t])
        bounded = clip(ratio, 1 - brick.clip_low, 1 + brick.clip_high)
        is_clipped = bounded * a < ratio * a
        eligible = brick.covariance_low < covariance(s, state)[t] < brick.covariance_high and not is_clipped
        kept = max(0.0, 1 - brick.share / state["eligible"]) if eligible else 1.0
        found[t] = -min(ratio * a, bounded * a) * kept
    return found


def kl_cov(brick, s, state):
    return {
        t: -a * math.exp(s.new[t] - s.old[t])
        + brick.coefficient * abs(s.new[t] - s.old[t]) * (covariance(s, state)[t] > state["bound"])
        for t, a in enumerate(s.a)
    }


def reinforce(brick, s, state):
    return {t: -a * s.new[t] for t, a in enumerate(s.a)}


def averaged(found, brick):
    """The mean over all sequences the brick counts, the slow way."""
    rows = [row for row in found if row]
    if None in rows[0]:
        return sum(row[None] for row in rows) / len(rows)
    if brick.average == "token":
        return sum(sum(row.values()) for row in rows) / sum(len(row) for row in rows)
    if brick.average == "sequence":
        return sum(sum(row.values()) / len(row) for row in rows) / len(rows)
    total = sum(sum(row.values()) for row in rows) / len(rows)
    return total / brick.length if brick.average == "constant" else total


def expected(brick, reference, new, fixed, state, decoupled=True):
    missing = getattr(brick, "missing_behaviour", "use_old")
    rows = [sequence(row, n, f, missing, decoupled) for row, n, f in zip(ROWS, new, fixed, strict=True)]
    return averaged([reference(brick, s, state) if len(s.a) else {} for s in rows], brick)


def finite_differences(function, vectors, step=1e-6):
    """Gradient of a function of a list of vectors, flat."""
    found = []
    for number, vector in enumerate(vectors):
        for t in range(len(vector)):
            ends = []
            for sign in (1, -1):
                moved = [other.copy() for other in vectors]
                moved[number][t] += sign * step
                ends.append(function(moved))
            found.append((ends[0] - ends[1]) / (2 * step))
    return np.array(found)


COVARIANCES = {"mean_advantage": 0.1, "mean_logprob": -1.0}
CASES = [
    (PPOClip(sequence_mask=0.02), ppo, {}),
    (PPOClip(sequence_mask=0.0, dual_clip=1.2, average="sequence"), ppo, {}),
    (DecoupledPPO(), decoupled_ppo, {}),
    (DecoupledPPO(cap=1.1, clip_high=0.3, missing_behaviour="use_old", average="sequence"), decoupled_ppo, {}),
    (GSPO(), gspo, {}),
    (GSPO(clip_low=0.1, clip_high=0.15), gspo, {}),
    (GSPO(clip_low=0.1, clip_high=0.15, token_level=True), gspo, {}),
    (GSPO(clip_low=0.5, clip_high=0.5, missing_behaviour="use_old"), gspo, {}),
    (CISPO(), cispo, {}),
    (CISPO(clip_low=0.2, clip_high=0.1, average="sequence"), cispo, {}),
    (SAPO(), sapo, {}),
    (SAPO(tau_positive=3.0, tau_negative=8.0, average="token", missing_behaviour="use_old"), sapo, {}),
    (TOPR(), topr, {}),
    (TOPR(average="token", missing_behaviour="use_old"), topr, {}),
    (OPMD(), opmd, {}),
    (OPMD(tau=0.3, regulariser="absorbed"), opmd, {}),
    (SPPO(), sppo, {}),
    (SPPO(clip=0.1, **CONSTANT), sppo, {}),
    (REC(), rec, {}),
    (REC(importance=True, average="sequence_sum"), rec, {}),
    (REC(clip="two_side", clip_high=0.4, importance=True), rec, {}),
    (REC(clip="ring", clip_low=0.1, clip_high=0.1, ring_low=0.2, ring_high=0.3), rec, {}),
    (REC(clip="none", missing_behaviour="use_old"), rec, {}),
    (GPG(), gpg, {}),
    (GPG(average="sequence"), gpg, {}),
    (GPG(count_flat=True), gpg, {}),
    (M2PO(), m2po, {"cut": 0.64}),
    (M2PO(missing_behaviour="use_old", average="sequence"), m2po, {"cut": 0.04}),
    (ClipCov(share=0.02, covariance_low=0.1), clip_cov, {**COVARIANCES, "eligible": 0.05}),
    (ClipCov(share=0.02, covariance_low=0.1, average="sequence"), clip_cov, {**COVARIANCES, "eligible": 0.01}),
    (KLCov(), kl_cov, {**COVARIANCES, "bound": 0.2}),
    (KLCov(coefficient=0.3, missing_behaviour="use_old"), kl_cov, {**COVARIANCES, "bound": 0.05}),
]


def leaf_loss(brick, state, rows=ROWS):
    leaf = Leaf(rows, torch.float64)
    algorithm, batch = Algorithm(policy_loss=brick), leaf.padded(range(len(rows)))
    divider = Divider(algorithm, [batch], state={"policy_loss": state}, progress=Progress())
    loss = divider.loss(batch)
    loss.backward()
    return leaf, loss.item(), divider.metrics()


@pytest.mark.parametrize(
    ("brick", "reference", "state"), CASES, ids=lambda value: getattr(value, "__name__", str(value))[:70]
)
def test_value_and_gradient_agree_with_a_slow_reference(brick, reference, state):
    leaf, loss, _ = leaf_loss(brick, state)
    fixed = [row.logprobs for row in ROWS]
    in_new = lambda new: expected(brick, reference, new, fixed, state)  # noqa: E731
    assert loss == pytest.approx(in_new(fixed), rel=1e-10)
    gradient = finite_differences(in_new, fixed)
    assert np.count_nonzero(np.abs(gradient) > 1e-6) > 5
    assert leaf.logprobs.grad.numpy() == pytest.approx(gradient, abs=1e-7)


def rho_of(brick, s):
    """rho of every token at the level of a `corrected`."""
    above = s.old if brick.ratio == "old" else s.fixed
    log_rho = np.where(s.known, above - s.behaviour, 0.0)
    if brick.level == "token":
        return np.exp(log_rho)
    total = log_rho.sum() / (max(s.known.sum(), 1) if brick.level == "geometric" else 1)
    return np.full(len(log_rho), math.exp(total))


def corrected(inner):
    def reference(brick, s, state):
        rho = rho_of(brick, s)
        inside = (rho >= brick.low) & (rho <= brick.high)
        weights = {
            "truncate": np.clip(rho, brick.low, brick.high),
            "mask": rho * inside,
            "reject": np.ones(len(rho)),
        }[brick.mode]
        if brick.mode == "reject":
            s = SimpleNamespace(**{name: value[inside] for name, value in vars(s).items()})
            weights = weights[inside]
        s.a = s.a * weights
        return inner(brick.loss, s, state) if len(s.a) else {}

    return reference


MODES = ("truncate", "mask", "reject")
CORRECTED = [
    *((Corrected(mode=mode, low=0.8, high=1.2), ppo) for mode in MODES),
    *((Corrected(mode=mode, level="sequence", low=0.5, high=1.5, loss=Reinforce()), reinforce) for mode in MODES),
    *((Corrected(mode=mode, level="geometric", low=0.9, high=1.1, loss=SAPO()), sapo) for mode in MODES),
    (Corrected(low=0.9, high=1.1, loss=GSPO(clip_low=0.2, clip_high=0.2)), gspo),
    (Corrected(mode="reject", level="geometric", low=0.95, high=1.1, loss=GSPO(clip_low=0.2, clip_high=0.2)), gspo),
    (Corrected(ratio="new", high=1.1, loss=Reinforce(average="sequence_sum")), reinforce),
    (Corrected(ratio="new", mode="mask", level="sequence", low=0.7, high=1.3, loss=PPOClip(average="token")), ppo),
]


@pytest.mark.parametrize(("brick", "inner"), CORRECTED, ids=lambda value: getattr(value, "__name__", str(value))[:90])
def test_a_corrected_loss_agrees_with_a_slow_reference_and_shows_its_weights(brick, inner):
    fixed = [row.logprobs for row in ROWS]
    missing = getattr(brick.loss, "missing_behaviour", "use_old")

    def in_new(new):
        rows = [sequence(row, n, f, missing) for row, n, f in zip(ROWS, new, fixed, strict=True)]
        return averaged([corrected(inner)(brick, s, {}) if len(s.a) else {} for s in rows], brick.loss)

    leaf, loss, metrics = leaf_loss(brick, {})
    assert loss == pytest.approx(in_new(fixed), rel=1e-10)
    assert leaf.logprobs.grad.numpy() == pytest.approx(finite_differences(in_new, fixed), abs=1e-7)
    known = [rho_of(brick, sequence(row, row.logprobs, row.logprobs)) for row in ROWS]
    rho = np.concatenate(known)
    inside = (rho >= brick.low) & (rho <= brick.high)
    weights = {"truncate": np.clip(rho, brick.low, brick.high), "mask": rho * inside, "reject": inside}[brick.mode]
    assert 0 < inside.mean() < 1
    assert metrics["behaviour_bound_ratio"] == pytest.approx(1 - inside.mean())
    assert metrics["behaviour_weight"] == pytest.approx(weights.mean())


def test_metrics_of_the_losses_are_the_shares_they_name():
    rows = [sequence(row, row.logprobs, row.logprobs) for row in ROWS]
    flat = lambda values: np.concatenate([np.atleast_1d(value) for value in values])  # noqa: E731
    ratio, a = flat(np.exp(s.new - s.old) for s in rows), flat(s.a for s in rows)
    behaviour_ratio = flat(np.exp(s.new - s.behaviour) for s in rows)
    square, region = np.log(behaviour_ratio) ** 2, a * np.log(behaviour_ratio) > 0
    shares = [
        (CISPO(clip_low=0.2, clip_high=0.1), "clip_ratio", ((ratio < 0.8) | (ratio > 1.1)).mean()),
        (SPPO(clip=0.1), "clip_ratio", ((ratio < 1 / 1.1) | (ratio > 1.1)).mean()),
        (REC(clip="two_side"), "clip_ratio", ((behaviour_ratio < 0.8) | (behaviour_ratio > 1.2)).mean()),
        (REC(), "ratio_mean", behaviour_ratio.mean()),
        (SAPO(), "ratio_mean", ratio.mean()),
        (GSPO(), "ratio_mean", np.mean([math.exp(np.mean(s.new - s.old)) for s in rows if len(s.a)])),
        (M2PO(), "second_moment", square.mean()),
        (M2PO(), "clip_ratio", (region & (square > 0.64)).mean()),
        (M2PO(), "excess", ((square - 0.04) * (region & (square <= 0.64))).mean()),
        (M2PO(), "excess_double", ((square - 0.04) * (region & (square <= 1.28))).mean()),
        (KLCov(), "advantage_mean", a.mean()),
        (ClipCov(), "logprob_mean", flat(s.new for s in rows).mean()),
    ]
    for brick, name, value in shares:
        state = Algorithm(policy_loss=brick).state0()["policy_loss"]
        assert leaf_loss(brick, state)[2][name] == pytest.approx(value), (brick, name)
    state = {**COVARIANCES, "bound": 0.1, "eligible": 0.1}
    found = flat(covariance(s, state) for s in rows)
    assert leaf_loss(KLCov(), state)[2]["held_ratio"] == pytest.approx((found > 0.1).mean())
    assert leaf_loss(KLCov(), state)[2]["covariance_square"] == pytest.approx((found**2).mean())
    is_clipped = np.where(a > 0, ratio > 1.2, ratio < 0.8)
    eligible = ((found > 0.1) & (found < 5) & ~is_clipped).mean()
    assert leaf_loss(ClipCov(covariance_low=0.1), state)[2]["eligible_ratio"] == pytest.approx(eligible)
    dropped = flat((np.mean(s.behaviour - s.new) > 0.02) & (s.a < 0) for s in rows if len(s.a)).mean()
    assert dropped > 0
    assert leaf_loss(PPOClip(sequence_mask=0.02), {})[2]["sequence_masked_ratio"] == pytest.approx(dropped)
    everything = flat(row.streams["advantages"][row.action_mask] == 0 for row in ROWS).mean()
    assert everything > 0
    assert leaf_loss(GPG(), {})[2]["flat_ratio"] == pytest.approx(everything)
    tapers = flat(
        np.full((s.a < 0).sum(), min(1.0, math.exp(np.sum(s.new - s.behaviour)))) for s in rows if len(s.a)
    ).mean()
    assert leaf_loss(TOPR(), {})[2]["taper_mean"] == pytest.approx(tapers)
