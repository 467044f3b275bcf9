"""kill -9 of real processes: at named places, and at random a few times (often with TRIUNE_CRASH_KILLS=20)."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from benchmarks import crash_harness as harness

pytestmark = [pytest.mark.crash, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Counter[str]:
    """What a run trains that nobody kills."""
    found = harness.uninterrupted(tmp_path_factory.mktemp("whole"))
    assert sum(found.values()) == harness.STEPS * harness.TASKS_PER_STEP
    assert set(found.values()) == {1}
    return found


def test_case_38_killed_at_every_named_place_a_run_still_trains_each_task_once(tmp_path: Path, expected: Counter[str]):
    flight, trained = harness.killed_at_failpoints(tmp_path, harness.FAILPOINTS)
    assert flight.kills == list(harness.FAILPOINTS)
    assert trained == expected


def test_case_38_a_process_killed_while_it_amends_a_leased_entry_harms_nothing(tmp_path: Path, expected: Counter[str]):
    _, trained = harness.killed_while_amending(tmp_path)
    assert trained == expected


def test_case_38_triune_run_killed_at_random_trains_each_task_once(tmp_path: Path, expected: Counter[str]):
    _, trained = harness.killed_at_random(tmp_path, 2, random.Random("run"))
    assert trained == expected


@pytest.mark.parametrize("victim", ["explore", "train"])
def test_case_38_one_of_two_processes_killed_at_random_and_started_again_joins_the_other(
    tmp_path: Path, expected: Counter[str], victim: str
):
    _, trained = harness.one_of_two_killed(tmp_path, victim, 2, random.Random(victim))
    assert trained == expected


def test_case_42_a_deterministic_run_killed_and_resumed_ends_with_the_weights_of_one_that_was_not(tmp_path: Path):
    weights = []
    for name, places in (("whole", []), ("killed", ["buffer.put.inside:10", "trainer.checkpoint.after_rename:2"])):
        (tmp_path / name).mkdir()
        flight, _ = harness.killed_at_failpoints(tmp_path / name, places, deterministic=True)
        weights.append((flight.run_dir / "export" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
