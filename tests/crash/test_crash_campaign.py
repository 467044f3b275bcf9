"""kill -9 of real processes on a SQLite file: at named places, and at random a few times (200: make crash-campaign)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks import crash_scenarios as scenarios
from benchmarks.crash_flight import STEPS, TASKS_PER_STEP
from benchmarks.crash_scenarios import Flown, Site

pytestmark = [pytest.mark.crash, pytest.mark.timeout(600)]

NUM_KILLS = 2


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Counter[str]:
    """What a run trains that nobody kills."""
    found, _ = scenarios.uninterrupted(Site(tmp_path_factory.mktemp("whole")), "run")
    assert sum(found.values()) == STEPS * TASKS_PER_STEP
    assert set(found.values()) == {1}
    return found


def test_case_38_killed_at_every_named_place_a_run_still_trains_each_task_once(tmp_path: Path, expected: Counter[str]):
    flight, trained = scenarios.killed_at_failpoints(Site(tmp_path))
    assert flight.kills == list(scenarios.FAILPOINTS)
    assert trained == expected


def test_case_38_a_process_killed_while_it_amends_a_leased_entry_harms_nothing(tmp_path: Path, expected: Counter[str]):
    _, trained = scenarios.killed_while_amending(Site(tmp_path))
    assert trained == expected


def test_case_38_killed_as_segments_are_written_and_cleared_up_a_run_trains_each_task_once(
    tmp_path: Path, expected: Counter[str]
):
    flight, trained = scenarios.killed_with_segments(Site(tmp_path))
    assert flight.kills == [*scenarios.WRITING, scenarios.CLEARING]
    assert trained == expected


@pytest.mark.parametrize(
    ("name", "fly"),
    [
        ("run", scenarios.run_killed),
        ("train", scenarios.train_killed),
        ("explore", scenarios.explore_killed),
        ("both", scenarios.both_killed),
    ],
)
def test_case_38_killed_at_random_and_started_again_a_run_trains_each_task_once(
    tmp_path: Path, expected: Counter[str], name: str, fly: Callable[[Site, int, random.Random], Flown]
):
    flight, trained = fly(Site(tmp_path), NUM_KILLS, random.Random(name))
    assert len(flight.kills) == NUM_KILLS
    assert trained == expected


def test_case_42_a_deterministic_run_killed_and_resumed_ends_with_the_weights_of_one_that_was_not(tmp_path: Path):
    weights = []
    for name, places in (("whole", []), ("killed", ["buffer.put.inside:10", "trainer.checkpoint.after_rename:2"])):
        (tmp_path / name).mkdir()
        flight, _ = scenarios.killed_at_failpoints(Site(tmp_path / name), places, deterministic=True)
        weights.append((flight.run_dir / "export" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
