"""Taking truncated answers out of the loss changes no advantage of the others: one suite over every advantage."""

import asyncio

import numpy as np
import pytest

from triune.algorithms import Algorithm
from triune.pipelines.operators.mask_truncated import MaskTruncated
from triune.ports import Lease
from triune.records import Group, GroupId, Stop, Task
from triune.testing.batches import experience
from triune.testing.lanes import InlineLane
from triune.testing.proofs import cases
from triune.trainer.batch import COMPUTED, build_batch, prepare, stored_streams
from triune.trainer.derived import derived_streams

REWARDS = {"a": (1.0, 1.0, 0.0, 0.0), "b": (0.25, 1.0, 0.0, 0.5)}
CUT = {"a": (2, 3), "b": (1,)}
ADVANTAGES = {
    str(case): case
    for case in cases("advantage")
    if case.says("makes_advantages", True) and not set(case.says("needs", ())) & (COMPUTED | {"teacher_logprobs"})
}
every_advantage = pytest.mark.parametrize("case", ADVANTAGES.values(), ids=ADVANTAGES)


def group_of(key):
    """Rollouts of unequal length, some cut off, with all that an advantage reads."""
    of, rows = GroupId("run", "train", key, 0), []
    for member, reward in enumerate(REWARDS[key]):
        parts, notes = {"exact": reward / 2, "style": reward / 2}, {"greedy_reward": 0.4}
        stop = Stop.LENGTH if member in CUT[key] else Stop.DONE
        row = experience(member, group=of, reward=reward, actions=3 + member, stop=stop)
        rows.append(row.replace(reward_parts=parts, metrics=notes))
    return Group(id=of, task=Task(key=key), records=tuple(rows))


def advantages(brick, groups):
    """What each rollout is credited with in the end: {(task, member): advantages of its trained tokens}."""
    algorithm = Algorithm(advantage=brick)
    shaped = [brick(one) if callable(brick) else one for one in groups]
    batch = build_batch(
        [Lease(entry=str(one.id), revision=1, use_no=1, group=one) for one in shaped],
        streams=stored_streams(algorithm),
        derived=derived_streams(algorithm),
        mini_batches=1,
        budget=20,
        seed=(0, 0),
        device="cpu",
    )
    ready = asyncio.run(prepare(batch, None, algorithm, InlineLane(), recomputes_old=False))
    names, found = [row.id.rollout for row in batch.rows.experiences], {}  # one experience a rollout
    for micro in ready.micros:
        for line, number in enumerate(micro.batch.rollout_numbers.tolist()):
            rollout = names[number].group.task_key, names[number].member
            found[rollout] = micro.batch.advantages[line][micro.batch.action_mask[line]].numpy()
    return found


@every_advantage
def test_masking_cut_off_answers_changes_no_advantage_of_the_others(case):
    groups = [group_of(key) for key in REWARDS]
    expected, found = (advantages(case.brick, some) for some in (groups, [one.map(MaskTruncated()) for one in groups]))
    assert len(expected) > len(found)
    assert set(found) == {key for key in expected if key[1] not in CUT[key[0]]}
    for key, values in found.items():
        np.testing.assert_allclose(values, expected[key], rtol=1e-5, atol=1e-7)
    assert any(values.any() for values in found.values())
