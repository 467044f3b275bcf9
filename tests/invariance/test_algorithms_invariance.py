"""How sequences are laid out, split and ordered changes no loss and no gradient: one suite over every loss brick.

A new brick is covered on arrival, a plug-in's too: the suite takes bricks and settings from the registry.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import pytest
import torch

from triune.algorithms import Algorithm, Constant, Term
from triune.records import Source, Turn
from triune.testing import layouts
from triune.testing.batches import experience, group
from triune.testing.layouts import RANKS, agree, update
from triune.testing.proofs import KINDS, Case, cases


@dataclass(frozen=True)
class PerRollout:
    """A term per rollout and one with a constant, which no built-in brick has yet."""

    needs = frozenset()

    def __call__(self, batch, state, progress):
        square = batch.logprobs.square()
        return [
            Term("rollout", square, batch.action_mask, per="rollout"),
            Term("constant", square, batch.action_mask, weight=0.3, per=Constant(9)),
        ]


class Subject:
    """A case with its rows, and the state its brick has after one update."""

    def __init__(self, case):
        self.algorithm, self.is_paired = case.algorithm, case.is_paired
        self.rows = layouts.rows(is_paired=case.is_paired, streams=case.streams)

    @cached_property
    def state(self):
        start = self.algorithm.state0()
        return self.algorithm.update(start, update(self.algorithm, self.rows, state=start).metrics)

    @cached_property
    def expected(self):
        return self.update(layouts.whole)

    def update(self, layout):
        return update(self.algorithm, self.rows, layout, state=self.state)


class Handmade(Case):
    """A case that is not registered."""

    brick = PerRollout()
    algorithm = Algorithm(policy_loss=PerRollout())


SUBJECTS = {str(case): Subject(case) for case in cases(*KINDS)}
SUBJECTS["per-rollout"] = Subject(Handmade("policy_loss", "per_rollout"))
every_brick = pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)


@every_brick
@pytest.mark.parametrize("size", [1, 2, 4])
def test_case_18_19_22_micro_batches_add_up_to_the_whole_batch(subject, size):
    agree(subject.update(layouts.split(size, is_paired=subject.is_paired)), subject.expected)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_case_18_micro_batches_add_up_bit_for_bit_where_no_kernel_rounds_by_position(size):
    for subject in (SUBJECTS["policy_loss-ppo_clip"], SUBJECTS["policy_loss-reinforce"], SUBJECTS["kl-k3"]):
        assert torch.equal(subject.update(layouts.split(size)).gradient, subject.expected.gradient)


@every_brick
@pytest.mark.parametrize("fill", [-7.5, math.nan, math.inf])
def test_case_20_padding_and_what_it_holds_change_nothing(subject, fill):
    agree(subject.update(layouts.stuffed(fill)), subject.expected)


@every_brick
def test_case_18_packed_rows_agree_with_padded_ones(subject):
    agree(subject.update(layouts.packed), subject.expected)


@every_brick
def test_the_order_of_sequences_changes_nothing(subject):
    agree(subject.update(layouts.shuffled), subject.expected)


@every_brick
def test_case_18_ranks_add_up_to_one_rank(subject):
    for shares in RANKS:
        work = lambda rank, all_sum, shares=shares: layouts.on_rank(  # noqa: E731
            subject.algorithm, subject.rows, shares[rank], all_sum, state=subject.state
        )
        agree(layouts.summed(layouts.in_threads(work)), subject.expected)


UNKNOWN = {str(case): case for case in cases("policy_loss") if dict(case.options).get("missing_behaviour") == "use_old"}


@pytest.mark.parametrize("case", UNKNOWN.values(), ids=UNKNOWN)
def test_a_token_of_unknown_behaviour_counts_as_sampled_by_the_policy(case):
    rows = layouts.rows(streams=case.streams)
    told = []
    for row in rows:
        own = row.streams.get("old_logprobs", row.logprobs)
        known = np.where(np.isnan(row.streams["behaviour_logprobs"]), own, row.streams["behaviour_logprobs"])
        told.append(dataclasses.replace(row, streams={**row.streams, "behaviour_logprobs": known}))
    found, expected = (update(case.algorithm, one, dtype=torch.float64) for one in (rows, told))
    assert found.loss == pytest.approx(expected.loss, rel=1e-9)
    assert torch.allclose(found.gradient, expected.gradient, rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------------------------------------- answers of experts


@dataclass(frozen=True)
class Sampled:
    """A loss without terms, of an algorithm that samples groups."""

    needs = frozenset({"advantages"})

    def __call__(self, batch, state, progress):
        return []


def only(layout_of):
    return lambda leaf: [leaf.padded(layout_of)]


def tokens_of(rows, source):
    """Which numbers of a gradient (by log-probs, entropies and values) are those of a source."""
    return torch.tensor([row.source is source for row in rows for _ in range(len(row))]).repeat(3)


MIXED = {
    str(case): SUBJECTS[str(case)] for case in cases("policy_loss") if case.says("expert_gradient", None) is not None
}


@pytest.mark.parametrize("subject", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("source", [Source.POLICY, Source.EXPERT])
def test_what_one_wrote_changes_nothing_in_what_is_learnt_from_the_other(subject, source):
    own = [number for number, row in enumerate(subject.rows) if row.source is source]
    alone, mine = subject.update(only(own)).gradient, tokens_of(subject.rows, source)
    assert bool((alone[mine] != 0).any())
    assert torch.allclose(subject.expected.gradient[mine], alone[mine], rtol=3e-6, atol=1e-8)


WATCHED = {str(case): case for case in cases("kl", "entropy")}


@pytest.mark.parametrize("case", WATCHED.values(), ids=WATCHED)
def test_divergence_and_entropy_beside_answers_of_experts_are_those_of_what_was_sampled(case):
    algorithm = dataclasses.replace(case.algorithm, policy_loss=Sampled())
    rows = layouts.rows(streams=case.streams)
    own = [number for number, row in enumerate(rows) if row.source is Source.POLICY]
    found, expected = update(algorithm, rows), update(algorithm, rows, only(own))
    unknown = "tokens_without_behaviour"
    counted = ({**one.metrics, unknown: 0.0} for one in (found, expected))
    agree(*(dataclasses.replace(one, metrics=metrics) for one, metrics in zip((found, expected), counted, strict=True)))


# ---------------------------------------------------------------------------------------------- batch advantages

ADVANTAGES = {str(case): case for case in cases("advantage")}
OVER_BATCH = {name: case for name, case in ADVANTAGES.items() if case.says("where", "pipeline") == "trainer"}
every_batch_advantage = pytest.mark.parametrize("case", OVER_BATCH.values(), ids=OVER_BATCH)


@cache
def rows_of(streams):
    """Rows whose rollouts have one reward, one of them none; advantages are what a group's half would have made."""
    rows = [dataclasses.replace(row, streams=dict(row.streams)) for row in layouts.rows(streams=streams)]
    for row in rows:
        row.reward = rows[2 * row.rollout].reward if row.rollout != 3 else math.nan
    return rows


def over_batch(case, layout, all_sum=lambda vector: vector):
    rows = rows_of(case.streams | ({"token_rewards"} if case.says("takes_token_rewards", False) else set()))
    return layouts.batch_advantages(case.brick, rows, layout, all_sum)


def agree_in_streams(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-6, atol=1e-7, equal_nan=True), name


@every_batch_advantage
def test_case_29_batch_advantages_do_not_depend_on_the_layout(case):
    expected = over_batch(case, layouts.whole)
    assert bool((expected["advantages"].nan_to_num() != 0).any())
    different = [layouts.split(1), layouts.split(4), layouts.packed, layouts.shuffled]
    for layout in (*different, *(layouts.stuffed(fill) for fill in (-7.5, math.nan, math.inf))):
        agree_in_streams(over_batch(case, layout), expected)


@every_batch_advantage
def test_case_29_batch_advantages_of_two_ranks_are_those_of_one(case):
    expected = over_batch(case, layouts.whole)
    for shares in RANKS:
        parts = layouts.in_threads(lambda rank, all_sum, s=shares: over_batch(case, of_rank(s[rank]), all_sum))
        joined = {name: parts[0][name].clone() for name in expected}
        for name, value in parts[1].items() if parts[1] else ():
            joined[name] = value.where(joined[name].isnan(), joined[name])
        agree_in_streams(joined, expected)


@every_batch_advantage
def test_answers_of_experts_are_in_no_statistic_of_what_was_sampled(case):
    streams = case.streams | ({"token_rewards"} if case.says("takes_token_rewards", False) else set())
    rows = [
        dataclasses.replace(row, source=Source.EXPERT if row.rollout == 1 else Source.POLICY)
        for row in rows_of(streams)
    ]
    own = [number for number, row in enumerate(rows) if row.source is Source.POLICY]
    mine = tokens_of(rows, Source.POLICY)[: sum(map(len, rows))]
    found, expected = (
        {name: value[mine] for name, value in layouts.batch_advantages(case.brick, rows, layout, to_itself).items()}
        for layout in (layouts.whole, only(own))
    )
    agree_in_streams(found, expected)


def to_itself(vector):
    return vector


def of_rank(chosen):
    return lambda leaf: [leaf.padded(chosen)] if chosen else []


# ---------------------------------------------------------------------------------------------- group advantages

ON_GROUPS = {name: case for name, case in ADVANTAGES.items() if callable(case.brick)}
every_group_advantage = pytest.mark.parametrize("case", ON_GROUPS.values(), ids=ON_GROUPS)


def full_group(rewards=(0.25, 1.0, 0.0, 0.75, 0.5), failed=()):
    """A group with all that any advantage reads: two turns in states that were met twice, parts, a greedy reward."""
    rows = []
    for member, reward in enumerate(rewards):
        half, key = reward / 2, f"state {member % 2}"
        turns = (
            Turn(start=2, stop=4, reward=half / 2, state_key="start"),
            Turn(start=4, stop=6, reward=half, state_key=key),
        )
        parts, notes = {"exact": half, "style": reward - half}, {"greedy_reward": 0.4}
        rows.append(experience(member, reward=reward, actions=4, turns=turns, reward_parts=parts, metrics=notes))
        if member in failed:
            rows[-1] = rows[-1].replace(is_valid=False)
    return group(()).with_records(rows)


@every_group_advantage
def test_a_group_advantage_follows_its_rollout_when_the_group_is_reordered(case):
    made = full_group()
    order = [3, 0, 4, 2, 1]
    shuffled = made.with_records([made.records[number] for number in order])
    found = [{row.id: row for row in case.brick(one).experiences} for one in (made, shuffled)]
    assert found[0].keys() == found[1].keys()
    for name, row in found[0].items():
        for stream, value in row.streams.items():
            assert np.allclose(value, found[1][name].streams[stream], rtol=1e-6, atol=1e-7), stream


@every_group_advantage
def test_an_invalid_rollout_changes_no_advantage_of_the_others(case):
    whole = full_group(failed=[3])
    expected = case.brick(whole.with_records([*whole.records[:3], whole.records[4]])).experiences
    found = {row.id: row for row in case.brick(whole).experiences}
    for row in expected:
        for stream, value in row.streams.items():
            assert np.allclose(found[row.id].streams[stream], value, rtol=1e-6, atol=1e-7), stream
