"""Sections of a run file are frozen, know their keys and read bricks by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from pydantic import ValidationError

from triune.registry import brick
from triune.settings import BrickOf, Settings


@brick("sink", "house_sink")
@dataclass(frozen=True, kw_only=True)
class HouseSink:
    """A sink for these tests."""

    every: int = 1


class Section(Settings):
    """A section."""

    steps: int = 3
    """Steps to train."""
    sinks: list[Annotated[Any, BrickOf("sink")]] = ["house_sink"]
    """Where metrics go."""


def test_defaults_are_validated_so_that_a_default_brick_may_be_a_name():
    assert Section().sinks == [HouseSink()]


def test_a_brick_is_read_from_a_mapping_and_an_instance_is_kept():
    sink = HouseSink(every=3)
    assert Section(sinks=[{"use": "house_sink", "every": 2}, sink]).sinks == [HouseSink(every=2), sink]


def test_an_unknown_key_is_refused():
    with pytest.raises(ValidationError, match="stpes"):
        Section.model_validate({"stpes": 1})


def test_an_unknown_brick_is_refused_with_the_nearest_name():
    with pytest.raises(ValidationError, match="did you mean 'house_sink'"):
        Section.model_validate({"sinks": ["house_sing"]})


def test_a_section_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Section().steps = 4  # type: ignore[misc]


def test_docstrings_under_fields_are_their_description():
    assert Section.model_fields["steps"].description == "Steps to train."
