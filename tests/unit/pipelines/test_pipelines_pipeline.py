"""A pipeline runs operators in order, counts and times them, and contains their faults."""

import pytest

from triune import registry
from triune.algorithms.advantages.grpo import GRPOAdvantage
from triune.pipelines import Pipeline
from triune.pipelines.operators.drop_flat_groups import DropFlatGroups
from triune.pipelines.operators.drop_invalid import DropInvalid
from triune.pipelines.operators.length_penalty import LengthPenalty
from triune.pipelines.operators.reward_shaping import RewardShaping
from triune.records import Stop
from triune.testing.batches import experience, group


def ticking():
    """A clock that advances a second with every look."""
    seconds = iter(range(1000))
    return lambda: float(next(seconds))


def double(experience):
    return experience.replace(reward=experience.reward * 2)


def fussy(experience):
    if experience.member == 1:
        raise ValueError("cannot read this one")
    return experience


def broken(group):
    raise RuntimeError("no judge")


def test_operators_run_in_order_and_are_counted_and_timed():
    shaped = Pipeline([double, GRPOAdvantage(scale="none")], clock=ticking()).apply(group([1.0, 0.0]))
    assert [row.reward for row in shaped.group.experiences] == [2.0, 0.0]
    assert [row.advantages[-1] for row in shaped.group.experiences] == [1.0, -1.0]
    assert shaped.dropped_by == shaped.error == ""
    assert shaped.metrics == {
        "pipeline/double/time_s": 1.0,
        "pipeline/double/drop_ratio": 0.0,
        "pipeline/double/errors": 0.0,
        "pipeline/grpo/time_s": 1.0,
        "pipeline/grpo/drop_ratio": 0.0,
        "pipeline/grpo/errors": 0.0,
        "time/pipeline_s": 2.0,
    }


def test_an_operator_joins_the_lineage_of_exactly_the_records_it_changed():
    def only_first(group):
        first, *others = group.experiences
        return group.with_records([first.replace(priority=1.0), *others])

    shaped = Pipeline([only_first, DropInvalid(), fussy]).apply(group([1.0, 0.0, 0.0]))
    assert [row.operators for row in shaped.group.experiences] == [("only_first",), ("fussy",), ()]
    shaped = Pipeline([GRPOAdvantage()]).apply(group([1.0, 0.0]))
    assert [row.operators for row in shaped.group.experiences] == [("grpo",), ("grpo",)]


def test_a_dropped_group_names_its_operator_and_later_ones_do_not_run():
    seen = []
    shaped = Pipeline([DropFlatGroups(), seen.append]).apply(group([1.0, 1.0]))
    assert shaped.group is None
    assert shaped.dropped_by == "drop_flat_groups"
    assert shaped.metrics["pipeline/drop_flat_groups/drop_ratio"] == 1.0
    assert seen == []


def test_one_failing_experience_becomes_invalid_and_leaves_the_statistics():
    whole = group([1.0, 9.0, 0.0])
    shaped = Pipeline([fussy, GRPOAdvantage(scale="none")]).apply(whole)
    assert {row.member: row.advantages[-1] for row in shaped.group.experiences} == {0: 0.5, 2: -0.5}
    assert shaped.metrics["pipeline/fussy/errors"] == 1.0
    assert "train/task/0/1.0" in shaped.error
    assert "operator 'fussy' failed (ValueError: cannot read this one)" in shaped.error
    assert whole.experiences[1].is_valid


def test_a_failing_group_operator_drops_the_group_and_never_raises():
    shaped = Pipeline([broken, GRPOAdvantage()]).apply(group([1.0, 0.0]))
    assert shaped.group is None
    assert shaped.dropped_by == "broken"
    assert "RuntimeError: no judge" in shaped.error
    assert shaped.metrics["pipeline/broken/errors"] == 1.0


@pytest.mark.parametrize("wrong", [lambda group: 3, lambda experience: "text"])
def test_an_operator_that_returns_something_else_is_a_fault(wrong):
    shaped = Pipeline([wrong]).apply(group([1.0]))
    assert "expected" in shaped.error
    assert next(value for name, value in shaped.metrics.items() if name.endswith("errors")) == 1.0


@pytest.mark.parametrize("leave_nothing", [lambda experience: None, lambda group: group.with_records([])])
def test_a_group_left_without_records_is_dropped(leave_nothing):
    shaped = Pipeline([leave_nothing]).apply(group([1.0, 0.0]))
    assert shaped.group is None
    assert shaped.dropped_by
    assert shaped.error == ""


def test_no_operators_leave_the_group_itself():
    whole = group([1.0])
    assert Pipeline([]).apply(whole).group is whole


def test_case_36_shaping_hides_neither_the_reward_of_the_task_nor_its_parts():
    parts = {"correct": 1.0, "format": 0.5}
    rows = [
        experience(0, reward=1.5, reward_parts=parts, actions=8),
        experience(1, reward=0.0, reward_parts={**parts, "correct": 0.0}),
    ]
    weigh = RewardShaping(weights={"correct": 2.0, "format": 0.1}, scale=0.5)
    shaped = Pipeline([weigh, LengthPenalty(max_tokens=8, weight=0.2)]).apply(group([0.0]).with_records(rows))
    first = shaped.group.experiences[0]
    assert first.reward == pytest.approx(0.5 * (2.0 + 0.05) - 0.2)
    assert first.metrics["raw_reward"] == 1.5
    assert first.reward_parts == {"correct": 1.0, "format": 0.5, "length_penalty": -1.0}
    first.check()


@pytest.mark.parametrize("name", registry.names("operator"))
def test_every_operator_survives_groups_of_all_kinds(name):
    needed = {"length_penalty": {"max_tokens": 4}}
    operator = registry.build("operator", {"use": name, **needed.get(name, {})}, "pipeline.0")
    kinds = [
        group([]),
        group([1.0]),
        group([None, None]),
        group([1.0, 0.0, None]),
        group([1.0, 0.0], is_valid=False),
        group([1.0, 0.0], stop=Stop.LENGTH),
        group([1.0, 0.0], actions=0),
    ]
    for whole in kinds:
        shaped = Pipeline([operator, GRPOAdvantage()]).apply(whole)
        assert shaped.error == ""
        for row in shaped.group.experiences if shaped.group else ():
            row.check()
