"""What the shipped model can do before any reinforcement: enough to start from, with something left to learn."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import pytest


@pytest.fixture(scope="module")
def model():
    import torch
    from transformers import AutoModelForCausalLM

    folder = str(files("triune.models") / "nano")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def accuracy(model, operands: int, temperature: float, num: int = 400) -> float:
    """Share of right answers to sums of two-digit numbers; temperature 0 is greedy."""
    import torch

    torch.manual_seed(0)
    numbers = np.random.default_rng(0).integers(10, 100, (num, operands)).tolist()
    ids = torch.tensor([[256, 260, *"+".join(map(str, row)).encode(), *b"=", 258, 261] for row in numbers])
    start = ids.shape[1]
    with torch.no_grad():
        for _ in range(4):
            logits = model(input_ids=ids, use_cache=False).logits[:, -1]
            if temperature:
                chosen = torch.multinomial(torch.softmax(logits / temperature, -1), 1)
            else:
                chosen = logits.argmax(-1, keepdim=True)
            ids = torch.cat([ids, chosen], 1)
    answers = [bytes(row).split(b"\x00")[0] for row in ids[:, start:].masked_fill(ids[:, start:] == 258, 0).tolist()]
    return float(np.mean([answer == str(sum(row)).encode() for answer, row in zip(answers, numbers, strict=True)]))


def test_about_four_in_ten_sampled_two_digit_sums_are_right(model):
    assert 0.33 <= accuracy(model, 2, 1.0) <= 0.47


def test_the_greedy_answer_to_a_sum_of_three_numbers_is_mostly_wrong_but_samples_are_sometimes_right(model):
    assert accuracy(model, 3, 0.0) < 0.5
    assert accuracy(model, 3, 1.0) > 0.05
