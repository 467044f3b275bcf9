"""The crash campaign in figures: a line per scenario and store, as text, as a page and as JSON."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEAD = ("store", "killed", "runs", "kills", "while starting", "resumed from step", "s per kill", "lost", "twice", "")


@dataclass
class Line:
    """One scenario on one store.

    Attributes:
        store: `sqlite` or `postgres`.
        scenario: What was killed.
        wanted: Random kills planned.
        runs: Begun so far.
        kills: Every kill, in words.
        bases: Steps of the checkpoints that what trains went on from.
        seconds: Of all runs together, their ends without kills included.
        lost: Tasks that should have been trained and were not.
        twice: Tasks trained more often than by a run that nobody kills.
        broken: What went wrong; ends the line.
    """

    store: str
    scenario: str
    wanted: int
    runs: int = 0
    kills: list[str] = field(default_factory=list)
    bases: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0
    lost: int = 0
    twice: int = 0
    broken: str = ""

    def add(self, kills: Sequence[str], bases: Sequence[int], seconds: float) -> None:
        """Count a run."""
        self.kills += kills
        self.bases.update(bases)
        self.seconds += seconds

    def cells(self) -> tuple[str, ...]:
        """One text for each column of `HEAD`."""
        starting = sum("after its start" in kill for kill in self.kills)
        bases = " ".join(f"{base}:{num}" for base, num in sorted(self.bases.items())) or "-"
        pace = f"{self.seconds / max(1, len(self.kills)):.1f}"
        outcome = "BROKEN" if self.broken else "as uninterrupted"
        figures = (str(self.runs), str(len(self.kills)), str(starting), bases, pace, str(self.lost), str(self.twice))
        return (self.store, self.scenario, *figures, outcome)

    def figures(self) -> dict[str, Any]:
        """For the JSON line."""
        return {
            "store": self.store,
            "killed": self.scenario,
            "runs": self.runs,
            "kills": len(self.kills),
            "seconds": round(self.seconds, 1),
            "lost": self.lost,
            "twice": self.twice,
            "broken": self.broken,
        }


def row(line: Line, kills: Sequence[str], bases: Sequence[int], seconds: float) -> str:
    """What is printed when one run of a line has ended."""
    what = f"BROKEN {line.broken}" if line.broken else "; ".join(kills) or "finished before it was killed"
    steps = " ".join(map(str, bases))
    return f"{line.store:<9}{line.scenario:<15}{len(kills):>3} kills {seconds:>6.1f} s  from {steps or '-':<12} {what}"


def table(lines: Sequence[Line]) -> str:
    """All lines in Markdown, and their sums; nothing of a line that was not begun."""
    begun = [line for line in lines if line.runs]
    rows = [HEAD, *(line.cells() for line in begun)]
    kills, seconds = sum(len(line.kills) for line in begun), sum(line.seconds for line in begun)
    sums = (
        "",
        "all",
        str(sum(line.runs for line in begun)),
        str(kills),
        str(sum("after its start" in kill for line in begun for kill in line.kills)),
        "",
        f"{seconds / max(1, kills):.1f}",
        str(sum(line.lost for line in begun)),
        str(sum(line.twice for line in begun)),
        f"{sum(bool(line.broken) for line in begun)} broken",
    )
    rows.append(sums)
    widths = [max(len(cells[at]) for cells in rows) for at in range(len(HEAD))]
    padded = [[cell.ljust(width) for cell, width in zip(cells, widths, strict=True)] for cells in rows]
    texts = [f"| {' | '.join(cells)} |" for cells in padded]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([texts[0], rule, *texts[1:]])


def page(text: str, lines: Sequence[Line], num_tasks: int, binaries: Path | None, seconds: float) -> str:
    """The table with what it means, as it is committed beside the script."""
    server = f"PostgreSQL {binaries.parent.name}" if binaries else "no PostgreSQL server"
    return PAGE.format(
        text=text,
        minutes=f"{seconds / 60:.0f}",
        cores=os.cpu_count(),
        server=server,
        num_tasks=num_tasks,
        num_random=sum(len(line.kills) for line in lines if line.wanted),
        num_named=sum(len(line.kills) for line in lines if not line.wanted),
    )


PAGE = """# Crash campaign

Printed by `make crash-campaign` in {minutes} minutes on {cores} cores, with {server}.

Each run trains {num_tasks} tasks in 8 steps and saves a checkpoint every other step. It is started with the real
command line, killed with SIGKILL, started again (with `--resume` where it trains), killed again, and at last left to
finish. {num_random} kills were at random moments: uniformly over what is left of the run, one in six while a process
starts. {num_named} were at named places.

* `run`, `run, in flight`: explorer and trainer in one process, synchronous and one version behind.
* `train`, `explore`, `both`: two processes; one of them, or both at once.
* `server`: PostgreSQL with all its processes, or one of those, under a trainer and an explorer that go on by
  themselves.
* `server, gone`: it stays away until they give up with a message; they are resumed when it is back.
* `everything`: trainer, explorer and server at once, as when the machine ends.
* `failpoints`, `amending`, `segments`, `between stages`: each place that a failpoint names.

After every kill the conservation law holds. At the end of each run no lease and no admission is left, every step has
its row of metrics, `triune buffer verify` finds nothing, each task was trained once on the line of weights that
survived (as the store's uses, the checkpoints and a diary of the sampling say independently), and the multiset of
trained tasks is that of a run that nobody killed, which is the same on both stores, in one process and in two.

{text}

`resumed from step` counts what the processes that train went on from. `lost` and `twice` count tasks against the
uninterrupted run. Seconds are wall time per kill, the end of each run without kills included; several runs go at once.
"""
