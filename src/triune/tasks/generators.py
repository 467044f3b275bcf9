"""Generators of reasoning-gym by recipe, for the task set that makes rows and the worker that scores them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a generator is made of; equal recipes make equal rows."""

    generator: str
    options: Mapping[str, Any]
    seed: int
    size: int


def load_generator(recipe: Recipe) -> Any:
    """The generator of a recipe; cached, because some prepare word lists for seconds."""
    return _load(msgspec.json.encode(recipe, order="sorted"))


@lru_cache(maxsize=32)
def _load(recipe_json: bytes) -> Any:
    import reasoning_gym

    recipe = msgspec.json.decode(recipe_json, type=Recipe)
    return reasoning_gym.create_dataset(recipe.generator, seed=recipe.seed, size=recipe.size, **recipe.options)


@lru_cache(maxsize=256)
def _row(recipe_json: bytes, number: int) -> Any:
    return _load(recipe_json)[number]


def has_plain_scorer(recipe: Recipe) -> bool:
    """Whether the generator compares text and nothing more, so that scoring can neither hang nor evaluate anything."""
    from reasoning_gym.dataset import ProceduralDataset

    return type(load_generator(recipe)).score_answer is ProceduralDataset.score_answer


def score(recipe: Recipe, number: int, answer: str) -> tuple[float, bool]:
    """The generator's own score of an answer, and whether its scorer raised on it.

    Scorers raise on free text they cannot read. That is the answer's fault, and worth 0, when the same scorer accepts
    the row's own answer; else the scorer is broken.

    Raises:
        Exception: Whatever a broken scorer raises.
    """
    recipe_json = msgspec.json.encode(recipe, order="sorted")
    generator, row = _load(recipe_json), _row(recipe_json, number)
    try:
        return float(generator.score_answer(answer, row)), False
    except Exception:
        generator.score_answer(row["answer"], row)
        return 0.0, True
