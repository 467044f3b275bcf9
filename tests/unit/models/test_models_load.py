import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from triune.errors import ConfigError
from triune.models import LoraSettings, ModelSettings, canonical_state, export_model, load_model, resolve_model
from triune.models.load import switch_off_dropout
from triune.testing.tiny_models import save_tiny_llama, tiny_llama

PROMPT = torch.tensor([[2, 5, 9, 11, 3]])


def greedy(model: torch.nn.Module) -> list[int]:
    ids = PROMPT
    for _ in range(12):
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids[0].tolist()


def disturb(model: torch.nn.Module) -> None:
    """Change every trainable weight, as training does."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("tied", [True, False])
def test_the_canonical_state_is_sorted_holds_a_tied_head_once_and_views_the_live_weights(tied: bool):
    model = tiny_llama(tied=tied)
    state = canonical_state(model)
    assert list(state) == sorted(state)
    assert ("lm_head.weight" in state) is not tied
    assert state["model.embed_tokens.weight"].data_ptr() == model.get_input_embeddings().weight.data_ptr()
    total = sum(p.numel() for p in model.parameters())
    assert sum(value.numel() for value in state.values()) == total


def test_the_canonical_state_of_an_adapter_is_the_merged_model_under_plain_names(tmp_path: Path):
    save_tiny_llama(tmp_path)
    plain = load_model(ModelSettings(path=str(tmp_path)))
    model = load_model(ModelSettings(path=str(tmp_path), lora=LoraSettings(rank=4, alpha=6)))
    assert canonical_state(model).keys() == canonical_state(plain).keys()
    disturb(model)
    layer = model.get_base_model().model.layers[1].mlp.up_proj
    by_hand = layer.base_layer.weight + 6 / 4 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    state = canonical_state(model)
    torch.testing.assert_close(state["model.layers.1.mlp.up_proj.weight"], by_hand)
    plain.load_state_dict(state, strict=False)
    torch.testing.assert_close(plain(input_ids=PROMPT).logits, model(input_ids=PROMPT).logits, atol=1e-4, rtol=1e-4)


def test_reading_the_state_of_an_adapter_does_not_change_the_base_weights(tmp_path: Path):
    model = load_model(ModelSettings(path=str(save_tiny_llama(tmp_path)), lora=LoraSettings()))
    disturb(model)
    before = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.clone()
    canonical_state(model)
    assert torch.equal(before, model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4, alpha=32)])
def test_case_50_an_exported_model_says_the_same_greedy_text_after_reload(
    tmp_path: Path, lora: LoraSettings | None, tied: bool
):
    source = save_tiny_llama(tmp_path / "source", tied=tied)
    model = load_model(ModelSettings(path=str(source), lora=lora))
    untrained = greedy(model)
    disturb(model)
    said = greedy(model)
    assert said != untrained
    export_model(model, tmp_path / "export", source_name=str(source))
    again = load_model(ModelSettings(path=str(tmp_path / "export")))
    assert greedy(again) == said
    assert again.config.tie_word_embeddings is tied
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "float32"


def test_case_50_training_goes_on_from_an_exported_adapter_with_its_rank_and_alpha(tmp_path: Path):
    source = save_tiny_llama(tmp_path / "source")
    model = load_model(ModelSettings(path=str(source), lora=LoraSettings(rank=4, alpha=32)))
    disturb(model)
    export_model(model, tmp_path / "export", source_name=str(source))
    adapter = str(tmp_path / "export" / "adapter")
    again = load_model(ModelSettings(path=adapter))
    assert greedy(again) == greedy(model)
    assert again.peft_config["default"].lora_alpha == 32
    trained = {name for name, p in again.named_parameters() if p.requires_grad}
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    with pytest.raises(ConfigError, match=r"those of .*rank 4, alpha 32"):
        load_model(ModelSettings(path=adapter, lora=LoraSettings(rank=4, alpha=8)))


@pytest.mark.parametrize(
    ("tied", "targets", "says"),
    [
        (False, ("q_proj", "lm_head"), "the head"),
        (True, ("q_proj", "lm_head"), "the head"),
        (True, ("q_proj", "embed_tokens"), "the embedding among them, which is also the head"),
    ],
)
def test_an_adapter_that_would_be_published_otherwise_than_it_is_trained_is_refused(
    tmp_path: Path, tied: bool, targets: tuple[str, ...], says: str
):
    source = save_tiny_llama(tmp_path, tied=tied)
    with pytest.raises(ConfigError, match=rf"model\.lora\.targets: .*{says}"):
        load_model(ModelSettings(path=str(source), lora=LoraSettings(targets=targets)))


@pytest.mark.parametrize(("change", "says"), [({"use_dora": True}, "DoRA"), ({"modules_to_save": ["lm_head"]}, "head")])
def test_an_adapter_folder_that_cannot_be_published_as_it_is_trained_is_refused(
    tmp_path: Path, change: dict[str, Any], says: str
):
    source = save_tiny_llama(tmp_path / "source", tied=False)
    base = AutoModelForCausalLM.from_pretrained(source)
    adapter = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **change))
    adapter.peft_config["default"].base_model_name_or_path = str(source)
    adapter.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=rf"model\.path: .*{says}"):
        load_model(ModelSettings(path=str(tmp_path / "adapter")))


def test_case_04_a_model_with_dropout_gives_the_same_log_probs_twice_even_in_training_mode(tmp_path: Path):
    save_tiny_llama(tmp_path, dropout=0.5)
    model = load_model(ModelSettings(path=str(tmp_path), gradient_checkpointing=True))
    assert model.training
    assert torch.equal(model(input_ids=PROMPT).logits, model(input_ids=PROMPT).logits)
    noisy = tiny_llama(dropout=0.5).train()
    assert not torch.equal(noisy(input_ids=PROMPT).logits, noisy(input_ids=PROMPT).logits)
    assert switch_off_dropout(noisy) == 2
    assert torch.equal(noisy(input_ids=PROMPT).logits, noisy(input_ids=PROMPT).logits)


def test_gradient_checkpointing_gives_the_same_gradients(tmp_path: Path):
    save_tiny_llama(tmp_path)
    grads = []
    for checkpointing in (False, True):
        model = load_model(ModelSettings(path=str(tmp_path), gradient_checkpointing=checkpointing))
        model(input_ids=PROMPT).logits.square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(plain, recomputed)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("./nowhere", "no folder"),
        ("triune/nanno/x", "no folder"),
        ("EMPTY", "neither config.json nor a .gguf file"),
        ("TWO", "2 GGUF files"),
    ],
)
def test_a_path_without_a_model_is_a_message_that_says_what_to_do(tmp_path: Path, path: str, text: str):
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "TWO").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "TWO" / name).touch()
    with pytest.raises(ConfigError, match=text) as caught:
        resolve_model(tmp_path / path if path.isupper() else path)
    assert caught.value.where == "model.path"
    assert caught.value.do


def test_a_gguf_folder_and_a_gguf_file_resolve_to_the_same_source(tmp_path: Path):
    (tmp_path / "model.gguf").touch()
    assert resolve_model(tmp_path).gguf_file == "model.gguf"
    assert resolve_model(tmp_path / "model.gguf").location == str(tmp_path)
    assert resolve_model("owner/name").location == "owner/name"


def test_a_lora_target_that_is_no_layer_is_a_configuration_error(tmp_path: Path):
    save_tiny_llama(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.lora\.targets"):
        load_model(ModelSettings(path=str(tmp_path), lora=LoraSettings(targets=("nothing",))))


def test_bf16_masters_are_loaded_on_request(tmp_path: Path):
    save_tiny_llama(tmp_path)
    assert {p.dtype for p in load_model(ModelSettings(path=str(tmp_path))).parameters()} == {torch.float32}
    halves = load_model(ModelSettings(path=str(tmp_path), dtype="bfloat16"))
    assert {p.dtype for p in halves.parameters()} == {torch.bfloat16}


def test_a_cpu_that_only_emulates_bfloat16_multiplies_in_full_float32_whatever_is_asked(monkeypatch):
    from triune.models import device

    asked = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    for is_fast in (True, False):
        monkeypatch.setattr(device, "has_fast_bfloat16", lambda is_fast=is_fast: is_fast)
        device.set_float32_matmul("medium")
    assert asked == ["medium", "highest"]
