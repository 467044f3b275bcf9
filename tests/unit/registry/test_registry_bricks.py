"""Bricks are found by name, checked field by field and built from what a run file says."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from typing import Any

import pytest

from triune import registry
from triune.errors import ConfigError, PluginError
from triune.registry import brick, brick_field, build, construct, fields_of, find, import_path, names, snake_case


@brick("kl", "house_kl")
@dataclass(frozen=True, kw_only=True)
class HouseKL:
    """A brick for these tests."""

    weight: float = 0.1
    kind: str = "k3"


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class HouseMethod:
    """A brick that holds another."""

    group_size: int = 8
    kl: Any = brick_field("kl", HouseKL(weight=0.5, kind="k1"))


@brick("reward")
def house_reward(task, answer):
    """A function is a brick too."""
    return 1.0


@pytest.mark.parametrize(
    ("name", "expected"),
    [("PPOClip", "ppo_clip"), ("GuessNumber", "guess_number"), ("GRPO", "grpo"), ("already_snake", "already_snake")],
)
def test_a_class_name_becomes_the_name_used_in_run_files(name, expected):
    assert snake_case(name) == expected


def test_a_brick_is_built_from_its_name_or_from_a_mapping():
    assert build("kl", "house_kl", "algorithm.kl") == HouseKL()
    assert build("kl", {"use": "house_kl", "weight": "0.25"}, "algorithm.kl") == HouseKL(weight=0.25)
    assert build("reward", "house_reward", "tasks.reward") is house_reward


def test_case_57_setting_one_field_of_a_nested_brick_keeps_the_defaults_of_the_others():
    method = build("algorithm", {"use": "house_method", "kl": {"weight": 2}}, "algorithm")
    assert method == HouseMethod(kl=HouseKL(weight=2.0, kind="k1"))
    replaced = build("algorithm", {"use": "house_method", "kl": {"use": "house_kl"}}, "algorithm")
    assert replaced.kl == HouseKL(weight=0.1, kind="k3")
    assert build("algorithm", {"use": "house_method", "kl": None}, "algorithm").kl is None


def test_an_unknown_name_proposes_the_nearest():
    with pytest.raises(ConfigError, match=r"algorithm\.kl: no kl is called 'house_k1'.*did you mean 'house_kl'\?"):
        build("kl", "house_k1", "algorithm.kl")


def test_an_unknown_field_proposes_the_nearest():
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.wieght: HouseKL has no such field.*'weight'"):
        build("kl", {"use": "house_kl", "wieght": 1}, "algorithm.kl")


def test_every_wrong_value_is_named_with_its_key():
    with pytest.raises(ConfigError) as caught:
        construct(HouseKL, {"weight": "heavy", "kind": 3}, "algorithm.kl")
    assert "algorithm.kl.weight: found 'heavy'" in str(caught.value)
    assert "algorithm.kl.kind: found 3" in str(caught.value)


@pytest.mark.parametrize("spec", [{}, {"weight": 1}, {"use": 3}, 5])
def test_a_spec_without_a_name_says_what_to_write(spec):
    with pytest.raises(ConfigError, match="`use: NAME` of a kl"):
        build("kl", spec, "algorithm.kl")


def test_a_function_takes_no_fields():
    with pytest.raises(ConfigError, match="is a function and takes no fields, found tolerance"):
        build("reward", {"use": "house_reward", "tolerance": 1}, "tasks.reward")


def test_an_unknown_kind_is_refused_when_a_brick_is_marked():
    with pytest.raises(PluginError, match="policy_loss"):
        brick("no_such_kind")


def test_an_import_path_names_a_brick_and_is_what_workers_get():
    assert import_path(HouseKL).endswith(":HouseKL")
    assert find("kl", import_path(HouseKL), "algorithm.kl") is HouseKL


def test_case_59_a_plugin_that_fails_to_import_is_an_error_that_names_the_cause(tmp_path, monkeypatch):
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('no licence')\n")
    (tmp_path / "sound_plugin.py").write_text(
        textwrap.dedent(
            """
            def reward_length(task, answer):
                return len(answer)
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match=r"broken_plugin does not import \(RuntimeError: no licence\)"):
        find("reward", "broken_plugin:Reward", "tasks.reward")
    with pytest.raises(PluginError, match="did you mean 'reward_length'"):
        find("reward", "sound_plugin:reward_lenght", "tasks.reward")
    assert find("reward", "sound_plugin:reward_length", "tasks.reward")(None, "abc") == 3
    sys.modules.pop("sound_plugin")


def test_a_module_in_a_home_that_marks_nothing_is_named(tmp_path, monkeypatch):
    home = tmp_path / "house_home"
    home.mkdir()
    (home / "__init__.py").write_text("")
    (home / "empty.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(registry.HOMES, "sink", "house_home")
    assert "empty" in names("sink")
    with pytest.raises(PluginError, match="marks no sink named 'empty'"):
        find("sink", "empty", "monitor.sinks")


def test_a_class_that_is_no_dataclass_is_refused():
    class Plain:
        pass

    with pytest.raises(PluginError, match="is no dataclass"):
        construct(Plain, {}, "x")


def test_fields_of_lists_every_field_with_its_value():
    assert fields_of(HouseKL(weight=2.0)) == {"weight": 2.0, "kind": "k3"}
    assert fields_of(house_reward) == {}
