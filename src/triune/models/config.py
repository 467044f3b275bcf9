"""Settings of the policy, and of models that answer over HTTP (judges, teachers)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from triune.settings import Settings


class LoraSettings(Settings):
    """Train a low-rank adapter instead of all weights."""

    rank: int = Field(default=16, ge=1)
    """Rank of every adapter."""

    alpha: float = Field(default=32.0, gt=0)
    """Strength: the adapter adds `alpha / rank * B @ A` to a weight."""

    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the linear layers that get an adapter; `all-linear` is all but the head."""


class ModelSettings(Settings):
    """The policy that is trained."""

    path: str = "triune/nano"
    """`triune/nano` (shipped), a folder (Hugging Face, an exported adapter, GGUF), or a name on the hub."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the master weights that the optimiser changes. `auto` is float32: in bfloat16 small updates round away."""

    lora: LoraSettings | None = None
    """Train an adapter; null trains all weights."""

    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, about a third slower."""

    chat_template: str | None = None
    """Jinja text, or a file that holds it, in place of the tokenizer's own template."""

    trust_remote_code: bool = False
    """Let the model's own Python files run."""


class EndpointSettings(Settings):
    """A model behind an OpenAI-compatible endpoint."""

    url: str
    """Base address, ending in `/v1`."""

    model: str
    """Name of the model there."""

    api_key_env: str | None = None
    """Environment variable that holds the key; null sends none."""

    max_concurrency: int = Field(default=16, ge=1)
    """Requests in flight at once."""

    timeout_s: float = Field(default=120.0, gt=0)
    """Wall-clock limit of one request."""

    retries: int = Field(default=3, ge=0)
    """Further tries after a rate limit or a broken connection, with growing pauses."""
