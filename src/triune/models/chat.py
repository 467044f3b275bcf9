"""From messages to token ids and back: chat template, backend tokenizer, stop tokens.

Prompts are rendered and encoded once per distinct conversation. A conversation that goes on is *extended*: ids that
were sampled stay byte for byte, and only the text that the template writes after them is encoded. Nothing that was
sampled is ever decoded, encoded again and trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from triune.errors import ConfigError
from triune.shapes import TokensT

Message = Mapping[str, Any]

_MAX_CACHED = 16384
_SENTINEL = "qz7"


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A rendered conversation: the template's text and its ids (int32[P]), generation prompt included."""

    text: str
    ids: TokensT


class ChatTokenizer:
    """A Hugging Face tokenizer with its chat template, as the explorer needs it.

    Args:
        tokenizer: A loaded fast tokenizer.
        template: Jinja text in place of the tokenizer's own template.
        eos_ids: Further end tokens, usually `eos_token_id` of `generation_config.json`.

    Raises:
        ConfigError: The tokenizer has no chat template, or none of the stop tokens is known.
    """

    def __init__(self, tokenizer: Any, *, template: str | None = None, eos_ids: Sequence[int] = ()) -> None:
        self.hf = tokenizer
        if template is not None:
            tokenizer.chat_template = template
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._prompts: dict[bytes, Prompt] = {}
        self._texts: dict[bytes, str] = {}
        self._special = frozenset(int(i) for i in tokenizer.all_special_ids)
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(self._find_stops(eos_ids)))
        if not self.stop_ids:
            raise ConfigError(
                "model.path", "the tokenizer names no end token", "eos_token_id in generation_config.json"
            )

    @classmethod
    def load(cls, folder: str | Path, *, template: str | None = None, trust_remote_code: bool = False) -> ChatTokenizer:
        """Read the tokenizer of a model folder, with every end token its `generation_config.json` names.

        Args:
            folder: A folder in Hugging Face format.
            template: Jinja text, or the path of a file that holds it; None = the tokenizer's own.
            trust_remote_code: Whether code in the folder may run.

        Raises:
            ConfigError: There is no tokenizer, or it has no chat template and none was given.
        """
        from transformers import AutoTokenizer

        folder = Path(folder)
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError("model.path", f"no tokenizer in {folder} ({error})", "tokenizer.json") from error
        if template is not None and "{" not in template:
            template = Path(template).read_text(encoding="utf-8")
        return cls(tokenizer, template=template, eos_ids=_configured_ends(folder))

    # ------------------------------------------------------------------------------------------- text → ids

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = (), *, generate: bool = True) -> str:
        """The template's text; tool arguments given as JSON text render as the object they spell."""
        if self.hf.chat_template is None:
            raise ConfigError("model.chat_template", "the tokenizer has no chat template", "Jinja text or a file of it")
        text = self.hf.apply_chat_template(
            [_with_objects(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=generate,
        )
        assert isinstance(text, str)
        return text

    def encode(self, text: str) -> TokensT:
        """int32[T]; adds no special tokens, knows those spelled in the text."""
        if self._backend is not None:
            return np.array(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int32)
        return np.array(self.hf(text, add_special_tokens=False)["input_ids"], dtype=np.int32)

    def plain_text(self, text: str) -> TokensT:
        """int32[T]: plain text with the special tokens that the tokenizer gives it by itself, and an end token."""
        ids = list(self.hf(text)["input_ids"])
        end = self.stop_ids[0] if self.hf.eos_token_id is None else int(self.hf.eos_token_id)
        return np.array(ids if ids[-1:] == [end] else [*ids, end], dtype=np.int32)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Prompt:
        """Render and encode a conversation up to where the model speaks; cached per distinct conversation."""
        key = msgspec.msgpack.encode((messages, tools) if tools else messages)
        found = self._prompts.get(key)
        if found is None:
            text = self.render(messages, tools)
            found = _remember(self._prompts, key, Prompt(text=text, ids=self.encode(text)))
            found.ids.setflags(write=False)
        return found

    def extend(self, text: str, last: int, rendered: str) -> TokensT | None:
        """Ids the template puts between what was said and the model's next turn.

        Args:
            text: Everything the recorded ids stand for, without the sampled stop token.
            last: The last recorded id.
            rendered: The template's text of the longer conversation.

        Returns:
            int32[n] to append to the recorded ids, or None when the recorded ids are no exact prefix of the new
            prompt: the template changed what came before (strips past thinking, trims answers), or the model
            stopped with another token than the template writes.
        """
        if not rendered.startswith(text):
            return None
        ids = self.encode(rendered[len(text) :])
        if last not in self.stop_ids:
            return ids
        if len(ids) == 0 or ids[0] != last:
            return None
        return ids[1:]

    @staticmethod
    def extends(prefix: TokensT, ids: TokensT) -> bool:
        """Whether `ids` begin with exactly `prefix`."""
        return len(prefix) <= len(ids) and bool(np.array_equal(prefix, ids[: len(prefix)]))

    # ------------------------------------------------------------------------------------------- ids → text

    def decode(self, ids: TokensT) -> str:
        """Text of ids, special tokens spelled out."""
        key = ids.tobytes()
        found = self._texts.get(key)
        if found is not None:
            return found
        plain = ids.tolist()
        if self._backend is not None:
            text = self._backend.decode(plain, skip_special_tokens=False)
        else:
            text = self.hf.decode(plain, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return _remember(self._texts, key, text) if len(plain) <= 32 else text

    def answer(self, sampled: TokensT) -> str:
        """Text of a completion without the stop token that ended it."""
        if len(sampled) and int(sampled[-1]) in self.stop_ids:
            sampled = sampled[:-1]
        return self.decode(sampled)

    # ------------------------------------------------------------------------------------------------ stops

    def _find_stops(self, eos_ids: Sequence[int]) -> list[int]:
        """The tokenizer's eos, the configured ends, and the token the template writes after an answer."""
        found = [] if self.hf.eos_token_id is None else [int(self.hf.eos_token_id)]
        found += [int(i) for i in eos_ids]
        if self.hf.chat_template is None:
            return found
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _SENTINEL}]
        after = self.render(said, generate=False).rpartition(_SENTINEL)[2]
        ids = self.encode(after).tolist()
        return found + [i for i in ids[:1] if i in self._special or self._is_added(i)]

    def _is_added(self, token: int) -> bool:
        return token in getattr(self.hf, "added_tokens_decoder", {})


def _configured_ends(folder: Path) -> list[int]:
    """`eos_token_id` of `generation_config.json`: one number, a list, or absent."""
    path = folder / "generation_config.json"
    if not path.exists():
        return []
    ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    return [ends] if isinstance(ends, int) else list(ends or [])


def _with_objects(message: Message) -> dict[str, Any]:
    """Copy of a message whose tool calls carry objects, as templates expect; text that is no JSON stays text."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function", call))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments)
        except json.JSONDecodeError:
            return dict(call)
    return {**call, "function": function} if "function" in call else function


def _remember(cache: dict[bytes, Any], key: bytes, value: Any) -> Any:
    if len(cache) >= _MAX_CACHED:
        cache.clear()
    cache[key] = value
    return value
