"""House rules about what is public: bricks, front doors and settings."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pickle
import pkgutil
from typing import Any

import pytest

import triune
from triune import registry
from triune.settings import Settings

ROOMS = sorted(module.name for module in pkgutil.iter_modules(triune.__path__) if module.name != "testing")


def built_in_bricks() -> list[tuple[str, str]]:
    found = []
    for kind, home in registry.HOMES.items():
        if home.split(".")[1] in ROOMS and importlib.util.find_spec(home) is not None:
            package = importlib.import_module(home)
            found += [(kind, m.name) for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")]
    return found


def settings_classes() -> list[type[Settings]]:
    for room in ROOMS:
        if importlib.util.find_spec(f"triune.{room}") and hasattr(
            importlib.import_module(f"triune.{room}"), "__path__"
        ):
            for module in pkgutil.iter_modules(importlib.import_module(f"triune.{room}").__path__):
                if module.name in ("config", "run_config"):
                    importlib.import_module(f"triune.{room}.{module.name}")
    found: list[type[Settings]] = []
    todo = [Settings]
    while todo:
        children = [child for child in todo.pop().__subclasses__() if child.__module__.startswith("triune.")]
        found += children
        todo += children
    return sorted(set(found), key=lambda cls: (cls.__module__, cls.__qualname__))


@pytest.mark.parametrize(("kind", "name"), built_in_bricks())
def test_a_brick_is_found_by_its_file_name_and_says_what_it_does(kind, name):
    target = registry.find(kind, name, "test")
    assert target.__brick__ == (kind, name)
    assert target.__doc__
    assert target.__doc__ != inspect.signature(target).__str__()
    module, attribute = registry.import_path(target).split(":")
    assert getattr(importlib.import_module(module), attribute) is target


@pytest.mark.parametrize(("kind", "name"), built_in_bricks())
def test_a_brick_is_a_frozen_keyword_only_dataclass_that_pickles(kind, name):
    target = registry.find(kind, name, "test")
    if not inspect.isclass(target):
        return
    assert dataclasses.is_dataclass(target)
    assert target.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert all(field.kw_only for field in dataclasses.fields(target) if field.init)
    assert callable(target)
    assert "__doc__" in vars(target)
    required = [
        field.name
        for field in dataclasses.fields(target)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if not required:
        brick = target()
        assert pickle.loads(pickle.dumps(brick)) == brick


def public_things() -> list[tuple[str, str]]:
    found = []
    for room in ROOMS:
        module = importlib.import_module(f"triune.{room}")
        found += [(room, name) for name in getattr(module, "__all__", [])]
    return found


@pytest.mark.parametrize(("room", "name"), public_things())
def test_everything_behind_a_front_door_has_a_docstring(room, name):
    thing: Any = getattr(importlib.import_module(f"triune.{room}"), name)
    is_ours = str(getattr(thing, "__module__", "")).startswith("triune")  # array types of `shapes` are not
    if is_ours and (inspect.isclass(thing) or inspect.isfunction(thing)):
        own = thing.__dict__.get("__doc__") if inspect.isclass(thing) else thing.__doc__
        assert own, f"triune.{room}.{name}"
        assert not own.startswith(f"{name}("), "the docstring that dataclass makes up does not count"


@pytest.mark.parametrize("cls", settings_classes(), ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_every_setting_says_what_it_is(cls):
    assert cls.__doc__
    for name, field in cls.model_fields.items():
        assert field.description, f"{cls.__module__}.{cls.__name__}.{name} has no docstring under it"
