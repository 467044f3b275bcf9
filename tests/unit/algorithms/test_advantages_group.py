"""Advantages of one group against numbers worked out by hand and short float64 references."""

import itertools
import math

import numpy as np
import pytest

from triune.algorithms.advantages.asymre import AsymREAdvantage
from triune.algorithms.advantages.gdpo import GDPOAdvantage
from triune.algorithms.advantages.gigpo import GiGPOAdvantage
from triune.algorithms.advantages.grpo import GRPOAdvantage
from triune.algorithms.advantages.max_rl import MaxRLAdvantage
from triune.algorithms.advantages.multi_step_grpo import MultiStepGRPOAdvantage
from triune.algorithms.advantages.opmd import OPMDAdvantage
from triune.algorithms.advantages.rec import RECAdvantage
from triune.algorithms.advantages.reinforce_pp_baseline import ReinforcePPBaselineAdvantage
from triune.algorithms.advantages.remax import ReMaxAdvantage
from triune.algorithms.advantages.rloo import RLOOAdvantage
from triune.errors import ConfigError, RecordError
from triune.records import GroupId
from triune.testing.batches import experience, group


def per_rollout(shaped):
    """Advantage by rollout number; checks that it stands on action tokens only and is one number."""
    found = {}
    for row in shaped.experiences:
        stream = row.streams["advantages"]
        assert stream.dtype == np.float32
        assert (stream[~row.action_mask] == 0).all()
        values = set(stream[row.action_mask].tolist())
        assert len(values) == 1
        assert found.setdefault(row.member, values.pop()) == float(stream[row.action_mask][0])
    return found


LOG_AVG_EXP = math.log((1 + math.e) / 2)  # of rewards 0 and 1 with tau 1
GOLDEN = [
    (RLOOAdvantage(), [1.0, 0.0, 0.0, 3.0], [0.0, -4 / 3, -4 / 3, 8 / 3]),  # 1 - 3/3, 0 - 4/3, 0 - 4/3, 3 - 1/3
    (RLOOAdvantage(), [2.0, 1.0], [1.0, -1.0]),
    (OPMDAdvantage(), [1.0, 0.0, 0.0, 3.0], [0.0, -1.0, -1.0, 2.0]),
    (OPMDAdvantage(baseline="log_avg_exp"), [0.0, 1.0], [-LOG_AVG_EXP, 1 - LOG_AVG_EXP]),
    (
        OPMDAdvantage(baseline="log_avg_exp", tau=0.5),
        [0.0, math.log(3) / 2],  # exp(r / tau) is 1 and 3: the baseline is log(2) / 2
        [-math.log(2) / 2, math.log(1.5) / 2],
    ),
    (OPMDAdvantage(baseline="log_avg_exp", tau=1e-3), [0.0, 1.0], [-1 + 1e-3 * math.log(2), 1e-3 * math.log(2)]),
    (AsymREAdvantage(), [1.0, 0.0], [0.6, -0.4]),
    (AsymREAdvantage(shift=0.25), [1.0, 0.0, 0.5], [0.25, -0.75, -0.25]),
    (RECAdvantage(), [1.0, 0.0, 0.0, 3.0], [0.0, -1.0, -1.0, 2.0]),
    (MaxRLAdvantage(), [1.0, 0.0, 0.0, 0.0], [3.0, -1.0, -1.0, -1.0]),
    (MaxRLAdvantage(), [1.0, 1.0, 0.0], [0.5, 0.5, -1.0]),
    (MaxRLAdvantage(subtract_mean=False), [1.0, 0.0, 0.0, 0.0], [4.0, 0.0, 0.0, 0.0]),
    (MultiStepGRPOAdvantage(), [1.0, 0.0, 0.0, 3.0], [0.0, -0.70710678, -0.70710678, 1.41421356]),
    (MultiStepGRPOAdvantage(scale="none"), [1.0, 0.0], [0.5, -0.5]),
    (MultiStepGRPOAdvantage(std="population"), [1.0, 0.0], [1.0, -1.0]),
    (GiGPOAdvantage(std="population"), [1.0, 0.0], [1.0, -1.0]),  # no turns, no anchors
    (ReinforcePPBaselineAdvantage(), [1.0, 0.0, 0.0, 3.0], [0.0, -1.0, -1.0, 2.0]),  # the trainer whitens later
    # ranks 0, 1.5, 1.5, 3 of 3, less 0.5
    (GRPOAdvantage(rank=True, scale="none"), [-9.0, 1.0, 1.0, 700.0], [-0.5, 0.0, 0.0, 0.5]),
    (GRPOAdvantage(rank=True, epsilon=0.0), [-9.0, 1.0, 1.0, 700.0], [-1.2247449, 0.0, 0.0, 1.2247449]),  # sqrt(3/2)
    (GRPOAdvantage(rank=True, scale="none"), [5.0, 4.0, 4.0, 4.0], [0.5, -1 / 6, -1 / 6, -1 / 6]),
    (GRPOAdvantage(fill_to=8, scale="none"), [1.0, 0.0], [2.0, -2.0]),
    (GRPOAdvantage(fill_to=2, scale="none"), [1.0, 0.0, 0.5], [0.5, -0.5, 0.0]),  # larger than full: left alone
    (GRPOAdvantage(fill_to=4, epsilon=0.0), [1.0, 0.0], [math.sqrt(2), -math.sqrt(2)]),
]
GROUPED = [
    GRPOAdvantage(rank=True),
    GRPOAdvantage(fill_to=8),
    RLOOAdvantage(),
    OPMDAdvantage(),
    OPMDAdvantage(baseline="log_avg_exp", tau=0.3),
    AsymREAdvantage(),
    RECAdvantage(),
    RECAdvantage(drop="balance"),
    MaxRLAdvantage(),
    MaxRLAdvantage(subtract_mean=False),
    MultiStepGRPOAdvantage(),
    MultiStepGRPOAdvantage(rewards="turns"),
    GiGPOAdvantage(),
    ReinforcePPBaselineAdvantage(),
]
KEEPS_FLAT_GROUPS = (AsymREAdvantage, MaxRLAdvantage)


@pytest.mark.parametrize(("brick", "rewards", "expected"), GOLDEN, ids=str)
def test_every_option_has_golden_values(brick, rewards, expected):
    assert list(per_rollout(brick(group(rewards))).values()) == pytest.approx(expected, abs=3e-6)


@pytest.mark.parametrize("brick", GROUPED, ids=str)
@pytest.mark.parametrize("rewards", [[0.1] * 8, [1 / 3] * 3, [5.0], [0.0, 0.0], []])
def test_no_spread_is_exactly_zero_unless_the_method_says_otherwise(brick, rewards):
    expected = {0.0}
    if isinstance(brick, AsymREAdvantage):
        expected = {float(np.float32(0.1))}
    if brick == MaxRLAdvantage(subtract_mean=False) and any(rewards):
        assert list(per_rollout(brick(group(rewards))).values()) == pytest.approx([1.0] * len(rewards))
        return
    assert set(per_rollout(brick(group(rewards))).values()) <= expected


@pytest.mark.parametrize(
    "brick", [GRPOAdvantage(epsilon=0.0), MultiStepGRPOAdvantage(epsilon=0.0), GiGPOAdvantage(epsilon=0.0)], ids=str
)
def test_a_flat_group_without_epsilon_is_zero_and_no_division_by_it(brick):
    assert set(per_rollout(brick(group([0.3, 0.3]))).values()) == {0.0}


@pytest.mark.parametrize("brick", GROUPED, ids=str)
def test_invalid_members_count_for_nothing_and_credit_goes_by_rollout_not_by_position(brick):
    rewards = {0: 9.0, 1: 1.0, 2: 4.0, 3: 0.0, 4: 2.0}
    whole = group(list(rewards.values()))
    rows = [row.replace(is_valid=row.member != 0) for row in whole.experiences]
    rows[2] = rows[2].replace(reward=None)
    alone = per_rollout(brick(group([1.0, 0.0, 2.0])))
    for order in itertools.permutations(range(5)):
        found = per_rollout(brick(whole.with_records([rows[n] for n in order])))
        assert list(found) == [n for n in order if n in (1, 3, 4)]
        assert [found[1], found[3], found[4]] == pytest.approx(list(alone.values()), abs=1e-6)


@pytest.mark.parametrize("brick", GROUPED, ids=str)
def test_a_rollout_of_several_experiences_counts_once(brick):
    whole = group([1.0, 0.0, 0.5])
    second = experience(0, reward=1.0, branch=1, prompt=4)
    found = brick(whole.with_records([*whole.records, second]))
    assert len(found) == 4
    if brick == MultiStepGRPOAdvantage(rewards="turns"):  # here steps are compared, and this rollout has two
        return
    assert per_rollout(found) == pytest.approx(per_rollout(brick(whole)))


@pytest.mark.parametrize("brick", GROUPED, ids=str)
def test_experiences_of_another_task_are_refused(brick):
    whole = group([1.0, 0.0])
    stranger = experience(2, reward=0.0, group=GroupId("run", "train", "other", 0))
    with pytest.raises(RecordError, match="experiences of this group only"):
        brick(whole.with_records([*whole.records, stranger]))


def test_ranks_ignore_the_size_of_rewards_and_any_increasing_change_of_them():
    rewards = np.random.default_rng(0).normal(size=9).round(1)
    rank = lambda values: list(per_rollout(GRPOAdvantage(rank=True)(group(values))).values())  # noqa: E731
    assert rank(rewards) == rank(np.exp(3 * rewards) - 100)
    assert sum(rank(rewards)) == pytest.approx(0, abs=1e-5)
    assert np.argmax(rank(rewards)) == np.argmax(rewards)


def test_ranks_over_the_deviation_of_rewards_are_refused():
    with pytest.raises(ConfigError, match="write `scale: group`"):
        GRPOAdvantage(rank=True, scale="batch").check("algorithm.advantage")
    GRPOAdvantage(rank=True).check("algorithm.advantage")


# --------------------------------------------------------------------------------------- expectations, exactly


def expected_gradient(brick, chance, size):
    """E[1/G sum A_i d log p(y_i)] for an answer that is right with `chance`, over all groups of this size."""
    total = 0.0
    for rewards in itertools.product([0.0, 1.0], repeat=size):
        weight = math.prod(chance if reward else 1 - chance for reward in rewards)
        scores = [1 / chance if reward else -1 / (1 - chance) for reward in rewards]
        advantages = [row.streams["advantages"][-1] for row in brick(group(rewards)).experiences]
        total += weight * float(np.mean(np.array(scores) * advantages))
    return total


@pytest.mark.parametrize("chance", [0.1, 0.6])
@pytest.mark.parametrize("size", [2, 5])
def test_what_the_expected_gradient_of_the_success_rate_is(chance, size):
    found = lambda brick: expected_gradient(brick, chance, size)  # noqa: E731
    assert found(RLOOAdvantage()) == pytest.approx(1.0, rel=1e-5)  # the policy gradient of p is 1
    assert found(RECAdvantage()) == pytest.approx((size - 1) / size, rel=1e-5)
    assert found(OPMDAdvantage()) == pytest.approx((size - 1) / size, rel=1e-5)
    assert found(AsymREAdvantage()) == pytest.approx((size - 1) / size, rel=1e-5)  # on-policy a shift is nothing


@pytest.mark.parametrize("chance", [0.1, 0.6])
@pytest.mark.parametrize("size", [2, 5])
def test_max_rl_follows_the_series_of_the_log_likelihood_and_one_term_less_with_the_mean(chance, size):
    # d pass@k / dp = k (1 - p)^(k - 1), so the first T terms of the series are sum of (1 - p)^(k - 1)
    series = lambda terms: sum((1 - chance) ** (k - 1) for k in range(1, terms + 1))  # noqa: E731
    assert expected_gradient(MaxRLAdvantage(subtract_mean=False), chance, size) == pytest.approx(series(size), rel=1e-5)
    assert expected_gradient(MaxRLAdvantage(), chance, size) == pytest.approx(series(size - 1), rel=1e-5)


def test_max_rl_refuses_negative_rewards_and_wants_two_rollouts_only_with_the_mean():
    with pytest.raises(RecordError, match=r"reward of -0\.5; expected 0 or more"):
        MaxRLAdvantage()(group([1.0, -0.5]))
    assert MaxRLAdvantage().least_group == 2
    assert MaxRLAdvantage(subtract_mean=False).least_group == 1
    assert list(per_rollout(MaxRLAdvantage(subtract_mean=False)(group([2.0]))).values()) == [1.0]


# ------------------------------------------------------------------------------------------- single methods


def test_rec_drops_the_surplus_of_rollouts_below_the_mean_and_centres_the_rest():
    rewards = [1.0, 0.0, 0.0, 0.0, 0.0]
    found = per_rollout(RECAdvantage(drop="balance")(group(rewards)))
    assert found[0] == 0.5
    assert sorted(found.values()) == [-0.5, 0.0, 0.0, 0.0, 0.5]
    mirrored = [0.0, 1.0, 1.0, 1.0, 1.0]
    assert per_rollout(RECAdvantage(drop="balance")(group(mirrored))) == per_rollout(RECAdvantage()(group(mirrored)))


def test_rec_drops_the_same_rollouts_whatever_their_order():
    whole = group([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    turned = whole.with_records(whole.records[::-1])
    brick = RECAdvantage(drop="balance")
    assert per_rollout(brick(whole)) == per_rollout(brick(turned))


def test_remax_subtracts_the_reward_of_the_greedy_member_and_leaves_it_out():
    whole = group([1.0, 0.25, 0.0])
    rows = list(whole.experiences)
    rows[1] = rows[1].replace(temperature=0.0)
    assert per_rollout(ReMaxAdvantage()(whole.with_records(rows))) == {0: 0.75, 2: -0.25}
    rows[1] = rows[1].replace(temperature=np.zeros(len(rows[1]), np.float32))
    assert per_rollout(ReMaxAdvantage()(whole.with_records(rows))) == {0: 0.75, 2: -0.25}
    rows[0] = rows[0].replace(is_valid=False)
    assert per_rollout(ReMaxAdvantage()(whole.with_records(rows))) == {2: -0.25}
    rows[1] = rows[1].replace(is_valid=False)
    with pytest.raises(RecordError, match="the greedy member failed"):
        ReMaxAdvantage()(whole.with_records(rows))


def test_remax_takes_a_noted_greedy_reward_and_refuses_a_group_without_one():
    whole = group([1.0, 0.0], metrics={"greedy_reward": 0.25, "other": 0.5})
    assert per_rollout(ReMaxAdvantage()(whole)) == {0: 0.75, 1: -0.25}
    assert per_rollout(ReMaxAdvantage(metric="other")(whole)) == {0: 0.5, 1: -0.5}
    with pytest.raises(RecordError, match="no greedy baseline; expected a greedy member or metric 'greedy_reward'"):
        ReMaxAdvantage()(group([1.0, 0.0]))


def parts(*columns):
    """A group whose rollouts have these reward parts."""
    whole = group([0.0] * len(columns))
    return whole.with_records(
        [row.replace(reward_parts=part) for row, part in zip(whole.experiences, columns, strict=True)]
    )


def test_gdpo_normalises_every_part_on_its_own():
    whole = parts({"right": 0.0, "short": 10.0}, {"right": 1.0, "short": 30.0}, {"right": 2.0, "short": 20.0})
    brick = GDPOAdvantage(weights={"right": 1.0, "short": 0.5}, epsilon=0.0)
    assert list(per_rollout(brick(whole)).values()) == pytest.approx([-1 - 0.5, 0 + 0.5, 1 + 0.0])
    assert list(per_rollout(GDPOAdvantage(epsilon=0.0)(whole)).values()) == pytest.approx([-2.0, 1.0, 1.0])
    only = GDPOAdvantage(weights={"short": 2.0}, std="population", epsilon=0.0)
    assert list(per_rollout(only(whole)).values()) == pytest.approx([-2 * 1.2247449, 2 * 1.2247449, 0.0])


def test_gdpo_tells_apart_what_the_sum_hides_and_ignores_a_flat_part():
    whole = parts(
        {"a": 1.0, "b": 0.0, "flat": 7.0}, {"a": 0.0, "b": 1.0, "flat": 7.0}, {"a": 0.0, "b": 0.0, "flat": 7.0}
    )
    first, second, third = per_rollout(GDPOAdvantage(weights={"a": 3.0, "b": 1.0, "flat": 1.0})(whole)).values()
    assert first > second > third
    assert set(per_rollout(GDPOAdvantage(weights={"flat": 1.0})(whole)).values()) == {0.0}


def test_gdpo_refuses_a_rollout_without_a_part():
    with pytest.raises(RecordError, match=r"no reward part 'b'; expected one of its parts \(a\)"):
        GDPOAdvantage()(parts({"a": 1.0, "b": 0.0}, {"a": 0.0}))
    with pytest.raises(RecordError, match="no reward parts"):
        GDPOAdvantage()(group([1.0, 0.0]))
    invalid = parts({"a": 1.0}, {"a": 0.0}, {})
    rows = [row.replace(is_valid=bool(row.reward_parts)) for row in invalid.experiences]
    assert list(per_rollout(GDPOAdvantage()(invalid.with_records(rows)))) == [0, 1]
