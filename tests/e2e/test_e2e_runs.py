"""Real runs of a tiny random model, from the configuration to the exported folder."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import triune
from triune.buffer import StoredBuffer
from triune.cli.boundary import run as command_line
from triune.errors import RunFailed, StoreError

STEPS = {"steps": 5, "save_every": 2}


def test_a_run_ends_with_exit_code_0_a_full_summary_and_a_row_of_each_role_for_every_step(bench: Any, capsys: Any):
    file = bench.file(tasks={"reward": "format"} | {"reward": {"use": "format", "pattern": ".*[a-m].*"}})
    assert command_line(["run", str(file)]) == 0
    summary = bench.summary()
    assert (summary["status"], summary["steps"], summary["exit_reason"]) == ("finished", 3, "3 steps done")
    assert {"reward", "loss", "grad_norm", "entropy", "staleness", "logprob_gap"} <= summary["metrics"].keys()
    assert summary["metrics"]["reward"]["first_step"] == 1
    assert summary["metrics"]["reward"]["last_step"] == 3
    for role in ("trainer", "explorer"):
        assert [row["step"] for row in bench.steps(role=role)] == [1, 2, 3]
    folder = bench.runs / "small"
    assert {path.name for path in folder.iterdir()} >= {"run.resolved.json", "buffer.sqlite", "checkpoints", "export"}
    assert "finished: 3 steps done" in capsys.readouterr().out


def test_a_deterministic_run_gives_the_same_weights_bit_for_bit_and_the_same_metrics(bench: Any):
    for name in "ab":
        bench.run(name, deterministic=True)
    assert_same(bench, "a", "b")
    bench.run("c", deterministic=True, seed=1)
    assert bench.weights("c") != bench.weights("a")


@pytest.mark.parametrize("where", ["trainer.publish.after:5", "trainer.checkpoint.after_rename:2"])
def test_case_42_a_deterministic_run_that_failed_and_was_resumed_ends_with_the_weights_of_one_that_did_not(
    bench: Any, failpoints: Any, where: str
):
    bench.run("whole", deterministic=True, trainer=STEPS)
    failpoints(f"{where}:raise")
    with pytest.raises(RunFailed, match="failpoint"):
        bench.run("cut", deterministic=True, trainer=STEPS)
    assert bench.summary("cut")["status"] == "failed"
    failpoints("")
    bench.run("cut", deterministic=True, trainer=STEPS, options={"resume": True})
    assert_same(bench, "cut", "whole")


@pytest.mark.parametrize(("call", "number"), [("put", 10), ("put", 14), ("admit_next", 3)])
def test_case_42_a_deterministic_run_whose_store_failed_between_the_groups_of_a_step_is_resumed_exactly(
    bench: Any, monkeypatch: Any, call: str, number: int
):
    bench.run("whole", deterministic=True, trainer=STEPS)
    real, calls = getattr(StoredBuffer, call), []

    async def failing(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            raise StoreError("the store", "the disk is full")
        return await real(*args, **options)

    monkeypatch.setattr(StoredBuffer, call, failing)
    with pytest.raises(RunFailed, match="the disk is full"):
        bench.run("cut", deterministic=True, trainer=STEPS)
    bench.run("cut", deterministic=True, trainer=STEPS, options={"resume": True})
    assert_same(bench, "cut", "whole")


VARIANTS: dict[str, dict[str, Any]] = {
    "adapters": {"model": {"lora": {"rank": 4}}},
    "reference": {"algorithm": {"kl": {"use": "k3", "coefficient": 0.1}}},
    "several updates a step": {"trainer": {**STEPS, "epochs": 2, "mini_batches": 2}},
    "a version every other step": {"sync": {"every": 2}},
    "shuffled": {"tasks": {"order": "shuffled", "epochs": 1}},
    "supervised": {
        "algorithm": {"use": "sft", "group_size": None},
        "tasks": {"reward": None},
        "trainer": {**STEPS, "tasks_per_step": None, "sequences_per_step": 4},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_case_42_every_kind_of_run_is_resumed_exactly(bench: Any, failpoints: Any, variant: str):
    sections = {"deterministic": True, "trainer": STEPS, **VARIANTS[variant]}
    bench.run("whole", **sections)
    failpoints("trainer.checkpoint.after_rename:2:raise")
    with pytest.raises(RunFailed, match="failpoint"):
        bench.run("cut", **sections)
    failpoints("")
    bench.run("cut", **sections, options={"resume": True})
    assert_same(bench, "cut", "whole")


def assert_same(bench: Any, one: str, other: str) -> None:
    assert bench.weights(one) == bench.weights(other)
    for role in ("trainer", "explorer"):
        assert bench.steps(one, role) == bench.steps(other, role)


def test_a_finished_run_is_not_begun_again_by_accident_and_a_restart_keeps_the_old_folder(bench: Any, capsys: Any):
    bench.run()
    assert command_line(["run", str(bench.file())]) == 2
    assert "holds a run already (finished, 3 steps)" in capsys.readouterr().err
    bench.run(options={"restart": True})
    assert (bench.runs / "small.1" / "summary.json").exists()
    assert bench.run(options={"resume": True})["steps"] == 3


def test_functions_from_a_notebook_run_inside_its_running_event_loop(bench: Any):
    asked: list[str] = []

    async def workflow(task: triune.Task, model: triune.Model) -> float:
        answer = await model.chat().ask(task.data["question"])
        asked.append(task.key)
        return float(len(answer) % 2)

    async def cell() -> dict[str, Any]:
        return triune.run(bench.config(tasks={"reward": None}), workflow=workflow)

    assert asyncio.run(cell())["status"] == "finished"
    assert len(asked) == 3 * 4 * 2


def test_a_plain_function_may_be_the_workflow(bench: Any):
    def workflow(task: triune.Task, model: triune.Model, reward: Any) -> Any:
        return reward(task, model.generate(task.data["question"]).text)

    assert bench.run(options={"workflow": workflow})["status"] == "finished"


@pytest.mark.parametrize("style", ["drain", "inflight"])
def test_an_asynchronous_run_never_trains_on_what_is_older_than_its_bound(bench: Any, style: str):
    bench.run(sync={"max_staleness": 2, "style": style}, trainer={"steps": 6})
    rows = bench.steps()
    assert len(rows) == 6
    assert max(row["staleness_max"] for row in rows) <= 2
    assert max(row["staleness_max"] for row in rows) > 0


@pytest.mark.parametrize("deterministic", [False, True])
def test_case_45_a_run_whose_tasks_run_out_trains_the_short_last_batch_and_ends_well(bench: Any, deterministic: bool):
    summary = bench.run(tasks={"epochs": 1}, trainer={"steps": 9, "tasks_per_step": 16}, deterministic=deterministic)
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    assert summary["exit_reason"] == "the data ended after 3 steps"
    assert [row["num_sequences"] for row in bench.steps()] == [32, 32, 16]


def test_groups_that_an_operator_drops_give_their_slots_to_others(bench: Any):
    bench.run(pipeline=[{"use": "drop_flat_groups"}], trainer={"steps": 4})
    assert [row["num_sequences"] for row in bench.steps()] == [8] * 4
    assert sum(row["groups"] for row in bench.rows(role="explorer")) > 16


def test_a_kl_term_holds_the_policy_to_its_reference(bench: Any):
    bench.run("free", trainer={"steps": 4})
    bench.run("held", trainer={"steps": 4}, algorithm={"kl": {"use": "k3", "coefficient": 0.1}})
    found = [row["kl"] for row in bench.steps("held")]
    assert found[0] == pytest.approx(0, abs=1e-6)
    assert found[-1] > 1e-5
    assert bench.weights("held") != bench.weights("free")


def test_case_50_a_run_with_adapters_exports_whole_weights_that_load_and_say_what_the_policy_says(bench: Any):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    bench.run(model={"lora": {"rank": 4}})
    folder = bench.runs / "small" / "export"
    model = AutoModelForCausalLM.from_pretrained(folder)
    names = {name for name, _ in model.named_parameters()}
    assert not any("lora" in name for name in names)
    before = AutoModelForCausalLM.from_pretrained(bench.shared / "model")
    changed = [
        name
        for (name, new), (_, old) in zip(model.named_parameters(), before.named_parameters(), strict=True)
        if (new != old).any()
    ]
    assert changed
    assert AutoTokenizer.from_pretrained(folder).chat_template


@pytest.mark.parametrize("during", ["hold", "copy", "checkpoint"])
def test_versions_are_measured_when_they_are_due_each_row_naming_its_version(bench: Any, during: str):
    held_out = {"use": "jsonl", "path": str(bench.shared / "tasks.jsonl"), "limit": 6, "name": "held"}
    bench.run(
        eval={"every": 2, "tasks": held_out, "temperature": 0, "max_tokens": 4, "during": during},
        trainer={"steps": 4, "save_every": 1, "keep_checkpoints": 9},
    )
    rows = [json.loads(line) for line in (bench.runs / "small" / "eval.jsonl").read_text().splitlines()]
    measured = sorted({(row["step"], row["version"]) for row in rows})
    assert measured == ([] if during == "checkpoint" else [(0, 0)]) + [(2, 2), (4, 4)]
    assert bench.summary()["metrics"]["eval/held/mean@1"]["last_step"] == 4


def test_supervised_training_on_questions_and_answers_lowers_the_loss(bench: Any):
    bench.run(
        algorithm={"use": "sft", "group_size": None},
        tasks={"reward": None},
        trainer={"steps": 12, "tasks_per_step": None, "sequences_per_step": 8, "learning_rate": 1e-2},
    )
    losses = [row["loss"] for row in bench.steps()]
    assert len(losses) == 12
    assert losses[-1] < losses[0] / 1.5


def test_all_checkpoints_of_a_run_are_measured_by_bench(bench: Any, capsys: Any):
    held_out = {"use": "jsonl", "path": str(bench.shared / "tasks.jsonl"), "limit": 6, "name": "held"}
    file = bench.file(
        tasks={"reward": "last_number"},
        eval={"every": 0, "tasks": {**held_out, "reward": "last_number"}, "max_tokens": 4},
        trainer={"steps": 2, "save_every": 1},
    )
    assert command_line(["run", str(file)]) == 0
    capsys.readouterr()
    assert command_line(["bench", str(bench.runs / "small"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["step"], row["version"]) for row in rows] == [(1, 1), (2, 2)]
    assert all(0 <= row["mean@1"] <= 1 for row in rows)


def test_an_exported_checkpoint_says_the_same_greedy_text_as_the_runs_own_export(bench: Any, capsys: Any):
    bench.run()
    out = bench.folder / "model"
    assert command_line(["export", str(bench.runs / "small"), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert greedy(out) == greedy(bench.runs / "small" / "export")
    assert (out / "model.safetensors").read_bytes() == bench.weights()


def greedy(folder: Path) -> list[int]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1="}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model.generate(**prompt, max_new_tokens=12, do_sample=False)[0].tolist()
