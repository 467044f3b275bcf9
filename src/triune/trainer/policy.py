"""The model in training: forward passes to log-probs, and the frozen reference."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from triune.errors import CheckpointError, ConfigError
from triune.models import canonical_state
from triune.trainer.body import SMALL, Body, spread
from triune.trainer.head import chosen_logprobs
from triune.trainer.layout import Micro

log = logging.getLogger("triune.trainer")

_ADDED = re.compile(r"\.lora_(embedding_)?B\.")
_SCALED_HEADS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


class Policy(Body):
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
        float32_matmul: Literal["medium", "high", "highest"] | None = "medium",
    ) -> None:
        super().__init__(model, precision=precision, float32_matmul=float32_matmul)
        self._head = self.base.get_output_embeddings()
        _check_head(self.base, self._head)
        self.trainable = {name: value for name, value in model.named_parameters() if value.requires_grad}
        rounded = [value.dtype for value in self.trainable.values() if value.dtype != torch.float32]
        self.has_rounded_masters = bool(rounded)
        if rounded:
            log.warning(
                "the trained weights are %s: small updates round away and the loss floor rises; "
                "use `model.dtype: float32` unless memory forbids it",
                str(rounded[0]).removeprefix("torch."),
            )
        self._reference: Policy | None = None
        self._initial: Mapping[str, Tensor] | None = None

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained over frozen weights."""
        return hasattr(self.model, "peft_config")

    @property
    def tokens_per_micro_batch(self) -> int:
        """What `trainer.tokens_per_micro_batch: null` means for this model here."""
        if self.device.type != "cpu":
            return 16384
        return 16384 if self.num_parameters <= SMALL else 2048

    def logprobs(self, micro: Micro, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """float32[B, T]: log-probs of the trained tokens (0 elsewhere), and entropies when asked for.

        With gradient, unless the caller is inside `torch.no_grad()`; both use the same kernels, so that on unchanged
        weights the two agree bit for bit. The head runs only on positions that predict a trained token.
        """
        chosen = self.hidden(micro).to(self.dtype)
        targets = micro.batch.tokens.reshape(-1)[micro.chosen]
        logprobs, entropies = chosen_logprobs(chosen, self._head.weight, targets, micro.temperature, entropy=entropy)
        return spread(logprobs, micro), None if entropies is None else spread(entropies, micro)

    def keep_reference(self) -> None:
        """Freeze the present weights as the reference policy.

        Under a new adapter, which adds nothing yet, that is the base with it off; of one that was trained before, its
        tensors are kept.
        """
        if self.has_adapter:
            if any(value.any() for name, value in self.trainable.items() if _ADDED.search(name)):  # 0 in a new adapter
                self._initial = {name: value.detach().clone() for name, value in self.trainable.items()}
            return
        frozen = copy.deepcopy(self.model).requires_grad_(False)
        self._reference = copy.copy(self)
        self._reference.__dict__.update(Policy(frozen, precision="float32", float32_matmul=None).__dict__)
        self._reference.has_autocast, self._reference.dtype = self.has_autocast, self.dtype
        self._reference._packs = self._packs

    @contextmanager
    def reference(self) -> Iterator[Policy]:
        """Inside, log-probs of the reference policy can be computed with what is yielded."""
        if self._initial is not None:
            with self._holding(self._initial):
                yield self
            return
        if self.has_adapter:
            with self.model.disable_adapter():
                yield self
            return
        assert self._reference is not None, "keep_reference was not called"
        yield self._reference

    @contextmanager
    def _holding(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the trained parameters have these values."""
        live = {name: parameter.data for name, parameter in self.trainable.items()}
        try:
            for name, parameter in self.trainable.items():
                parameter.data = weights[name]
            yield
        finally:
            for name, parameter in self.trainable.items():
                parameter.data = live[name]

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


def _check_head(base: Any, head: Any) -> None:
    config = base.config
    scaled = [name for name in _SCALED_HEADS if getattr(config, name, None) not in (None, 1, 1.0)]
    if scaled or getattr(head, "bias", None) is not None or not hasattr(head, "weight"):
        found = f"a head with {scaled[0]}" if scaled else "a head that is no linear layer without bias"
        raise ConfigError("model.path", found, "logits = hidden @ weight.T", "choose a model of another family")
