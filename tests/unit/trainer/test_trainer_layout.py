import numpy as np
import pytest
import torch

from triune.errors import TrainingError
from triune.ports import Lease
from triune.records import Experience
from triune.testing.training import sampled_group
from triune.trainer.layout import pad_rows, plan_micro_batches, plan_mini_batches
from triune.trainer.rows import build_rows, describe

LENGTHS = [(3, 2), (5, 6), (4, 1), (3, 9)]


def leases(*groups, **changes) -> list[Lease]:
    if changes:
        groups = tuple(group.map(lambda row: row.replace(**changes)) for group in groups)
    return [Lease(entry=str(group.id), revision=1, use_no=0, group=group) for group in groups]


def rows_of(num: int = 3, **options):
    return build_rows(leases(*(sampled_group(f"t{n}", lengths=LENGTHS, **options) for n in range(num))), ["advantages"])


def test_padded_rows_hold_every_sequence_with_its_streams_in_place():
    rows = rows_of()
    micro = pad_rows(rows, np.array([3, 0, 5]))
    assert micro.batch.tokens.shape == (3, 12)
    assert micro.inputs.shape == (3, 11)
    for place, number in enumerate([3, 0, 5]):
        row, stop = rows.experiences[number], rows.ends[number]
        assert micro.batch.tokens[place, :stop].tolist() == row.tokens[:stop].tolist()
        mask = micro.batch.action_mask[place].numpy()
        assert mask.tolist() == [*row.action_mask[:stop].tolist(), *[False] * (12 - stop)]
        np.testing.assert_array_equal(
            micro.batch.streams["behaviour_logprobs"][place].numpy()[mask], row.logprobs[row.action_mask]
        )
        assert micro.batch.advantages[place].numpy()[mask].tolist() == row.advantages[row.action_mask].tolist()
    assert micro.batch.rollouts.tolist() == [3, 0, 5]
    width = 11
    pairs = zip(micro.chosen.tolist(), micro.before.tolist(), strict=True)
    assert all((c // 12, c % 12) == (b // width, b % width + 1) for c, b in pairs)


def test_case_13_pad_id_equal_to_eos_id_does_not_change_the_mask():
    group = sampled_group("t", lengths=[(3, 2), (3, 5)])
    short = group.experiences[0]
    eos = int(short.tokens[-1])
    assert eos != 0
    ended = short.replace(tokens=np.where(short.action_mask, 0, short.tokens).astype(np.int32))  # 0 is what we pad with
    micro = pad_rows(build_rows(leases(group.with_records([ended, group.experiences[1]]))), np.array([0, 1]))
    assert micro.batch.action_mask.sum(1).tolist() == [2, 5]


def test_case_12_the_mask_is_the_sampled_tokens_the_stop_token_included_and_nothing_else():
    rows = rows_of(1)
    micro = pad_rows(rows, np.arange(4))
    for place, (prompt, answer) in enumerate(LENGTHS):
        trained = torch.nonzero(micro.batch.action_mask[place])[:, 0].tolist()
        assert trained == list(range(prompt, prompt + answer))


def test_case_03_ids_that_no_engine_sampled_have_no_behaviour_log_prob_never_a_zero():
    group = sampled_group("t", lengths=LENGTHS)
    unknown = [row.replace(logprobs=np.full(len(row), np.nan, np.float32)) for row in group.experiences]
    micro = pad_rows(build_rows(leases(group.with_records(unknown))), np.arange(4))
    assert not micro.batch.known_behaviour.any()
    behaviour = micro.batch.streams["behaviour_logprobs"][micro.batch.action_mask]
    assert behaviour.isnan().all()


def test_case_02_ratios_use_the_untruncated_log_probs_where_they_were_recorded():
    group = sampled_group("t", lengths=LENGTHS)
    raw = [row.replace(raw_logprobs=row.logprobs - 1) for row in group.experiences]
    kept = build_rows(leases(group.with_records(raw)))
    plain = build_rows(leases(group))
    np.testing.assert_array_equal(
        kept.streams["behaviour_logprobs"], plain.streams["behaviour_logprobs"] - np.float32(1)
    )


def test_a_first_token_cannot_be_trained_and_what_follows_the_last_action_is_not_computed():
    group = sampled_group("t", lengths=[(0, 4), (3, 2)])
    tail = group.experiences[1]
    observed = tail.replace(
        tokens=np.append(tail.tokens, [9, 9, 9]).astype(np.int32),
        action_mask=np.append(tail.action_mask, [False] * 3),
        logprobs=np.append(tail.logprobs, [np.nan] * 3).astype(np.float32),
        versions=np.append(tail.versions, [-1] * 3).astype(np.int32),
        streams={},
    )
    rows = build_rows(leases(group.with_records([group.experiences[0], observed])))
    assert rows.ends.tolist() == [4, 5]
    assert pad_rows(rows, np.arange(2)).batch.action_mask.sum(1).tolist() == [3, 2]


def test_micro_batches_never_exceed_the_budget_and_never_cut_a_sequence():
    lengths = np.array([3, 50, 7, 7, 1, 20, 20, 2])
    plan = plan_micro_batches(lengths, 40)
    assert sorted(np.concatenate(plan).tolist()) == list(range(8))
    for part in plan:
        assert len(part) == 1 or len(part) * lengths[part].max() <= 40
    widths = [lengths[part].max() for part in plan]
    assert widths == sorted(widths, reverse=True)


def test_micro_batches_are_as_few_as_the_budget_allows_and_no_larger_than_they_must_be():
    sizes = [len(part) * 10 for part in plan_micro_batches(np.full(9, 10), 80)]
    assert sizes == [50, 40]
    assert plan_micro_batches(np.array([], int), 80) == []


def test_mini_batches_never_cut_a_rollout_and_are_dealt_by_the_seed():
    group = sampled_group("t", size=6)
    split = [row.replace(id=type(row.id)(row.id.rollout, branch)) for row in group.experiences for branch in (0, 1, 2)]
    rows = build_rows(leases(group.with_records(split)))
    assert rows.num_rollouts == 6
    minis = plan_mini_batches(rows, 4, (1, 2))
    owners = [set(rows.rollouts[part].tolist()) for part in minis]
    assert sum(len(one) for one in owners) == 6
    assert set.union(*owners) == set(range(6))
    assert sorted(np.concatenate(minis).tolist()) == list(range(18))
    again = plan_mini_batches(rows, 4, (1, 2))
    assert all((one == other).all() for one, other in zip(minis, again, strict=True))
    assert any(
        len(one) != len(other) or (one != other).any()
        for one, other in zip(minis, plan_mini_batches(rows, 4, (1, 3)), strict=True)
    )


def test_invalid_rollouts_and_rows_without_actions_are_left_out_and_counted():
    group = sampled_group("t", lengths=LENGTHS)
    first, second, *rest = group.experiences
    masked = second.replace(
        action_mask=np.zeros(len(second), bool),
        logprobs=np.full(len(second), np.nan, np.float32),
        versions=np.full(len(second), -1, np.int32),
    )
    rows = build_rows(leases(group.with_records([first.replace(is_valid=False), masked, *rest])))
    assert (len(rows), rows.num_invalid) == (3, 1)
    assert plan_mini_batches(rows, 1, (0,))[0].tolist() == [1, 2]


def test_several_temperatures_in_one_batch_reach_their_tokens():
    group = sampled_group("t", lengths=[(3, 2), (3, 4)])
    hot, mixed = group.experiences
    mixed = mixed.replace(temperature=np.linspace(0.5, 1.1, 7, dtype=np.float32))
    rows = build_rows(leases(group.with_records([hot.replace(temperature=2.0), mixed])))
    micro = pad_rows(rows, np.array([1, 0]))
    assert micro.temperature is not None
    want = [*np.linspace(0.5, 1.1, 7, dtype=np.float32)[3:].tolist(), 2.0, 2.0]
    assert micro.temperature.tolist() == want
    assert pad_rows(build_rows(leases(group)), np.arange(2)).temperature is None


def test_case_07_a_temperature_of_zero_is_refused():
    with pytest.raises(TrainingError, match="temperature of 0"):
        build_rows(leases(sampled_group("t"), temperature=0.0))


def test_a_missing_stream_names_the_experience_and_what_to_add():
    with pytest.raises(TrainingError, match=r"no stream 'advantages'.*add an advantage operator") as caught:
        build_rows(leases(sampled_group("t"), streams={}), ["advantages"])
    assert caught.value.where.startswith("run/train/t/0/0")


def test_an_empty_batch_is_described_and_lays_out_to_nothing():
    rows = build_rows([])
    assert len(rows) == rows.num_actions == rows.num_rollouts == 0
    assert plan_mini_batches(rows, 2, (0,)) == []
    assert "no rollout" in describe([])
    group = sampled_group("t")
    assert isinstance(group.records[0], Experience)
    assert "rollout run/train/t/0/0.0 stopped with 'done'" in describe(leases(group))
