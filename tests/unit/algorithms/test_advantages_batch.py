"""Advantages of a whole step against float64 references, in every layout, split and on two ranks."""

import math
import threading

import numpy as np
import pytest
import torch

from triune.algorithms import Algorithm
from triune.algorithms.advantages.gdpo import GDPOAdvantage
from triune.algorithms.advantages.grpo import GRPOAdvantage
from triune.algorithms.advantages.jsd import JSDAdvantage
from triune.algorithms.advantages.on_policy_distill import OnPolicyDistill
from triune.algorithms.advantages.reinforce_pp import ReinforcePPAdvantage
from triune.algorithms.advantages.reinforce_pp_baseline import ReinforcePPBaselineAdvantage
from triune.algorithms.advantages.reward_to_go import RewardToGo
from triune.records import Source
from triune.testing.batches import Leaf, Row, group, random_rows

NUM = 11


def make_rows(seed=7):
    """Ragged rows with every stream; two in a row share a rollout and its reward, the last rollout's is unknown."""
    rows, chance = random_rows(NUM, seed=seed, missing=0.0), np.random.default_rng(seed)
    for number, row in enumerate(rows):
        size, row.source = len(row), Source.POLICY
        row.reward = float(np.nan) if row.rollout == NUM // 2 else rows[number - number % 2].reward
        row.streams["advantages"] = np.full(size, rows[number - number % 2].streams["advantages"][0])
        row.streams |= {name: -chance.random(size) * 2 for name in ("old_logprobs", "teacher_logprobs")}
        row.streams["token_rewards"] = chance.normal(size=size) * 0.3
    return rows


ROWS = make_rows()
BRICKS = [
    GRPOAdvantage(scale="batch"),
    GDPOAdvantage(),
    ReinforcePPAdvantage(),
    ReinforcePPAdvantage(statistics="rollouts", discount=0.9),
    ReinforcePPBaselineAdvantage(),
    ReinforcePPBaselineAdvantage(statistics="rollouts"),
    RewardToGo(),
    RewardToGo(discount=0.7, baseline=0.25),
    OnPolicyDistill(),
    OnPolicyDistill(extrapolation=1.5, discount=0.6, coefficient=0.3, task_weight=1.0),
    JSDAdvantage(),
    JSDAdvantage(beta=0.0),
    JSDAdvantage(beta=1.0, coefficient=0.5),
]


def layouts(leaf):
    """The same rows in several layouts and micro-batches, as (batch, numbers of its rows)."""
    every = list(range(NUM))
    yield [(leaf.padded(every), every)]
    yield [(leaf.padded(every, width=40, extra_rows=2, fill=1e6), every)]
    yield [(leaf.packed(every, tail=3, fill=math.nan), every)]
    yield [(leaf.padded([n]), [n]) for n in every]
    mixed = [9, 2, 5, 0], [10, 1], [3, 4, 8, 7, 6]
    yield [(leaf.packed(mixed[0]), mixed[0]), (leaf.padded(mixed[1]), mixed[1]), (leaf.packed(mixed[2]), mixed[2])]


def collect(pieces, streams):
    """{(row, t): advantage}; checks that nothing stands outside the action mask."""
    found = {}
    for (batch, numbers), stream in zip(pieces, streams, strict=True):
        value = stream["advantages"]
        assert value.dtype == torch.float32 or batch.advantages.dtype == torch.float64
        assert not value[~batch.action_mask].any()
        for b in range(value.shape[0]):
            for t in range(value.shape[1]):
                if batch.action_mask[b, t]:
                    place = b if batch.segments is None else int(batch.segments[b, t])
                    first = 0 if batch.segments is None else int((batch.segments[b] == place).nonzero()[0])
                    found[numbers[place], t - first] = float(value[b, t])
    return found


def run(brick, pieces, all_sum=lambda vector: vector):
    return collect(pieces, brick.over_batch([batch for batch, _ in pieces], all_sum, NUM // 2 + 1))


def actions(row):
    return np.flatnonzero(row.action_mask)


def to_go(row, paid, final, discount):
    """{t: return} by the definition, a double loop."""
    places = actions(row)
    return {
        t: sum(discount ** (j - i) * (paid[places[j]] + final * (j == len(places) - 1)) for j in range(i, len(places)))
        for i, t in enumerate(places)
    }


def whiten(values, over, epsilon):
    """{(row, t): value} whitened; `rollouts` weighs each rollout once."""
    known = {key: value for key, value in values.items() if not math.isnan(value)}
    per_rollout = {}
    for row, _ in known:
        per_rollout[ROWS[row].rollout] = per_rollout.get(ROWS[row].rollout, 0) + 1
    weights = np.array([1.0 if over == "tokens" else 1 / per_rollout[ROWS[row].rollout] for row, _ in known])
    numbers = np.array(list(known.values()))
    mean = np.average(numbers, weights=weights)
    deviation = math.sqrt(np.average((numbers - mean) ** 2, weights=weights))
    return {key: (known[key] - mean) / (deviation + epsilon) if key in known else 0.0 for key in values}


def reference(brick):
    """{(row, t): advantage}, the slow way."""
    found = {}
    for number, row in enumerate(ROWS):
        stream = row.streams
        gap = stream["teacher_logprobs"] - stream["old_logprobs"]
        for t in actions(row):
            match brick:
                case JSDAdvantage(beta=0.0):
                    value = brick.coefficient * (math.exp(gap[t]) - 1)
                case JSDAdvantage():
                    mixture = brick.beta * math.exp(stream["teacher_logprobs"][t]) + (1 - brick.beta) * math.exp(
                        stream["old_logprobs"][t]
                    )
                    value = brick.coefficient * (math.log(mixture) - stream["old_logprobs"][t]) / brick.beta
                case OnPolicyDistill():
                    pull = stream["teacher_logprobs"] - stream["ref_logprobs"]
                    paid = brick.extrapolation * pull - (stream["old_logprobs"] - stream["ref_logprobs"])
                    value = stream["advantages"][t] + brick.coefficient * to_go(row, paid, 0.0, brick.discount)[t]
                case RewardToGo():
                    value = to_go(row, stream["token_rewards"], row.reward, brick.discount)[t] - brick.baseline
                    value = 0.0 if math.isnan(row.reward) else value
                case ReinforcePPAdvantage():
                    value = to_go(row, stream["token_rewards"], row.reward, brick.discount)[t]
                    value = math.nan if math.isnan(row.reward) else value
                case _:
                    value = stream["advantages"][t]
            found[number, int(t)] = value
    if isinstance(brick, GRPOAdvantage):
        rewards = {row.rollout: row.reward for row in ROWS if not math.isnan(row.reward)}
        deviation = np.std(list(rewards.values()), ddof=1)
        return {key: value / (deviation + brick.epsilon) for key, value in found.items()}
    if isinstance(brick, GDPOAdvantage):
        return whiten(found, "rollouts", brick.epsilon)
    if isinstance(brick, ReinforcePPAdvantage | ReinforcePPBaselineAdvantage):
        return whiten(found, brick.statistics, brick.epsilon)
    return found


@pytest.mark.parametrize("brick", BRICKS, ids=str)
def test_every_option_agrees_with_a_slow_reference_in_every_layout_and_split(brick):
    expected = reference(brick)
    assert len(set(expected.values())) > 3
    for pieces in layouts(Leaf(ROWS, torch.float64)):
        found = run(brick, pieces)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, abs=1e-5, rel=1e-5), key


class TwoRanks:
    """Runs a brick on two ranks at once; `all_sum` waits for the other one, and fails when it never comes."""

    def __init__(self):
        self.barrier, self.slots, self.calls = threading.Barrier(2, timeout=20), [None, None], [0, 0]

    def all_sum(self, rank):
        def add(vector):
            assert vector.dtype == torch.float64
            self.slots[rank] = vector
            self.calls[rank] += 1
            self.barrier.wait()
            total = self.slots[0] + self.slots[1]
            self.barrier.wait()
            return total

        return add

    def run(self, brick, shares):
        found, threads = [None, None], []
        for rank, pieces in enumerate(shares):
            work = lambda rank=rank, pieces=pieces: found.__setitem__(rank, run(brick, pieces, self.all_sum(rank)))  # noqa: E731
            threads.append(threading.Thread(target=work))
            threads[-1].start()
        for thread in threads:
            thread.join()
        assert self.calls[0] == self.calls[1]
        return found[0] | found[1]


@pytest.mark.parametrize("brick", BRICKS, ids=str)
def test_two_ranks_find_what_one_finds_even_when_one_has_no_rows(brick):
    leaf, every = Leaf(ROWS, torch.float64), list(range(NUM))
    expected = run(brick, [(leaf.padded(every), every)])
    shares = [
        [(leaf.padded([0, 3, 6]), [0, 3, 6]), (leaf.packed([9]), [9])],
        [(leaf.packed([1, 2, 4, 5, 7, 8, 10]), [1, 2, 4, 5, 7, 8, 10])],
    ]
    for split in (shares, [[(leaf.padded(every), every)], []]):
        found = TwoRanks().run(brick, split)
        assert found.keys() == expected.keys()
        assert [found[key] for key in expected] == pytest.approx(list(expected.values()), abs=1e-6)


def one(values, *, reward=0.0, rollout=0, **streams):
    """A row whose first token is the prompt."""
    mask = np.arange(len(values) + 1) > 0
    named = {name: np.array([9.0, *value]) for name, value in streams.items()}
    return Row(
        mask,
        named | {"advantages": np.array([0.0, *values])},
        np.full(len(mask), -1.0),
        np.ones(len(mask)),
        rollout,
        reward,
    )


def advantages(brick, *rows):
    leaf = Leaf(rows, torch.float64)
    numbers = list(range(len(rows)))
    algorithm = Algorithm(advantage=brick)
    found = algorithm.batch_advantages([leaf.padded(numbers)], num_rollouts=1 + max(row.rollout for row in rows))
    return [stream[row.action_mask].tolist() for row, stream in zip(rows, _lines(found, rows), strict=True)]


def _lines(found, rows):
    return [found[0]["advantages"][n, : len(row)] for n, row in enumerate(rows)]


def test_golden_returns_to_go():
    row = one([0, 0, 0], reward=1.0, token_rewards=[0.5, 0.0, -0.25])
    assert advantages(RewardToGo(), row) == [[1.25, 0.75, 0.75]]
    assert advantages(RewardToGo(discount=0.5), row) == [[0.5 + 0.25 * 0.75, 0.5 * 0.75, 0.75]]
    assert advantages(RewardToGo(discount=0.0), row) == [[0.5, 0.0, 0.75]]
    assert advantages(RewardToGo(baseline=1.0), one([0, 0], reward=3.0)) == [[2.0, 2.0]]


def test_time_passes_with_trained_tokens_only():
    row = one([0, 0, 0, 0], reward=1.0)
    row.action_mask = np.array([False, True, False, False, True])
    leaf = Leaf([row], torch.float64)
    (found,) = RewardToGo(discount=0.5).over_batch([leaf.padded([0])], lambda vector: vector, 1)
    assert found["advantages"].tolist() == [[0.0, 0.5, 0.0, 0.0, 1.0]]


def test_golden_whitening_over_tokens_and_over_rollouts():
    rows = one([0, 0, 0], reward=1.0), one([0], reward=5.0, rollout=1)
    # tokens 1, 1, 1, 5: mean 2, squares 1, 1, 1, 9. Rollouts 1, 5: mean 3, deviation 2
    (long, short) = advantages(ReinforcePPAdvantage(epsilon=0.0), *rows)
    assert long == pytest.approx([-1 / math.sqrt(3)] * 3)
    assert short == pytest.approx([3 / math.sqrt(3)])
    assert advantages(ReinforcePPAdvantage(epsilon=0.0, statistics="rollouts"), *rows) == [[-1.0] * 3, [1.0]]
    halves = one([0, 0], reward=1.0), one([0], reward=1.0), one([0], reward=5.0, rollout=1)  # the first has two rows
    found = advantages(ReinforcePPAdvantage(epsilon=0.0, statistics="rollouts"), *halves)
    assert found == [[-1.0] * 2, [-1.0], [1.0]]


def test_group_mean_first_then_whitening_moves_a_flat_group_only_over_tokens():
    rows = one([0.5, 0.5, 0.5]), one([-0.5], rollout=1), one([0.0], rollout=2)
    by_rollout = advantages(ReinforcePPBaselineAdvantage(statistics="rollouts"), *rows)
    assert by_rollout[2] == [0.0]
    by_token = advantages(ReinforcePPBaselineAdvantage(epsilon=0.0), *rows)
    # 0.5 three times, -0.5, 0: mean 0.2, squares 3 x 0.09 + 0.49 + 0.04 = 0.8
    assert by_token[2] == pytest.approx([-0.2 / 0.4])


@pytest.mark.parametrize(
    "brick",
    [ReinforcePPAdvantage(), ReinforcePPAdvantage(statistics="rollouts", epsilon=0.0), ReinforcePPBaselineAdvantage()],
    ids=str,
)
def test_a_step_in_which_nothing_differs_is_exactly_zero(brick):
    rows = [one([0.1] * n, reward=0.1, rollout=n - 1) for n in (1, 2, 3)]
    assert advantages(brick, *rows) == [[0.0], [0.0] * 2, [0.0] * 3]
    assert advantages(brick, one([0.7], reward=0.7)) == [[0.0]]


def test_gdpo_whitens_only_when_asked():
    assert GDPOAdvantage().where == "trainer"
    assert GDPOAdvantage(whiten=False).where == "pipeline"
    rows = one([3.0, 3.0]), one([1.0], rollout=1)
    assert advantages(GDPOAdvantage(epsilon=0.0), *rows) == [[1.0, 1.0], [-1.0]]


# ------------------------------------------------------------------------------------------------ distillation


def test_golden_distillation():
    row = one([1.0, 1.0], old_logprobs=[-1.0, -2.0], teacher_logprobs=[-0.5, -3.0], ref_logprobs=[-1.5, -1.0])
    assert advantages(OnPolicyDistill(), row) == [[1.5, 0.0]]  # beside the task's 1: 0.5 and -1
    assert advantages(OnPolicyDistill(discount=1.0), row) == [[0.5, 0.0]]
    assert advantages(OnPolicyDistill(coefficient=2.0), row) == [[2.0, -1.0]]
    # 2 log(teacher / reference) - log(old / reference): 2 - 0.5 and -4 + 1
    assert advantages(OnPolicyDistill(extrapolation=2.0), row) == [[2.5, -2.0]]
    assert advantages(OnPolicyDistill(extrapolation=0.0), row) == [[0.5, 2.0]]  # back to the reference


def test_a_teacher_alone_takes_rollouts_without_a_reward_and_a_task_compares_them():
    whole = group([1.0, None, 0.0])
    alone = OnPolicyDistill()(whole)
    assert len(alone) == 3
    assert all((row.streams["advantages"] == 0).all() for row in alone.experiences)
    both = OnPolicyDistill(task_weight=0.5)(whole)
    assert [float(row.streams["advantages"][-1]) for row in both.experiences] == [0.25, -0.25]
    assert OnPolicyDistill().least_group == 1
    assert OnPolicyDistill(task_weight=0.5).least_group == 2


def test_distillation_needs_a_reference_only_to_extrapolate():
    assert OnPolicyDistill().needs == {"old_logprobs", "teacher_logprobs"}
    assert OnPolicyDistill(extrapolation=1.2).needs == {"old_logprobs", "teacher_logprobs", "ref_logprobs"}
    assert Algorithm(advantage=JSDAdvantage()).recomputes_old(num_updates=1, max_staleness=0)


LOGITS = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)
TEACHER = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
REFERENCE = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)


def expected_gradient(brick):
    """E over the policy's next tokens of A x grad log p, summed exactly."""
    policy = LOGITS.softmax(0)
    rows = [
        one([0.0], old_logprobs=[float(p.log())], teacher_logprobs=[float(t.log())], ref_logprobs=[float(r.log())])
        for p, t, r in zip(policy, TEACHER, REFERENCE, strict=True)
    ]
    values = torch.tensor([line[0] for line in advantages(brick, *rows)], dtype=torch.float64)
    logits = LOGITS.clone().requires_grad_()
    (policy * values * logits.log_softmax(0)).sum().backward()
    return logits.grad


def gradient_of(objective):
    logits = LOGITS.clone().requires_grad_()
    objective(logits.softmax(0)).backward()
    return logits.grad


def kl(p, q):
    return (p * (p / q).log()).sum()


@pytest.mark.parametrize("beta", [0.05, 0.5, 0.9])
def test_the_expected_gradient_of_jsd_is_that_of_the_divergence(beta):
    def divergence(policy):
        mixture = beta * TEACHER + (1 - beta) * policy
        return beta * kl(TEACHER, mixture) + (1 - beta) * kl(policy, mixture)

    expected = -gradient_of(divergence) / (beta * (1 - beta))
    assert torch.allclose(expected_gradient(JSDAdvantage(beta=beta)), expected, atol=1e-6)


def test_the_ends_of_jsd_are_the_two_kls():
    forward = -gradient_of(lambda policy: kl(TEACHER, policy))
    reverse = -gradient_of(lambda policy: kl(policy, TEACHER))
    assert torch.allclose(expected_gradient(JSDAdvantage(beta=0.0)), forward, atol=1e-6)
    assert torch.allclose(expected_gradient(JSDAdvantage(beta=1.0)), reverse, atol=1e-6)
    assert torch.allclose(expected_gradient(OnPolicyDistill()), reverse, atol=1e-6)
    for end in (0.0, 1.0):
        near = expected_gradient(JSDAdvantage(beta=abs(end - 1e-5)))
        assert torch.allclose(near, expected_gradient(JSDAdvantage(beta=end)), atol=1e-4)


def test_jsd_stays_finite_where_policy_and_teacher_disagree_wildly():
    gaps = torch.tensor([-700.0, 0.0, 700.0], dtype=torch.float64)
    assert JSDAdvantage(beta=0.5).value(gaps).tolist() == pytest.approx(
        [-2 * math.log(2), 0.0, 2 * (700 - math.log(2))]
    )
    assert JSDAdvantage(beta=1.0).value(gaps).tolist() == [-700.0, 0.0, 700.0]


def test_extrapolation_ends_where_the_teacher_is_exaggerated():
    # At reference x (teacher / reference)^2, normalised, the expected gradient of extrapolation 2 vanishes.
    goal = REFERENCE * (TEACHER / REFERENCE) ** 2
    policy = goal / goal.sum()
    rows = [
        one([0.0], old_logprobs=[float(p.log())], teacher_logprobs=[float(t.log())], ref_logprobs=[float(r.log())])
        for p, t, r in zip(policy, TEACHER, REFERENCE, strict=True)
    ]
    values = [line[0] for line in advantages(OnPolicyDistill(extrapolation=2.0), *rows)]
    assert values == pytest.approx([values[0]] * 3, abs=1e-6)  # a constant: nothing left to gain
    scaled = [line[0] for line in advantages(OnPolicyDistill(coefficient=2.0), *rows)]
    assert max(scaled) - min(scaled) > 0.5  # a factor on everything still pulls back to the teacher
