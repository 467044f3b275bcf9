"""Make the untrained nano model: an ordinary Hugging Face folder with a byte-level tokenizer and a chat template.

    python recipes/nano/make_folder.py runs/nano-untrained --size 1M

Sizes: `1M` is the shape that ships as `triune/nano`; `0.3M` is a smaller one for benches. Both start from random
weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<|bos|>", "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tool_call|>")
"""Ids 256 and up; ids 0 to 255 are the bytes themselves, so any text can be sent and comes back unchanged."""

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")

SHAPES = {
    "1M": {"hidden_size": 192, "intermediate_size": 416, "num_hidden_layers": 3, "num_attention_heads": 6},
    "0.3M": {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 3},
}
KEY_VALUE_HEADS = {"1M": 2, "0.3M": 1}
MAX_POSITIONS = 2048


def byte_characters() -> list[str]:
    """The printable stand-in of each byte that byte-level tokenizers use, in byte order (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        stand_ins.setdefault(byte, chr(256 + len(stand_ins) - len(printable)))
    return [stand_ins[byte] for byte in range(256)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer: one token per byte, special tokens above, eos = `<|end|>`."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        additional_special_tokens=list(SPECIAL[3:]),
    )
    fast.chat_template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    return fast


def build_config(size: str) -> LlamaConfig:
    """Llama architecture with tied embeddings and grouped key-value heads."""
    return LlamaConfig(
        vocab_size=256 + len(SPECIAL),
        num_key_value_heads=KEY_VALUE_HEADS[size],
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=256,
        pad_token_id=257,
        eos_token_id=258,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        attention_dropout=0.0,
        dtype="float32",
        **SHAPES[size],
    )


def make_folder(path: Path, size: str = "1M", seed: int = 0) -> int:
    """Write config, tokenizer, template and random weights (float32) into a folder; returns the parameter count."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(build_config(size))
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    generation = {"bos_token_id": 256, "eos_token_id": 258, "pad_token_id": 257, "do_sample": True, "temperature": 1.0}
    (path / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--size", choices=SHAPES, default="1M")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    count = make_folder(arguments.path, arguments.size, arguments.seed)
    print(f"{arguments.path}: {count:,} parameters")
