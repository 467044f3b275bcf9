"""What the crash campaign plans and what its checks find, without killing anybody."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from benchmarks import crash_campaign, crash_checks, crash_scenarios
from benchmarks.crash_campaign import Campaign
from benchmarks.crash_table import Line, table

import triune

SOURCES = Path(triune.__file__).parent


class Hangar:
    """Of a machine with or without a server's programs."""

    def __init__(self, *, has_server: bool) -> None:
        self.binaries = Path("/usr/lib/postgresql/17/bin") if has_server else None


def plan(kills: int, *, has_server: bool) -> list[Line]:
    hangar: Any = Hangar(has_server=has_server)
    return Campaign(hangar, seed=0).plan(list(crash_campaign.SCENARIOS), kills)


def test_every_failpoint_of_the_program_is_in_the_campaign():
    found = {name for file in SOURCES.rglob("*.py") for name in re.findall(r'failpoint\("([^"]+)"\)', file.read_text())}
    single = (crash_scenarios.AMENDING, crash_scenarios.CLEARING, crash_scenarios.BETWEEN_STAGES)
    places = (*crash_scenarios.FAILPOINTS, *crash_scenarios.WRITING, *single)
    assert found == {place.partition(":")[0] for place in places}


@pytest.mark.parametrize("has_server", [True, False])
@pytest.mark.parametrize("kills", [0, 7, 200])
def test_the_planned_kills_are_those_asked_for_and_fall_on_every_scenario(kills: int, has_server: bool):
    lines = plan(kills, has_server=has_server)
    assert sum(line.wanted for line in lines) == kills
    stores = {"sqlite", "postgres"} if has_server else {"sqlite"}
    assert {line.store for line in lines} == stores
    if kills == 200:
        idle = {line.scenario for line in lines if not line.wanted}
        assert idle == {"failpoints", "amending", "segments", "between stages"}


def test_kills_of_the_server_are_planned_only_on_a_server():
    assert "server" not in {line.scenario for line in plan(200, has_server=False)}
    assert {line.store for line in plan(200, has_server=True) if line.scenario == "server"} == {"postgres"}


def test_the_diary_counts_only_batches_on_the_line_that_survived(tmp_path: Path):
    diary = tmp_path / "diary.jsonl"
    pages = [(1, "a"), (1, "b"), (1, "c"), (2, "c"), (2, "d")]  # 1 was killed after its third step, saved after two
    diary.write_text("".join(json.dumps({"pid": pid, "uses": [[entry, 1, 0]]}) + "\n" for pid, entry in pages))
    survived = crash_checks.surviving_uses(diary, [(1, 0), (2, 2)], 4)
    assert Counter(survived) == Counter({("a", 1): 1, ("b", 1): 1, ("c", 1): 1, ("d", 1): 1})
    with pytest.raises(crash_checks.Broken, match="only 2 were trained"):
        crash_checks.surviving_uses(diary, [(1, 0), (2, 2)], 5)


def test_the_table_sums_its_lines_and_leaves_out_what_was_not_flown():
    lines = [Line("sqlite", "run", 3), Line("postgres", "both", 2), Line("sqlite", "train", 0)]
    for line in lines[:2]:
        line.runs = 1
        line.add(["1.0 s after its start", "0.3 s into its work"], [0, 2], 10.0)
    rows = [[cell.strip() for cell in text.strip("|").split("|")] for text in table(lines).splitlines()]
    assert rows[2] == ["sqlite", "run", "1", "2", "1", "0:1 2:1", "5.0", "0", "0", "as uninterrupted"]
    assert rows[4] == ["", "all", "2", "4", "2", "", "5.0", "0", "0", "0 broken"]
    assert len(rows) == 5
