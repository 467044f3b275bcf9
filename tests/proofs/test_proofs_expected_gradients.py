"""What every brick says of its expected gradient, on a bandit with five arms, without sampling noise."""

import numpy as np
import pytest

from triune.records import Source
from triune.testing.bandit import Bandit, TwoSteps, weight_of
from triune.testing.proofs import KINDS, cases

SEEDS = (1, 2, 3)
NEAR = 1e-4
"""How far log-ratios are from 0 in the proofs inside a clip."""
STRENGTHS = np.array([1.0, 2.0, 4.0, 1.0, 2.0])


def chosen(*claims, kinds=KINDS):
    """Cases with one of these claims."""
    found = {}
    for case in cases(*kinds):
        if getattr(case.brick, "expected_gradient", None) in claims:
            found[str(case)] = case
    return pytest.mark.parametrize("case", found.values(), ids=found)


def scale_of(case):
    """How many times the claimed gradient: what the brick says, over the length of `average: constant`."""
    options = dict(case.options)
    return case.says("gradient_scale", 1.0) / (options["length"] if options.get("average") == "constant" else 1)


def near(distribution, seed):
    """A distribution whose log-ratios to the given one are about NEAR."""
    moved = distribution * np.exp(NEAR * np.random.default_rng(seed).uniform(-1, 1, 5) / 2)
    return moved / moved.sum()


def close(found, expected):
    assert np.allclose(found, expected, rtol=1e-9, atol=1e-11), f"{found} instead of {expected}"


@pytest.mark.parametrize("case", cases(*KINDS), ids=str)
def test_every_brick_says_what_its_expected_gradient_is(case):
    assert case.claim


@chosen("improves_reward", "improves_likelihood")
def test_a_brick_with_a_weak_claim_says_what_it_follows_instead(case):
    text = " ".join(type(case.brick).__doc__.split()).lower()
    assert "biased" in text or "gradient" in text, f"{case}: say in the docstring what the expected gradient equals"


# ------------------------------------------------------------------------------------------------ policy losses


@chosen("policy_gradient")
def test_on_fresh_samples_the_loss_descends_the_negative_policy_gradient(case):
    for seed in SEEDS:
        bandit = Bandit.random(seed)
        close(bandit.gradient(case), -scale_of(case) * bandit.policy_gradient())


@chosen("policy_gradient")
def test_on_fresh_answers_of_two_tokens_the_direction_is_that_of_the_policy_gradient(case):
    # how much a sequence weighs against a token is the brick's business; both answers here are equally long
    for seed in SEEDS:
        bandit = TwoSteps.random(seed)
        found, expected = -bandit.gradient(case), bandit.policy_gradient()
        scale = found @ expected / (expected @ expected)
        assert scale > 0
        close(found / scale, expected)


@chosen("imitation")
def test_an_imitation_descends_the_cross_entropy_of_its_data(case):
    for seed in SEEDS:
        bandit = Bandit.random(seed)
        found = bandit.gradient(case, sampler=bandit.other, source=Source.EXPERT)
        close(found, -scale_of(case) * bandit.imitation())


@chosen("improves_reward", "improves_likelihood")
def test_going_along_the_gradient_raises_what_the_brick_says(case):
    is_reward = case.claim == "improves_reward"
    if case.is_paired:
        chosen_share = np.array([(s / (s + STRENGTHS)).sum() - 0.5 for s in STRENGTHS]) / 10
        start = Bandit(np.full(5, 0.2), chosen_share, np.full(5, 0.2), np.log(STRENGTHS))  # who wrote the pairs
        descent = -start.pair_gradient(case, start.policy, STRENGTHS)
        assert descent @ (start.policy_gradient() if is_reward else start.imitation()) > 0
        return
    for seed in SEEDS:
        bandit = Bandit.random(seed)
        if not is_reward:
            assert_each_answer_pulls_towards_itself(case, bandit)
            continue
        labels = case.says("reads", "") == "labels"
        if labels:
            bandit = Bandit(bandit.policy, bandit.other, bandit.policy, np.sign(bandit.rewards))
        assert -bandit.gradient(case, labels=labels) @ bandit.policy_gradient() > 0


def assert_each_answer_pulls_towards_itself(case, bandit):
    """Each answer raises its own log-prob, by some weight, and a mixture does what its answers do."""
    total = np.zeros(5)
    for arm, share in enumerate(bandit.other):
        descent = -bandit.gradient(case, sampler=np.eye(5)[arm], source=Source.EXPERT)
        own = np.eye(5)[arm] - bandit.policy
        close(descent, descent[arm] / own[arm] * own)
        assert descent[arm] > 0
        total += share * descent
    close(-bandit.gradient(case, sampler=bandit.other, source=Source.EXPERT), total)


@chosen("bradley_terry")
def test_a_preference_loss_rests_where_the_policy_is_the_reference_times_exp_of_reward_over_beta(case):
    for seed in SEEDS:
        bandit = Bandit.random(seed)
        best = bandit.reference * STRENGTHS ** (1 / case.brick.beta)
        close(bandit.pair_gradient(case, best / best.sum(), STRENGTHS), np.zeros(5))
        start = Bandit(bandit.reference, bandit.other, bandit.reference, np.log(STRENGTHS))
        descent = -start.pair_gradient(case, start.policy, STRENGTHS)
        assert descent @ start.policy_gradient() > 1e-6


@pytest.mark.parametrize(
    "case", [case for case in cases("policy_loss") if hasattr(case.brick, "expert_gradient")], ids=str
)
def test_tokens_of_experts_have_the_gradient_the_brick_says(case):
    for seed in SEEDS:
        bandit = Bandit.random(seed)
        found = bandit.gradient(case, sampler=bandit.other, source=Source.EXPERT)
        if case.brick.expert_gradient == "imitation":
            close(found, -case.says("expert_scale", 1.0) * bandit.imitation())
        else:
            assert case.brick.expert_gradient == "improves_likelihood"
            assert_each_answer_pulls_towards_itself(case, bandit)


# ------------------------------------------------------------------------------------- KL, entropy and critic


@chosen("reverse_kl", "forward_kl", "total_variation", "zero", kinds=("kl",))
def test_case_31_a_kl_estimator_descends_the_divergence_it_names(case):
    for seed in SEEDS:
        bandit = Bandit.random(seed)
        close(bandit.gradient(case), weight_of(case) * getattr(bandit, case.claim)())


@chosen("entropy", kinds=("entropy",))
def test_an_entropy_term_is_the_entropy(case):
    for seed in SEEDS:
        bandit = Bandit.random(seed)
        close(bandit.gradient(case), weight_of(case) * bandit.entropy())


@chosen("mean_return", kinds=("critic",))
def test_a_critic_rests_at_the_mean_return_and_moves_towards_it(case):
    for seed in SEEDS:
        bandit = Bandit.random(seed)
        mean = bandit.policy @ bandit.rewards
        close(bandit.value_gradient(case, mean), 0.0)
        assert bandit.value_gradient(case, mean + 0.01) > 0 > bandit.value_gradient(case, mean - 0.01)


@chosen("nothing")
def test_a_brick_that_claims_nothing_has_no_gradient(case):
    if case.kind != "critic":
        assert not Bandit.random(1).gradient(case).any()


# ------------------------------------------------------------------------------------------------- off-policy


def off_policy(word):
    found = {str(case): case for case in cases("policy_loss", "kl") if case.says("off_policy", "") == word}
    return pytest.mark.parametrize("case", found.values(), ids=found)


def true(case, bandit):
    if case.kind == "kl":
        return weight_of(case) * getattr(bandit, case.claim)()
    assert case.claim == "policy_gradient", f"{case}: `off_policy` is for unbiased losses"
    return -scale_of(case) * bandit.policy_gradient()


@off_policy("exact")
def test_a_brick_that_is_exact_off_policy_is_so_for_any_sampler(case):
    for seed in SEEDS:
        bandit = Bandit.random(seed)
        if case.claim == "nothing":
            continue
        old = bandit.reference if case.says("is_decoupled", False) else None
        close(bandit.gradient(case, sampler=bandit.other, old=old), true(case, bandit))


@off_policy("inside_clip")
def test_a_clipped_loss_is_exact_while_no_ratio_leaves_its_clip(case):
    for seed in SEEDS:
        given = Bandit.random(seed)
        bandit = Bandit(near(given.other, seed), given.other, given.reference, given.rewards)
        old = near(given.other, seed + 10) if case.says("is_decoupled", False) else None
        found = bandit.gradient(case, sampler=given.other, old=old)
        close(found, true(case, bandit))


def test_the_proof_inside_a_clip_sees_a_loss_without_ratios():
    (case,) = (case for case in cases("policy_loss") if str(case) == "policy_loss-reinforce")
    given = Bandit.random(1)
    bandit = Bandit(near(given.other, 1), given.other, given.reference, given.rewards)
    assert not np.allclose(bandit.gradient(case, sampler=given.other), true(case, bandit), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("word", sorted({case.says("off_policy", "") for case in cases("policy_loss", "kl")}))
def test_off_policy_claims_are_known_words(word):
    assert word in ("", "exact", "inside_clip")
