"""What RAFT keeps, and that it is fine-tuning on it."""

import numpy as np
import pytest

from triune import registry
from triune.algorithms.advantages.raft import RaftAdvantage
from triune.pipelines import Pipeline
from triune.testing.batches import experience, group


def kept(brick, rewards):
    shaped = brick(group(rewards))
    assert all((row.advantages == row.action_mask).all() for row in shaped.experiences)
    return [row.member for row in shaped.experiences]


@pytest.mark.parametrize(
    ("brick", "members"),
    [
        (RaftAdvantage(), [1, 3, 4]),
        (RaftAdvantage(above=0.5), [3, 4]),
        (RaftAdvantage(above=None, best=1), [3]),
        (RaftAdvantage(best=2), [3, 4]),
        (RaftAdvantage(above=None), [0, 1, 2, 3, 4]),
    ],
    ids=str,
)
def test_rollouts_that_are_kept_are_credited_with_one_and_the_others_leave_the_batch(brick, members):
    assert kept(brick, [0.0, 0.5, -1.0, 2.0, 2.0]) == members


def test_all_sequences_of_a_kept_rollout_stay_and_invalid_rollouts_never_do():
    made = group([1.0, 0.0])
    branch = experience(0, reward=1.0, branch=1)
    failed = experience(2, reward=5.0, is_valid=False)
    shaped = RaftAdvantage()(made.with_records([*made.records, branch, failed]))
    assert [(row.member, row.id.branch) for row in shaped.experiences] == [(0, 0), (0, 1)]


def test_a_group_without_success_is_dropped_so_that_another_one_is_made():
    shaped = Pipeline([RaftAdvantage()]).apply(group([0.0, 0.0]))
    assert (shaped.group, shaped.dropped_by) == (None, "raft")


def test_the_loss_of_raft_is_that_of_fine_tuning_on_what_was_kept():
    import torch

    from triune.algorithms import Divider, Progress
    from triune.testing.batches import Leaf, random_rows

    rows = random_rows(6, seed=1)
    for row in rows:
        row.streams["advantages"] = np.ones(len(row))
    found = []
    for name in ("raft", "sft"):
        algorithm = registry.build("algorithm", {"use": name}, "algorithm")
        batch = Leaf(rows, torch.float64).padded(range(6))
        divider = Divider(algorithm, [batch], state=algorithm.state0(), progress=Progress())
        found.append(divider.loss(batch).item())
    assert found[0] == pytest.approx(found[1], rel=1e-12)
