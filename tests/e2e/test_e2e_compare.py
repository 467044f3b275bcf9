"""`triune compare`: which runs it makes, what it says about them, and what becomes of those that fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from triune.cli.boundary import run as command_line
from triune.launcher import Start, compare_variants
from triune.testing.run_files import save_run_file

PLUGIN = str(Path(__file__).with_name("e2e_plugin.py"))
REWARD = {"reward": {"use": "format", "pattern": ".*[a-m].*"}}
SHORT = {"trainer": {"steps": 2}, "tasks": REWARD}


def variant(bench: Any, name: str, **sections: Any) -> str:
    config = bench.config(**{**SHORT, **sections})
    del config["name"]
    return str(save_run_file(config, bench.folder / f"{name}.yaml"))


@pytest.fixture
def two(bench: Any) -> list[str]:
    """Two variants that differ in their learning rate."""
    slow = variant(bench, "slow", trainer={"steps": 2, "learning_rate": 1e-4})
    return [variant(bench, "fast"), slow]


def started(said: str) -> list[str]:
    """`fast 0`, `slow 0`, … in the order in which runs were begun."""
    lines = [line for line in said.splitlines() if line.startswith("run ") and ":" not in line]
    return [f"{line.split(', ')[1].split(' ')[0]} {line.rsplit(' ', 1)[1]}" for line in lines]


def rewards(folder: Path) -> dict[int, float]:
    """Step → reward, as the only row that has it says."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["reward"] for row in rows if "reward" in row}


def test_variants_run_in_turn_with_the_same_seeds_and_end_in_a_table_a_picture_and_numbers(
    bench: Any, two: list[str], capsys: Any
):
    out = bench.folder / "both"
    assert command_line(["compare", *two, "seed=3", "--seeds", "2", "--out", str(out), "--json"]) == 0
    said = capsys.readouterr().out
    assert started(said) == ["fast 3", "slow 3", "fast 4", "slow 4"]
    report = json.loads(said.splitlines()[-1])
    assert report == json.loads((out / "compare.json").read_text())
    assert (report["status"], report["metric"], report["seeds"]) == ("finished", "reward", [3, 4])
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    fast, slow = report["variants"]
    for row in (fast, slow):
        curves = [rewards(out / row["name"] / f"seed-{seed}") for seed in (3, 4)]
        assert row["curve"]["steps"] == [1, 2]
        assert row["curve"]["mean"] == pytest.approx([(curves[0][step] + curves[1][step]) / 2 for step in (1, 2)])
        assert row["initial"]["values"] == [curve[1] for curve in curves]
        assert row["final"]["values"] == [curve[2] for curve in curves]
        assert row["difference"]["values"] == pytest.approx([curve[2] - curve[1] for curve in curves])
        assert row["samples"] == 2 * 4 * 2
        assert row["seconds"] > 0
    assert fast["against_first"] is None
    pairs = zip(slow["final"]["values"], fast["final"]["values"], strict=True)
    assert slow["against_first"]["values"] == pytest.approx([one - other for one, other in pairs])
    resolved = json.loads((out / "slow" / "seed-4" / "run.resolved.json").read_text())["config"]
    assert (resolved["seed"], resolved["trainer"]["learning_rate"]) == (4, 1e-4)
    assert "variant\tseeds\tinitial\tfinal\tdifference\tagainst fast\twall-clock\tsamples" in said


def test_finished_runs_are_skipped_a_begun_one_goes_on_and_more_seeds_may_follow(
    bench: Any, two: list[str], capsys: Any, failpoints: Any
):
    words = ["compare", *two, "trainer.save_every=1", "--seeds", "1", "--out", str(bench.folder / "both")]
    failpoints("trainer.checkpoint.after_rename:3:raise")  # after the first step of the second run
    assert command_line(words) == 1
    failpoints("")
    assert command_line(words) == 2
    assert "holds 2 of these runs already" in capsys.readouterr().err
    assert command_line([*words, "--resume"]) == 0
    said = capsys.readouterr().out
    assert "run 1 of 2, fast with seed 0: is finished, skipped" in said
    rows = (bench.folder / "both" / "slow" / "seed-0" / "metrics.jsonl").read_text()
    assert '"resumed_step":1' in rows.replace(" ", "").replace("1.0", "1")
    words[words.index("1", 4)] = "2"
    assert command_line([*words, "--resume"]) == 0
    assert started(capsys.readouterr().out) == ["fast 1", "slow 1"]
    assert command_line([*words, "--restart"]) == 0
    assert len(started(capsys.readouterr().out)) == 4
    assert (bench.folder / "both" / "fast" / "seed-0.1" / "summary.json").exists()


def test_a_failing_variant_is_named_after_the_others_are_done_and_the_table_says_so(
    bench: Any, two: list[str], capsys: Any
):
    bad = variant(bench, "bad", plugins=[PLUGIN], tasks={"workflow": "raises", "reward": None})
    out = bench.folder / "three"
    assert command_line(["compare", two[0], bad, two[1], "--seeds", "2", "--out", str(out)]) == 1
    said = capsys.readouterr()
    assert "variant bad" in said.err
    assert "no such tool" in said.err
    assert "--resume --out" in said.err
    assert "bad (failed)\t0 of 2" in said.out
    assert "bad with seed 1: left out, an earlier one failed" in said.out
    report = json.loads((out / "compare.json").read_text())
    assert report["status"] == "failed"
    assert [(row["status"], row["seeds"]) for row in report["variants"]] == [
        ("finished", [0, 1]),
        ("failed", []),
        ("finished", [0, 1]),
    ]
    assert report["variants"][2]["against_first"] is not None


def test_held_out_tasks_are_compared_where_every_variant_measures_them(bench: Any, two: list[str], capsys: Any):
    held_out = {"use": "jsonl", "path": str(bench.shared / "tasks.jsonl"), "limit": 4, **REWARD}
    evaluated = variant(bench, "evaluated", eval={"every": 1, "tasks": held_out, "max_tokens": 4})
    report = compare_variants([evaluated], seeds=1, out=bench.folder / "one")
    assert report["metric"] == "eval/reward"
    row = report["variants"][0]
    assert row["curve"]["steps"] == [0, 1, 2]
    assert (row["initial"]["low"], row["curve"]["low"]) == (None, [None] * 3)
    other = compare_variants([evaluated], seeds=1, out=bench.folder / "one", metric="loss", start=Start.RESUME)
    assert other["variants"][0]["final"] is not None
    words = [
        "compare",
        evaluated,
        "--seeds",
        "1",
        "--out",
        str(bench.folder / "one"),
        "--resume",
        "--metric",
        "rewards",
    ]
    capsys.readouterr()
    assert command_line(words) == 2
    said = capsys.readouterr().err
    assert "evaluated has no rewards" in said
    assert "eval/reward" in said
    assert command_line(["compare", evaluated, two[0], "--metric", "eval/reward"]) == 2
    assert "fast.yaml measures nothing" in capsys.readouterr().err


def test_ctrl_c_keeps_what_is_done_and_a_resume_goes_on(bench: Any, two: list[str], monkeypatch: Any):
    from triune.launcher.local import launch

    calls: list[str] = []

    def interrupted(request: Any) -> Any:
        calls.append(request.config.run_dir.parent.name)
        if len(calls) == 2:
            raise KeyboardInterrupt("SIGINT")
        return launch(request)

    out = bench.folder / "both"
    monkeypatch.setattr("triune.launcher.compare.launch", interrupted)
    assert command_line(["compare", *two, "--seeds", "1", "--out", str(out)]) == 130
    report = json.loads((out / "compare.json").read_text())
    assert report["status"] == "interrupted"
    assert [row["status"] for row in report["variants"]] == ["finished", "unfinished"]
    monkeypatch.undo()
    assert command_line(["compare", *two, "--seeds", "1", "--out", str(out), "--resume"]) == 0
    assert json.loads((out / "compare.json").read_text())["status"] == "finished"


def test_all_that_is_wrong_with_all_variants_is_told_before_anything_starts(bench: Any, two: list[str], capsys: Any):
    staged = variant(bench, "staged", stages=[{"name": "one"}])
    silent = variant(bench, "silent", monitor={"sinks": ["console"]})
    broken = variant(bench, "broken", trainer={"stepz": 3})
    copied = bench.folder / "copy"
    copied.mkdir()
    (copied / "fast.yaml").write_text(Path(two[0]).read_text())
    words = ["compare", two[0], staged, silent, broken, str(copied / "fast.yaml"), "runs_dir=x"]
    assert command_line(words) == 2
    said = capsys.readouterr().err
    for line in (
        "fast: several variants have this name",
        "staged.yaml: stages: found 1 stages; expected a single run",
        "silent.yaml: monitor.sinks: found no jsonl",
        "broken.yaml: trainer.stepz: trainer has no key 'stepz'",
        "override runs_dir: found in a comparison, which names its runs itself; use --out",
    ):
        assert line in said
    assert not bench.runs.exists()
    assert command_line(["compare", "trainer.steps=3"]) == 2
    assert "no run file was named" in capsys.readouterr().err
