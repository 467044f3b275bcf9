"""Engines over random tiny models, on a lane of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np
import torch

from triune.explorer.engines.embedded import Embedded, EmbeddedEngine
from triune.models import canonical_state, weight_digest
from triune.ports import Completion, GenerateRequest, Sampling, WeightUpdate
from triune.testing.lanes import InlineLane

T = TypeVar("T")


def tiny_model(family: str = "llama", *, tied: bool = True, seed: int = 0, vocab: int = 300, **options: Any) -> Any:
    """A random two-layer model of a family; weights large enough that its distributions are not flat."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    if family == "gpt2":
        sizes = {"vocab_size": vocab, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "eos_token_id": 1}
    config = AutoConfig.for_model(family, **{**sizes, **options})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                torch.nn.init.uniform_(weight, 0.5, 1.5)
            if name.endswith("bias"):
                torch.nn.init.normal_(weight, std=0.3)
    return model.eval()


def update_of(state: Any, version: int = 0) -> WeightUpdate:
    return WeightUpdate(version=version, step=version, digest=weight_digest(state), dtype="float32")


async def make_engine(model: Any, tokenizer: Any = None, lane: Any = None, **settings: Any) -> EmbeddedEngine:
    """An engine that serves the model as version 0."""
    keep_kv = settings.pop("keep_kv", False)
    engine = EmbeddedEngine(
        model.config, tokenizer, lane or InlineLane(), Embedded(**{"slots": 16, **settings}), keep_kv=keep_kv
    )
    state = canonical_state(model)
    await engine.swap(update_of(state), state)
    return engine


def prompts(num: int, *, seed: int = 0, low: int = 3, high: int = 30, vocab: int = 300) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(2, vocab, generator.integers(low, high)).astype(np.int32) for _ in range(num)]


def hf_logprobs(model: Any, prompt: np.ndarray, tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """[n, V] log-probs of the Hugging Face forward after the prompt and each sampled token but the last."""
    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).numpy()


def at(table: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return table[np.arange(len(tokens)), tokens]


async def generate_all(engine: EmbeddedEngine, asked: list[np.ndarray], **sampling: Any) -> list[Completion]:
    how = Sampling(**{"max_tokens": 12, "ignore_eos": True, **sampling})
    requests = [
        GenerateRequest(id=f"r{number}/0", prompt=prompt, seed=1000 + number, sampling=how)
        for number, prompt in enumerate(asked)
    ]
    return list(await asyncio.gather(*map(engine.generate, requests)))


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine; a hang is a failure."""
    return asyncio.run(asyncio.wait_for(work, 60))
