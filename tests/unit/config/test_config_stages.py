"""Run files with stages: merging, overriding, deriving, refusing."""

import pytest

from triune.config import (
    StagedConfig,
    check_same_run,
    check_same_stages,
    config_hash,
    load_config,
    load_run_file,
    save_resolved,
    save_staged,
    stage_name,
)
from triune.config.stages import merge
from triune.errors import CheckpointError, ConfigError

FILE = {
    "name": "s",
    "tasks": {"use": "arithmetic", "digits": 1},
    "algorithm": {"use": "dr_grpo", "group_size": 4},
    "trainer": {"steps": 3, "tasks_per_step": 4},
    "stages": [
        {"name": "warm", "algorithm": "sft", "trainer": {"tasks_per_step": None, "sequences_per_step": 8}},
        {"name": "rl", "algorithm": {"group_size": 2}, "trainer": {"learning_rate": 1e-4}},
    ],
}


def staged(*overrides, source=FILE):
    config = load_run_file(source, overrides)
    assert isinstance(config, StagedConfig)
    return config


def problem(*overrides, source=FILE):
    with pytest.raises(ConfigError) as caught:
        load_run_file(source, overrides)
    return str(caught.value)


def test_a_file_without_stages_is_an_ordinary_run():
    plain = {key: value for key, value in FILE.items() if key != "stages"}
    assert load_run_file(plain).to_plain() == load_config(plain).to_plain()


def test_a_stage_is_the_file_with_what_differs_and_begins_where_the_one_before_exports():
    warm, rl = staged("model.path=some/model").stages
    assert [stage_name(each) for each in (warm, rl)] == ["warm", "rl"]
    assert [str(each.run_dir) for each in (warm, rl)] == ["runs/s/01-warm", "runs/s/02-rl"]
    assert (warm.model.path, rl.model.path) == ("some/model", "runs/s/01-warm/export")
    assert (warm.origins["model.path"], rl.origins["model.path"]) == ("override", "derived")
    assert (type(warm.algorithm).__name__, warm.algorithm.group_size) == ("SFT", 1)
    assert (type(rl.algorithm).__name__, rl.algorithm.group_size) == ("DrGRPO", 2)
    assert (warm.trainer.sequences_per_step, rl.trainer.tasks_per_step, rl.trainer.steps) == (8, 4, 3)


@pytest.mark.parametrize(
    ("top", "own", "expected"),
    [
        ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"c": 4}}, {"a": 1, "b": {"c": 4, "d": 3}}),
        ({"use": "x", "a": 1}, {"use": "y"}, {"use": "y"}),
        ({"use": "x", "a": 1}, {"use": "x", "b": 2}, {"use": "x", "a": 1, "b": 2}),
        ({"use": "x", "a": 1}, "x", "x"),
        ("x", {"a": 2}, {"use": "x", "a": 2}),
        ({"use": "x", "a": 1}, {"sets": ["y"]}, {"sets": ["y"]}),
        ({"sets": ["y"], "order": "z"}, {"use": "x"}, {"use": "x"}),
        ([1, 2], [3], [3]),
        (None, {"a": 1}, {"a": 1}),
        ({"a": 1}, None, None),
    ],
)
def test_mappings_are_merged_and_another_brick_replaces(top, own, expected):
    assert merge(top, own) == expected


def test_an_override_reaches_one_stage_or_every_stage_that_takes_the_key_from_the_top():
    config = staged("stages.1.trainer.steps=5", "trainer.steps=2", "seed=7")
    assert [(each.trainer.steps, each.seed) for each in config.stages] == [(2, 7), (5, 7)]
    assert [each.origins["trainer.steps"] for each in config.stages] == ["override", "override"]
    assert [each.origins["trainer.learning_rate"] for each in config.stages] == ["default", "file"]


def test_case_52_an_override_that_no_stage_would_notice_is_refused():
    said = problem("algorithm.group_size=2")
    assert "override algorithm.group_size: every stage says something else there" in said
    assert "stages.0.algorithm.group_size" in said


def test_all_problems_of_all_stages_are_told_at_once_and_those_of_the_top_once():
    said = problem("stages.0.trainer.steps=x", "stages.1.trainer.stepz=1", "tasks.digits=many", "stages.1.plugins=[a]")
    for line in (
        "4 problems",
        "\n  stages.0.trainer.steps: found 'x'; expected a valid integer",
        "\n  stages.1.trainer.stepz: trainer has no key 'stepz' (value 1); did you mean 'steps'?",
        "\n  tasks.sets.0.digits: found 'many'",
        "\n  stages.1.plugins: found ['a'] in a stage; write `plugins` once, at the top of the file",
    ):
        assert line in said, said
    assert said.count("digits") == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages=[]", "stages: found []; expected a list of stages"),
        ("stages.0=sft", "stages.0: found 'sft'; expected a mapping"),
        ("stages.1.name=null", "stages.1.name: missing; expected a name"),
        ("stages.1.name=a/b", "stages.1.name: found 'a/b'"),
        ("name=a/b", "name: found 'a/b'"),
        ("stages.1.model.path=x", "stages.1.model.path: found 'x'; expected nothing: a stage begins with the weights"),
        ("stages.1.stages=[{name: x}]", "stages.1.stages: found [{'name': 'x'}] in a stage"),
        ("stages.0.runs_dir=x", "stages.0.runs_dir: found 'x' in a stage; write `runs_dir` once"),
        ("stages.2.trainer.steps=1", "stages is a list of 2"),
        ("stages.0.trainer={steps: 3, tasks_per_step: 4}", "stages.0.trainer.tasks_per_step: sft does not consume"),
        ("stages.1.seed=${nowhere}", "stages.1.seed: Interpolation key 'nowhere' not found"),
    ],
)
def test_what_is_wrong_with_stages_is_answered_with_its_key(override, message):
    assert message in problem(override)


def test_commands_for_a_single_run_say_which_folder_they_take():
    with pytest.raises(ConfigError, match=r"stages: found a run of several stages; .*runs/NAME/01-STAGE"):
        load_config(FILE)


def test_what_is_resolved_is_a_run_file_of_the_same_stages(tmp_path):
    config = staged(f"runs_dir={tmp_path}", "stages.1.trainer.steps=5")
    save_staged(config)
    again = staged(source=tmp_path / "s")
    for old, new in zip(config.stages, again.stages, strict=True):
        assert (new.to_plain(), new.origins, config_hash(new)) == (old.to_plain(), old.origins, config_hash(old))
    changed = staged("stages.0.name=sft", source=tmp_path / "s")
    assert changed.stages[1].model.path == f"{tmp_path}/s/01-sft/export"
    with pytest.raises(CheckpointError, match=r"stages\.0\.name: was 'warm', now 'sft'"):
        check_same_stages(changed)


def test_a_stage_can_be_read_from_its_own_folder_and_stays_the_same_run_when_all_are_moved(tmp_path):
    config = staged(f"runs_dir={tmp_path}")
    save_resolved(config.stages[1], config.stages[1].run_dir)
    alone = load_config(config.stages[1].run_dir)
    assert alone.model.path == f"{tmp_path}/s/01-warm/export"
    assert config_hash(alone) == config_hash(config.stages[1])
    moved = staged(f"runs_dir={tmp_path}/elsewhere").stages[1]
    check_same_run(moved, config.stages[1].run_dir)
    with pytest.raises(CheckpointError, match=r"model\.path: was None, now 'x'"):
        check_same_run(load_config(config.stages[1].run_dir, ["model.path=x"]), config.stages[1].run_dir)


def test_a_single_run_is_not_resumed_in_the_folder_of_a_staged_one_nor_the_other_way_round(tmp_path):
    config = staged(f"runs_dir={tmp_path}")
    single = load_config({key: value for key, value in FILE.items() if key != "stages"}, [f"runs_dir={tmp_path}"])
    save_staged(config)
    with pytest.raises(CheckpointError, match="it holds a run of several stages"):
        check_same_run(single, config.run_dir)
    save_resolved(single, config.run_dir)
    with pytest.raises(CheckpointError, match="it holds a single run"):
        check_same_stages(config)


def test_plugins_of_a_staged_file_are_there_for_every_stage_and_after_a_resume(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from triune import reward\n@reward('mine')\ndef mine(task, answer) -> float:\n    return 1.0\n"
    )
    source = {
        **FILE,
        "runs_dir": str(tmp_path),
        "plugins": [str(tmp_path / "mine.py")],
        "tasks": {"use": "arithmetic", "reward": "mine"},
    }
    config = staged(source=source)
    save_staged(config)
    (tmp_path / "mine.py").unlink()
    again = staged(source=config.run_dir)
    assert [config_hash(each) for each in again.stages] == [config_hash(each) for each in config.stages]
