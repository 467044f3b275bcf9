"""Built-in operators against numbers worked out by hand."""

import numpy as np
import pytest

from triune import registry
from triune.errors import ConfigError, RewardError
from triune.pipelines import raw_rewards, with_reward
from triune.pipelines.operators.drop_flat_groups import DropFlatGroups
from triune.pipelines.operators.drop_invalid import DropInvalid
from triune.pipelines.operators.length_penalty import LengthPenalty
from triune.pipelines.operators.mask_truncated import MaskTruncated
from triune.pipelines.operators.reward_shaping import RewardShaping
from triune.records import Stop, Turn
from triune.testing.batches import experience, group


def test_flat_groups_are_dropped_by_the_reward_of_the_task():
    assert DropFlatGroups()(group([1.0, 1.0, 1.0])) is None
    assert DropFlatGroups()(group([])) is None
    mixed = group([1.0, 0.0])
    assert DropFlatGroups()(mixed) is mixed
    rows = group([0.0, 0.0]).experiences
    penalised = group([]).with_records([rows[0], with_reward(rows[1], -0.3)])
    assert DropFlatGroups()(penalised) is None
    assert DropFlatGroups(tolerance=0.5)(group([0.1, 0.4])) is None


def test_flat_groups_look_only_at_valid_rollouts_and_can_compare_a_part():
    rows = [experience(n, reward=float(n), is_valid=n < 1, reward_parts={"correct": 1.0}) for n in range(3)]
    assert DropFlatGroups()(group([]).with_records(rows)) is None
    rows = [experience(n, reward=float(n), reward_parts={"correct": 1.0}) for n in range(3)]
    assert DropFlatGroups(part="correct")(group([]).with_records(rows)) is None
    with pytest.raises(RewardError, match=r"no reward part 'right'; expected one of its parts \(correct\)"):
        DropFlatGroups(part="right")(group([]).with_records(rows))


def test_case_34_invalid_rollouts_go_with_all_their_experiences():
    rows = [
        experience(0, reward=1.0),
        experience(1, reward=0.0, is_valid=False),
        experience(1, reward=0.0, branch=1),
        experience(2, reward=0.5),
    ]
    whole = group([]).with_records(rows)
    assert [row.member for row in DropInvalid()(whole).experiences] == [0, 2]
    assert DropInvalid(min_group=3)(whole) is None
    clean = group([1.0, 0.0])
    assert DropInvalid(min_group=2)(clean) is clean


@pytest.mark.parametrize("stop", [stop for stop in Stop if stop.is_truncated])
def test_case_60_every_kind_of_truncation_is_masked_but_keeps_its_reward(stop):
    row = experience(0, reward=0.7, stop=stop, turns=(Turn(start=2, stop=5),), raw_logprobs=np.zeros(5, np.float32))
    masked = MaskTruncated()(row)
    assert not masked.action_mask.any()
    assert masked.reward == 0.7
    assert masked.streams["untrained"].tolist() == [0, 0, 1, 1, 1]
    masked.check()
    assert row.action_mask.any()


def test_masking_can_be_limited_to_some_stops_and_leaves_finished_answers():
    done, cut = experience(stop=Stop.DONE), experience(stop=Stop.TIMEOUT)
    assert MaskTruncated()(done) is done
    assert MaskTruncated(stops=(Stop.LENGTH,))(cut) is cut
    built = registry.build("operator", {"use": "mask_truncated", "stops": ["length"]}, "pipeline.0")
    assert built.stops == (Stop.LENGTH,)


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0.0), (12, 0.0), (14, -0.5), (16, -1.0), (30, -1.0)])
def test_the_soft_overlong_penalty_has_the_published_shape(tokens, expected):
    assert LengthPenalty(max_tokens=16, margin=4).penalty(tokens) == expected
    assert LengthPenalty(max_tokens=16).penalty(tokens) == expected  # a quarter by default


def test_a_rollout_is_as_long_as_all_its_turns():
    rows = [
        experience(0, reward=1.0, actions=3),
        experience(0, reward=1.0, actions=5, branch=1),
        experience(1, reward=1.0, actions=1),
    ]
    penalise = LengthPenalty(max_tokens=10, style="linear", weight=0.5)
    shaped = penalise(group([]).with_records(rows))
    assert [row.reward for row in shaped.experiences] == pytest.approx([0.6, 0.6, 0.95])
    assert [row.reward_parts["length_penalty"] for row in shaped.experiences] == pytest.approx([-0.8, -0.8, -0.1])
    assert raw_rewards(shaped) == {0: 1.0, 1: 1.0}


def test_reward_shaping_weighs_scales_shifts_and_clips():
    row = experience(reward=3.0, reward_parts={"a": 1.0, "b": -2.0})
    assert RewardShaping(weights={"a": 1.0, "b": 0.5})(row).reward == 0.0
    assert RewardShaping(scale=2.0, shift=-1.0)(row).reward == 5.0
    assert RewardShaping(clip_low=-1.0, clip_high=1.0)(row).reward == 1.0
    assert RewardShaping()(row) is row
    twice = RewardShaping(shift=1.0)(RewardShaping(scale=0.1)(row))
    assert twice.metrics["raw_reward"] == 3.0
    with pytest.raises(RewardError, match="no reward part 'c'"):
        RewardShaping(weights={"c": 1.0})(row)
    with pytest.raises(RewardError, match="the shaped reward is inf"):
        with_reward(row, float("inf"))


WRONG = [
    ({"use": "length_penalty"}, "max_tokens"),
    ({"use": "length_penalty", "max_tokens": 8, "margin": 9}, "pipeline.0.margin: found 9"),
    ({"use": "length_penalty", "max_tokens": 8, "margin": 2, "style": "linear"}, "pipeline.0.margin: found it with"),
    ({"use": "reward_shaping", "clip_low": 2, "clip_high": 1}, "pipeline.0.clip_low: found 2.0 above"),
    ({"use": "drop_flat_group"}, "did you mean 'drop_flat_groups'"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=str)
def test_settings_that_cannot_work_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        registry.build("operator", fields, "pipeline.0").check("pipeline.0")
