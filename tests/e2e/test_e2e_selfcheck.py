"""`triune selfcheck` on whole run files: silent on healthy ones, loud and with exit code 1 on a fault."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from e2e_selfcheck_parts import group_ranks, two_threads

from triune.cli.boundary import run as command_line
from triune.models import resolve_model
from triune.selfcheck import Status, selfcheck
from triune.testing.chats import STRIPS_THINKING
from triune.testing.faults import plant

PARTS = "e2e_selfcheck_parts"
EXACT = {"float32_matmul": "highest"}
VARIED = {"reward": f"{PARTS}:varied"}
NANO = {"model": {"path": "triune/nano"}, "tasks": {"use": "arithmetic", "path": None, "reward": None}}
HOT = {"max_tokens": 8, "temperature": 1.3}

HEALTHY: dict[str, dict[str, Any]] = {
    "the quick start": {**NANO, "algorithm": {"group_size": 8}},
    "dr_grpo at a low temperature": {
        "tasks": VARIED, "algorithm": {"use": "dr_grpo", "group_size": 4}, "trainer": EXACT,
        "explorer": {"temperature": 0.6},
    },
    "reinforce with groups of one at a high temperature": {
        "tasks": VARIED, "algorithm": {"use": "reinforce", "group_size": 1}, "explorer": HOT, "trainer": EXACT,
    },
    "an adapter with a KL term": {
        "tasks": VARIED, "model": {"lora": {"rank": 4}}, "algorithm": {"group_size": 4, "kl": {"use": "k3"}},
    },
    "all weights with a KL term and an entropy bonus": {
        "tasks": VARIED, "algorithm": {"group_size": 4, "kl": {"use": "k2"}, "entropy": {"use": "bonus"}},
    },
    "an environment of several turns": {
        "tasks": {"reward": None, "workflow": {"use": "multi_turn", "environment": f"{PARTS}:Echo"}},
        "algorithm": {"group_size": 4},
    },
    "one experience per turn": {
        "tasks": {"reward": None, "workflow": {"use": "multi_turn", "environment": f"{PARTS}:Echo"}},
        "algorithm": {"group_size": 4}, "explorer": {"merge_turns": False},
    },
    "a template that rewrites past turns": {
        "tasks": {"reward": None, "workflow": {"use": "multi_turn", "environment": f"{PARTS}:Echo"}},
        "algorithm": {"group_size": 4}, "model": {"chat_template": STRIPS_THINKING},
    },
    "a workflow and a reward of one's own, in runner processes": {
        "tasks": {"workflow": f"{PARTS}:asks", **VARIED}, "algorithm": {"group_size": 4},
    },
    "bfloat16 in trainer and engine": {
        **NANO, "algorithm": {"group_size": 8}, "trainer": {"precision": "bfloat16"},
        "explorer": {"engine": {"use": "embedded", "dtype": "bfloat16"}},
    },
    "bfloat16 masters": {**NANO, "model": {"path": "triune/nano", "dtype": "bfloat16"}, "algorithm": {"group_size": 8}},
    "truncated sampling": {
        "tasks": VARIED, "algorithm": {"group_size": 4}, "trainer": EXACT,
        "explorer": {"top_p": 0.9, "top_k": 20, "record_truncation": True},
    },
    "several updates a step, stale and in flight": {
        "tasks": VARIED, "algorithm": {"group_size": 4, "advantage": {"use": "grpo", "scale": "batch"}},
        "trainer": {"epochs": 2, "mini_batches": 2}, "sync": {"max_staleness": 2, "style": "inflight"},
        "pipeline": ["drop_flat_groups"],
    },
    "deterministic, with weights in files": {
        "tasks": VARIED, "algorithm": {"group_size": 4}, "deterministic": True, "sync": {"channel": "files"},
    },
    "demonstrations": {
        "algorithm": {"use": "sft", "group_size": None}, "tasks": {"reward": None},
        "trainer": {"tasks_per_step": None, "sequences_per_step": 4},
    },
}  # fmt: skip

FAST = ("the quick start", "demonstrations")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in HEALTHY]
)
def test_a_healthy_run_raises_no_alarm(bench: Any, name: str):
    report = selfcheck(bench.config(**HEALTHY[name]))
    assert quiet(report)
    assert len(report.of(Status.PASSED)) >= 10


@pytest.mark.parametrize(
    "functions", [{"workflow": two_threads}, {"reward": group_ranks}], ids=["two conversations", "a reward of groups"]
)
def test_functions_passed_from_python_raise_no_alarm(bench: Any, functions: dict[str, Any]):
    config = bench.config(algorithm={"group_size": 4}, tasks={"reward": None})
    assert quiet(selfcheck(config, **functions))


def quiet(report: Any) -> bool:
    loud = [f"{one.name}: {one.found}" for one in report.findings if one.status in (Status.FAILED, Status.WARNED)]
    assert not loud
    return True


def test_the_command_writes_its_file_beside_the_run_and_touches_nothing_else(bench: Any, capsys: Any):
    file = bench.file(tasks=VARIED, algorithm={"group_size": 4})
    assert command_line(["selfcheck", str(file)]) == 0
    assert [path.name for path in bench.runs.iterdir()] == ["small.selfcheck.json"]
    written = json.loads((bench.runs / "small.selfcheck.json").read_text())
    assert written["is_right"]
    assert {one["status"] for one in written["findings"]} == {"passed", "skipped"}
    out = capsys.readouterr().out
    assert "because the algorithm has no KL term" in out
    assert "small.selfcheck.json" in out


def test_the_command_names_cause_and_cure_and_ends_with_exit_code_1(bench: Any, capsys: Any, tmp_path: Path):
    file = bench.file(tasks=VARIED, algorithm={"group_size": 4}, explorer={"temperature": 0.6}, trainer=EXACT)
    with plant("temperature_ignored_by_trainer"):
        code = command_line(["selfcheck", str(file), "--only", "logprobs", "--out", str(tmp_path / "found.json")])
    assert code == 1
    out = capsys.readouterr().out
    assert "cause: " in out
    assert "ignores the temperature" in " ".join(out.split())
    assert "do: the trainer must divide logits by the temperature" in out
    (finding,) = json.loads((tmp_path / "found.json").read_text())["findings"]
    assert finding["status"] == "failed"
    assert finding["numbers"]["gap"] > 0.01


def test_a_check_that_does_not_exist_is_refused_with_those_that_do(bench: Any, capsys: Any):
    assert command_line(["selfcheck", str(bench.file(tasks=VARIED)), "--only", "logprob"]) == 2
    assert "some of rollouts, mask, turns" in capsys.readouterr().err


def test_a_workflow_that_fails_is_named_once_and_the_rest_is_skipped(bench: Any):
    with plant("question_missing"):
        report = selfcheck(bench.config(tasks={"reward": "exact_match"}), only=["rollouts", "mask", "logprobs"])
    assert [one.status for one in report.findings] == [Status.FAILED, Status.SKIPPED, Status.SKIPPED]
    assert "no field 'question'" in report.findings[0].found


def test_a_reward_that_is_always_the_same_is_a_warning_and_the_rest_is_proved_with_rewards_dealt_out(bench: Any):
    config = bench.config(algorithm={"group_size": 4}, pipeline=["drop_flat_groups"], tasks={"reward": None})
    report = selfcheck(
        config, reward=lambda task, answer: 0.0, only=["reward_spread", "first_update", "direction", "optimiser"]
    )
    assert [one.status for one in report.findings] == [Status.WARNED, *[Status.PASSED] * 3]
    assert report.is_right


def test_every_stage_is_checked_whose_weights_are_there(capsys: Any, tmp_path: Path):
    file = tmp_path / "two.yaml"
    file.write_text(
        f"runs_dir: {tmp_path / 'runs'}\n"
        "model: {path: triune/nano}\n"
        "tasks: {use: arithmetic}\n"
        "algorithm: {use: grpo, group_size: 4}\n"
        "explorer: {max_tokens: 8, runner: inline}\n"
        "trainer: {steps: 2, tasks_per_step: 4}\n"
        "stages: [{name: first}, {name: second, explorer: {temperature: 0.6}}]\n"
    )
    asked = ["selfcheck", str(file), "--only", "mask", "--json"]
    assert command_line(asked) == 0
    told = capsys.readouterr()
    assert [stage["name"] for stage in json.loads(told.out)["stages"]] == ["01-first"]
    assert "02-second is not checked: its weights come from the stage before it" in told.err
    shutil.copytree(resolve_model("triune/nano").location, tmp_path / "runs" / "two" / "01-first" / "export")
    assert command_line([*asked, "--out", str(tmp_path / "found.json")]) == 0
    assert len(json.loads(capsys.readouterr().out)["stages"]) == 2
    assert (tmp_path / "found-02-second.json").exists()
    with plant("temperature_ignored_by_trainer"):
        assert command_line(["selfcheck", str(file), "--only", "logprobs"]) == 1
    assert "02-second" in capsys.readouterr().out
