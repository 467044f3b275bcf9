"""The pieces that checks are made of, against numbers worked out by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from triune.algorithms.advantages.asymre import AsymREAdvantage
from triune.algorithms.advantages.dr_grpo import DrGRPOAdvantage
from triune.algorithms.advantages.reinforce import ReinforceAdvantage
from triune.ports import Completion, GenerateRequest
from triune.records import Group
from triune.selfcheck.checks import CHECKS
from triune.selfcheck.checks.advantages import zero_on_flat
from triune.selfcheck.checks.masks import owners
from triune.selfcheck.probe import compare, cosine
from triune.selfcheck.recorder import Call
from triune.selfcheck.report import Finding, Report, Status
from triune.selfcheck.rig import is_mixed, limited
from triune.testing.batches import experience, group
from triune.testing.faults import FAULTS


def test_there_are_many_faults_and_every_check_finds_one():
    assert len(FAULTS) >= 25
    assert {fault.found_by for fault in FAULTS.values()} == {check.check_name for check in CHECKS}
    assert all(fault.breaks.endswith(".") for fault in FAULTS.values())


def test_a_difference_is_relative_to_the_first_and_names_the_worst_tensor():
    one = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    other = {"a": torch.tensor([3.0, 0.5]), "b": torch.tensor([4.0])}
    found = compare(one, other)
    assert found.relative == pytest.approx(0.1)  # 0.5 of a norm of 5
    assert found.worst == "a"
    assert compare(one, {"a": one["a"]}).relative == math.inf
    assert compare({}, {}).relative == 0.0


def test_a_cosine_is_that_of_what_both_sides_have():
    one = {"a": torch.tensor([1.0, 0.0]), "c": torch.tensor([9.0])}
    assert cosine(one, {"a": torch.tensor([1.0, 1.0])}) == pytest.approx(math.sqrt(0.5))
    assert cosine(one, {"a": torch.tensor([-2.0, 0.0])}) == pytest.approx(-1.0)
    assert cosine(one, {"a": torch.zeros(2)}) == 0.0


def test_a_call_belongs_to_the_first_branch_that_begins_with_it():
    def call(turn: int, prompt: list[int], said: list[int]) -> Call:
        tokens = np.array(said, dtype=np.int32)
        nothing = np.zeros(len(said), dtype=np.float32)
        done = Completion(tokens=tokens, logprobs=nothing, versions=np.zeros(len(said), dtype=np.int32))
        return Call(request=GenerateRequest(id=f"r/{turn}", prompt=np.array(prompt, dtype=np.int32)), completion=done)

    first, second = experience(prompt=2, actions=2), experience(prompt=5, actions=1)  # 0 1 2 3 and 0 1 2 3 4 5
    calls = [call(0, [0, 1], [2, 3]), call(1, [0, 1, 2, 3, 4], [5]), call(2, [7], [8])]
    owned, orphans = owners([first, second], calls)
    assert [[one.turn for one in some] for some in owned] == [[0], [1]]
    assert [one.turn for one in orphans] == [2]


def test_large_groups_give_fewer_members_and_small_ones_all():
    groups = [group([0.0, 1.0, 0.0, 1.0], prompt=10, actions=10), group([0.0] * 4, prompt=10, actions=10)]
    assert [len(one) for one in limited(groups, 160)] == [4, 4]
    assert [len(one) for one in limited(groups, 80)] == [2, 2]
    assert [len(one) for one in limited(groups, 1)] == [2, 2]
    assert [is_mixed(one) for one in groups] == [True, False]


def test_advantages_that_compare_give_flat_groups_nothing_unless_they_say_otherwise():
    bricks = (DrGRPOAdvantage(), AsymREAdvantage(), ReinforceAdvantage())
    assert [zero_on_flat(brick) for brick in bricks] == [True, False, False]
    flat = group([1.0, 1.0])
    for brick in bricks:
        found: Group = brick(flat)
        is_zero = all(not row.advantages.any() for row in found.experiences if row.advantages is not None)
        assert is_zero or not zero_on_flat(brick)


def test_a_report_is_right_when_nothing_failed_and_reads_back_as_json():
    def finding(status: Status) -> Finding:
        return Finding(name="n", proves="p", status=status, found="f", fix="", numbers={"gap": 0.5}, seconds=1.0)

    def report(*statuses: Status) -> Report:
        return Report(name="r", model="m", config_hash="h", findings=tuple(map(finding, statuses)), seconds=2.0)

    assert report(Status.PASSED, Status.WARNED, Status.SKIPPED).is_right
    assert not report(Status.PASSED, Status.FAILED).is_right
    read = json.loads(report(Status.FAILED).to_json())
    assert read["is_right"] is False
    assert read["findings"][0]["status"] == "failed"
    assert read["findings"][0]["numbers"] == {"gap": 0.5}
