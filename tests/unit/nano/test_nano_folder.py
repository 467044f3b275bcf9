"""The shipped model is an ordinary Hugging Face folder to which any text can be sent."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

NANO = Path(str(files("triune.models") / "nano"))
CHAT = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "12+34="},
    {"role": "assistant", "content": "46"},
    {"role": "user", "content": [{"type": "text", "text": "And 1+"}, {"type": "text", "text": "1?"}]},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}],
    },
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "2"},
]


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(NANO)


def render(tokenizer, messages, **options) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def test_the_folder_is_small_and_has_room_for_long_prompts():
    config = json.loads((NANO / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] >= 1024
    assert (NANO / "model.safetensors").stat().st_size <= 3_000_000


def test_the_weights_are_about_a_million_numbers_in_bfloat16():
    from safetensors import safe_open

    with safe_open(NANO / "model.safetensors", "pt") as weights:
        shapes = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
        assert {piece.get_dtype() for piece in shapes.values()} == {"BF16"}
        count = 0
        for piece in shapes.values():
            size = 1
            for length in piece.get_shape():
                size *= length
            count += size
    assert 0.9e6 < count < 1.3e6


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.text(st.characters(codec="utf-8"), max_size=30))
def test_any_text_comes_back_unchanged_one_token_a_byte(tokenizer, text):
    ids = tokenizer.encode(text)
    if "<|" not in text:
        assert bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text


def test_special_tokens_have_ids_above_the_bytes(tokenizer):
    assert len(tokenizer) == 264
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id) == (256, 257, 258)
    assert tokenizer.convert_tokens_to_ids(["<|system|>", "<|user|>", "<|assistant|>"]) == [259, 260, 261]
    assert tokenizer.convert_tokens_to_ids(["<|tool|>", "<|tool_call|>"]) == [262, 263]


def test_a_conversation_is_rendered_as_its_roles(tokenizer):
    expected = (
        "<|bos|><|system|>Add.<|end|><|user|>12+34=<|end|><|assistant|>46<|end|><|user|>And 1+1?<|end|>"
        '<|assistant|><|tool_call|>{"name": "add", "arguments": {"a": 1, "b": "é"}}<|end|>'
        "<|tool|>2<|end|><|assistant|>2<|end|>"
    )
    assert render(tokenizer, CHAT) == expected
    prompt = tokenizer.apply_chat_template(CHAT[1:2], add_generation_prompt=True, return_dict=False)
    assert prompt == [256, 260, *b"12+34=", 258, 261]


def test_every_turn_extends_the_exact_ids_of_the_turns_before(tokenizer):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    for end in range(1, len(CHAT)):
        shorter = render(tokenizer, CHAT[:end], tools=tools)
        longer = render(tokenizer, CHAT[: end + 1], tools=tools)
        assert longer.startswith(shorter)
        if CHAT[end]["role"] == "assistant":
            prompt = render(tokenizer, CHAT[:end], tools=tools, add_generation_prompt=True)
            assert longer.startswith(prompt)
            assert longer.endswith("<|end|>")


def test_case_17_tool_arguments_as_text_or_as_an_object_give_the_same_prompt(tokenizer):
    def call(arguments):
        return [
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        ]

    assert render(tokenizer, call({"b": 1, "a": [2]})) == render(tokenizer, call('{"b": 1, "a": [2]}'))


def test_assistant_tokens_are_marked_by_the_template(tokenizer):
    out = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    marked = [token for token, mask in zip(out["input_ids"], out["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(marked).startswith("46<|end|><|tool_call|>")


def test_an_unknown_role_is_refused(tokenizer):
    with pytest.raises(Exception, match="unknown role critic"):
        render(tokenizer, [{"role": "critic", "content": "no"}])
