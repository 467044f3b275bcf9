import torch

from triune.models import digest
from triune.models.digest import weight_digest


def _state(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "b.weight": torch.randn(700, 600, generator=generator).to(dtype),
        "a.weight": torch.randn(33, 7, generator=generator).to(dtype),
        "c.bias": torch.randn(5, generator=generator).to(dtype),
    }


def test_the_digest_depends_on_names_and_values_but_not_on_order_or_layout():
    state = _state()
    plain = weight_digest(state)
    assert len(plain) == 16
    assert int(plain, 16) >= 0
    assert weight_digest(dict(reversed(state.items()))) == plain
    strided = {name: value.t().contiguous().t() if value.ndim == 2 else value for name, value in state.items()}
    assert weight_digest(strided) == plain
    renamed = dict(state)
    renamed["d.bias"] = renamed.pop("c.bias")
    assert weight_digest(renamed) != plain


def test_every_single_changed_bit_changes_the_digest():
    state = _state()
    seen = {weight_digest(state)}
    for position in (0, 1, 2, 3, 65535, 262143, 419999):
        for bit in (0, 7, 15):
            changed = state["b.weight"].clone()
            changed.view(torch.int16).view(-1)[position] ^= (1 << bit) if bit < 15 else -(1 << 15)
            seen.add(weight_digest({**state, "b.weight": changed}))
    assert len(seen) == 1 + 7 * 3


def test_moving_values_between_places_or_shapes_changes_the_digest():
    state = _state()
    plain = weight_digest(state)
    weight = state["b.weight"]
    assert weight_digest({**state, "b.weight": weight.view(600, 700)}) != plain
    assert weight_digest({**state, "b.weight": weight.flip(0)}) != plain
    assert weight_digest({**state, "b.weight": weight.float()}) != plain
    assert weight_digest({}) != plain


def test_the_digest_is_the_same_on_every_machine():
    state = {"x": torch.arange(10, dtype=torch.float32), "y": torch.tensor([1, 2, 3], dtype=torch.uint8)}
    assert weight_digest(state) == "26d69ab8a746ad42"


def test_several_threads_find_the_digest_that_one_finds(monkeypatch):
    state = {**_state(), "odd": torch.arange(13, dtype=torch.uint8)[3:], "big": torch.arange(70_000)}
    alone = weight_digest(state)
    monkeypatch.setattr(digest, "_THREADED", 0)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert weight_digest(state) == alone
    finally:
        torch.set_num_threads(before)
