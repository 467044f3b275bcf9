"""Identities read back from their text, whatever the names hold; experiences are checked at the door."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triune.errors import RecordError
from triune.records import Experience, ExperienceId, Group, GroupId, RolloutId, Task, Turn

names = st.text(st.characters(codec="utf-8"), max_size=10)


@given(
    names, names, names, st.integers(0, 10**6), st.integers(0, 99), st.integers(0, 9), st.integers(0, 9), names, names
)
def test_ids_are_read_back_from_their_text(run, taskset, key, visit, member, attempt, branch, policy, agent):
    ident = ExperienceId(RolloutId(GroupId(run, taskset, key, visit), member, attempt), branch, policy, agent)
    assert ExperienceId.parse(str(ident)) == ident
    assert RolloutId.parse(str(ident.rollout)) == ident.rollout
    assert GroupId.parse(str(ident.rollout.group)) == ident.rollout.group


@pytest.mark.parametrize("text", ["", "a/b/c", "a/b/c/x", "a/b/c/1/2"])
def test_a_malformed_group_id_is_refused(text):
    with pytest.raises(RecordError, match="run/taskset/task_key/visit"):
        GroupId.parse(text)


def test_malformed_rollout_and_experience_ids_are_refused():
    with pytest.raises(RecordError, match=r"member\.attempt"):
        RolloutId.parse("a/b/c/1/2")
    with pytest.raises(RecordError, match=r"policy\.agent\.branch"):
        ExperienceId.parse("a/b/c/1/2.0/main.agent")


def make(member: int, **changes) -> Experience:
    fields = {
        "id": ExperienceId(RolloutId(GroupId("r", "t", "k", 0), member)),
        "tokens": np.array([1, 2, 3], np.int32),
        "action_mask": np.array([False, False, True]),
        "logprobs": np.array([np.nan, np.nan, -1], np.float32),
        "versions": np.array([-1, -1, 5], np.int32),
        "reward": float(member),
    }
    return Experience(**{**fields, **changes})


def test_a_sound_experience_passes_the_check():
    make(0, turns=(Turn(start=2, stop=3),), streams={"advantages": np.zeros(3, np.float32)}).check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action_mask": np.array([True, False])}, "action_mask has shape"),
        ({"tokens": np.array([1, 2, 3])}, "tokens is int64"),
        ({"logprobs": np.array([0, np.nan, -1], np.float32)}, "log-prob outside the action mask"),
        ({"versions": np.array([5, -1, 5], np.int32)}, "version outside the action mask"),
        ({"logprobs": np.array([np.nan, np.nan, 0.5], np.float32)}, "log-prob above 0"),
        ({"reward": float("inf")}, "reward is inf"),
        ({"turns": (Turn(start=1, stop=3),)}, r"turn \[1, 3\)"),
        ({"streams": {"values": np.zeros(2, np.float32)}}, r"streams\.values has shape"),
        ({"temperature": np.ones(2, np.float32)}, "temperature has shape"),
    ],
)
def test_a_record_that_breaks_its_contract_is_named(changes, message):
    with pytest.raises(RecordError, match=message):
        make(0, **changes).check()


def test_case_25_group_statistics_count_each_rollout_once_by_its_number():
    twice = [make(1), make(1, id=ExperienceId(RolloutId(GroupId("r", "t", "k", 0), 1), 1))]
    group = Group(
        id=GroupId("r", "t", "k", 0),
        task=Task(key="k"),
        records=(make(4), *twice, make(2, is_valid=False), make(3, reward=None)),
    )
    assert list(group.members) == [4, 1, 2, 3]
    assert list(group.valid_members) == [4, 1]
    assert group.rewards.tolist() == [4.0, 1.0]


def test_oldest_version_looks_at_action_tokens_only():
    assert make(0).oldest_version == 5
    assert make(0, action_mask=np.zeros(3, bool)).oldest_version == -1
