"""Random two-layer models that load in milliseconds: for tests of trainers, engines and channels."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def tiny_llama(
    *, vocab: int = 64, hidden: int = 32, layers: int = 2, tied: bool = True, seed: int = 0, dropout: float = 0.0
) -> Any:
    """A Llama with random weights, larger than usual so that its distributions are not flat."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        attention_dropout=dropout,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return model.eval()


def save_tiny_llama(folder: Path, **options: Any) -> Path:
    """Write `tiny_llama(**options)` as a Hugging Face folder without a tokenizer."""
    tiny_llama(**options).save_pretrained(folder)
    return folder
