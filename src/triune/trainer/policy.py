"""The model in training: forward passes to log-probs, and the frozen reference."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from triune.errors import CheckpointError, ConfigError
from triune.models import canonical_state, has_fast_bfloat16, return_freed_memory, set_float32_matmul
from triune.trainer.attention import LONGEST
from triune.trainer.head import chosen_logprobs
from triune.trainer.layout import Micro
from triune.trainer.packing import PackedRows, use_packed_attention

log = logging.getLogger("triune.trainer")

_SMALL = 20_000_000
"""Models below this many parameters compute in float32 on a CPU: they are bound by launches, not by products."""

_SCALED_HEADS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


class Policy:
    """A causal language model with what training needs to know about it.

    Args:
        model: From `triune.models.load_model`.
        precision: `bfloat16` runs products under autocast; `auto` chooses by device and size.
        float32_matmul: Inner precision of float32 products on a CPU; set for the whole process.

    Raises:
        ConfigError: The model's head is not a plain linear layer.
    """

    def __init__(
        self,
        model: Any,
        *,
        precision: Literal["auto", "float32", "bfloat16"] = "auto",
        float32_matmul: Literal["medium", "high", "highest"] = "medium",
    ) -> None:
        self.model = model
        base = model.get_base_model() if hasattr(model, "peft_config") else model
        self._body = base.base_model if base.base_model is not base else base.get_decoder()
        self._head = base.get_output_embeddings()
        _check_head(base, self._head)
        parameters = list(model.parameters())
        self.device = parameters[0].device
        self.num_parameters = sum(parameter.numel() for parameter in parameters)
        self.trainable = {name: value for name, value in model.named_parameters() if value.requires_grad}
        if precision == "auto":
            pays = self.device.type != "cpu" or (self.num_parameters > _SMALL and has_fast_bfloat16())
            precision = "bfloat16" if pays else "float32"
        self.has_autocast = precision == "bfloat16" and parameters[0].dtype == torch.float32
        self.dtype = torch.bfloat16 if precision == "bfloat16" else parameters[0].dtype
        self.has_rounded_masters = any(value.dtype != torch.float32 for value in self.trainable.values())
        if self.has_rounded_masters:
            log.warning(
                "the trained weights are %s: small updates round away and the loss floor rises; "
                "use `model.dtype: float32` unless memory forbids it",
                str(parameters[0].dtype).removeprefix("torch."),
            )
        self._packs = use_packed_attention(base)
        if self.device.type == "cpu":
            set_float32_matmul(float32_matmul)
        self._reference: Policy | None = None

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained over frozen weights."""
        return hasattr(self.model, "peft_config")

    @property
    def tokens_per_micro_batch(self) -> int:
        """What `trainer.tokens_per_micro_batch: null` means for this model here."""
        if self.device.type != "cpu":
            return 16384
        return 16384 if self.num_parameters <= _SMALL else 1024

    def tidy(self) -> None:
        """Give freed activations and gradients back where they are large and lie in the process's heap."""
        if self.device.type == "cpu" and self.num_parameters > _SMALL:
            return_freed_memory()

    def logprobs(self, micro: Micro, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """float32[B, T]: log-probs of the trained tokens (0 elsewhere), and entropies when asked for.

        With gradient, unless the caller is inside `torch.no_grad()`; both use the same kernels, so that on unchanged
        weights the two agree bit for bit. The head runs only on positions that predict a trained token.
        """
        cast = torch.autocast(self.device.type, torch.bfloat16) if self.has_autocast else nullcontext()
        with cast:
            hidden = self._hidden(micro)
        chosen = hidden.to(self.dtype)
        targets = micro.batch.tokens.reshape(-1)[micro.chosen]
        logprobs, entropies = chosen_logprobs(chosen, self._head.weight, targets, micro.temperature, entropy=entropy)
        return _spread(logprobs, micro), None if entropies is None else _spread(entropies, micro)

    def _hidden(self, micro: Micro) -> Tensor:
        """[M, H]: states that predict the trained tokens."""
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
        return hidden[0].index_select(0, rows.ranks[micro.before]) if rows.num_uses else None

    def _additive(self, allowed: Tensor) -> Tensor:
        """[R, 1, W, W] to add to attention scores: what every attention of Transformers takes as it is."""
        mask = torch.zeros(allowed.shape, dtype=self.dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(self.dtype).min).unsqueeze(1)

    def keep_reference(self) -> None:
        """Freeze the present weights as the reference policy; under an adapter that is the base with it off."""
        if self.has_adapter:
            return
        frozen = copy.deepcopy(self.model).requires_grad_(False)
        self._reference = copy.copy(self)
        inner: Any = torch.get_float32_matmul_precision()  # the process's, which a policy sets
        self._reference.__dict__.update(Policy(frozen, precision="float32", float32_matmul=inner).__dict__)
        self._reference.has_autocast, self._reference.dtype = self.has_autocast, self.dtype
        self._reference._packs = self._packs

    @contextmanager
    def reference(self) -> Iterator[Policy]:
        """Inside, log-probs of the reference policy can be computed with what is yielded."""
        if self.has_adapter:
            with self.model.disable_adapter():
                yield self
            return
        assert self._reference is not None, "keep_reference was not called"
        yield self._reference

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take trained weights, as a checkpoint holds them.

        Raises:
            CheckpointError: They are another model's.
        """
        if weights.keys() != self.trainable.keys():
            odd = sorted(weights.keys() ^ self.trainable.keys())[0]
            raise CheckpointError("checkpoint", f"its weights differ from the model's, e.g. {odd}", "the same model")
        with torch.no_grad():
            for name, value in weights.items():
                self.trainable[name].copy_(value)

    def state(self) -> dict[str, Tensor]:
        """Canonical tensors to publish: views of live weights, adapters merged."""
        return canonical_state(self.model)


def _spread(values: Tensor, micro: Micro) -> Tensor:
    """[M] → [B, T], 0 where nothing was computed."""
    tokens = micro.batch.tokens
    return values.new_zeros(tokens.numel()).index_put((micro.chosen,), values).view(tokens.shape)


def _check_head(base: Any, head: Any) -> None:
    config = base.config
    scaled = [name for name in _SCALED_HEADS if getattr(config, name, None) not in (None, 1, 1.0)]
    if scaled or getattr(head, "bias", None) is not None or not hasattr(head, "weight"):
        found = f"a head with {scaled[0]}" if scaled else "a head that is no linear layer without bias"
        raise ConfigError("model.path", found, "logits = hidden @ weight.T", "choose a model of another family")
