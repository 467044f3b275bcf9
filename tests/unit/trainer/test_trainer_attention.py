import pytest
import torch

from triune.trainer.attention import short_attention


def by_definition(query, key, value, allowed, scale):
    """Every query head with its key head, written out in float64."""
    share = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        scores = query[:, head].double() @ key[:, head // share].double().transpose(1, 2) * scale
        scores = scores.masked_fill(~allowed, -torch.inf)
        heads.append(scores.softmax(-1) @ value[:, head // share].double())
    return torch.stack(heads, dim=2)


def inputs(length: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(length)

    def make(heads: int):
        return torch.randn(3, length, heads, 8, generator=generator).to(dtype).transpose(1, 2).detach().requires_grad_()

    return make(6), make(2), make(2), torch.randn(3, length, 6, 8, generator=generator).to(dtype)


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("length", [1, 2, 7, 130])
@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients_equal_the_definition_within_and_across_blocks(length: int, masked: bool):
    query, key, value, up = inputs(length)
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    bias = None
    if masked:
        generator = torch.Generator().manual_seed(1)
        allowed = allowed & ((torch.rand(3, length, length, generator=generator) > 0.5) | torch.eye(length).bool())
        bias = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min).unsqueeze(1)
    got = short_attention(query, key, value, bias, 0.3)
    want = by_definition(query, key, value, allowed, 0.3)
    assert got.shape == (3, length, 6, 8)
    torch.testing.assert_close(got, want.float(), atol=1e-5, rtol=1e-5)
    mine = torch.autograd.grad(got, [query, key, value], up)
    theirs = torch.autograd.grad(want, [query, key, value], up.double())
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_bf16_inputs_give_bf16_results_near_the_truth():
    query, key, value, up = inputs(40, torch.bfloat16)
    got = short_attention(query, key, value, None, 0.3)
    want = by_definition(query, key, value, torch.ones(40, 40, dtype=torch.bool).tril(), 0.3)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, atol=2e-2, rtol=2e-2)
    gradients = torch.autograd.grad(got, [query, key, value], up)
    assert {one.dtype for one in gradients} == {torch.bfloat16}
