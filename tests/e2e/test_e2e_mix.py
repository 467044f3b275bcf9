"""MIX from a user's file, and exact resumes of every way to choose what a step trains on."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from triune.buffer import open_buffer
from triune.config import load_config
from triune.errors import ConfigError, RunFailed, TriuneError
from triune.testing.run_files import save_additions

ROOT = Path(__file__).parents[2]
MIX = ROOT / "examples" / "mix"


def sections(shared: Path, **more: Any) -> dict[str, Any]:
    """Sections of a run that mixes answers in, a quarter of four entries."""
    if not (shared / "answers.jsonl").exists():
        save_additions(shared / "answers.jsonl", 5)
    return {"expert": {"use": "jsonl", "path": str(shared / "answers.jsonl"), "order": "sequential"}, **more}


def expert_entries(bench: Any) -> list[tuple[str, str]]:
    """Entries of the buffer `expert` with their states, in the order in which they were put."""
    with sqlite3.connect(bench.runs / "small" / "buffer.sqlite") as store:
        return list(store.execute("SELECT entry, state FROM entries WHERE buffer = 'expert' ORDER BY seq"))


@pytest.mark.parametrize("algorithm", ["my_mix", "mix", "chord"])
def test_a_user_s_file_and_the_built_ins_mix_expert_answers_into_every_step(bench: Any, algorithm: str):
    plugins = [str(MIX / "mix.py")] if algorithm == "my_mix" else []
    bench.run(**sections(bench.shared), algorithm={"use": algorithm}, plugins=plugins)
    rows = bench.steps()
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["num_sequences"] == 3 * 2 + 1
        assert row["sft_loss"] > 0
        assert row["tokens_without_behaviour"] > 0
    assert rows[-1]["sft_loss"] != rows[0]["sft_loss"]


def test_the_user_s_file_is_three_small_classes_and_computes_what_the_built_in_does(bench: Any):
    text = (MIX / "mix.py").read_text()
    code = [line for line in text.splitlines() if line.strip() and not line.strip().startswith(("#", '"""'))]
    assert text[text.index("from dataclasses") :] in (ROOT / "docs" / "howto" / "mix.md").read_text() + "\n"
    assert text.count("class ") == 3
    assert len(code) <= 55
    bench.run("mine", **sections(bench.shared), algorithm={"use": "my_mix"}, plugins=[str(MIX / "mix.py")],
              deterministic=True)  # fmt: skip
    bench.run("theirs", **sections(bench.shared), algorithm={"use": "mix"}, deterministic=True)
    assert bench.weights("mine") == bench.weights("theirs")


def test_the_example_run_files_are_valid_and_differ_only_in_how_they_learn():
    found = {}
    for name in ("grpo", "mix", "chord"):
        config = load_config(MIX / f"{name}.yaml")
        assert config.name == name
        found[name] = {
            key: value
            for key, value in config.to_plain().items()
            if key not in ("name", "algorithm", "expert", "plugins")
        }
    assert found["grpo"] == found["mix"] == found["chord"]


def test_answers_are_read_in_order_again_and_again_and_every_one_is_stored_once(bench: Any):
    bench.run(**sections(bench.shared), algorithm={"use": "mix"}, trainer={"steps": 7})
    found = expert_entries(bench)
    assert [entry for entry, state in found if state == "spent"] == [
        f"small/expert/t{number % 5:02d}/{number}" for number in range(7)
    ]
    assert len(found) == 7 + 2 * 4
    assert bench.summary()["steps"] == 7


def test_questions_of_expert_answers_are_put_as_those_that_are_trained_on(bench: Any):
    workflow = {"use": "single_turn", "system": "Be brief.", "template": "Add: {question}"}
    bench.run(**sections(bench.shared), algorithm={"use": "mix"}, tasks={"workflow": workflow})
    config = load_config(bench.runs / "small")

    async def look() -> Any:
        buffer = open_buffer(config.buffer, bench.runs / "small")
        try:
            return await buffer.read("small/expert/t00/0")
        finally:
            await buffer.close()

    messages = asyncio.run(look()).experiences[0].messages
    assert [message["content"] for message in messages] == ["Be brief.", "Add: 0+0=", "0"]


STEPS = {"steps": 5, "save_every": 2}
STRATEGIES: dict[str, dict[str, Any]] = {
    "mix": {"algorithm": {"use": "mix"}},
    "chord": {"algorithm": {"use": "chord", "policy_loss": {"warmup_steps": 2, "decay_steps": 2}}},
    "replay": {"algorithm": {"sampling": {"use": "replay", "ratio": 0.5, "max_uses": 3, "cooldown": 1}}},
    "dynamic": {"algorithm": {"sampling": {"use": "dynamic", "max_tries": 3}}},
    "drop_flat_groups": {"pipeline": ["drop_flat_groups"]},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("where", ["trainer.checkpoint.after_rename:2", "trainer.publish.after:5"])
def test_case_42_a_run_that_failed_is_resumed_exactly_whatever_its_steps_are_made_of(
    bench: Any, failpoints: Any, strategy: str, where: str
):
    given = {"deterministic": True, "trainer": STEPS, **STRATEGIES[strategy]}
    if strategy in ("mix", "chord"):
        given = sections(bench.shared, **given)
    bench.run("whole", **given)
    failpoints(f"{where}:raise")
    with pytest.raises(RunFailed, match="failpoint"):
        bench.run("cut", **given)
    failpoints("")
    bench.run("cut", **given, options={"resume": True})
    assert bench.weights("cut") == bench.weights("whole")
    assert bench.steps("cut") == bench.steps("whole")


def test_case_30_a_run_whose_groups_are_all_flat_ends_with_its_steps_and_says_so(bench: Any):
    flat = {"reward": lambda task, answer: 0.0}
    summary = bench.run(algorithm={"sampling": {"use": "dynamic", "max_tries": 2}}, options=flat)
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    for row in bench.steps():
        assert (row["num_short"], row["num_flat"], row["num_tries"]) == (4, 8, 2)
        assert row["grad_norm"] == 0


def test_case_30_a_run_whose_operator_drops_every_group_of_endless_tasks_ends_with_the_reason(bench: Any):
    with pytest.raises(RunFailed, match=r"12 groups in a row were dropped, the last by drop_flat_groups"):
        bench.run(
            tasks={"use": "arithmetic", "path": None, "reward": None, "order": None, "digits": 1},
            pipeline=["drop_flat_groups"],
            explorer={"max_dropped": 12},
            options={"reward": lambda task, answer: 0.0},
        )


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"algorithm": {"use": "mix"}}, "expert: found none, and mix takes answers from the buffer `expert`"),
    ({"algorithm": {"use": "grpo"}, "expert": {"use": "arithmetic"}}, "grpo takes nothing from the buffer `expert`"),
    (
        {
            "algorithm": {"use": "mix", "sampling": {"shares": {"main": 0.9, "expert": 0.1}}},
            "expert": {"use": "arithmetic"},
        },
        "algorithm.sampling.shares.expert: found 0.1, and a step has 4 entries",
    ),
    ({"algorithm": {"use": "mix"}, "expert": {"use": "arithmetic", "epochs": 2}}, "`epochs` has no meaning here"),
    ({"algorithm": {"sampling": "freshest"}, "deterministic": True}, "freshest with `deterministic: true`"),
    ({"algorithm": {"sampling": {"use": "replay", "ratio": 0.8}}}, "there would never be enough to replay"),
]


@pytest.mark.parametrize(("sections", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_mixtures_that_cannot_work_are_refused_when_the_file_is_read(bench: Any, sections: Any, message: str):
    with pytest.raises(ConfigError) as found:
        load_config(bench.config(**sections))
    assert message in str(found.value)


def test_rows_without_answers_end_a_mixed_run_with_their_name(bench: Any):
    path = bench.folder / "questions.jsonl"
    path.write_text(json.dumps({"id": "q", "question": "1+1="}) + "\n")
    with pytest.raises(TriuneError, match="the row has no 'answer'"):
        bench.run(expert={"use": "jsonl", "path": str(path)}, algorithm={"use": "mix"})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_explorers_beside_a_trainer_put_every_answer_once(bench: Any):
    file = bench.file(
        **sections(bench.shared), algorithm={"use": "mix"}, tasks={"reward": "last_number"}, sync={"channel": "files"}
    )
    command = str(Path(sys.executable).with_name("triune"))
    roles = [
        subprocess.Popen([command, role, str(file)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for role in ("train", "explore", "explore")
    ]
    try:
        said = [role.communicate(timeout=120)[0] for role in roles]
    finally:
        for role in roles:
            role.kill()
    assert [role.returncode for role in roles] == [0, 0, 0], said
    assert [row["num_from_expert"] for row in bench.steps()] == [1, 1, 1]
    assert [entry for entry, _ in expert_entries(bench)][:3] == [f"small/expert/t0{n}/{n}" for n in range(3)]


def test_a_strategy_that_takes_more_than_it_declares_ends_the_run_with_its_name(bench: Any):
    (bench.shared / "greedy.py").write_text(
        "from dataclasses import dataclass\n"
        "from triune.registry import brick\n"
        '@brick("sampling")\n'
        "@dataclass(frozen=True, kw_only=True)\n"
        "class TakesAll:\n"
        '    """Say half, take all."""\n'
        "    fresh_ratio = 0.5\n"
        '    buffers = ("main",)\n'
        "    async def __call__(self, buffer, num, *, step=0, max_staleness=None, ahead=None):\n"
        "        return await buffer.lease(num, max_staleness=max_staleness)\n"
    )
    plugins = [str(bench.shared / "greedy.py")]
    with pytest.raises(TriuneError, match=r"TakesAll.*asks for 4 fresh groups where at most 2"):
        bench.run(algorithm={"sampling": {"use": "takes_all"}}, plugins=plugins)
