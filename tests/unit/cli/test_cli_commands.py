"""The command line: what it prints, how it fails, how fast it starts."""

import json
import subprocess
import sys

import pytest

from triune.cli import boundary
from triune.errors import ConfigError, RunFailed, StoreError

RUN = "tasks: {use: arithmetic}\ntrainer: {steps: 3, tasks_per_step: 4}\n"


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "first.yaml"
    path.write_text(RUN)
    return str(path)


def triune(capsys, *arguments):
    code = boundary.run(list(arguments))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_importing_the_command_line_is_fast_and_loads_neither_torch_nor_transformers():
    code = (
        "import time; t = time.perf_counter(); import triune.cli, triune.cli.app; t = time.perf_counter() - t\n"
        "import sys; print(t, [m for m in ('torch', 'transformers', 'peft', 'matplotlib') if m in sys.modules])"
    )
    best = 9.0
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seconds, _, heavy = done.stdout.strip().partition(" ")
        assert heavy == "[]"
        best = min(best, float(seconds))
    assert best < 0.4


def test_case_61_check_prints_values_origins_and_what_a_step_consumes(capsys, file):
    code, out, _ = triune(capsys, "check", file, "seed=3")
    assert code == 0
    assert "seed\t3\toverride" in out
    assert "trainer.steps\t3\tfile" in out
    for line in (
        "groups per step        4",
        "sequences per step     32",
        "updates per step       1",
        "versions per step      1",
    ):
        assert line in out


def test_check_prints_json_for_programs(capsys, file):
    code, out, _ = triune(capsys, "check", file, "--json")
    content = json.loads(out)
    assert code == 0
    assert content["step"]["sequences"] == 32
    assert content["config"]["trainer"]["steps"] == 3


def test_an_error_is_four_parts_on_stderr_without_a_traceback_and_exit_code_2(capsys, file):
    code, out, err = triune(capsys, "check", file, "trainer.stepz=3")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "triune: trainer.stepz",
        "  found:    trainer has no key 'stepz' (value 3)",
        "  do:       did you mean 'steps'?",
    ]


def test_debug_shows_the_traceback_wherever_it_stands(capsys, file):
    code, _, err = triune(capsys, "check", file, "trainer.stepz=3", "--debug")
    assert code == 2
    assert "Traceback" in err


def test_a_missing_run_file_exits_with_2(capsys, file):
    code, _, err = triune(capsys, "run", "frist.yaml")
    assert code == 2
    assert "no such file" in err
    assert "did you mean 'first.yaml'?" in err


def test_a_wrong_type_exits_with_2(capsys, file):
    code, _, err = triune(capsys, "run", file, "trainer.steps=many")
    assert code == 2
    assert "found 'many'" in err


def test_a_usage_error_exits_with_2(capsys):
    assert triune(capsys, "runn", "x")[0] == 2


SUMMARY = {
    "status": "finished",
    "exit_reason": "60 steps done",
    "seconds": 3.0,
    "metrics": {
        "reward": {"first": 0.4, "last": 0.9, "first_step": 1, "last_step": 60},
        "eval/held_out/mean@1": {"first": 0.41, "last": 0.92, "first_step": 0, "last_step": 60},
        "eval/held_out/mean@1/low": {"first": 0.35, "last": 0.88, "first_step": 0, "last_step": 60},
        "eval/held_out/mean@1/high": {"first": 0.47, "last": 0.95, "first_step": 0, "last_step": 60},
    },
    "curve": "runs/first/curve.png",
    "export": "runs/first/export",
}


class FakeLauncher:
    def __init__(self, error=None):
        self.error, self.calls = error, []

    def __getattr__(self, name):
        def call(*arguments, **options):
            self.calls.append((name, arguments, options))
            if self.error is not None:
                raise self.error
            return SUMMARY

        return call


@pytest.fixture
def launcher(monkeypatch):
    import triune

    fake = FakeLauncher()
    monkeypatch.setitem(sys.modules, "triune.launcher", fake)
    monkeypatch.setattr(triune, "launcher", fake, raising=False)
    return fake


def test_run_hands_the_configuration_and_the_folder_to_the_launcher(capsys, file, launcher):
    assert triune(capsys, "run", file, "seed=4", "--resume")[0] == 0
    ((name, (config, folder), options),) = launcher.calls
    assert (name, config.seed, str(folder)) == ("run", 4, "runs/first")
    assert options == {"resume": True, "restart": False, "allow_changes": False}


def test_a_finished_run_says_what_it_reached_and_where_it_is(capsys, file, launcher):
    out = triune(capsys, "run", file)[1]
    assert "reward                  0.400 → 0.900   (step 1 → 60)" in out
    assert "eval/held_out/mean@1    0.410 [0.350, 0.470] → 0.920 [0.880, 0.950]   (step 0 → 60)" in out
    assert "runs/first/curve.png" in out
    assert "runs/first/export" in out


def test_case_53_a_failed_component_ends_with_its_cause_and_a_non_zero_exit(capsys, file, launcher):
    launcher.error = RunFailed("trainer", "ended at step 3", "", "see runs/first/summary.json")
    launcher.error.__cause__ = StoreError("buffer.sqlite", "disk full", "", "free space")
    code, _, err = triune(capsys, "run", file)
    assert code == 1
    assert err.startswith("triune: trainer\n")
    assert "caused by buffer.sqlite\n  found:    disk full" in err


def test_ctrl_c_exits_with_130(capsys, file, launcher):
    launcher.error = KeyboardInterrupt()
    assert triune(capsys, "run", file)[0] == 130


def test_an_unexpected_error_exits_with_1_and_names_a_file_with_the_traceback(capsys, file, launcher):
    launcher.error = RuntimeError("surprise")
    code, _, err = triune(capsys, "run", file)
    assert code == 1
    assert "Traceback" not in err
    path = next(word for word in err.split() if word.startswith("/") and "triune-" in word).rstrip(",")
    with open(path) as traceback:
        assert "RuntimeError: surprise" in traceback.read()


def test_resume_and_restart_exclude_each_other(capsys, file):
    code, _, err = triune(capsys, "run", file, "--resume", "--restart")
    assert code == 2
    assert "both were given" in err


def test_ls_lists_kinds_and_bricks_and_knows_plurals(capsys):
    assert "policy_loss\t" in triune(capsys, "ls")[1]
    for word in ("algorithms", "policy_losses", "policy-loss", "operators"):
        code, out, _ = triune(capsys, "ls", word)
        assert code == 0
        assert out.count("\t") >= 2
    code, _, err = triune(capsys, "ls", "algoritms")
    assert code == 2
    assert "did you mean 'algorithm'?" in err


def test_show_explains_fields_defaults_and_source(capsys):
    code, out, _ = triune(capsys, "show", "ppo_clip")
    assert code == 0
    assert "clip_high\tnumber (> 0)\t0.2\tHow far above 1 it may rise." in out
    assert "arXiv:1707.06347" in out
    assert "def __call__" in out


def test_show_prints_every_brick_of_that_name(capsys):
    out = triune(capsys, "show", "grpo", "--no-source")[1]
    assert "algorithm grpo" in out
    assert "advantage grpo" in out
    assert "advantage grpo" not in triune(capsys, "show", "algorithm/grpo", "--no-source")[1]


def test_show_answers_a_typo_with_the_nearest_name(capsys):
    code, _, err = triune(capsys, "show", "ppo_clp")
    assert code == 2
    assert "did you mean 'ppo_clip'?" in err


def test_bricks_of_a_plugin_file_are_listed(capsys, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from triune.registry import brick\n\n@brick('reward')\ndef shortest(task, answer):\n    '''Prefers short.'''\n"
    )
    out = triune(capsys, "ls", "rewards", "--plugin", str(tmp_path / "mine.py"))[1]
    assert "shortest\tPrefers short." in out


def test_doctor_says_what_is_there(capsys):
    code, out, _ = triune(capsys, "doctor", "--json")
    facts = json.loads(out)["facts"]
    assert code == 0
    assert facts["cores"] >= 1
    assert "extra tensorboard" in facts


def test_buffer_commands_answer_a_missing_run_with_what_is_there(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "other").mkdir(parents=True)
    (tmp_path / "runs" / "other" / "run.resolved.json").write_text("{}")
    for command in ("ls", "show", "stats"):
        code, _, err = triune(capsys, "buffer", command, "quickstart")
        assert code == 2
        assert "one of other, or a run's folder" in err


def test_version_and_help_texts_exist(capsys):
    assert triune(capsys, "--version")[1].count(".") == 2
    for command in ("run", "explore", "train", "bench", "check", "ls", "show", "export", "doctor", "buffer"):
        code, out, _ = triune(capsys, command, "--help")
        assert code == 0
        assert len(out) > 300


def test_bad_state_is_a_config_error():
    from triune.cli.buffers import list_entries

    with pytest.raises(ConfigError, match="--state: found 'redy'"):
        list_entries("x", "redy", 1, False)
