import pytest
import torch

from triune.trainer import head
from triune.trainer.head import chosen_logprobs

M, H, V = 23, 8, 50


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def inputs(requires_grad: bool = True):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(M, H, generator=generator).requires_grad_(requires_grad)
    weight = torch.randn(V, H, generator=generator).requires_grad_(requires_grad)
    targets = torch.randint(V, (M,), generator=generator)
    temperature = 0.5 + torch.rand(M, generator=generator)
    return hidden, weight, targets, temperature


def by_hand(hidden, weight, targets, temperature):
    """The definition, in float64, with all logits at once."""
    scores = (hidden.double() @ weight.double().t() / temperature.double()[:, None]).log_softmax(-1)
    return scores.gather(1, targets[:, None])[:, 0], -(scores.exp() * scores).sum(-1)


@pytest.mark.parametrize("rows_per_chunk", [1, 7, 1000])
def test_log_probs_entropies_and_their_gradients_equal_the_definition(monkeypatch, rows_per_chunk: int):
    monkeypatch.setattr(head, "_rows_per_chunk", lambda vocab: rows_per_chunk)
    hidden, weight, targets, temperature = inputs()
    generator = torch.Generator().manual_seed(1)
    up_l, up_h = torch.randn(M, generator=generator), torch.randn(M, generator=generator)
    logprobs, entropy = chosen_logprobs(hidden, weight, targets, temperature, entropy=True)
    want_l, want_h = by_hand(hidden, weight, targets, temperature)
    torch.testing.assert_close(logprobs.double(), want_l, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), want_h, atol=1e-5, rtol=1e-5)
    got = torch.autograd.grad((logprobs * up_l + entropy * up_h).sum(), [hidden, weight])
    want = torch.autograd.grad((want_l * up_l + want_h * up_h).sum(), [hidden, weight])
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs.float(), atol=1e-5, rtol=1e-4)


def test_case_01_the_log_prob_is_that_of_the_tempered_distribution():
    hidden, weight, targets, _ = inputs(requires_grad=False)
    for temperature in (0.6, 1.0, 1.4):
        want = (hidden @ weight.t() / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]
        got, _ = chosen_logprobs(hidden, weight, targets, torch.full((M,), temperature))
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_without_temperature_the_gradient_is_that_of_cross_entropy():
    hidden, weight, targets, _ = inputs()
    (-chosen_logprobs(hidden, weight, targets)[0].mean()).backward()
    again, same, _, _ = inputs()
    torch.nn.functional.cross_entropy(again @ same.t(), targets).backward()
    torch.testing.assert_close(hidden.grad, again.grad, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(weight.grad, same.grad, atol=1e-6, rtol=1e-4)


def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_still_do():
    hidden, weight, targets, temperature = inputs()
    weight.requires_grad_(False)
    chosen_logprobs(hidden, weight, targets, temperature)[0].sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None


def test_a_head_in_bf16_returns_float32_close_to_the_truth():
    hidden, weight, targets, temperature = inputs(requires_grad=False)
    got, _ = chosen_logprobs(hidden.bfloat16(), weight, targets, temperature)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), by_hand(hidden, weight, targets, temperature)[0], atol=0.2, rtol=0.02)
