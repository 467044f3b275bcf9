"""Plug-in files: loaded under the hash of their content, copied into the run, never a warning."""

import subprocess
import sys

import pytest

from triune.config import check_same_run, config_hash, load_config, save_resolved
from triune.errors import ConfigError, PluginError

PLUGIN = '''
from dataclasses import dataclass
from triune.registry import brick

@brick("operator")
@dataclass(frozen=True, kw_only=True)
class KeepAll:
    """Keep everything."""
    share: float = 1.0

    def __call__(self, group):
        return group
'''
RUN = """
plugins: [mine.py]
tasks: {use: arithmetic}
pipeline: [{use: keep_all, share: 0.5}]
trainer: {steps: 1, tasks_per_step: 2}
"""


def write_run(folder, plugin=PLUGIN):
    (folder / "mine.py").write_text(plugin)
    (folder / "run.yaml").write_text(RUN)
    return folder / "run.yaml"


def test_a_brick_of_a_plugin_file_beside_the_run_file_can_be_named(tmp_path):
    config = load_config(write_run(tmp_path))
    assert config.pipeline[0].share == 0.5
    (plugin,) = config.loaded_plugins
    assert plugin.module.startswith("triune_plugins.mine_")
    assert config.to_plain()["pipeline"][0]["use"] == f"{plugin.module}:KeepAll"


def test_another_process_imports_the_copy_in_the_runs_folder(tmp_path):
    config = load_config(write_run(tmp_path))
    run_dir = tmp_path / "run"
    save_resolved(config, run_dir)
    (tmp_path / "mine.py").unlink()
    code = (
        "import sys; from triune.config import load_config;"
        "config = load_config(sys.argv[1]); print(config.pipeline[0].share, config.to_plain()['pipeline'][0]['use'])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run_dir)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0.5", config.to_plain()["pipeline"][0]["use"]]


def test_case_59_a_plugin_that_does_not_import_is_an_error_with_file_and_line(tmp_path):
    with pytest.raises(PluginError, match=r"plugins\.0 \(.*mine\.py:3\): ZeroDivisionError: division by zero"):
        load_config(write_run(tmp_path, "x = 1\n\ny = 1 / 0\n"))
    with pytest.raises(PluginError, match=r"mine\.py:1\): SyntaxError"):
        load_config(write_run(tmp_path, "def broken(:\n"))


def test_case_59_a_missing_plugin_is_an_error(tmp_path):
    file = write_run(tmp_path)
    (tmp_path / "mine.py").unlink()
    with pytest.raises(PluginError, match=r"plugins\.0: no file 'mine\.py'"):
        load_config(file)


def test_an_unknown_field_of_a_plugins_brick_is_answered_with_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match=r"pipeline\.0\.shar: KeepAll has no such field; did you mean 'share'\?"):
        load_config(write_run(tmp_path), ["pipeline.0={use: keep_all, shar: 1}"])


def test_a_changed_plugin_is_another_module_and_another_configuration(tmp_path):
    from triune.config import config_hash

    first = load_config(write_run(tmp_path))
    second = load_config(write_run(tmp_path, PLUGIN.replace("1.0", "2.0")))
    assert first.loaded_plugins[0].module != second.loaded_plugins[0].module
    assert config_hash(first) != config_hash(second)


def test_plugins_in_any_order_are_the_same_run_when_it_is_resumed_from_its_folder(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.py").write_text(f"NAME = {name!r}\n")
    file = tmp_path / "two.yaml"
    file.write_text("plugins: [b.py, a.py]\ntasks: {use: arithmetic}\ntrainer: {steps: 3, tasks_per_step: 4}\n")
    config = load_config(file)
    folder = tmp_path / "runs" / "two"
    folder.mkdir(parents=True)
    save_resolved(config, folder)
    again = load_config(folder)
    check_same_run(again, folder)
    assert config_hash(again) == config_hash(config)
