"""kill -9 of PostgreSQL itself, alone and with everything else, and of processes whose store is on it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from benchmarks import crash_scenarios as scenarios
from benchmarks.crash_flight import STEPS, TASKS_PER_STEP
from benchmarks.crash_scenarios import Flown, Site

from triune.testing import postgres

pytest.importorskip("psycopg")
pytestmark = [pytest.mark.crash, pytest.mark.postgres, pytest.mark.timeout(600)]

EXPECTED = Counter(f"t{number:02d}" for number in range(STEPS * TASKS_PER_STEP))
"""What a run trains that nobody kills: the tasks in their order, each once."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A run's folder and a server that may be killed."""
    binaries = postgres.find_binaries()
    if binaries is None:
        pytest.skip(postgres.MISSING)
    server = postgres.PostgresServer(binaries)
    server.start()
    yield Site(tmp_path, server)
    server.remove()


def test_case_38_on_a_server_too_a_run_killed_at_every_named_place_trains_each_task_once(site: Site):
    flight, trained = scenarios.killed_at_failpoints(site)
    assert flight.kills == list(scenarios.FAILPOINTS)
    assert trained == EXPECTED


@pytest.mark.parametrize(
    ("name", "fly", "num"),
    [
        ("comes back", scenarios.server_killed, 4),
        ("stays away", scenarios.server_gone, 1),
        ("with everything else", scenarios.everything_killed, 1),
    ],
)
def test_case_38_a_server_killed_at_random_loses_nothing_and_nothing_is_trained_twice(
    site: Site, name: str, fly: Callable[[Site, int, random.Random], Flown], num: int
):
    flight, trained = fly(site, num, random.Random(name))
    assert flight.kills
    assert trained == EXPECTED
