"""Attention of the engine: full products, and the process's precision as it was."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from triune.explorer.engines import _attention
from triune.explorer.engines._attention import attend


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 9, 16, generator=generator).to(dtype) for _ in range(3))
    return q, k, v


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_attention_is_exact_at_any_matmul_precision_and_leaves_it_alone(precision):
    q, k, v = inputs()
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    torch.set_float32_matmul_precision(precision)
    assert float((attend(q, k, v, is_causal=True) - exact).abs().max()) < 1e-5
    assert torch.get_float32_matmul_precision() == precision
    mask = torch.zeros(9, 9).masked_fill_(~torch.ones(9, 9, dtype=torch.bool).tril(), float("-inf"))
    assert float((attend(q, k, v, mask=mask) - exact).abs().max()) < 1e-5


def test_the_kernel_runs_in_full_products_where_queries_are_float32(monkeypatch):
    seen = []
    kernel = _attention.scaled_dot_product_attention

    def looked_at(*tensors, **options):
        seen.append(torch.get_float32_matmul_precision())
        return kernel(*tensors, **options)

    monkeypatch.setattr(_attention, "scaled_dot_product_attention", looked_at)
    torch.set_float32_matmul_precision("medium")
    attend(*inputs())
    attend(*inputs(torch.bfloat16))
    assert seen == ["highest", "medium"]


def test_a_failing_call_leaves_the_precision_alone():
    q, k, v = inputs()
    torch.set_float32_matmul_precision("medium")
    with pytest.raises(RuntimeError):
        attend(q, k[:, :, :, :4], v)
    assert torch.get_float32_matmul_precision() == "medium"
