import torch

from triune.testing.tiny_models import tiny_llama
from triune.trainer import packing
from triune.trainer.packing import PackedRows, few_sizes, use_packed_attention

INSIDE = torch.tensor([[True] * 5, [True] * 2 + [False] * 3, [True] * 4 + [False]])


def packed_inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, 11, 8, generator=generator).requires_grad_() for heads in (4, 2, 2)]


def by_definition(query, key, value, scale):
    """Each row alone, in float64."""
    parts, start = [], 0
    for length in (5, 2, 4):
        rows = slice(start, start + length)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        heads = []
        for head in range(4):
            scores = query[0, head, rows].double() @ key[0, head // 2, rows].double().t() * scale
            heads.append(scores.masked_fill(~causal, -torch.inf).softmax(-1) @ value[0, head // 2, rows].double())
        parts.append(torch.stack(heads, 1))
        start += length
    return torch.cat(parts).unsqueeze(0)


def check(got, inputs):
    want = by_definition(*inputs, 0.3)
    torch.testing.assert_close(got, want.float(), atol=1e-4, rtol=1e-4)
    up = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    mine = torch.autograd.grad(got, inputs, up)
    theirs = torch.autograd.grad(want, inputs, up.double())
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_rows_are_packed_end_to_end_and_each_attends_to_itself_only():
    rows = PackedRows(INSIDE, None)
    tokens = torch.arange(15).view(3, 5)
    assert rows.pack(tokens).tolist() == [[0, 1, 2, 3, 4, 5, 6, 10, 11, 12, 13]]
    assert rows.ends.tolist() == [0, 5, 7, 11]
    inputs = packed_inputs()
    check(rows.attend(*inputs, 0.3), inputs)
    assert rows.num_uses == 1


def test_with_row_ends_a_varlen_kernel_gets_what_it_needs(monkeypatch):
    def varlen(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
        """The contract of `torch.nn.attention.varlen.varlen_attn`, row by row."""
        assert (max_q, max_k, window_size, enable_gqa) == (5, 5, (-1, 0), True)
        parts = []
        for start, stop in zip(cu_q.tolist(), cu_q.tolist()[1:], strict=False):
            one = [x[start:stop].transpose(0, 1).unsqueeze(0) for x in (query, key, value)]
            mixed = torch.nn.functional.scaled_dot_product_attention(*one, is_causal=True, scale=scale, enable_gqa=True)
            parts.append(mixed[0].transpose(0, 1))
        return torch.cat(parts)

    monkeypatch.setattr(packing, "varlen_attn", varlen)
    inputs = packed_inputs()
    check(PackedRows(INSIDE, None)._attend_varlen(*inputs, 0.3), inputs)


def test_a_model_that_uses_it_agrees_with_torchs_kernel_and_long_rows_go_there(monkeypatch):
    model, ids = tiny_llama(), torch.randint(64, (2, 20))
    want = model(input_ids=ids).logits
    assert use_packed_attention(model)
    torch.testing.assert_close(model(input_ids=ids).logits, want, atol=1e-4, rtol=1e-4)
    monkeypatch.setattr(packing, "LONGEST", 10)
    monkeypatch.setattr(packing, "short_attention", None)
    torch.testing.assert_close(model(input_ids=ids).logits, want, atol=1e-4, rtol=1e-4)


def test_attention_with_a_window_is_left_alone():
    model = tiny_llama()
    model.config.sliding_window = 4
    assert not use_packed_attention(model)


def test_a_step_meets_few_shapes_whatever_its_rows_are():
    sizes = [few_sizes(num) for num in range(1, 4097)]
    assert all(num <= size <= num + num // 16 for num, size in enumerate(sizes, 1))
    assert len(set(sizes[1024:])) == 2 * 16
    shapes = set()
    for num in range(33, 65):
        rows = PackedRows(torch.arange(70) < torch.arange(num)[:, None] % 70 + 1, None)
        shapes.add(tuple(rows.shape))
    assert len(shapes) <= 16


def test_copies_that_fill_a_shape_up_get_no_gradient_and_change_no_log_prob():
    model = tiny_llama()
    use_packed_attention(model)
    inside = torch.arange(45) < torch.arange(13, 46)[:, None]
    tokens = torch.randint(1, 60, inside.shape, generator=torch.Generator().manual_seed(0))
    rows = PackedRows(inside, torch.zeros(33, 1, 45, 45).masked_fill_(~torch.ones(45, 45, dtype=bool).tril(), -1e9))
    assert rows.num == 957 < len(rows.places)
    assert rows.shape == (34, 46)
    places = rows.pack(torch.arange(45).expand(33, 45))
    packed = model.model(input_ids=rows.pack(tokens), position_ids=places, packed_rows=rows, use_cache=False)[0]
    padded = model.model(input_ids=tokens, use_cache=False)[0]
    read = rows.in_row[inside.reshape(-1)]
    torch.testing.assert_close(packed[0][read], padded[inside], atol=1e-5, rtol=1e-4)
    weights = list(model.model.parameters())
    mine = torch.autograd.grad(packed[0][read].square().sum(), weights)
    theirs = torch.autograd.grad(padded[inside].square().sum(), weights)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
