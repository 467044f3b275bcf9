"""kill -9 of everything a run consists of, at random moments and at every named place: `make crash-campaign`.

Every run is killed several times and resumed after each; at its end nothing may be lost and nothing trained twice, what
it trained must be what a run trains that nobody kills, and the store must be sound. Stores: SQLite, and PostgreSQL
where its server's programs are installed.

Sizes: TRIUNE_CRASH_KILLS (random kills in all, default 200), TRIUNE_CRASH_SEED, TRIUNE_CRASH_JOBS (runs at a time).
Arguments name single scenarios; `--table FILE` writes the table as a page. Prints a line for each run, the table, and
as its last line JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import crash_scenarios as scenarios
from benchmarks.crash_checks import Broken
from benchmarks.crash_flight import NUM_TASKS
from benchmarks.crash_scenarios import Flown, Pace, Site
from benchmarks.crash_table import Line, page, row, table
from triune.testing.postgres import MISSING, PostgresServer, find_binaries
from triune.testing.run_files import small_run

PER_RUN = 6
"""Kills that one run survives at most."""

SHAPES = {"one process": ("run",), "two processes": ("train", "explore")}

STORES = ("sqlite", "postgres")

ASYNCHRONOUS = {"sync": {"max_staleness": 1, "style": "inflight", "channel": "memory"}}


@dataclass(frozen=True)
class Scenario:
    """What is done to a run.

    Attributes:
        fly: A site, kills and chance → the run, and what it trained.
        shape: Which uninterrupted run it resembles.
        share: Of the random kills; 0 = it kills at named places, once each.
        stores: Where it can be done.
    """

    fly: Callable[[Site, int, random.Random], Flown]
    shape: str = "two processes"
    share: float = 1.0
    stores: Sequence[str] = STORES


def _at_places(fly: Callable[[Site], Flown]) -> Scenario:
    return Scenario(lambda site, num, chance: fly(site), shape="one process", share=0.0)


SCENARIOS: dict[str, Scenario] = {
    "server": Scenario(scenarios.server_killed, stores=("postgres",)),
    "server, gone": Scenario(scenarios.server_gone, share=0.5, stores=("postgres",)),
    "everything": Scenario(scenarios.everything_killed, stores=("postgres",)),
    "both": Scenario(scenarios.both_killed),
    "train": Scenario(scenarios.train_killed),
    "explore": Scenario(scenarios.explore_killed),
    "run": Scenario(scenarios.run_killed, shape="one process"),
    "run, in flight": Scenario(partial(scenarios.run_killed, **ASYNCHRONOUS), shape="one process"),
    "failpoints": _at_places(scenarios.killed_at_failpoints),
    "amending": _at_places(scenarios.killed_while_amending),
    "segments": _at_places(scenarios.killed_with_segments),
    "between stages": _at_places(scenarios.killed_between_stages),
}
"""What is killed: parts of the store's server, of the run, or a process at named places."""


class Hangar:
    """Folders of runs, and servers that are lent to one run at a time."""

    def __init__(self, root: Path, binaries: Path | None) -> None:
        self.root, self.binaries = root, binaries
        self._idle: list[PostgresServer] = []
        self._made: list[PostgresServer] = []
        small_run(root / "new", num_tasks=NUM_TASKS)

    @contextmanager
    def site(self, store: str, name: str, pace: Pace) -> Iterator[Site]:
        """A folder with a model and tasks, and a server where the store is on one; kept where something broke."""
        folder = self.root / f"{store}-{name}".replace(", ", "-").replace(" ", "-")
        shutil.copytree(self.root / "new", folder)
        server = self._server() if store == "postgres" else None
        try:
            yield Site(folder, server, pace)
        except BaseException:
            if server is not None:
                with suppress(RuntimeError):
                    server.stop("immediate")
            raise
        if server is not None:
            self._idle.append(server)
        shutil.rmtree(folder)

    def _server(self) -> PostgresServer:
        if self._idle:
            return self._idle.pop()
        assert self.binaries is not None, "nothing is planned on a server where there is none"
        server = PostgresServer(self.binaries)
        self._made.append(server)
        server.start()
        return server

    def close(self) -> None:
        """End the servers that nothing broke on."""
        while self._idle:
            self._idle.pop().remove()

    def leave(self, *_: object) -> None:
        """Asked to end (SIGTERM): end the servers, and with them the runs on them, and go."""
        for server in self._made:
            with suppress(RuntimeError, OSError):
                server.remove()
        os._exit(128 + signal.SIGTERM)


class Campaign:
    """Plans the kills, flies the runs, several at a time, and collects a line per scenario and store."""

    def __init__(self, hangar: Hangar, seed: int) -> None:
        self.hangar, self.seed = hangar, seed
        self.stores = STORES if hangar.binaries else STORES[:1]
        self.expected: Counter[str] = Counter()
        self.paces: dict[tuple[str, str], Pace] = {}
        self._says = threading.Lock()

    def look(self, pool: ThreadPoolExecutor) -> None:
        """Fly the runs that nobody kills, of every store and shape: they must train the same.

        Raises:
            Broken: They do not, or not every task once.
        """
        kinds = [(store, shape) for store in self.stores for shape in SHAPES]
        found = list(pool.map(self._uninterrupted, kinds))
        self.paces = {kind: pace for kind, (_, pace) in zip(kinds, found, strict=True)}
        self.expected = found[0][0]
        if any(trained != self.expected for trained, _ in found) or set(self.expected.values()) != {1}:
            raise Broken(f"runs that nobody killed trained {[trained for trained, _ in found]}")

    def _uninterrupted(self, kind: tuple[str, str]) -> tuple[Counter[str], Pace]:
        store, shape = kind
        with self.hangar.site(store, f"whole {shape}", Pace(0.0, 0.0)) as site:
            return scenarios.uninterrupted(site, *SHAPES[shape])

    def plan(self, names: Sequence[str], kills: int) -> list[Line]:
        """A line for each scenario and store, with its part of the random kills, largest remainders first."""
        kinds = [(name, store) for name in names for store in SCENARIOS[name].stores if store in self.stores]
        weights = [SCENARIOS[name].share for name, _ in kinds]
        exact = [kills * weight / (sum(weights) or 1.0) for weight in weights]
        parts = [int(each) for each in exact]
        for at in sorted(range(len(kinds)), key=lambda at: parts[at] - exact[at])[: round(sum(exact)) - sum(parts)]:
            parts[at] += 1
        return [Line(store, name, part) for (name, store), part in zip(kinds, parts, strict=True)]

    def fly(self, line: Line) -> None:
        """All runs of a line; a broken law ends the line, is printed, and its folder is kept."""
        scenario = SCENARIOS[line.scenario]
        wanted = line.wanted if scenario.share else 1
        while len(line.kills) < wanted and not line.broken and line.runs < wanted + 2:
            line.runs += 1
            num = min(PER_RUN, wanted - len(line.kills))
            began, kills, bases = time.monotonic(), [], []
            try:
                pace = self.paces[line.store, scenario.shape]
                with self.hangar.site(line.store, f"{line.scenario} {line.runs}", pace) as site:
                    chance = random.Random(f"{self.seed} {line.store} {line.scenario} {line.runs}")
                    flight, trained = scenario.fly(site, num, chance)
                    kills, bases = flight.kills, [base for _, base in flight.bases[1:]]
                    if trained != self.expected:
                        lost, more = self.expected - trained, trained - self.expected
                        line.lost, line.twice = line.lost + lost.total(), line.twice + more.total()
                        raise Broken(f"trained {more} too much and {lost} never; {flight.where()}")
            except Exception as error:  # whatever ends a run is its outcome
                line.broken = f"{type(error).__name__}: {error}"
            line.add(kills, bases, time.monotonic() - began)
            with self._says:
                print(row(line, kills, bases, time.monotonic() - began), flush=True)


def main() -> int:
    """Run the campaign in a temporary folder, which stays when something broke."""
    parser = argparse.ArgumentParser(prog="crash_campaign", description=__doc__)
    parser.add_argument("scenario", nargs="*", help=f"of {', '.join(SCENARIOS)}; all without")
    parser.add_argument("--table", type=Path, help="also write the table here, as a page")
    given = parser.parse_args()
    unknown = [name for name in given.scenario if name not in SCENARIOS]
    if unknown:
        parser.error(f"no scenario {unknown[0]!r}; expected one of {', '.join(SCENARIOS)}")
    kills, seed = int(os.environ.get("TRIUNE_CRASH_KILLS", "200")), int(os.environ.get("TRIUNE_CRASH_SEED", "0"))
    jobs = int(os.environ.get("TRIUNE_CRASH_JOBS", str(min(4, len(os.sched_getaffinity(0))))))
    root, began = Path(tempfile.mkdtemp(prefix="triune-crash-")), time.monotonic()
    hangar = Hangar(root, find_binaries())
    signal.signal(signal.SIGTERM, hangar.leave)
    campaign = Campaign(hangar, seed)
    lines = campaign.plan(given.scenario or list(SCENARIOS), kills)
    if hangar.binaries is None:
        skipped = ", ".join(name for name in SCENARIOS if "postgres" in SCENARIOS[name].stores)
        print(f"on PostgreSQL skipped: {skipped} ({MISSING})")
    try:
        with ThreadPoolExecutor(jobs) as pool:
            campaign.look(pool)
            list(pool.map(campaign.fly, lines))
    finally:
        hangar.close()
    seconds = time.monotonic() - began
    text = table(lines)
    print(text)
    if given.table:
        given.table.write_text(page(text, lines, sum(campaign.expected.values()), hangar.binaries, seconds))
    broken = [line for line in lines if line.broken]
    if not broken:
        shutil.rmtree(root, ignore_errors=True)
    print(json.dumps({"seed": seed, "jobs": jobs, "seconds": round(seconds, 1), "lines": [x.figures() for x in lines]}))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
