"""Alarms and the console."""

import pytest
from test_monitor_rows import open_monitor, rows

from triune import registry
from triune.errors import TrainingError
from triune.monitor import MonitorSettings, RunInfo
from triune.monitor.sinks.console import Console


def rings_at(name, stream, **fields):
    alarm, state = registry.build("alarm", {"use": name, **fields}, "alarm"), {}
    for step, metrics in enumerate(stream):
        state, message = alarm(metrics, state)
        if message:
            return step
    return None


def test_entropy_collapse_rings_while_the_task_is_unsolved_and_not_after():
    assert rings_at("entropy_collapse", [{"entropy": 0.001, "reward": 0.3}] * 9, patience=3) == 2
    assert rings_at("entropy_collapse", [{"entropy": 0.001, "reward": 0.95}] * 9, patience=3) is None
    assert rings_at("entropy_collapse", [{"entropy": 0.001}, {"entropy": 0.5}] * 9, patience=2) is None


def test_logprob_gap_rings_above_its_limit():
    assert rings_at("logprob_gap", [{"logprob_gap": 0.3}] * 9, patience=3) == 2
    assert rings_at("logprob_gap", [{"logprob_gap": 0.02}] * 50) is None


def test_kl_growth_rings_on_acceleration_and_not_on_slow_drift():
    assert rings_at("kl_growth", [{"kl": 0.01 * 1.3**i} for i in range(40)]) is not None
    assert rings_at("kl_growth", [{"kl": 0.3 + 0.001 * i} for i in range(200)]) is None


def test_length_drift_rings_when_answers_grow_without_reward():
    grown = [{"response_length": 10, "reward": 0.5}] * 5 + [{"response_length": 40, "reward": 0.5}] * 9
    paid = [{"response_length": 10, "reward": 0.2}] * 5 + [{"response_length": 40, "reward": 0.9}] * 9
    assert rings_at("length_drift", grown) == 9
    assert rings_at("length_drift", paid) is None


def test_reward_hacking_rings_when_a_part_rises_while_the_task_falls():
    hacked = [{"accuracy": 0.8 - 0.01 * i, "reward/format": 0.2 + 0.01 * i} for i in range(60)]
    honest = [{"accuracy": 0.2 + 0.01 * i, "reward/format": 0.2 + 0.01 * i} for i in range(60)]
    assert rings_at("reward_hacking", hacked) is not None
    assert rings_at("reward_hacking", honest) is None


def test_an_alarm_that_warns_says_so_once_per_episode_and_the_run_goes_on(tmp_path):
    monitor = open_monitor(tmp_path, alarms=[{"use": "logprob_gap", "patience": 1}])
    for step in range(1, 6):
        monitor.log({"logprob_gap": 1.0}, role="trainer", step=step)
    monitor.finish("finished", "done")
    notes = [row for row in rows(tmp_path) if "note" in row]
    assert len(notes) == 1
    assert notes[0]["alarm/logprob_gap"] == 1.0


def test_an_alarm_that_stops_ends_the_run_at_the_step_boundary_with_what_to_do(tmp_path):
    monitor = open_monitor(tmp_path, alarms=[{"use": "logprob_gap", "patience": 2, "policy": "stop"}])
    monitor.log({"logprob_gap": 1.0}, role="trainer", step=1)
    with pytest.raises(TrainingError, match=r"step 2: alarm logprob_gap.*policy: warn"):
        monitor.log({"logprob_gap": 1.0}, role="trainer", step=2)
    monitor.finish("failed", "alarm")


def test_case_52_an_unknown_alarm_field_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="did you mean 'limit'"):
        MonitorSettings.model_validate({"alarms": [{"use": "logprob_gap", "limits": 1}]})


def test_the_console_prints_one_plain_line_per_step_when_the_output_is_no_terminal(tmp_path, capsys):
    monitor = open_monitor(tmp_path, sinks=["console"])
    for step in range(1, 4):
        monitor.log({"reward": step / 10, "loss": 0.5}, role="trainer", step=step)
    monitor.log({"eval/add/mean@1": 0.75, "eval/add/mean@1/low": 0.7, "eval/add/mean@1/high": 0.8}, role="eval", step=3)
    monitor.note("alarm nothing")
    monitor.finish("finished", "done")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 1/5  reward 0.100  loss +0.5000")
    assert lines[3:] == ["eval at step 3  add/mean@1 0.750 [0.700, 0.800]", "  alarm nothing"]


def test_the_live_panel_shows_progress_and_waits(tmp_path, capsys):
    sink = Console(live=True)(RunInfo(name="demo", folder=tmp_path, steps=4))
    sink.merged(2, {"reward": 0.5})
    sink.show_waits(["explorer waits for a free slot since 12 s"])
    sink._live.refresh()
    sink.close()
    out = capsys.readouterr().out
    assert "step 2/4" in out
    assert "explorer waits for a free slot since 12 s" in out
