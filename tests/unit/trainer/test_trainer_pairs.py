"""Pairs and texts in the trainer: what stays together, what is trained, what it costs."""

import asyncio
import math

import numpy as np
import pytest
import torch

from triune import registry
from triune.algorithms import Divider, Progress
from triune.errors import TrainingError
from triune.ports import Lease
from triune.records import Group, GroupId, Pair, Task, Text
from triune.testing.lanes import InlineLane
from triune.testing.tiny_models import tiny_llama
from triune.testing.training import RecordingMonitor, filled_buffer, sampled_group
from triune.trainer import Checkpoints, Policy, Trainer, TrainerSettings
from triune.trainer.batch import build_batch, prepare, stored_streams
from triune.trainer.layout import lay_out, plan_mini_batches, plan_trees
from triune.trainer.rows import build_rows


def pair_group(key: str, lengths: list[tuple[int, int]], **changes) -> Group:
    """A group with one pair of two random answers of these (prompt, answer) tokens."""
    made = sampled_group(key, lengths=lengths, seed=1)
    chosen, rejected = (row.replace(streams={}) for row in made.experiences)
    return made.with_records([Pair(chosen=chosen, rejected=rejected, **changes)])


def leases(*groups: Group) -> list[Lease]:
    return [Lease(entry=str(group.id), revision=1, use_no=1, group=group) for group in groups]


SHAPES = [[(5, 3), (5, 9)], [(12, 2), (12, 1)], [(3, 6), (3, 6)], [(8, 20), (8, 4)], [(5, 1), (5, 2)]]
PAIRS = [pair_group(f"p{n}", shape, weight=1 + n / 2, margin=n / 10) for n, shape in enumerate(SHAPES)]
ODD = [pair_group("odd", [(5, 3), (9, 4)]), *PAIRS]
"""The halves of the first do not begin alike, so that no tree holds them."""


@pytest.mark.parametrize("budget", [1, 40, 10**6])
@pytest.mark.parametrize("num_minis", [1, 3])
@pytest.mark.parametrize("groups", [PAIRS, ODD], ids=["trees", "padded"])
def test_both_halves_of_a_pair_lie_in_one_micro_batch_and_one_mini_batch(groups, budget, num_minis):
    rows = build_rows(leases(*groups))
    assert (plan_trees(rows, np.arange(len(rows)), 512) is None) is (groups is ODD)
    seen = []
    minis = plan_mini_batches(rows, num_minis, (0,))
    assert len(minis) == num_minis
    for numbers in minis:
        for micro in lay_out(rows, numbers, budget):
            batch = micro.batch
            for pair in sorted(set(batch.pairs.tolist())):
                halves = batch.chosen[batch.pairs == pair].tolist()
                assert sorted(halves) == [False, True]
                seen.append(pair)
            chosen, rejected = batch.halves(batch.pairs)
            assert torch.equal(chosen, rejected)
            assert batch.weights.tolist() == [groups[pair].records[0].weight for pair in batch.pairs.tolist()]
            margins = [np.float32(groups[pair].records[0].margin) for pair in batch.pairs.tolist()]
            assert batch.margins.tolist() == margins
    assert sorted(seen) == list(range(len(groups)))


def test_a_half_is_told_from_the_other_by_its_tokens():
    rows = build_rows(leases(*PAIRS))
    for micro in lay_out(rows, np.arange(len(rows)), 30):
        for place, (pair, is_chosen) in enumerate(
            zip(micro.batch.pairs.tolist(), micro.batch.chosen.tolist(), strict=True)
        ):
            record = PAIRS[pair].records[0]
            half = record.chosen if is_chosen else record.rejected
            assert micro.batch.tokens[place, : len(half)].tolist() == half.tokens.tolist()


def test_padded_pairs_keep_to_the_budget_of_a_micro_batch_unless_one_alone_is_larger():
    rows = build_rows(leases(*ODD))
    micros = lay_out(rows, np.arange(len(rows)), 60, widest=0)
    assert len(micros) > 2
    assert all(micro.inputs.numel() <= 60 or len(micro.inputs) == 2 for micro in micros)


def test_a_pair_with_a_failed_or_masked_half_is_left_out_whole():
    failed, masked, whole = PAIRS[:3]
    one, other = failed.records[0], masked.records[0]
    failed = failed.with_records([Pair(chosen=one.chosen, rejected=one.rejected.replace(is_valid=False))])
    nothing = other.chosen.replace(
        action_mask=np.zeros(len(other.chosen), bool),
        logprobs=np.full(len(other.chosen), np.nan, np.float32),
        versions=np.full(len(other.chosen), -1, np.int32),
    )
    masked = masked.with_records([Pair(chosen=nothing, rejected=other.rejected)])
    rows = build_rows(leases(failed, masked, whole))
    assert (len(rows), rows.num_invalid) == (2, 4)
    assert rows.weights.tolist() == [whole.records[0].weight]
    assert len(build_rows(leases(failed))) == 0


def moved_policy() -> Policy:
    policy = Policy(tiny_llama(), float32_matmul="highest")
    policy.keep_reference()
    with torch.no_grad():
        for number, value in enumerate(policy.trainable.values()):
            value += 0.02 * math.sin(number + 1)
    return policy


def update(algorithm, groups, budget, widest=512):
    """Loss and gradient of one update."""
    policy = moved_policy()
    batch = build_batch(
        leases(*groups),
        streams=stored_streams(algorithm),
        mini_batches=1,
        budget=budget,
        seed=(0,),
        device="cpu",
        widest=widest,
    )
    ready = asyncio.run(prepare(batch, policy, algorithm, InlineLane(), recomputes_old=False))
    (micros,) = ready.minis
    divider = Divider(algorithm, [m.batch for m in micros], state=algorithm.state0(), progress=Progress())
    total = 0.0
    for micro in micros:
        loss = divider.loss(micro.batch.with_logprobs(policy.logprobs(micro)[0]))
        loss.backward()
        total += loss.item()
    return len(micros), total, torch.cat([value.grad.flatten() for value in policy.trainable.values()])


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo"])
def test_many_pairs_in_one_micro_batch_equal_many_micro_batches_of_one(name):
    algorithm = registry.build("algorithm", {"use": name}, "algorithm")
    whole, trees, apart = (
        update(algorithm, PAIRS, budget, widest) for budget, widest in ((10**6, 0), (10**6, 512), (1, 0))
    )
    assert (whole[0], trees[0], apart[0]) == (1, 1, len(PAIRS))
    for other in (trees, apart):
        assert other[1] == pytest.approx(whole[1], rel=1e-4)
        assert torch.allclose(other[2], whole[2], rtol=1e-3, atol=1e-4 * float(whole[2].abs().max()))


def test_the_loss_of_dpo_is_that_of_the_plain_forward_of_both_models():
    algorithm = registry.build("algorithm", {"use": "dpo", "policy_loss": {"beta": 0.3}}, "algorithm")
    policy, reference = moved_policy().model, tiny_llama()

    def log_ratio(row):
        ids = torch.from_numpy(row.tokens.astype(np.int64))[None]
        found = []
        for model in (policy, reference):
            with torch.no_grad():
                scores = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
            found.append(scores.gather(1, ids[0, 1:, None])[:, 0].numpy()[row.action_mask[1:]].sum())
        return found[0] - found[1]

    torch.set_float32_matmul_precision("highest")
    expected = 0.0
    for group in PAIRS:
        pair = group.records[0]
        gap = 0.3 * (log_ratio(pair.chosen) - log_ratio(pair.rejected)) - pair.margin
        expected += pair.weight * math.log1p(math.exp(-gap)) / len(PAIRS)
    assert update(algorithm, PAIRS, 10**6)[1] == pytest.approx(expected, rel=1e-4)


# ------------------------------------------------------------------------------------------------- refusals


def test_a_batch_of_pairs_and_something_else_is_refused():
    with pytest.raises(TrainingError, match="holds no pair, unlike others of its batch"):
        build_rows(leases(PAIRS[0], sampled_group("t")))


@pytest.mark.parametrize(
    ("name", "groups", "message"),
    [
        ("sft", PAIRS, "found pairs; expected what the algorithm reads: answers"),
        ("dpo", [sampled_group("t")], "found single sequences; expected what the algorithm reads: pairs"),
    ],
)
def test_an_algorithm_is_never_given_what_it_does_not_read(name, groups, message):
    with pytest.raises(TrainingError, match=message):
        update(registry.build("algorithm", {"use": name}, "algorithm"), groups, 10**6)


# ---------------------------------------------------------------------------------------------------- texts


def test_every_token_of_a_text_but_the_first_is_trained():
    group_id = GroupId("run", "train", "t", 0)
    pieces = [Text(id=f"{group_id}/{n}", tokens=np.arange(3 + n, dtype=np.int32) + 5) for n in range(2)]
    rows = build_rows(leases(Group(id=group_id, task=Task(key="t"), records=tuple(pieces))))
    assert (len(rows), rows.num_rollouts, rows.num_actions) == (2, 2, 2 + 3)
    (micro,) = lay_out(rows, np.arange(2), 10**6)
    mask = {
        tuple(row[row > 0].tolist()): m.tolist()
        for row, m in zip(micro.batch.tokens, micro.batch.action_mask, strict=True)
    }
    assert mask == {(5, 6, 7): [False, True, True, False], (5, 6, 7, 8): [False, True, True, True]}


# ----------------------------------------------------------------------------------------------------- loop


def test_a_few_steps_of_dpo_widen_the_margin_and_the_loop_ends_with_a_short_batch(tmp_path):
    async def work():
        plain = [pair_group("the same", shape).records for shape in SHAPES[:4]]
        ids = [GroupId("run", "train", f"g{n}", 0) for n in range(14)]
        groups = [Group(id=one, task=Task(key=one.task_key), records=plain[n % 4]) for n, one in enumerate(ids)]
        buffer = await filled_buffer(tmp_path, groups)
        monitor, lane = RecordingMonitor(), InlineLane()
        trainer = Trainer(
            TrainerSettings(steps=99, pairs_per_step=4, learning_rate=1e-3, save_every=0),
            Policy(tiny_llama(), float32_matmul="highest"),
            registry.build("algorithm", "dpo", "algorithm"),
            buffer=buffer,
            channel=registry.build("channel", "memory", "c")(ledger=buffer, lane=lane, folder=tmp_path / "w"),
            lane=lane,
            monitor=monitor,
            checkpoints=Checkpoints(tmp_path / "checkpoints"),
        )
        await asyncio.wait_for(trainer.run(), 60)
        await buffer.close()
        return trainer, monitor

    trainer, monitor = asyncio.run(work())
    assert (trainer.step, trainer.exit_reason) == (4, "the data ended after 4 steps")
    assert monitor.steps("num_sequences") == [8, 8, 8, 4]
    margins = monitor.steps("reward_margin")
    assert margins[0] == pytest.approx(0, abs=1e-6)
    assert margins[:3] == sorted(margins[:3]), "the last batch holds other pairs"
    assert margins[-1] > 0.05
    assert monitor.steps("policy_loss")[0] == pytest.approx(math.log(2), rel=1e-5)
    assert monitor.steps("pair_accuracy")[1:] == [1, 1, 1]
