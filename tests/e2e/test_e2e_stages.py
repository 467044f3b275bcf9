"""Runs of several stages, from one file: what is skipped, what goes on, what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import triune
from triune.cli.boundary import run as command_line
from triune.errors import CheckpointError, RunFailed

SFT = {"use": "sft"}
STAGES = [
    {
        "name": "warm",
        "algorithm": SFT,
        "trainer": {"steps": 2, "tasks_per_step": None, "sequences_per_step": 4},
    },
    {"name": "rl", "algorithm": {"use": "grpo", "group_size": 2}, "trainer": {"steps": 3, "save_every": 1}},
]
REWARD = {"reward": {"use": "format", "pattern": ".*[a-m].*"}}


def staged(bench: Any, **sections: Any) -> dict[str, Any]:
    return bench.config("all", **{"deterministic": True, "tasks": REWARD, "stages": STAGES, **sections})


def staged_file(bench: Any, **sections: Any) -> str:
    from triune.testing.run_files import save_run_file

    return str(save_run_file(staged(bench, **sections), bench.folder / "all.yaml"))


def weights(bench: Any, stage: str) -> bytes:
    return (bench.runs / "all" / stage / "export" / "model.safetensors").read_bytes()


def summary(bench: Any, stage: str = "") -> dict[str, Any]:
    return json.loads((bench.runs / "all" / stage / "summary.json").read_text())


def rows(bench: Any, stage: str) -> list[str]:
    return (bench.runs / "all" / stage / "metrics.jsonl").read_text().splitlines()


def statuses(bench: Any) -> list[str]:
    return [entry["status"] for entry in summary(bench)["stages"]]


@pytest.fixture(scope="module")
def expected(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Weights at the end of all stages when nothing interrupts them: each stage run by hand."""
    from triune.testing.run_files import small_run

    folder, path = tmp_path_factory.mktemp("by_hand"), str(shared / "model")
    for stage in STAGES:
        config = small_run(shared, deterministic=True, tasks=REWARD, trainer=stage["trainer"])
        config |= {"algorithm": stage["algorithm"], "name": stage["name"]}
        config |= {"runs_dir": str(folder), "model": {"path": path}}
        path = triune.run(config)["export"]
    return (Path(path) / "model.safetensors").read_bytes()


def test_every_stage_begins_with_the_last_ones_weights_and_the_whole_has_a_summary(bench: Any, expected: bytes):
    found = triune.run(staged(bench))
    assert found == summary(bench)
    assert (found["status"], found["steps"], statuses(bench)) == ("finished", 5, ["finished", "finished"])
    assert weights(bench, "02-rl") == expected
    assert weights(bench, "01-warm") != expected
    assert found["export"] == str(bench.runs / "all" / "02-rl" / "export")
    assert found["metrics"]["reward"]["first_stage"] == "02-rl"
    loss = found["metrics"]["loss"]
    assert (loss["first_stage"], loss["last_stage"]) == ("01-warm", "02-rl")
    assert loss["first"] == summary(bench, "01-warm")["metrics"]["loss"]["first"]
    assert loss["last"] == summary(bench, "02-rl")["metrics"]["loss"]["last"]
    resolved = json.loads((bench.runs / "all" / "02-rl" / "run.resolved.json").read_text())
    assert resolved["config"]["model"]["path"] == str(bench.runs / "all" / "01-warm" / "export")
    assert resolved["origins"]["model.path"] == "derived"


def test_finished_stages_are_skipped_and_an_override_lets_the_last_one_go_on(bench: Any, capsys: Any):
    file = staged_file(bench)
    assert command_line(["run", file]) == 0
    assert "exported model" in capsys.readouterr().out
    before = [rows(bench, stage) for stage in ("01-warm", "02-rl")]
    assert command_line(["run", file]) == 2
    assert "holds a run already (finished, 5 steps)" in capsys.readouterr().err
    assert command_line(["run", file, "--resume"]) == 0
    assert capsys.readouterr().out.count("is finished, skipped") == 2
    assert [rows(bench, stage) for stage in ("01-warm", "02-rl")] == before
    assert command_line(["run", str(bench.runs / "all"), "stages.1.trainer.steps=4", "--resume"]) == 0
    assert "stage 1 of 2, warm: is finished, skipped" in capsys.readouterr().out
    assert summary(bench, "02-rl")["steps"] == 4
    assert rows(bench, "01-warm") == before[0]


def test_a_failed_stage_ends_the_whole_is_named_and_goes_on_after_a_resume(
    bench: Any, failpoints: Any, capsys: Any, expected: bytes
):
    file = staged_file(bench)
    failpoints("trainer.checkpoint.after_rename:2:raise")  # one for the warm-up's last, one inside the second stage
    assert command_line(["run", file]) == 1
    said = capsys.readouterr().err
    assert said.startswith("triune: stage 2 of 2, rl\n")
    assert "failpoint" in said
    assert "go on with --resume" in said
    assert (summary(bench)["status"], summary(bench)["failed_stage"]) == ("failed", "02-rl")
    assert statuses(bench) == ["finished", "failed"]
    failpoints("")
    assert command_line(["run", file, "--resume"]) == 0
    assert statuses(bench) == ["finished", "finished"]
    assert "failed_stage" not in summary(bench)
    assert weights(bench, "02-rl") == expected


def test_a_stage_that_cannot_begin_is_named_with_exit_code_2_and_the_later_ones_wait(bench: Any, capsys: Any):
    first = {"name": "broken", "tasks": {"reward": None}}
    assert command_line(["run", staged_file(bench, stages=[first, STAGES[1]], tasks={"reward": None})]) == 2
    said = capsys.readouterr().err
    assert said.startswith("triune: stage 1 of 2, broken: ")
    assert "write `reward: NAME` beside it" in said
    assert statuses(bench) == ["failed", "waiting"]
    assert not (bench.runs / "all" / "02-rl").exists()


@pytest.mark.crash
def test_case_38_killed_between_two_stages_and_inside_each_a_resume_ends_with_the_same_weights(
    bench: Any, expected: bytes
):
    file = staged_file(bench)
    places = ["trainer.publish.after:2", "launcher.stages.between:2", "trainer.checkpoint.before_rename:2", ""]
    codes, seen = [], []
    for place in places:
        words = [
            sys.executable,
            "-c",
            "from triune.cli.boundary import main; main()",
            "run",
            file,
            *(["--resume"] if codes else []),
        ]
        done = subprocess.run(words, env={**os.environ, "TRIUNE_FAILPOINT": place}, capture_output=True, text=True)
        codes.append(done.returncode)
        seen.append(statuses(bench))
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, -signal.SIGKILL, 0], done.stderr
    assert seen == [["running", "waiting"], ["finished", "waiting"], ["finished", "running"], ["finished", "finished"]]
    assert weights(bench, "02-rl") == expected


@pytest.mark.parametrize("stage", ["01-warm", "02-rl"])
def test_ctrl_c_inside_a_stage_ends_the_whole_in_order_and_loses_nothing(
    bench: Any, monkeypatch: Any, capsys: Any, expected: bytes, stage: str
):
    from triune.trainer import Trainer

    file, real = staged_file(bench), Trainer._train

    async def interrupted(self: Any, *args: Any) -> Any:
        is_second = (bench.runs / "all" / "02-rl").exists()
        if is_second == (stage == "02-rl") and self.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return await real(self, *args)

    monkeypatch.setattr(Trainer, "_train", interrupted)
    assert command_line(["run", file]) == 130
    assert summary(bench)["status"] == "interrupted"
    assert statuses(bench) == (["interrupted", "waiting"] if stage == "01-warm" else ["finished", "interrupted"])
    monkeypatch.undo()
    assert command_line(["run", file, "--resume"]) == 0
    assert weights(bench, "02-rl") == expected


def test_ctrl_c_between_two_stages_is_written_down(bench: Any, monkeypatch: Any, expected: bytes):
    from triune.launcher import stages

    def interrupt(name: str) -> None:
        if (bench.runs / "all" / "01-warm").exists():
            raise KeyboardInterrupt("SIGINT")

    monkeypatch.setattr(stages, "failpoint", interrupt)
    with pytest.raises(KeyboardInterrupt):
        triune.run(staged(bench))
    assert (summary(bench)["status"], statuses(bench)) == ("interrupted", ["finished", "waiting"])
    monkeypatch.undo()
    triune.run(staged(bench), resume=True)
    assert weights(bench, "02-rl") == expected


def test_what_a_stage_was_made_with_or_from_may_not_change(bench: Any, capsys: Any):
    file = staged_file(bench)
    assert command_line(["run", file]) == 0
    capsys.readouterr()

    def refused(*words: str) -> str:
        assert command_line(["run", file, "--resume", *words]) == 1
        said = capsys.readouterr().err
        assert all(part in said for part in ("found:", "expected:", "do:"))
        return said

    said = refused("stages.0.trainer.learning_rate=0.5")
    assert "01-warm" in said
    assert "trainer.learning_rate: was 0.001, now 0.5" in said
    assert "stages.0.name: was 'warm', now 'other'" in refused("stages.0.name=other")
    said = refused("stages.0.trainer.steps=3")  # would be trained further, under the feet of the second
    assert "01-warm, which is not finished or is to be trained further" in said
    exported = bench.runs / "all" / "01-warm" / "export" / "model.safetensors"
    content = exported.read_bytes()
    exported.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "it began with other weights than 01-warm exports now" in refused()
    exported.unlink()
    assert "`triune export" in refused()
    exported.write_bytes(content)
    assert command_line(["run", file, "--resume"]) == 0
    assert summary(bench)["status"] == "finished"


def test_a_restart_begins_all_stages_again_and_keeps_the_old_folder(bench: Any):
    triune.run(staged(bench))
    triune.run(staged(bench), restart=True)
    assert (bench.runs / "all.1" / "02-rl" / "summary.json").exists()
    assert statuses(bench) == ["finished", "finished"]


def test_a_stage_may_be_added_to_a_finished_run(bench: Any):
    triune.run(staged(bench, stages=STAGES[:1]))
    first = rows(bench, "01-warm")
    triune.run(staged(bench), resume=True)
    assert rows(bench, "01-warm") == first
    assert statuses(bench) == ["finished", "finished"]


def test_functions_from_python_serve_every_stage(bench: Any):
    asked: list[str] = []

    def reward(task: triune.Task, answer: str) -> float:
        asked.append(task.key)
        return float(len(answer) % 2)

    two = [{"name": "one", "trainer": {"steps": 1}}, {"name": "two", "trainer": {"steps": 1}}]
    assert triune.run(staged(bench, stages=two), reward=reward)["status"] == "finished"
    assert len(asked) == 2 * 4 * 2


def test_check_validates_every_stage_and_prints_json_for_programs(bench: Any, capsys: Any):
    file = staged_file(bench)
    assert command_line(["check", file]) == 0
    said = capsys.readouterr().out
    assert "stage 1 of 2, warm" in said
    assert "trainer.sequences_per_step\t4\tfile" in said
    assert "2 stages: valid" in said
    assert command_line(["check", file, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [stage["name"] for stage in content["stages"]] == ["01-warm", "02-rl"]
    assert content["stages"][1]["origins"]["model.path"] == "derived"
    assert command_line(["check", file, "stages.1.trainer.steps=many", "stages.0.explorer.max_tokens=0"]) == 2
    said = capsys.readouterr().err
    assert "stages.1.trainer.steps" in said
    assert "stages.0.explorer.max_tokens" in said


def test_a_stage_is_looked_at_like_any_run(bench: Any, capsys: Any):
    file = staged_file(bench)
    assert command_line(["run", file]) == 0
    capsys.readouterr()
    assert command_line(["buffer", "stats", str(bench.runs / "all" / "02-rl")]) == 0
    assert command_line(["export", str(bench.runs / "all" / "02-rl"), "--out", str(bench.folder / "model")]) == 0
    assert (bench.folder / "model" / "model.safetensors").read_bytes() == weights(bench, "02-rl")
    capsys.readouterr()
    for words in (["export", str(bench.runs / "all")], ["train", file]):
        assert command_line(words) == 2
        assert "runs/NAME/01-STAGE" in capsys.readouterr().err


def test_a_stage_that_another_process_runs_is_left_to_it(bench: Any):
    from triune.launcher import RunFolder, Start

    triune.run(staged(bench))
    held = RunFolder.open(bench.runs, "all", Start.RESUME, roles=("stages",))
    with pytest.raises(Exception, match="another process is the stages of this run"):
        triune.run(staged(bench), resume=True)
    held.release()
    with pytest.raises(CheckpointError, match="it holds a run of several stages"):
        triune.run({**bench.config("all"), "name": "all"}, resume=True)


def test_a_role_that_fails_is_the_cause_of_the_stages_failure(bench: Any, failpoints: Any):
    failpoints("trainer.publish.after:1:raise")
    with pytest.raises(RunFailed, match="stage 1 of 2, warm") as caught:
        triune.run(staged(bench))
    assert caught.value.__cause__ is not None
