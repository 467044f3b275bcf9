"""Which row each admitted request gets, and how its prompt comes into the cache: reused, copied or run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from triune.explorer.engines._intake import Job
from triune.explorer.engines._prefixes import Prefixes, PromptKey
from triune.explorer.engines._rows import Rows

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Shared:
    """Jobs whose prompt another row already begins with."""

    row: int
    logits: Tensor
    jobs: list[int]


@dataclass(kw_only=True, eq=False)
class Plan:
    """Everything by index into the admitted jobs.

    Attributes:
        rows: Row of each job.
        shared: Prompts copied from a row of an earlier admission.
        extended: (job, start): its row already holds the first `start` positions.
        fresh: Jobs that share one prompt, which is run once.
    """

    rows: list[int]
    shared: list[Shared] = field(default_factory=list)
    extended: list[tuple[int, int]] = field(default_factory=list)
    fresh: list[list[int]] = field(default_factory=list)


def session_of(request_id: str) -> str:
    """The rollout of a request `rollout/turn`; empty when the id names no turn."""
    session, _, turn = request_id.rpartition("/")
    return session if turn.isdigit() else ""


def plan_admission(jobs: Sequence[Job], rows: Rows, prefixes: Prefixes, num_rows: int) -> Plan:
    """Give rows out of the first `num_rows`, and forget what they held, but for what a job goes on from."""
    plan = Plan(rows=[-1] * len(jobs))
    free = set(np.flatnonzero(~rows.is_live[:num_rows]).tolist())
    by_key: dict[PromptKey | int, list[int]] = {}
    for number, job in enumerate(jobs):
        found = prefixes.find_session(session_of(job.request.id), job.form.prompt)
        if found is not None and found[0] in free:
            plan.rows[number] = found[0]
            plan.extended.append((number, found[1]))
            free.discard(found[0])
        else:
            by_key.setdefault(number if job.form.key is None else job.form.key, []).append(number)
    for key, members in by_key.items():
        held = None if isinstance(key, int) else prefixes.find_prompt(key)
        if held is None or (not rows.is_live[held[0]] and held[0] not in free):
            plan.fresh.append(members)
            continue
        plan.shared.append(Shared(row=held[0], logits=held[1], jobs=members))
        if held[0] in free:
            plan.rows[members[0]] = held[0]
            free.discard(held[0])
    _give_rows(plan, free, prefixes, top=max(rows.top, int(rows.is_live.sum()) + len(jobs)))
    return plan


def _give_rows(plan: Plan, free: set[int], prefixes: Prefixes, top: int) -> None:
    """Low rows first, so that few dead ones are stepped over; among them those whose loss costs nothing."""
    waiting = [i for members in plan.fresh for i in members]
    waiting += [i for share in plan.shared for i in share.jobs if plan.rows[i] < 0]
    near = sorted(free, key=lambda row: (row >= top, prefixes.remembers(row), row))[: len(waiting)]
    for number, row in zip(waiting, sorted(near), strict=True):
        plan.rows[number] = row
        prefixes.forget_row(row)
    for number, _ in plan.extended:
        prefixes.forget_row(plan.rows[number])
