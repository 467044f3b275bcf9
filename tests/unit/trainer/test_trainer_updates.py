"""Gradients do not depend on how a batch is cut, padded or ordered."""

import asyncio

import numpy as np
import pytest
import torch

from triune import registry
from triune.errors import TrainingError
from triune.ports import Lease
from triune.testing.lanes import InlineLane
from triune.testing.tiny_models import tiny_llama
from triune.testing.training import sampled_group
from triune.trainer import Policy, TrainerSettings
from triune.trainer.batch import build_batch, prepare, stored_streams
from triune.trainer.layout import pad_rows
from triune.trainer.optimiser import Optimiser
from triune.trainer.rows import build_rows
from triune.trainer.updates import Tally, Updater

ALGORITHMS = [
    {"use": "grpo"},
    {"use": "grpo", "policy_loss": {"average": "sequence"}},
    {"use": "grpo", "kl": {"use": "k3", "coefficient": 0.1}, "entropy": {"use": "bonus", "coefficient": 0.01}},
    {"use": "dr_grpo"},
    {"use": "reinforce"},
    {"use": "sft"},
]


@pytest.fixture(scope="module")
def groups():
    model = tiny_llama()
    return [sampled_group(f"t{n}", model=model, temperature=0.8) for n in range(4)]


def algorithm_of(spec):
    return registry.build("algorithm", spec, "algorithm")


def policy_of(**options):
    return Policy(tiny_llama(**options), float32_matmul="highest")


def leases(groups):
    return [Lease(entry=str(group.id), revision=1, use_no=0, group=group) for group in groups]


def gradients(groups, spec, *, budget: int, policy=None, lay_out=None) -> tuple[dict[str, torch.Tensor], dict]:
    algorithm, policy = algorithm_of(spec), policy or policy_of()
    if "ref_logprobs" in algorithm.needs:
        policy.keep_reference()
    updater = Updater(
        policy, algorithm, Optimiser(policy.trainable, TrainerSettings()), TrainerSettings(), InlineLane()
    )
    updater.optimiser.update = lambda step: _kept(policy)  # type: ignore[method-assign]

    async def go():
        batch = build_batch(
            leases(groups),
            streams=stored_streams(algorithm),
            mini_batches=1,
            budget=budget,
            seed=(0,),
            device="cpu",
        )
        if lay_out is not None:
            batch = type(batch)(rows=batch.rows, minis=[lay_out(batch)])
        batch = await prepare(batch, policy, algorithm, InlineLane(), recomputes_old=False)
        tally = Tally()
        await updater.run(batch.minis[0], step=0, num_rollouts=batch.rows.num_rollouts, tally=tally)
        return tally.means()

    metrics = asyncio.run(go())
    return {name: value.grad.clone() for name, value in policy.trainable.items()}, metrics


def _kept(policy):
    from triune.trainer.optimiser import Updated

    norm = torch.nn.utils.get_total_norm([value.grad for value in policy.trainable.values()])
    return Updated(float(norm), True)


@pytest.mark.parametrize("spec", ALGORITHMS, ids=lambda spec: "-".join(map(str, spec.values()))[:40])
def test_case_18_gradients_are_equal_for_any_micro_batch_and_case_19_nothing_is_divided_twice(groups, spec):
    whole, metrics = gradients(groups, spec, budget=10**6)
    assert max(float(value.abs().max()) for value in whole.values()) > 1e-4
    for budget in (1, 26, 60):
        cut, same = gradients(groups, spec, budget=budget)
        for name, value in whole.items():
            torch.testing.assert_close(cut[name], value, atol=2e-6, rtol=2e-4)
        assert same.keys() == metrics.keys()
        for name, value in metrics.items():
            assert same[name] == pytest.approx(value, abs=1e-5, rel=1e-4), name


def test_case_22_several_backward_passes_before_one_update_keep_all_gradients(groups):
    """Each group alone, weighted by its share of tokens, sums to the gradient of all."""
    whole, _ = gradients(groups, {"use": "sft"}, budget=1)
    counts = [sum(row.num_actions for row in group.experiences) for group in groups]
    total = {name: torch.zeros_like(value) for name, value in whole.items()}
    for group, count in zip(groups, counts, strict=True):
        alone, _ = gradients([group], {"use": "sft"}, budget=1)
        for name, value in alone.items():
            total[name] += value * count / sum(counts)
    for name, value in whole.items():
        torch.testing.assert_close(total[name], value, atol=1e-6, rtol=1e-4)


def test_case_20_what_stands_in_the_padding_does_not_change_the_gradient_by_a_bit(groups):
    def garbage(fill: int):
        def lay_out(batch):
            micro = pad_rows(batch.rows, np.arange(len(batch.rows)))
            inside = torch.arange(micro.inputs.shape[1]) < torch.from_numpy(batch.rows.ends)[:, None]
            assert not inside.all()
            micro.inputs[~inside] = fill
            for stream in micro.batch.streams.values():
                stream[~micro.batch.action_mask] = float("nan") if fill else 0.0
            return [micro.with_streams()]

        return lay_out

    first, one = gradients(groups, ALGORITHMS[2], budget=1, lay_out=garbage(0))
    second, two = gradients(groups, ALGORITHMS[2], budget=1, lay_out=garbage(63))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert one == two


def test_case_05_log_probs_of_micro_batches_of_1_and_8_agree_within_1e_4_with_the_plain_forward(groups):
    policy = policy_of()
    batch = {}
    for budget in (1, 100, 10**6):
        built = build_batch(leases(groups), streams=(), mini_batches=1, budget=budget, seed=(0,), device="cpu")
        for micro in built.micros:
            with torch.no_grad():
                logprobs, _ = policy.logprobs(micro)
            gap = (logprobs - micro.batch.streams["behaviour_logprobs"])[micro.batch.action_mask].abs().max()
            batch[budget] = max(batch.get(budget, 0.0), float(gap))
    assert max(batch.values()) < 1e-4


def test_case_04_log_probs_with_and_without_gradient_agree_bit_for_bit(groups):
    policy = policy_of()
    for micro in build_batch(leases(groups), streams=(), mini_batches=1, budget=100, seed=(0,), device="cpu").micros:
        with torch.no_grad():
            frozen, _ = policy.logprobs(micro)
        alive, _ = policy.logprobs(micro)
        assert alive.requires_grad
        assert torch.equal(frozen, alive)


def test_case_01_on_an_unchanged_policy_the_ratio_is_one_at_any_temperature():
    model = tiny_llama()
    for temperature in (0.6, 1.0, 1.4):
        _, metrics = gradients(
            [sampled_group("t", model=model, temperature=temperature)], {"use": "grpo"}, budget=10**6
        )
        assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["logprob_gap"] < 1e-5


def test_recomputed_old_log_probs_make_the_first_ratio_exactly_one(groups):
    algorithm, policy = algorithm_of({"use": "grpo", "old_logprobs": "always"}), policy_of()

    async def go():
        batch = build_batch(leases(groups), streams=("advantages",), mini_batches=2, budget=60, seed=(0,), device="cpu")
        batch = await prepare(batch, policy, algorithm, InlineLane(), recomputes_old=True)
        for micro in batch.micros:
            logprobs, _ = policy.logprobs(micro)
            assert torch.equal(logprobs.detach(), micro.batch.old_logprobs)

    asyncio.run(go())


def test_the_reference_is_the_initial_policy_and_under_an_adapter_the_base(groups, tmp_path):
    from triune.models import LoraSettings, ModelSettings, load_model
    from triune.testing.tiny_models import save_tiny_llama

    save_tiny_llama(tmp_path)
    micro = pad_rows(build_rows(leases(groups)), np.arange(8))
    for lora in (None, LoraSettings(rank=2)):
        policy = Policy(load_model(ModelSettings(path=str(tmp_path), lora=lora)), float32_matmul="highest")
        policy.keep_reference()
        with torch.no_grad():
            before, _ = policy.logprobs(micro)
            for value in policy.trainable.values():
                value += 0.05
            with policy.reference() as reference:
                kept, _ = reference.logprobs(micro)
            moved, _ = policy.logprobs(micro)
        assert torch.equal(before, kept)
        assert not torch.equal(before, moved)


def test_a_loss_that_is_not_finite_leaves_the_weights_and_stops_the_run_after_a_few(groups):
    policy, algorithm = policy_of(), algorithm_of({"use": "grpo"})
    settings = TrainerSettings(max_bad_updates=2, learning_rate=0.1)
    updater = Updater(policy, algorithm, Optimiser(policy.trainable, settings), settings, InlineLane())
    broken = [
        group.map(lambda row: row.with_streams(advantages=np.full(len(row), np.inf, np.float32))) for group in groups
    ]
    before = {name: value.detach().clone() for name, value in policy.trainable.items()}

    async def go(some):
        batch = build_batch(leases(some), streams=("advantages",), mini_batches=1, budget=99, seed=(0,), device="cpu")
        tally = Tally()
        await updater.run(batch.minis[0], step=0, num_rollouts=16, tally=tally)
        return tally

    assert asyncio.run(go(broken)).num_bad == 1
    assert all(torch.equal(before[name], value) for name, value in policy.trainable.items())
    assert asyncio.run(go(groups)).num_applied == 1
    asyncio.run(go(broken))
    with pytest.raises(TrainingError, match="2 updates in a row"):
        asyncio.run(go(broken))


def test_advantages_of_zero_move_nothing_although_the_optimiser_has_momentum(groups):
    policy, algorithm = policy_of(), algorithm_of({"use": "grpo"})
    settings = TrainerSettings(learning_rate=0.1)
    updater = Updater(policy, algorithm, Optimiser(policy.trainable, settings), settings, InlineLane())
    flat = [group.map(lambda row: row.with_streams(advantages=np.zeros(len(row), np.float32))) for group in groups]

    async def go(some):
        batch = build_batch(leases(some), streams=("advantages",), mini_batches=1, budget=99, seed=(0,), device="cpu")
        tally = Tally()
        await updater.run(batch.minis[0], step=0, num_rollouts=16, tally=tally)
        return tally

    assert asyncio.run(go(groups)).num_applied == 1
    before = {name: value.detach().clone() for name, value in policy.trainable.items()}
    tally = asyncio.run(go(flat))
    assert (tally.num_applied, tally.means()["grad_norm"]) == (0, 0.0)
    assert all(torch.equal(before[name], value) for name, value in policy.trainable.items())


def test_case_08_the_reference_is_scored_on_the_ids_and_at_the_temperature_of_the_policy():
    model = tiny_llama()
    group = sampled_group("t", model=model, temperature=0.6)
    policy = Policy(model, float32_matmul="highest")
    policy.keep_reference()
    algorithm = algorithm_of({"use": "grpo", "kl": {"use": "k3", "coefficient": 0.1}})

    async def go():
        batch = build_batch(
            leases([group]), streams=("advantages",), mini_batches=1, budget=99, seed=(0,), device="cpu"
        )
        batch = await prepare(batch, policy, algorithm, InlineLane(), recomputes_old=False)
        (micro,) = batch.micros
        mask = micro.batch.action_mask
        sampled = micro.batch.streams["behaviour_logprobs"][mask]  # by the same weights, at 0.6
        torch.testing.assert_close(micro.batch.ref_logprobs[mask], sampled, atol=1e-4, rtol=1e-4)

    asyncio.run(go())


def test_gradient_checkpointing_changes_no_gradient_in_any_layout(groups, tmp_path):
    from triune.models import ModelSettings, load_model
    from triune.testing.tiny_models import save_tiny_llama

    folder = str(save_tiny_llama(tmp_path))
    found = []
    for checkpointing in (False, True):
        model = load_model(ModelSettings(path=folder, gradient_checkpointing=checkpointing))
        found.append(gradients(groups, {"use": "grpo"}, budget=40, policy=Policy(model, float32_matmul="highest"))[0])
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, atol=1e-6, rtol=1e-5)
