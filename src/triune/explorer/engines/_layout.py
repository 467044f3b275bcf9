"""What the fast path needs to know of a model, and which models it can run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_FAMILY = frozenset({"llama", "qwen2", "qwen3", "mistral"})
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of a Llama-like model."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    is_tied: bool
    max_positions: int

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    @property
    def kv_width(self) -> int:
        """Numbers that one position adds to one layer's cache: keys and values."""
        return 2 * self.kv_heads * self.head_dim


def why_generic(config: Any) -> str:
    """Why the fast path cannot run this model; empty when it can."""
    if config.model_type not in _FAMILY:
        return f"model_type {config.model_type}"
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"activation {config.hidden_act}"
    rope = rope_parameters(config)
    if rope.get("rope_type", "default") not in _STATIC_ROPE or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"rotary embedding {rope}"
    layer_types = getattr(config, "layer_types", None) or []
    slides = config.model_type == "mistral" and getattr(config, "sliding_window", None) is not None
    if slides or any(kind != "full_attention" for kind in layer_types):
        return "sliding attention"
    return ""


def read_layout(config: Any) -> Layout:
    """Sizes from a Hugging Face config for which `why_generic` is empty."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Layout(
        num_layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        vocab=config.vocab_size,
        eps=config.rms_norm_eps,
        is_tied=bool(config.tie_word_embeddings),
        max_positions=config.max_position_embeddings,
    )


def rope_parameters(config: Any) -> dict[str, Any]:
    """Rotary settings of a config; older ones keep theta and scaling apart."""
    found = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    found.setdefault("rope_theta", getattr(config, "rope_theta", 10000.0))
    return found


def rotations(config: Any, layout: Layout, num: int, device: Any) -> Tensor:
    """complex64[num, D / 2]: turn of every pair of a head's numbers at every position, attention scaling included."""
    import torch

    rope = rope_parameters(config)
    kind, scaling = rope.get("rope_type", "default"), 1.0
    if kind == "default":
        exponent = torch.arange(0, layout.head_dim, 2, dtype=torch.float32) / layout.head_dim
        frequency = 1.0 / rope["rope_theta"] ** exponent
    else:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequency, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    angle = torch.outer(torch.arange(num, dtype=torch.float32), frequency.float())
    return torch.polar(torch.full_like(angle, float(scaling)), angle).to(device)
