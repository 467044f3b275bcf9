"""Rows, stages, waits and summaries of the monitor."""

import json
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from triune.errors import TrainingError
from triune.monitor import MonitorSettings, RunInfo, RunMonitor
from triune.monitor.series import Series
from triune.monitor.steps import StepMerger


class FakeClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def open_monitor(folder: Path, clock=None, **settings):
    settings = {"sinks": ["jsonl"], "curve": False, **settings}
    info = RunInfo(name="test", folder=folder, steps=5, roles=("trainer",))
    return RunMonitor(MonitorSettings.model_validate(settings), info, clock=clock or FakeClock()).start()


def rows(folder: Path):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_row_has_step_and_role_and_its_metrics(tmp_path):
    monitor = open_monitor(tmp_path)
    monitor.log({"reward": 0.5}, role="explorer", step=0)
    monitor.log({"loss": float("nan")}, role="trainer", step=1)
    monitor.finish("finished", "done")
    explorer, trainer = rows(tmp_path)
    assert (explorer["step"], explorer["role"], explorer["reward"]) == (0, "explorer", 0.5)
    assert (trainer["step"], trainer["role"], trainer["loss"]) == (1, "trainer", None)


def test_stages_are_summed_into_the_next_row_of_their_role(tmp_path):
    clock = FakeClock()
    monitor = open_monitor(tmp_path, clock)
    for _ in range(2):
        with monitor.timed("trainer/update"):
            clock.now += 1.5
        with monitor.timed("encode"):
            clock.now += 0.25
    monitor.log({}, role="explorer", step=0)
    monitor.log({}, role="trainer", step=1)
    monitor.log({}, role="trainer", step=2)
    monitor.finish("finished", "done")
    explorer, first, second = rows(tmp_path)
    assert explorer["time/encode_s"] == 0.5
    assert "time/update_s" not in explorer
    assert first["time/update_s"] == 3.0
    assert "time/update_s" not in second


def test_idle_ratio_is_the_share_of_time_a_role_waited_counting_overlaps_once(tmp_path):
    clock = FakeClock()
    monitor = open_monitor(tmp_path, clock)
    with monitor.waiting("trainer", "a full batch"):
        clock.now += 1
        with monitor.waiting("trainer", "a checkpoint"):
            clock.now += 1
    clock.now += 6
    monitor.log({}, role="trainer", step=1)
    clock.now += 4
    monitor.log({}, role="trainer", step=2)
    monitor.finish("finished", "done")
    assert [row["idle_ratio"] for row in rows(tmp_path)] == [0.25, 0.0]


def test_names_beyond_the_limit_are_left_out_once_and_do_not_freeze_those_that_are_known(tmp_path, monkeypatch):
    monitor = open_monitor(tmp_path)
    monitor.log({"loss": 3.0}, role="trainer", step=1)
    monkeypatch.setattr("triune.monitor.monitor.MAX_METRICS", 1)
    monitor.log({"other": 0.0, "more": 0.0, "loss": 2.0}, role="trainer", step=2)
    monitor.log({"more": 0.0, "loss": 1.0}, role="trainer", step=3)
    summary = json.loads(monitor.finish("finished", "done").read_text())
    assert summary["metrics"]["loss"]["last"] == 1.0
    assert "more" not in summary["metrics"]
    (note,) = [note for note in monitor.notes if "not summarised" in note]
    assert "and later ones" in note


def test_a_wait_longer_than_the_heartbeat_is_said_with_its_reason_and_age(tmp_path):
    clock = FakeClock()
    monitor = open_monitor(tmp_path, clock, heartbeat_s=10)
    with monitor.waiting("explorer", "a free slot"):
        clock.now += 9
        monitor.beat()
        clock.now += 3
        monitor.beat()
        monitor.beat()
    monitor.finish("finished", "done")
    assert [row["note"] for row in rows(tmp_path)] == ["explorer waits for a free slot since 12 s"]


def test_the_heartbeat_speaks_without_anybody_calling_it(tmp_path):
    monitor = open_monitor(tmp_path, time.monotonic, heartbeat_s=0.05)
    with monitor.waiting("trainer", "a full batch"):
        time.sleep(0.25)
    monitor.finish("finished", "done")
    assert "trainer waits for a full batch" in rows(tmp_path)[0]["note"]


def test_summary_holds_status_reason_and_first_and_last_values(tmp_path):
    monitor = open_monitor(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "running"
    for step, reward in enumerate([0.2, 0.4, 0.8], start=1):
        monitor.log({"reward": reward - 0.1}, role="explorer", step=step - 1)
        monitor.log({"reward": reward}, role="trainer", step=step)
    monitor.log({"eval/add/mean@1": 0.7}, role="eval", step=3)
    monitor.finish("finished", "3 steps", export="export")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["exit_reason"]) == ("finished", 3, "3 steps")
    assert (summary["metrics"]["reward"]["first"], summary["metrics"]["reward"]["last"]) == (0.2, 0.8)
    assert summary["metrics"]["eval/add/mean@1"]["last"] == 0.7
    assert summary["export"] == "export"


def test_case_53_a_failed_run_says_so_in_its_summary_with_the_four_parts(tmp_path):
    monitor = open_monitor(tmp_path)
    monitor.finish("failed", "loss is NaN", error=TrainingError("step 3", "loss is nan", "a number", "lower the rate"))
    error = json.loads((tmp_path / "summary.json").read_text())["error"]
    assert (error["where"], error["found"], error["expected"], error["do"]) == (
        "step 3",
        "loss is nan",
        "a number",
        "lower the rate",
    )


def test_the_explorers_row_that_follows_the_trainers_belongs_to_the_same_step(tmp_path):
    merger = StepMerger(("explorer", "trainer"))
    assert merger.add("trainer", 1, {"loss": 1.0}) == []
    assert merger.add("explorer", 1, {"reward": 0.25, "time/swap_s": 2.0}) == [
        (1, {"reward": 0.25, "time/swap_s": 2.0, "loss": 1.0})
    ]
    assert merger.add("trainer", 2, {"loss": 2.0}) == []
    for step in (3, 4):
        assert merger.add("trainer", step, {}) == [(step - 1, {"loss": 2.0} if step == 3 else {})]
    assert merger.add("trainer", 5, {"loss": 5.0}) == [(4, {}), (5, {"loss": 5.0})], "no explorer logs any more"
    assert merger.add("explorer", 6, {"reward": 0.5}) == []
    assert merger.add("trainer", 6, {"loss": 6.0}) == []
    assert merger.rest() == [(6, {"reward": 0.5, "loss": 6.0})]


def test_an_explore_only_run_completes_a_step_when_the_version_moves_on(tmp_path):
    monitor = open_monitor(tmp_path)
    for reward in (0.0, 1.0):
        monitor.log({"reward": reward}, role="explorer", step=0)
    monitor.log({"reward": 1.0}, role="explorer", step=1)
    monitor.finish("finished", "end of tasks")
    reward = json.loads((tmp_path / "summary.json").read_text())["metrics"]["reward"]
    assert (reward["first"], reward["last"]) == (0.5, 1.0)


def test_a_torn_last_line_is_cut_off_at_the_next_start(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step":1,"role":"trainer"}\n{"step":2,"ro')
    monitor = open_monitor(tmp_path)
    monitor.log({}, role="trainer", step=2)
    monitor.finish("finished", "done")
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


def test_a_resumed_run_keeps_its_first_values_and_forgets_the_lost_line(tmp_path):
    monitor = open_monitor(tmp_path)
    for step, reward in [(1, 0.1), (2, 0.2), (3, 9.0)]:
        monitor.log({"reward": reward}, role="trainer", step=step)
    monitor.finish("interrupted", "Ctrl-C")
    info = RunInfo(name="test", folder=tmp_path, steps=5)
    settings = MonitorSettings.model_validate({"sinks": ["jsonl"], "curve": False})
    for resumed, reward in [(2, 0.3), (3, 0.4)]:
        again = RunMonitor(settings, info).start(resumed_step=resumed)
        again.log({"reward": reward}, role="trainer", step=resumed + 1)
        again.finish("finished", "done")
    reward = json.loads((tmp_path / "summary.json").read_text())["metrics"]["reward"]
    assert (reward["first"], reward["last"], reward["max"]) == (0.1, 0.4, 0.4)


class FullDisk:
    def write(self, row):
        raise OSError(28, "No space left on device")

    def merged(self, step, metrics):
        pass

    def close(self):
        pass


@dataclass(frozen=True, kw_only=True)
class FullDiskSink:
    def __call__(self, info):
        return FullDisk()


def test_a_full_disk_names_the_sink_once_and_the_run_goes_on(tmp_path, capsys):
    monitor = open_monitor(tmp_path, sinks=[FullDiskSink(), "jsonl"])
    monitor.log({"loss": 1.0}, role="trainer", step=1)
    monitor.log({"loss": 1.0}, role="trainer", step=2)
    monitor.finish("finished", "done")
    assert capsys.readouterr().err.count("sink fulldisksink failed (No space left on device)") == 1
    assert [row["step"] for row in rows(tmp_path) if row["role"] == "trainer"] == [1, 2]


def test_a_full_disk_ends_the_run_when_the_policy_says_stop(tmp_path):
    monitor = open_monitor(tmp_path, sinks=[FullDiskSink()], on_sink_failure="stop")
    monitor.log({"reward": 1.0}, role="explorer", step=0)
    with pytest.raises(TrainingError, match=r"monitor\.sinks\.fulldisksink: No space left on device"):
        monitor.log({"loss": 1.0}, role="trainer", step=1)
    monitor.finish("failed", "disk")


def test_a_real_full_device_is_an_error_of_the_jsonl_sink(tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    monitor = open_monitor(tmp_path, on_sink_failure="stop")
    with pytest.raises(TrainingError, match="No space left"):
        monitor.log({"loss": 1.0}, role="trainer", step=1)


def test_a_metric_that_is_no_number_is_named_and_left_out(tmp_path):
    monitor = open_monitor(tmp_path)
    monitor.log({"reward": "high", "loss": 1}, role="trainer", step=1)
    monitor.finish("finished", "done")
    assert "'reward' of trainer is str" in rows(tmp_path)[0]["note"]
    assert rows(tmp_path)[1]["loss"] == 1.0


def test_case_48_memory_of_the_monitor_does_not_grow_with_steps(tmp_path):
    monitor = open_monitor(tmp_path, time.monotonic)

    def steps(start, stop):
        for step in range(start, stop):
            monitor.log({"reward": 0.5, "response_length": 7.0}, role="explorer", step=step)
            monitor.log({"loss": 1.0, "kl": 0.1, "entropy": 0.3}, role="trainer", step=step + 1)

    steps(0, 3000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    steps(3000, 9000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512  # KiB
    assert len(monitor._series["reward"]) <= 1024
    monitor.finish("finished", "done")


def test_a_row_costs_less_than_100_microseconds(tmp_path):
    monitor = open_monitor(tmp_path, time.monotonic)
    row = {f"metric_{i}": 0.5 for i in range(20)}
    best = min(_time_of_100(monitor, row, start) for start in range(0, 1000, 100))
    monitor.finish("finished", "done")
    assert best / 100 < 100e-6


def _time_of_100(monitor, row, start):
    began = time.perf_counter()
    for step in range(start, start + 100):
        monitor.log(row, role="trainer", step=step)
    return time.perf_counter() - began


def test_a_series_keeps_its_shape_in_bounded_memory():
    series = Series(capacity=16)
    for step in range(1000):
        series.add(step, float(step))
    points = list(series)
    assert len(points) <= 17
    assert all(abs(step - value) < 1e-9 for step, value in points)
    assert (series.first, series.last, series.maximum) == ((0, 0.0), (999, 999.0), 999.0)


def test_tensorboard_events_can_be_read_back(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    monitor = open_monitor(tmp_path, sinks=["tensorboard"])
    monitor.log({"loss": 1.5}, role="trainer", step=1)
    monitor.finish("finished", "done")
    (file,) = (tmp_path / "tensorboard").iterdir()
    values = {v.tag: v.tensor.float_val[0] for e in EventFileLoader(str(file)).Load() for v in e.summary.value}
    assert values["trainer/loss"] == 1.5


def test_the_curve_shows_reward_and_evaluations(tmp_path):
    monitor = open_monitor(tmp_path, curve=True)
    for step in range(1, 4):
        monitor.log({"reward": step / 4}, role="trainer", step=step)
        monitor.log({"eval/a/mean@1": 0.5, "eval/a/mean@1/low": 0.4, "eval/a/mean@1/high": 0.6}, role="eval", step=step)
    monitor.finish("finished", "done")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_curve_that_cannot_be_drawn_does_not_hide_how_the_run_ended(tmp_path):
    monitor = open_monitor(tmp_path, curve=True)
    monitor.log({"reward": 0.5}, role="trainer", step=1)
    (tmp_path / "curve.png").mkdir()  # as good as a full disk
    monitor.finish("failed", "the disk is full")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["exit_reason"]) == ("failed", "the disk is full")
    assert any("curve.png" in note for note in summary["notes"])
