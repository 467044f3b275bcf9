"""Whether two models mean the same by a token id."""

from __future__ import annotations

from triune.errors import ConfigError
from triune.models.config import ModelSettings
from triune.models.source import resolve_model


def check_same_vocabulary(model: ModelSettings, other: ModelSettings, where: str) -> None:
    """Refuse a model that is to read the policy's token ids and means other tokens by them.

    Further tokens of its own are no harm: the policy never samples them. Sizes of embeddings are not compared: models
    of one family pad theirs differently.

    Args:
        model: The policy.
        other: The model that reads its ids.
        where: Dotted key of the other one, for messages.

    Raises:
        ConfigError: A token of the policy has another id, or none, in the other model; or one has no tokenizer.
    """
    ours, theirs = _vocabulary(model, "model"), _vocabulary(other, where)
    odd = sorted(token for token, number in ours.items() if theirs.get(token) != number)
    if not odd:
        return
    first = min(odd, key=lambda token: ours[token])
    there = f"is {theirs[first]} there" if first in theirs else "is unknown there"
    raise ConfigError(
        f"{where}.path",
        f"{len(odd)} of {len(ours)} tokens differ from {model.path}'s, e.g. {first!r} is {ours[first]} and {there}",
        "a model with the policy's vocabulary",
        "choose one of the same family as model.path",
    )


def _vocabulary(settings: ModelSettings, where: str) -> dict[str, int]:
    from transformers import AutoTokenizer

    source = resolve_model(settings.path, f"{where}.path")
    gguf = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.location, trust_remote_code=settings.trust_remote_code, **gguf)
    except (OSError, ValueError, KeyError) as error:
        text = str(error).strip().splitlines()[0]
        found = f"{settings.path} has no tokenizer that loads ({text})"
        raise ConfigError(f"{where}.path", found, "one, so that vocabularies can be compared") from error
    return tokenizer.get_vocab()
