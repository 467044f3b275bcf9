"""What is killed, when, and what is started again: each scenario is one run that survives several kills.

A moment is drawn uniformly over what is left of the run, from the instant at which the victim said that its work began;
one in six lies between the start of a process and that instant instead.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.crash_checks import Broken
from benchmarks.crash_flight import FILE, STEPS, Flight, Process, campaign_config, stop
from triune.testing.postgres import PostgresServer

FAILPOINTS = (
    "buffer.put.inside:6",
    "buffer.admit.inside:3",
    "buffer.ack.inside:2",
    "trainer.publish.after:3",
    "trainer.checkpoint.after_rename:1",
    "trainer.checkpoint.before_rename:1",
    "explorer.swap.mid:2",
    "buffer.commit_version.inside:2",
)
"""Places that every run passes, and at which pass of them the process is killed."""

AMENDING = "buffer.amend.leased:1"
"""A place that only somebody passes who amends."""

BETWEEN_STAGES = "launcher.stages.between:2"
"""A place that only a run of several stages passes."""

WRITING = ("buffer.segments.before_commit:1", "buffer.segments.before_commit:7")
"""A place that only a run passes whose records are in segments: the first time, and later."""

CLEARING = "buffer.gc.after_commit:1"
"""A place that only somebody passes who frees what killed puts left in segments."""

STARTING_RATIO = 1 / 6
"""Kills before the victim's work began."""

AWAY_S = 1.0
"""How long calls wait for a server that stays away, where they shall give up."""

GIVES_UP_S = 30.0
"""How long a part may take to say that its server is gone, and to end."""

LINGERS_S = 5.0
"""How long an explorer is waited for that may just be waiting for its trainer."""

MANY = 40
"""More processes than any run needs."""

ONE_PROCESS_RATIO = 0.3
"""Kills of one process of the server; its master ends the others and recovers."""

COMES_BACK_S = 30.0
"""How long calls wait for a server that is killed and started again."""

Flown = tuple[Flight, Counter[str]]


@dataclass(frozen=True)
class Pace:
    """How long a run takes that nobody kills, in seconds.

    Attributes:
        start_s: Until its work begins.
        work_s: From there to its end.
    """

    start_s: float
    work_s: float


@dataclass(frozen=True)
class Site:
    """Where a scenario happens.

    Attributes:
        folder: An empty one, for this run alone.
        server: Holds the store; None = a SQLite file in the run's folder.
        pace: Of a run like this; by default so short that every run lives to see its kills.
    """

    folder: Path
    server: PostgresServer | None = None
    pace: Pace = Pace(2.0, 1.0)

    def config(self, *, patience_s: float = COMES_BACK_S, **sections: Any) -> dict[str, Any]:
        """The campaign's run file over this store."""
        store: Mapping[str, Any] = FILE
        if self.server is not None:
            store = {"use": "postgres", "url": self.server.url, "reconnect_s": patience_s}
        return campaign_config(self.folder, store=store, **sections)

    def needs_server(self) -> PostgresServer:
        """The server that a scenario kills."""
        assert self.server is not None, "scenarios that kill a server are planned where there is one"
        return self.server


# ------------------------------------------------------------------------------------------ nobody is killed


def uninterrupted(site: Site, *commands: str) -> tuple[Counter[str], Pace]:
    """Trained task keys of a run that nobody kills, and how long it takes; the first command is the one that trains."""
    channel = "memory" if len(commands) == 1 else "files"
    with Flight(site.folder, site.config(channel=channel)) as flight:
        began = time.monotonic()
        processes = [flight.start(command) for command in commands]
        flight.until_begun(*processes)
        work = time.monotonic()
        flight.finish(processes[0])
        pace = Pace(work - began, time.monotonic() - work)
        flight.finish(*processes)
        return flight.check(), pace


# ---------------------------------------------------------------------------------------------- named places


def killed_at_failpoints(site: Site, names: Sequence[str] = FAILPOINTS, **sections: Any) -> Flown:
    """One run, killed at each failpoint in turn, resumed after each, then left to finish."""
    with Flight(site.folder, site.config(**sections)) as flight:
        for name in names:
            flight.until_killed(flight.start("run", name), name)
        flight.finish(flight.start("run"))
        return flight, flight.check()


def killed_while_amending(site: Site) -> Flown:
    """One run, beside a process that dies while it amends what the trainer has leased."""
    with Flight(site.folder, site.config()) as flight:
        process = flight.start("run")
        flight.until_begun(process)
        flight.until_killed(flight.start_amending(AMENDING), AMENDING)
        flight.finish(process)
        return flight, flight.check()


def killed_between_stages(site: Site) -> Flown:
    """A run of two stages, killed when the first has finished; the second is what is looked at."""
    config = site.config()
    sampling = {**config["algorithm"]["sampling"], "path": str(site.folder / "first.jsonl")}
    first = {
        "name": "first",
        "algorithm": {**config["algorithm"], "sampling": sampling},
        "trainer": {"steps": 1},
    }
    with Flight(site.folder, {**config, "stages": [first, {"name": "second"}]}, stage="02-second") as flight:
        flight.until_killed(flight.start("run", BETWEEN_STAGES), BETWEEN_STAGES)
        flight.finish(flight.start("run"))
        return flight, flight.check()


def killed_with_segments(site: Site) -> Flown:
    """A run whose records are in segments, killed as it writes them; then who clears up after it is killed too."""
    config = site.config()
    config["buffer"]["segments"] = {"url": str(site.folder / "segments"), "min_bytes": 1}
    with Flight(site.folder, config) as flight:
        for name in WRITING:
            flight.until_killed(flight.start("run", name), name)
        flight.until_killed(flight.start_clearing(CLEARING), CLEARING)
        flight.finish(flight.start("run"))
        return flight, flight.check()


# -------------------------------------------------------------------------------------------- random moments


def run_killed(site: Site, num: int, chance: random.Random, **sections: Any) -> Flown:
    """`triune run`, killed up to `num` times: fewer where it finishes before."""
    with Flight(site.folder, site.config(**sections)) as flight:
        process = flight.start("run")
        while len(flight.kills) < num and _strike(flight, site.pace, chance, [process], [process]):
            process = flight.start("run")
        flight.finish(process)
        return flight, flight.check()


def parts_killed(
    site: Site, num: int, chance: random.Random, *, victims: Sequence[str], with_server: bool = False
) -> Flown:
    """`triune train` beside `triune explore`; the victims are killed at once, up to `num` times, and started again."""
    server = site.needs_server() if with_server else None
    with Flight(site.folder, site.config(channel="files")) as flight:
        parts = {name: flight.start(name) for name in ("train", "explore")}
        while len(flight.kills) < num:
            hit = [parts[name] for name in victims]
            if not _strike(flight, site.pace, chance, hit, list(parts.values()), server):
                break
            parts |= {name: flight.start(name) for name in victims}
        flight.finish(*parts.values())
        return flight, flight.check()


TRAINER, EXPLORER = ("train",), ("explore",)

train_killed = partial(parts_killed, victims=TRAINER)
explore_killed = partial(parts_killed, victims=EXPLORER)
both_killed = partial(parts_killed, victims=TRAINER + EXPLORER)
everything_killed = partial(parts_killed, victims=TRAINER + EXPLORER, with_server=True)


def _strike(
    flight: Flight,
    pace: Pace,
    chance: random.Random,
    victims: Sequence[Process],
    watched: Sequence[Process],
    server: PostgresServer | None = None,
) -> bool:
    """Kill the victims, and the server with them, at a random moment; False when one of those watched ended before."""
    base = flight.last_step()
    if chance.random() < STARTING_RATIO:
        moment = chance.uniform(0.2, pace.start_s)
        why = f"{moment:.1f} s after its start"
    else:
        if not flight.until_begun(*victims):
            return False
        moment = chance.uniform(0.0, pace.work_s * (STEPS - base) / STEPS)
        why = f"{moment:.1f} s into its work"
    if not flight.sleep(moment, *watched):
        return False
    if server is None:
        stop(*victims)
    else:
        blows: list[Callable[[], None]] = [lambda: stop(*victims), server.kill]
        chance.shuffle(blows)
        for blow in blows:
            blow()
        server.start()
    flight.note_kill(why)
    return True


# ------------------------------------------------------------------------------------------------ the server


def server_killed(site: Site, num: int, chance: random.Random) -> Flown:
    """The server, or one of its processes, is killed and comes back: trainer and explorer go on by themselves."""
    server = site.needs_server()
    with Flight(site.folder, site.config(channel="files")) as flight:
        parts = [flight.start(name) for name in ("train", "explore")]
        flight.until_begun(*parts)
        while len(flight.kills) < num and flight.sleep(chance.uniform(0.0, 2 * site.pace.work_s / num), *parts):
            if chance.random() < ONE_PROCESS_RATIO:
                with suppress(ProcessLookupError):
                    os.kill(chance.choice(server.processes()[1:]), signal.SIGKILL)
                flight.kills.append("one process of the server")
                continue  # it recovers while the parts ask for it
            server.kill()
            server.start()
            flight.note_kill("the server")
        flight.finish(*parts)
        return flight, flight.check()


def server_gone(site: Site, num: int, chance: random.Random) -> Flown:
    """The server is killed and stays away: whoever needs it says so and ends, and is resumed when it is back."""
    server = site.needs_server()
    with Flight(site.folder, site.config(channel="files", patience_s=AWAY_S)) as flight:
        parts = {name: flight.start(name) for name in ("train", "explore")}
        while len(flight.kills) < num and not _are_over(flight, parts):
            left = (STEPS - flight.last_step()) / STEPS
            moment = chance.uniform(0.0, site.pace.work_s * left)
            if flight.until_begun(*parts.values()) and flight.sleep(moment, *parts.values()):
                server.kill()
                _until_given_up(flight, parts)
                server.start()
                flight.note_kill("the server, which stayed away")
        while not _are_over(flight, parts):
            time.sleep(0.05)
        return flight, flight.check()


def _until_given_up(flight: Flight, parts: Mapping[str, Process]) -> None:
    """Whoever trains ends by itself; whoever explores too, unless it was waiting for a trainer to join."""
    flight.wait(parts["train"], GIVES_UP_S)
    flight.sleep(LINGERS_S, parts["explore"])


def _are_over(flight: Flight, parts: dict[str, Process]) -> bool:
    """Whether all have finished; who gave up because of the server is started again."""
    for name, part in list(parts.items()):
        if part.poll() not in (None, 0):
            said = flight.said(part)
            if part.returncode < 0 or "found:" not in said or ".traceback" in said:
                raise Broken(f"{part.args} ended with {part.returncode} and said {said!r}; {flight.where()}")
            parts[name] = flight.start(name)
    if len(flight.processes) > MANY:
        raise Broken(f"{len(flight.processes)} processes did not bring the run to its end; {flight.where()}")
    return all(part.poll() == 0 for part in parts.values())
