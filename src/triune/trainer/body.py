"""The body of a language model: from token ids to the hidden states that predict trained tokens."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from triune.models import has_fast_bfloat16, return_freed_memory, set_float32_matmul
from triune.trainer.attention import LONGEST
from triune.trainer.layout import Micro
from triune.trainer.packing import PackedRows, use_packed_attention

SMALL = 20_000_000
"""Models below this many parameters compute in float32 on a CPU: they are bound by launches, not by products."""


class Body:
    """What policy, teacher and critic share: one forward pass through the layers, in every layout.

    Args:
        model: From `triune.models.load_model`.
        precision: `bfloat16` runs products under autocast; `auto` chooses by device and size.
        float32_matmul: Inner precision of float32 products on a CPU, set for the whole process; None leaves it.
    """

    def __init__(
        self,
        model: Any,
        *,
        precision: Literal["auto", "float32", "bfloat16"] = "auto",
        float32_matmul: Literal["medium", "high", "highest"] | None = None,
    ) -> None:
        self.model = model
        self.base = model.get_base_model() if hasattr(model, "peft_config") else model
        self._body = body_of(model)
        parameters = list(model.parameters())
        self.device = parameters[0].device
        self.num_parameters = sum(parameter.numel() for parameter in parameters)
        if precision == "auto":
            pays = self.device.type != "cpu" or (self.num_parameters > SMALL and has_fast_bfloat16())
            precision = "bfloat16" if pays else "float32"
        self.has_autocast = precision == "bfloat16" and parameters[0].dtype == torch.float32
        self.dtype = torch.bfloat16 if precision == "bfloat16" else parameters[0].dtype
        self._packs = use_packed_attention(self.base)
        if self.device.type == "cpu" and float32_matmul is not None:
            set_float32_matmul(float32_matmul)

    def tidy(self) -> None:
        """Give freed activations and gradients back where they are large and lie in the process's heap."""
        if self.device.type == "cpu" and self.num_parameters > SMALL:
            return_freed_memory()

    def hidden(self, micro: Micro) -> Tensor:
        """[M, H]: states that predict the trained tokens, in the order of `micro.chosen`."""
        cast = torch.autocast(self.device.type, torch.bfloat16) if self.has_autocast else nullcontext()
        with cast:
            return self._hidden(micro)

    def _hidden(self, micro: Micro) -> Tensor:
        bias = None if micro.allowed is None else self._additive(micro.allowed)
        fits = self.device.type != "cpu" or micro.inputs.shape[1] <= LONGEST
        if self._packs and fits and not bool(micro.inside.all()):
            found = self._packed_hidden(micro, bias)
            if found is not None:
                return found
            self._packs = False
        hidden = self._body(
            input_ids=micro.inputs, position_ids=micro.positions, attention_mask=bias, use_cache=False
        ).last_hidden_state
        return hidden.flatten(0, 1).index_select(0, micro.before)

    def _packed_hidden(self, micro: Micro, bias: Tensor | None) -> Tensor | None:
        """The same without computing padding; None when the model does not hand the layout on to its attention."""
        rows = PackedRows(micro.inside, bias)
        positions = micro.positions
        if positions is None:
            positions = torch.arange(micro.inputs.shape[1], device=self.device).expand(micro.inputs.shape)
        hidden = self._body(
            input_ids=rows.pack(micro.inputs), position_ids=rows.pack(positions), packed_rows=rows, use_cache=False
        ).last_hidden_state
        return hidden[0].index_select(0, rows.in_row[micro.before]) if rows.num_uses else None

    def _additive(self, allowed: Tensor) -> Tensor:
        """[R, 1, W, W] to add to attention scores: what every attention of Transformers takes as it is."""
        mask = torch.zeros(allowed.shape, dtype=self.dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(self.dtype).min).unsqueeze(1)


def body_of(model: Any) -> Any:
    """The module that makes hidden states, adapters included, without the head."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    return base.base_model if base.base_model is not base else base.get_decoder()


def spread(values: Tensor, micro: Micro) -> Tensor:
    """[M] → [B, T], 0 where nothing was computed."""
    tokens = micro.batch.tokens
    return values.new_zeros(tokens.numel()).index_put((micro.chosen,), values).view(tokens.shape)
