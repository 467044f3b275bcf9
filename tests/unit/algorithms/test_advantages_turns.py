"""Advantages of rollouts of several turns against numbers worked out by hand and a slow reference."""

import itertools

import numpy as np
import pytest

from triune.algorithms.advantages.gigpo import GiGPOAdvantage
from triune.algorithms.advantages.grpo import GRPOAdvantage
from triune.algorithms.advantages.multi_step_grpo import MultiStepGRPOAdvantage
from triune.records import Turn
from triune.testing.batches import experience, group


def rollout(member, reward, *turns, merged=True):
    """A rollout whose turns are (reward, state key): two tokens each, with one token of the world in front."""
    if merged:
        row = experience(member, reward=reward, prompt=0, actions=3 * len(turns))
        mask = np.arange(len(row)) % 3 != 0
        spans = tuple(
            Turn(start=3 * n + 1, stop=3 * n + 3, reward=paid, state_key=key) for n, (paid, key) in enumerate(turns)
        )
        return [row.replace(action_mask=mask, turns=spans)]
    return [
        experience(member, reward=reward, branch=n, prompt=1, actions=2).replace(
            turns=(Turn(start=1, stop=3, reward=paid, state_key=key),)
        )
        for n, (paid, key) in enumerate(turns)
    ]


def of(*rollouts):
    return group([]).with_records([row for rows in rollouts for row in rows])


def per_turn(shaped):
    """Advantages by rollout: one number per turn, checked to be the same on all its tokens and 0 on the world's."""
    found = {}
    for row in sorted(shaped.experiences, key=lambda row: row.id.branch):
        stream = row.streams["advantages"]
        assert stream.dtype == np.float32
        assert (stream[~row.action_mask] == 0).all()
        for turn in row.turns:
            values = set(stream[turn.start : turn.stop].tolist())
            assert len(values) == 1
            found.setdefault(row.member, []).append(values.pop())
    return found


BRICKS = [
    MultiStepGRPOAdvantage(),
    MultiStepGRPOAdvantage(divide_by_steps=True),
    MultiStepGRPOAdvantage(rewards="turns"),
    MultiStepGRPOAdvantage(rewards="turns", scale="none", divide_by_steps=True),
    GiGPOAdvantage(),
    GiGPOAdvantage(scale="none", discount=0.5, step_weight=2.0),
    GiGPOAdvantage(std="population", discount=1.0),
]


def test_the_final_advantage_goes_to_every_turn():
    whole = of(rollout(0, 1.0, (None, None), (None, None)), rollout(1, 0.0, (None, None)))
    brick = MultiStepGRPOAdvantage(scale="none")
    assert per_turn(brick(whole)) == {0: [0.5, 0.5], 1: [-0.5]}
    divided = MultiStepGRPOAdvantage(scale="none", divide_by_steps=True)
    assert per_turn(divided(whole)) == {0: [0.25, 0.25], 1: [-0.5]}


def test_turn_rewards_are_normalised_over_all_steps_and_summed_from_each_on():
    whole = of(rollout(0, 3.0, (1.0, None), (2.0, None)), rollout(1, 0.0, (0.0, None), (0.0, None)))
    # rewards 1, 2, 0, 0: mean 0.75; squares 0.0625, 1.5625, 0.5625, 0.5625 sum to 2.75
    plain = MultiStepGRPOAdvantage(rewards="turns", scale="none")
    assert per_turn(plain(whole)) == {0: [1.5, 1.25], 1: [-1.5, -0.75]}
    scaled = MultiStepGRPOAdvantage(rewards="turns", epsilon=0.0)
    deviation = np.sqrt(2.75 / 3)
    assert per_turn(scaled(whole))[0] == pytest.approx([1.5 / deviation, 1.25 / deviation])
    population = MultiStepGRPOAdvantage(rewards="turns", epsilon=0.0, std="population", divide_by_steps=True)
    assert per_turn(population(whole))[1] == pytest.approx(np.array([-1.5, -0.75]) / np.sqrt(2.75 / 4) / 2)


def test_what_the_turns_do_not_account_for_is_paid_to_the_last_one():
    plain = MultiStepGRPOAdvantage(rewards="turns", scale="none")
    silent = of(rollout(0, 3.0, (None, None), (None, None)), rollout(1, 1.0, (None, None), (None, None)))
    told = of(rollout(0, 3.0, (0.0, None), (3.0, None)), rollout(1, 1.0, (0.0, None), (1.0, None)))
    assert per_turn(plain(silent)) == per_turn(plain(told)) == {0: [1.0, 2.0], 1: [-1.0, 0.0]}
    penalised = of(rollout(0, 2.5, (1.0, None), (2.0, None)), rollout(1, 0.0, (0.0, None), (0.0, None)))
    assert per_turn(plain(penalised))[0] == pytest.approx([2.5 - 2 * 0.625, 1.5 - 0.625])


def test_gigpo_compares_steps_that_were_taken_in_one_state():
    first = rollout(0, 1.0, (None, "a"), (None, "b"))
    second = rollout(1, 0.0, (None, "a"), (None, "c"))
    brick = GiGPOAdvantage(scale="none", discount=0.5)
    # rollouts: +-0.5. State a: returns 0.5 and 0, so +-0.25. b and c were met once.
    assert per_turn(brick(of(first, second))) == {0: [0.75, 0.5], 1: [-0.75, -0.5]}
    doubled = GiGPOAdvantage(scale="none", discount=0.5, step_weight=2.0)
    assert per_turn(doubled(of(first, second)))[0] == [1.0, 0.5]
    nothing = GiGPOAdvantage(step_weight=0.0)
    assert per_turn(nothing(of(first, second)))[0] == per_turn(MultiStepGRPOAdvantage()(of(first, second)))[0]


def test_gigpo_compares_a_state_that_one_rollout_meets_twice():
    looped = rollout(0, 1.0, (-1.0, "a"), (2.0, "a"))
    straight = rollout(1, 1.0, (1.0, "a"))
    brick = GiGPOAdvantage(scale="none", discount=1.0)
    # returns in a: 1, 2, 1 with mean 4/3; both rollouts earned the same
    found = per_turn(brick(of(looped, straight)))
    assert found[0] == pytest.approx([-1 / 3, 2 / 3])
    assert found[1] == pytest.approx([-1 / 3])


def test_gigpo_gives_turns_without_a_key_no_step_part():
    whole = of(rollout(0, 1.0, (None, None), (None, None)), rollout(1, 0.0, (None, None), (None, None)))
    assert per_turn(GiGPOAdvantage(std="population", epsilon=0.0)(whole)) == {0: [1.0, 1.0], 1: [-1.0, -1.0]}


def slow_gigpo(rollouts, brick):
    """By rollout: a list of advantages per turn, the long way, in float64."""

    def normal(values):
        values = np.array(values, dtype=np.float64)
        centred = values - values.mean()
        if np.ptp(values) == 0:
            return np.zeros(len(values))
        if brick.scale == "none":
            return centred
        return centred / (values.std(ddof=int(brick.std == "sample" and len(values) > 1)) + brick.epsilon)

    members = list(rollouts)
    base = dict(zip(members, normal([reward for reward, _ in rollouts.values()]), strict=True))
    found = {member: [base[member]] * len(turns) for member, (_, turns) in rollouts.items()}
    by_state = {}
    for member, (reward, turns) in rollouts.items():
        paid = [turn[0] for turn in turns]
        paid[-1] += reward - sum(paid)
        for k, (_, key) in enumerate(turns):
            value = sum(brick.discount ** (j - k) * paid[j] for j in range(k, len(turns)))
            by_state.setdefault(key, []).append((member, k, value))
    for met in by_state.values():
        for (member, k, _), value in zip(met, normal([value for *_, value in met]), strict=True):
            found[member][k] += brick.step_weight * value
    return found


@pytest.mark.parametrize("brick", [brick for brick in BRICKS if isinstance(brick, GiGPOAdvantage)], ids=str)
@pytest.mark.parametrize("merged", [True, False])
def test_gigpo_agrees_with_a_slow_reference(brick, merged):
    chance = np.random.default_rng(5)
    rollouts = {}
    for member in range(6):
        turns = [(float(chance.integers(0, 3)), "abc"[chance.integers(3)]) for _ in range(chance.integers(1, 6))]
        rollouts[member] = (float(chance.normal()), turns)
    whole = of(*(rollout(m, reward, *turns, merged=merged) for m, (reward, turns) in rollouts.items()))
    found, expected = per_turn(brick(whole)), slow_gigpo(rollouts, brick)
    for member in rollouts:
        assert found[member] == pytest.approx(expected[member], abs=1e-5)


@pytest.mark.parametrize("brick", BRICKS, ids=str)
def test_it_does_not_matter_how_turns_are_stored_nor_in_which_order(brick):
    story = [(1.0, [(0.5, "a"), (0.0, "b"), (None, "a")]), (0.0, [(None, "a")]), (-1.0, [(0.25, "b"), (0.0, "a")])]
    merged = [rollout(n, reward, *turns) for n, (reward, turns) in enumerate(story)]
    split = [rollout(n, reward, *turns, merged=False) for n, (reward, turns) in enumerate(story)]
    expected = per_turn(brick(of(*merged)))
    for order in itertools.permutations(range(3)):
        for stored in (merged, split):
            found = per_turn(brick(of(*(stored[n] for n in order))))
            assert {n: found[n] for n in range(3)} == {n: pytest.approx(expected[n], abs=1e-6) for n in range(3)}
    backwards = of(*(rows[::-1] for rows in split))
    assert per_turn(brick(backwards)) == {n: pytest.approx(expected[n], abs=1e-6) for n in range(3)}


@pytest.mark.parametrize("brick", BRICKS, ids=str)
def test_invalid_rollouts_and_their_turns_count_for_nothing(brick):
    good = [rollout(0, 1.0, (1.0, "a"), (0.0, "a")), rollout(1, 0.5, (None, "a"))]
    broken = [row.replace(is_valid=False) for row in rollout(2, 9.0, (9.0, "a"))]
    unknown = [row.replace(reward=None) for row in rollout(3, 9.0, (9.0, "a"))]
    found = brick(of(broken, good[0], unknown, good[1]))
    assert per_turn(found) == per_turn(brick(of(*good)))


@pytest.mark.parametrize("brick", BRICKS, ids=str)
def test_one_valid_rollout_and_equal_rollouts_are_zero_where_no_step_differs(brick):
    alone = per_turn(brick(of(rollout(0, 1.0, (None, "a")))))
    assert alone == {0: [0.0]}
    equal = per_turn(
        brick(of(rollout(0, 0.1, (None, "a")), rollout(1, 0.1, (None, "a")), rollout(2, 0.1, (None, "b"))))
    )
    assert equal == {0: [0.0], 1: [0.0], 2: [0.0]}


@pytest.mark.parametrize("brick", BRICKS, ids=str)
def test_a_rollout_whose_tokens_are_all_masked_is_still_compared(brick):
    masked = [
        row.replace(action_mask=np.zeros(len(row), bool), turns=()) for row in rollout(0, 1.0, (None, "a"), (None, "a"))
    ]
    found = brick(of(masked, rollout(1, 0.0, (None, "a"))))
    assert (found.experiences[0].streams["advantages"] == 0).all()
    if brick == MultiStepGRPOAdvantage():
        assert per_turn(found)[1] == per_turn(GRPOAdvantage()(of(masked, rollout(1, 0.0, (None, "a")))))[1]
