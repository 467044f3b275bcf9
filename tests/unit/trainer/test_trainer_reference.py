"""The reference is asked the same question as the student: same ids, same temperature."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from triune import registry
from triune.models import LoraSettings, ModelSettings, load_model
from triune.ports import Lease
from triune.testing.lanes import InlineLane
from triune.testing.tiny_models import save_tiny_llama, tiny_llama
from triune.testing.training import sampled_group
from triune.trainer import Policy
from triune.trainer.batch import build_batch, prepare, stored_streams


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_case_08_the_reference_is_scored_at_the_temperature_and_on_the_ids_the_student_sampled(temperature):
    algorithm = registry.build("algorithm", {"use": "grpo", "kl": {"use": "k3", "coefficient": 0.1}}, "algorithm")
    group = sampled_group("t", model=tiny_llama(), temperature=temperature, lengths=[(4, 6), (4, 3), (4, 1)])
    initial, policy = tiny_llama(), Policy(tiny_llama(), float32_matmul="highest")
    policy.keep_reference()
    with torch.no_grad():
        for value in policy.trainable.values():
            value += 0.05  # the student has moved on; the reference has not
    batch = build_batch(
        [Lease(entry="e", revision=1, use_no=0, group=group)],
        streams=stored_streams(algorithm),
        mini_batches=1,
        budget=999,
        seed=(0,),
        device="cpu",
    )
    ready = asyncio.run(prepare(batch, policy, algorithm, InlineLane(), recomputes_old=False))
    (micro,) = ready.micros
    for row, experience in enumerate(group.experiences):
        ids = torch.from_numpy(experience.tokens.astype(np.int64))
        with torch.no_grad():
            scores = (initial(input_ids=ids[None]).logits[0, :-1].double() / temperature).log_softmax(-1)
        expected = scores.gather(1, ids[1:, None])[:, 0].numpy()[experience.action_mask[1:]]
        place = [n for n in range(len(group)) if torch.equal(micro.batch.tokens[n, : len(ids)], ids)]
        found = micro.batch.ref_logprobs[place[0]][micro.batch.action_mask[place[0]]].numpy()
        np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=f"row {row}")


def test_keeping_a_reference_leaves_the_precision_of_products_as_the_run_file_says():
    before = torch.get_float32_matmul_precision()
    try:
        policy = Policy(tiny_llama(), float32_matmul="highest")
        policy.keep_reference()
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("was_trained", [True, False])
def test_under_an_adapter_the_reference_is_the_model_the_run_begins_with(tmp_path: Path, was_trained: bool):
    model = load_model(ModelSettings(path=str(save_tiny_llama(tmp_path)), lora=LoraSettings(rank=4)))
    if was_trained:
        moved(model)
    prompt = torch.tensor([[1, 5, 7, 9]])
    with torch.no_grad():
        initial = model(input_ids=prompt).logits
        policy = Policy(model, float32_matmul="highest")
        policy.keep_reference()
        moved(model)
        changed = model(input_ids=prompt).logits
        with policy.reference() as reference:
            kept = reference.model(input_ids=prompt).logits
        after = model(input_ids=prompt).logits
    torch.testing.assert_close(kept, initial)
    assert not torch.allclose(kept, changed, atol=1e-3)
    assert torch.equal(after, changed)


def moved(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05
