"""Advantages against numbers worked out by hand."""

import numpy as np
import pytest
import torch

from triune.algorithms import Algorithm, MicroBatch, credit
from triune.algorithms.advantages.dr_grpo import DrGRPOAdvantage
from triune.algorithms.advantages.grpo import GRPOAdvantage
from triune.algorithms.advantages.none import NoAdvantage
from triune.algorithms.advantages.reinforce import ReinforceAdvantage
from triune.errors import RecordError
from triune.records import GroupId
from triune.testing.batches import experience, group


def per_rollout(shaped):
    """Advantage by rollout number; checks that it stands on action tokens only and is one number."""
    found = {}
    for row in shaped.experiences:
        stream = row.streams["advantages"]
        assert stream.dtype == np.float32
        assert (stream[~row.action_mask] == 0).all()
        assert len(set(stream[row.action_mask].tolist())) == 1
        found[row.member] = float(stream[row.action_mask][0])
    return found


GOLDEN = [
    (GRPOAdvantage(), [1.0, 0.0, 0.0, 3.0], [0.0, -0.70710678, -0.70710678, 1.41421356]),  # deviation sqrt(6/3)
    (GRPOAdvantage(std="population"), [1.0, 0.0, 0.0, 3.0], [0.0, -0.81649658, -0.81649658, 1.63299316]),  # sqrt(6/4)
    (GRPOAdvantage(scale="none"), [1.0, 0.0, 0.0, 3.0], [0.0, -1.0, -1.0, 2.0]),
    (GRPOAdvantage(scale="batch"), [1.0, 0.0, 0.0, 3.0], [0.0, -1.0, -1.0, 2.0]),  # the trainer divides later
    (GRPOAdvantage(epsilon=1.0, scale="group"), [0.0, 2.0], [-0.41421356, 0.41421356]),  # 1 / (sqrt(2) + 1)
    (DrGRPOAdvantage(), [1.0, 0.0, 0.0, 3.0], [0.0, -1.0, -1.0, 2.0]),
    (ReinforceAdvantage(), [1.0, -2.0], [1.0, -2.0]),
    (ReinforceAdvantage(baseline=0.5), [1.0, 0.0], [0.5, -0.5]),
]


@pytest.mark.parametrize(("brick", "rewards", "expected"), GOLDEN, ids=str)
def test_case_27_every_option_has_golden_values(brick, rewards, expected):
    assert list(per_rollout(brick(group(rewards))).values()) == pytest.approx(expected, abs=2e-6)


def test_case_27_scale_batch_divides_by_the_deviation_of_all_rollouts_of_the_step():
    rewards = torch.tensor([0.0, 1.0, 1.0, 4.0, 4.0])  # the last rollout has two sequences
    centred = torch.tensor([[-0.5], [0.5], [-1.5], [1.5], [1.5]])
    rows = lambda chosen: MicroBatch(  # noqa: E731
        tokens=torch.zeros(len(chosen), 1, dtype=torch.long),
        action_mask=torch.ones(len(chosen), 1, dtype=torch.bool),
        streams={"advantages": centred[chosen]},
        rewards=rewards[chosen],
        rollouts=torch.tensor([0, 1, 2, 3, 3])[chosen],
    )
    deviation = np.std([0.0, 1.0, 1.0, 4.0], ddof=1)
    algorithm = Algorithm(advantage=GRPOAdvantage(scale="batch", epsilon=0.0))
    for split in ([[0, 1, 2, 3, 4]], [[4, 1], [0, 3, 2]]):
        found = algorithm.batch_advantages([rows(chosen) for chosen in split], num_rollouts=4)
        assert found is not None
        for chosen, streams in zip(split, found, strict=True):
            assert torch.allclose(streams["advantages"], centred[chosen] / deviation)
    flat = MicroBatch(
        tokens=torch.zeros(2, 1, dtype=torch.long), action_mask=torch.ones(2, 1, dtype=torch.bool),
        streams={"advantages": torch.zeros(2, 1)}, rewards=torch.ones(2),
    )  # fmt: skip
    assert (algorithm.batch_advantages([flat], num_rollouts=2)[0]["advantages"] == 0).all()
    assert Algorithm(advantage=GRPOAdvantage()).batch_advantages([flat], num_rollouts=2) is None


@pytest.mark.parametrize("brick", [GRPOAdvantage(), GRPOAdvantage(std="population"), DrGRPOAdvantage()], ids=str)
@pytest.mark.parametrize("rewards", [[0.1] * 8, [1 / 3] * 3, [5.0], []])
def test_case_24_no_spread_is_exactly_zero(brick, rewards):
    assert set(per_rollout(brick(group(rewards))).values()) <= {0.0}


@pytest.mark.parametrize("brick", [GRPOAdvantage(), DrGRPOAdvantage()], ids=str)
def test_case_25_a_group_shrunk_by_failures_is_credited_by_rollout_and_not_by_position(brick):
    whole = group([9.0, 1.0, 0.0, 5.0])
    rows = [row.replace(is_valid=row.member != 0) for row in whole.experiences]
    shrunk = whole.with_records([rows[3], rows[0], rows[1], rows[2].replace(reward=None)])
    found = per_rollout(brick(shrunk))
    assert list(found) == [3, 1]
    assert found[3] == -found[1] > 0


def test_case_25_a_rollout_of_several_experiences_counts_once():
    whole = group([1.0, 0.0, 0.0])
    second = experience(0, reward=1.0, branch=1, prompt=4)
    found = per_rollout(DrGRPOAdvantage()(whole.with_records([*whole.records, second])))
    assert found == pytest.approx({0: 2 / 3, 1: -1 / 3, 2: -1 / 3})


def test_case_26_experiences_of_another_task_are_refused():
    whole = group([1.0, 0.0])
    stranger = experience(2, reward=0.0, group=GroupId("run", "train", "other", 0))
    with pytest.raises(RecordError, match="experiences of this group only"):
        GRPOAdvantage()(whole.with_records([*whole.records, stranger]))


@pytest.mark.parametrize("brick", [GRPOAdvantage(), DrGRPOAdvantage()], ids=str)
def test_case_29_advantages_do_not_depend_on_the_length_of_answers(brick):
    rewards = [1.0, 0.0, 0.5]
    rows = [
        experience(n, reward=reward, actions=actions)
        for n, (reward, actions) in enumerate(zip(rewards, [1, 40, 1], strict=True))
    ]
    ragged = group([0.0]).with_records(rows)
    assert per_rollout(brick(ragged)) == per_rollout(brick(group(rewards)))


def test_no_advantage_leaves_a_group_alone():
    whole = group([1.0, 0.0])
    assert NoAdvantage()(whole) is whole


def test_credit_wants_one_number_per_valid_rollout():
    with pytest.raises(ValueError, match="shorter"):
        credit(group([1.0, 0.0]), [1.0])
