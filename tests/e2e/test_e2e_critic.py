"""PPO with a critic and distillation from a teacher, from the run file to the exported model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import triune
from triune.errors import ConfigError, RunFailed
from triune.testing.run_files import save_tiny_policy

CRITIC = {"use": "value_model", "learning_rate": 3e-3}
PPO = {"use": "grpo", "group_size": 2, "advantage": "gae", "critic": CRITIC}


def test_ppo_on_the_embedded_policy_learns_what_its_answers_are_worth(tmp_path: Path):
    triune.run(
        {
            "name": "ppo",
            "runs_dir": str(tmp_path),
            "deterministic": True,
            "tasks": {"use": "arithmetic"},
            "algorithm": {**PPO, "group_size": 4},
            "explorer": {"max_tokens": 8},
            "trainer": {"steps": 6, "tasks_per_step": 16, "learning_rate": 1e-4},
            "monitor": {"sinks": ["jsonl"], "curve": False},
        }
    )
    rows = map(json.loads, (tmp_path / "ppo" / "metrics.jsonl").read_text().splitlines())
    steps = [row for row in rows if row["role"] == "trainer" and "loss" in row]
    losses = [row["value_loss"] for row in steps]
    assert len(losses) == 6
    # values start at 0, so the first loss is half the mean square of the reward; a constant alone takes most of it away
    assert losses[0] == pytest.approx(steps[0]["return_mean"] / 2, abs=1e-6)
    assert sum(losses[2:]) / 4 < 0.75 * losses[0]
    assert steps[0]["value_mean"] == 0.0
    assert abs(steps[-1]["value_mean"] - steps[-1]["return_mean"]) < 0.3
    assert all(row["critic_grad_norm"] > 0 for row in steps)


@pytest.mark.parametrize("model", [{}, {"lora": {"rank": 4}}], ids=["full", "adapters"])
def test_case_42_a_deterministic_run_with_a_critic_that_failed_is_resumed_exactly(
    bench: Any, failpoints: Any, model: Any
):
    kl = {"use": "k1", "place": "reward", "coefficient": 0.05}
    run = {
        "algorithm": {**PPO, "critic": {**CRITIC, "warmup_steps": 1, "value_clip": 0.2}, "kl": kl},
        "trainer": {"steps": 4, "save_every": 2},
        "deterministic": True,
        "model": model,
    }
    bench.run("whole", **run)
    failpoints("trainer.checkpoint.after_rename:1:raise")
    with pytest.raises(RunFailed, match="failpoint"):
        bench.run("cut", **run)
    failpoints("")
    bench.run("cut", **run, options={"resume": True})
    assert bench.weights("cut") == bench.weights("whole")
    assert bench.steps("cut") == bench.steps("whole")
    assert [row["num_updates"] for row in bench.steps("whole")] == [0, 1, 1, 1]


def test_a_student_learns_from_a_teacher_of_its_vocabulary_and_from_no_other(bench: Any, tmp_path: Path):
    save_tiny_policy(tmp_path / "teacher", hidden=48, seed=7)
    algorithm = {"use": "grpo", "group_size": 2, "advantage": "on_policy_distill"}
    summary = bench.run("distil", algorithm=algorithm, teacher={"path": str(tmp_path / "teacher")})
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    assert all(row["grad_norm"] > 0 for row in bench.steps("distil"))
    with pytest.raises(ConfigError, match=r"teacher\.path: \d+ of \d+ tokens differ"):
        bench.run("other", algorithm=algorithm, teacher={"path": "triune/nano"})
