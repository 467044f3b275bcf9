"""Which entries a lease takes: those that an index puts first, ranked again by a priority, sources in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from triune.buffer.candidates import Candidate, Priority, score_of, windows_of
from triune.buffer.database import Database
from triune.buffer.fairness import Turns
from triune.buffer.runs import Incarnation
from triune.buffer.versions import Versions
from triune.ports import LeaseOrder
from triune.records import GroupId, Source

WINDOW = 8
"""A priority chooses from the first `WINDOW x num` of each order it names, ..."""

LEAST_WINDOW = 64
"""... and from at least so many."""


class Order(NamedTuple):
    """What to lease, and in which order.

    Attributes:
        num: How many ordinary entries.
        urgent: How many urgent ones on top of them, in all that is leased for the step.
        buffer: Named buffer.
        min_version: Oldest version that may still be trained on.
        max_staleness: The same, counted in published steps on the surviving line; None = not asked.
        ahead: Only entries with at most this many groups admitted before them still open; None = any.
        by: Which of them go first.
        step: Steps that are done; None = not known.
        max_uses: How often what is granted may be used in all.
        again: Only entries that were used before, instead of only new ones.
        cooldown: With `again`: steps that must lie between two uses of one entry.
        is_ranked: Whether the run's priority decides instead of `by`.
    """

    num: int
    urgent: int
    buffer: str
    min_version: int
    max_staleness: int | None
    ahead: int | None
    by: LeaseOrder = "priority"
    step: int | None = None
    max_uses: int = 1
    again: bool = False
    cooldown: int = 0
    is_ranked: bool = False


class Found(NamedTuple):
    """A row of `entries` that could be leased now."""

    class_: int
    score: float
    ledger: int
    seq: int
    entry: str
    revision: int
    scope: str
    oldest: int
    max_uses: int
    reward: float | None
    advantage: float | None
    task: str
    source: str
    num_records: int
    created: float
    uses: int

    def is_of(self, run: str) -> bool:
        """Whether that run made it; versions of another one say nothing of its age."""
        return bool(self.scope) or self.entry.startswith(GroupId.prefix_of(run))


_FAR = 1 << 62
_COLUMNS = (
    "class, score, ledger, seq, entry, revision, scope, oldest_version, max_uses, reward, advantage, task, source, "
    "num_records, created"
)
_PASSES: dict[str, tuple[tuple[str, str], ...]] = {
    "priority": (("", "score DESC, ledger, seq"),),
    "age": (("", "ledger, seq"),),
    "newest": (("", "oldest_version DESC, ledger, seq"),),
    "reward": (("AND reward IS NOT NULL", "reward DESC, ledger, seq"), ("AND reward IS NULL", "ledger, seq")),
    "advantage": (
        ("AND advantage IS NOT NULL", "advantage DESC, ledger, seq"),
        ("AND advantage IS NULL", "ledger, seq"),
    ),
}
"""By order: conditions to go through one after the other, each with an order that an index keeps."""

_INDEXED = ("priority", "age", "newest")
"""Orders whose index every buffer has; that of another is made when it is first asked for."""

_USES = "(SELECT count(*) FROM uses u WHERE u.entry = e.seq AND u.consumer = :run AND u.state != 'returned')"
_NEW = {True: "granted = 0", False: f"granted = 0 AND {_USES} = 0"}
"""By whether an entry is this run's own: those of all runs count per consumer."""
_AGAIN = {
    True: "granted > 0 AND granted < max_uses AND granted < :uses AND "
    "NOT (oldest_version >= 0 AND oldest_version < :floor)",
    False: "granted = 0 AND max_uses > 1 AND "
    f"{_USES} BETWEEN 1 AND CASE WHEN max_uses < :uses THEN max_uses ELSE :uses END - 1 AND "
    "NOT (substr(entry, 1, length(:made_by)) = :made_by AND oldest_version >= 0 AND oldest_version < :floor)",
}
"""Likewise. An entry's `max_uses` is the largest that any run asked for, and only this run's versions have an age."""
_RESTED = (
    "NOT EXISTS (SELECT 1 FROM uses u "
    "WHERE u.entry = e.seq AND u.consumer = :run AND u.state != 'returned' AND coalesce(u.step, :now) >= :rested)"
)


class Choosing:
    """Finds what to grant.

    Without a priority the order is exact, whatever the number of entries that wait: an index keeps it. A priority is
    asked anew at every lease, of a window: the first `WINDOW x num` entries of every order it names (`windows`), so
    that a lease costs the same among a thousand entries as among a million. It is exact when every entry it would
    choose is in one of these windows: always, where no more wait than a window holds.
    """

    def __init__(
        self,
        db: Database,
        versions: Versions,
        *,
        priority: Priority | None = None,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        """`shares`: weights of sources that wait in one buffer at once; None = the order alone decides.

        Raises:
            ConfigError: The priority names an order that there is not.
        """
        self.db, self.versions, self.priority = db, versions, priority
        self.windows = () if priority is None else windows_of(priority, "buffer.priority")
        self._weights = None if shares is None else {Source(name).value: value for name, value in shares.items()}
        self._turns: dict[str, Turns] = {}  # of each buffer
        self._indexes: set[str] = set()

    def choose(self, who: Incarnation, order: Order, floor: int) -> list[Found]:
        """Up to `urgent` urgent entries, then up to `num` others, this run's own and those open to every run."""
        now = _FAR if order.step is None else order.step + 1
        given: dict[str, Any] = {
            "buffer": order.buffer, "run": who.run, "floor": floor, "now": now, "rested": now - order.cooldown,
            "uses": order.max_uses, "made_by": GroupId.prefix_of(who.run),
        }  # fmt: skip
        urgent = self._urgent(who.run, order, given)
        given |= {"class": 0, "before": self._horizon(who.run, order.ahead)}
        if self._weights is None:
            return urgent + self._ordinary(who, order, given)
        waiting = {
            source.value: rows
            for source in Source
            if (rows := self._ordinary(who, order, {**given, "source": source.value}))
        }
        return urgent + self._turns.setdefault(order.buffer, Turns(self._weights)).plan(waiting, order.num)

    def _urgent(self, run: str, order: Order, given: dict[str, Any]) -> list[Found]:
        """Up to `urgent` for one step, however many calls it is leased in."""
        found = self._first(order.by, order, {**given, "class": 1, "before": _FAR}, order.urgent)
        if not found or order.step is None:
            return found
        row = self.db.one(
            "SELECT count(*) FROM uses u JOIN entries e ON e.seq = u.entry "
            "WHERE u.consumer = ? AND u.state = 'leased' AND u.step = ? AND e.class = 1",
            (run, order.step + 1),
        )
        return found[: max(0, order.urgent - (row[0] if row else 0))]

    def settle(self, buffer: str) -> None:
        """What was chosen last of a buffer is granted, if this transaction commits."""
        if buffer in self._turns:
            self.db.if_undone(self._turns[buffer].commit())

    def _horizon(self, run: str, ahead: int | None) -> int:
        """Ledger position of the first open admission that must not be overtaken."""
        if ahead is None:
            return _FAR
        sql = "SELECT seq FROM admissions WHERE run = ? AND state = 'open' ORDER BY seq LIMIT 1 OFFSET ?"
        row = self.db.one(sql, (run, ahead))
        return row[0] if row else _FAR

    def _ordinary(self, who: Incarnation, order: Order, given: dict[str, Any]) -> list[Found]:
        if self.priority is None or not order.is_ranked:
            return self._first(order.by, order, given, order.num)
        wide, window = max(LEAST_WINDOW, WINDOW * order.num), dict[int, Found]()
        for by in self.windows:
            window |= {row.seq: row for row in self._first(by, order, given, wide)}
        return self.rank(who.run, window.values(), order.step)[: order.num]

    def _first(self, by: str, order: Order, given: dict[str, Any], limit: int) -> list[Found]:
        """The first entries in an order that an index keeps."""
        if not limit:
            return []
        if not order.again:
            self._need_index(by, "source" in given)
        own, free = (self._part(by, order, given, is_own, limit) for is_own in (True, False))
        if not own or not free:
            return own or free
        return sorted(own + free, key=_SORT[by])[:limit]

    def _part(self, by: str, order: Order, given: dict[str, Any], is_own: bool, limit: int) -> list[Found]:
        found: list[Found] = []
        for condition, ordering in _PASSES[by]:
            sql = _select(order.again, is_own, "source" in given, condition, ordering)
            found += [Found(*row) for row in self.db.all(sql, {**given, "limit": limit - len(found)})]
            if len(found) >= limit:
                break
        return found

    def _need_index(self, by: str, by_source: bool) -> None:
        """Make the index of an order that not every buffer needs, once."""
        name = f"entries_{by}_of_source" if by_source else f"entries_{by}"
        if name in self._indexes or (by in _INDEXED and not by_source):
            return
        columns = f"buffer, scope, class, {'source, ' if by_source else ''}{_PASSES[by][0][1]}"
        self.db.execute(
            f"CREATE INDEX IF NOT EXISTS {name} ON entries ({columns}) WHERE state = 'ready' AND granted = 0"
        )
        self._note_index(name)

    def _note_index(self, name: str) -> None:
        """It is there, if this transaction commits."""
        self._indexes.add(name)
        self.db.if_undone(lambda: self._indexes.discard(name))

    # ---- the priority

    def rank(self, run: str, rows: Iterable[Found], step: int | None) -> list[Found]:
        """Rows by what the priority says of them now, highest first; ties by age.

        Raises:
            PluginError: The priority fails, or its answer is no number.
        """
        assert self.priority is not None, "asked only where there is one"
        found = list(rows)
        staleness = {oldest: self.versions.staleness(run, oldest) for oldest in {row.oldest for row in found}}
        task_uses, next_step = self._task_uses(run, found), 0 if step is None else step + 1
        scores = {
            row.seq: score_of(
                self.priority,
                Candidate(
                    row.entry, row.score, row.reward, row.advantage, staleness[row.oldest] if row.is_of(run) else 0,
                    row.uses, task_uses.get(row.task, 0), row.source, row.num_records,
                    max(0.0, self.db.now - row.created), next_step,
                ),
            )
            for row in found
        }  # fmt: skip
        return sorted(found, key=lambda row: (-scores[row.seq], row.ledger, row.seq))

    def rows(self, seqs: Sequence[int]) -> list[Found]:
        """Entries that were never leased, by position."""
        sql = f"SELECT {_COLUMNS}, 0 FROM entries WHERE seq IN ({', '.join('?' * len(seqs)) or 'NULL'})"
        return [Found(*row) for row in self.db.all(sql, tuple(seqs))]

    def _task_uses(self, run: str, rows: Sequence[Found]) -> dict[str, int]:
        """Task → how often this run has leased entries of it (its own: those open to every run are not counted)."""
        tasks = sorted({row.task for row in rows})
        if not tasks:
            return {}
        if "entries_used" not in self._indexes:
            self.db.execute("CREATE INDEX IF NOT EXISTS entries_used ON entries (scope, task) WHERE granted > 0")
            self._note_index("entries_used")
        sql = (
            f"SELECT task, sum(granted) FROM entries WHERE granted > 0 AND scope = ? "
            f"AND task IN ({', '.join('?' * len(tasks))}) GROUP BY task"
        )
        return {task: int(uses) for task, uses in self.db.all(sql, (run, *tasks))}


def _select(again: bool, is_own: bool, by_source: bool, condition: str, ordering: str) -> str:
    """The query for this run's own entries, or for those that are open to every run."""
    allowed = f"{_AGAIN[is_own]} AND {_RESTED}" if again else _NEW[is_own]
    uses = "granted" if is_own else _USES if again else "0"
    # A planner that may use the bound as a range takes the index of the ledger, and sorts everything below it.
    bounded = "ledger" if ordering.startswith("ledger") and not condition else "+ledger"
    return (
        f"SELECT {_COLUMNS}, {uses} FROM entries e WHERE buffer = :buffer AND scope = {':run' if is_own else repr('')} "
        f"AND class = :class AND state = 'ready' AND {allowed} {'AND source = :source ' if by_source else ''}"
        f"{condition} AND {bounded} < :before ORDER BY {ordering} LIMIT :limit"
    )


def _age(row: Found) -> tuple[int, int]:
    return (row.ledger, row.seq)


_SORT: dict[str, Callable[[Found], Any]] = {
    "priority": lambda row: (-row.score, *_age(row)),
    "age": _age,
    "newest": lambda row: (-row.oldest, *_age(row)),
    "reward": lambda row: (row.reward is None, -(row.reward or 0.0), *_age(row)),
    "advantage": lambda row: (row.advantage is None, -(row.advantage or 0.0), *_age(row)),
}
"""The orders of `_PASSES`, for merging."""
