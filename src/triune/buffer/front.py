"""The buffer as the rest of the house sees it: port `Buffer`, asynchronous, over one store."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from triune.buffer.amendments import amendments_of
from triune.buffer.choosing import Order
from triune.buffer.config import BufferSettings
from triune.buffer.conservation import check_conservation
from triune.buffer.damage import Damaged
from triune.buffer.deleted import are_deleted, marks_of
from triune.buffer.entries import MAIN, Stored, decode_all
from triune.buffer.export import JSONL, export_entries
from triune.buffer.ledger import NO_MORE
from triune.buffer.manifest import deleted_since
from triune.buffer.new_entries import Put
from triune.buffer.parcels import Parcel, make_parcel, make_parcels, operators_of
from triune.buffer.query import Filter, equals
from triune.buffer.runs import Incarnation, TrainerState
from triune.buffer.store import Store
from triune.buffer.transfer import from_plain, import_lines
from triune.buffer.uses import Grant
from triune.buffer.writer import Items, Writer, call_on
from triune.errors import RecordError, StoreError
from triune.ports import AdmissionRule, EntryInfo, EntryState, Lease, LeaseOrder, Leases, Refund, WeightUpdate
from triune.records import Group, GroupId, Task

T = TypeVar("T")

RECHECK_S = 0.5
"""A waiter looks again at least this often, for what the clock alone changes (expired leases and deadlines)."""

NUM_FRESH = 1024
"""Groups just put that stay decoded in memory, so that a lease in the same process need not read them."""

_numbers = itertools.count()


class StoredBuffer:
    """Port `Buffer` over a `Store`. Calls may come from any event loop; every one is one transaction."""

    def __init__(
        self,
        store: Store,
        settings: BufferSettings,
        *,
        deterministic: bool = False,
        urgent_ratio: float = 0.25,
        filled: Collection[str] | None = None,
    ) -> None:
        """`deterministic` leases strictly in ledger order; `urgent_ratio` bounds urgent entries added to a step.

        `filled` names the buffers that somebody puts to during the run; on others no lease waits. None = all.
        """
        self.store, self.settings, self.filled = store, settings, filled
        self.deterministic, self.urgent_ratio = deterministic, urgent_ratio
        self.who: Incarnation | None = None
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{next(_numbers)}:{uuid.uuid4().hex[:8]}"
        self._fresh: OrderedDict[int, tuple[int, Group]] = OrderedDict()  # by position: names are given again
        self._waiters: set[tuple[str, asyncio.Future[None]]] = set()
        self._generation: dict[str, int] = {}
        self._writer = Writer(
            store.db, poll_s=settings.poll_s, beat_s=settings.lease_s / 3, beat=self._beat, wake=self._wake
        )

    # ---- waiting

    def _beat(self) -> None:
        if self.who is not None:
            self.store.runs.renew(self.who)

    def _wake(self, topics: set[str]) -> None:
        """Called on the writer's thread after a commit."""
        for topic in topics:
            self._generation[topic] = self._generation.get(topic, 0) + 1
        loops = {future.get_loop() for topic, future in tuple(self._waiters) if topic in topics}
        for loop in loops:
            call_on(loop, lambda loop=loop: self._release(loop, topics))

    def _release(self, loop: asyncio.AbstractEventLoop, topics: set[str]) -> None:
        for topic, future in tuple(self._waiters):
            if topic in topics and future.get_loop() is loop and not future.done():
                future.set_result(None)

    async def _until(
        self, topic: str, work: Callable[[], T | None], take_back: Callable[[T], object] | None = None
    ) -> T:
        """Repeat a transaction until it answers, woken by what it waits for.

        `take_back` undoes an answer that comes after who waits for it was cancelled.
        """
        while True:
            seen = self._generation.get(topic, 0)
            coming: asyncio.Future[T | None] = self._writer.submit(work)
            try:
                answer = await (coming if take_back is None else asyncio.shield(coming))
            except asyncio.CancelledError:
                if take_back is not None:
                    coming.add_done_callback(lambda done: self._take_back(done, take_back))
                raise
            if answer is not None:
                return answer
            await self._changed(topic, seen)

    def _take_back(self, done: asyncio.Future[T | None], take_back: Callable[[T], object]) -> None:
        answer = None if done.cancelled() or done.exception() is not None else done.result()
        if answer is not None and not self._writer.has_stopped:
            undone = self._writer.submit(lambda: take_back(answer))
            undone.add_done_callback(lambda late: late.cancelled() or late.exception())  # a resume does it where not

    async def _changed(self, topic: str, seen: int) -> None:
        waiter: tuple[str, asyncio.Future[None]] = (topic, asyncio.get_running_loop().create_future())
        self._waiters.add(waiter)
        self._writer.num_waiting += 1
        try:
            if self._generation.get(topic, 0) == seen:
                await asyncio.wait((waiter[1],), timeout=RECHECK_S)
        finally:
            self._writer.num_waiting -= 1
            self._waiters.discard(waiter)

    def _me(self) -> Incarnation:
        if self.who is None:
            raise StoreError(self.store.db.where, "no run is open", "open_run or join_run before this call")
        return self.who

    # ---- runs

    @property
    def epoch(self) -> int:
        """Of the incarnation that was opened or joined."""
        return self._me().epoch

    async def open_run(self, run: str, *, config_hash: str, data_hash: str) -> int:
        """Begin the next incarnation of `run`, which fences older ones; its epoch. Empty hashes are not compared."""
        self.who = await self._writer.submit(lambda: self.store.runs.open(run, self._owner, config_hash, data_hash))
        return self._me().epoch

    async def join_run(self, run: str, *, timeout_s: float) -> int:
        """Take part in the incarnation that is running; waits until there is one.

        Raises:
            StoreError: Nobody opened it in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                self.who = await self._until("runs", lambda: self.store.runs.join(run, self._owner))
        except TimeoutError as error:
            raise StoreError(
                f"run {run!r} in {self.store.db.where}",
                f"nobody has it open after {timeout_s:g} s",
                "a running trainer",
                "start `triune train` with the same file",
            ) from error
        return self._me().epoch

    async def is_finished(self, run: str) -> bool:
        """Whether a run, joined or not, wants no more experience."""
        return await self._writer.submit(lambda: self.store.runs.is_finished(run))

    async def trainer(self) -> TrainerState:
        """How the process that opened the run is, for an explorer beside it."""
        who = self._me()
        return await self._writer.submit(lambda: self.store.runs.trainer(who))

    async def has_explorer(self) -> bool:
        """Whether anybody else ever took part in the open run."""
        who = self._me()
        return await self._writer.submit(lambda: self.store.runs.has_explorer(who))

    async def has_stock(self) -> bool:
        """Whether the buffer `main` holds anything that the open run trains on, or has trained on."""
        who = self._me()
        return await self._writer.submit(lambda: self.store.entries.is_any_usable(who.run))

    # ---- admission and the ledger

    async def admit(self, task: Task, rule: AdmissionRule, *, cursor: Any = None) -> GroupId | None:
        """Wait for a slot, take it and advance the task cursor, in one transaction; None once no more are wanted."""
        who, ledger = self._me(), self.store.ledger

        def attempt() -> GroupId | str | None:
            found = ledger.admit(who, task, rule, cursor)
            if found is None:
                self.store.entries.settle_due(who)  # leases are for those who lease to return
            return found

        found = await self._until("slots", attempt)
        return None if isinstance(found, str) else found

    async def admit_next(
        self, tasks: Sequence[tuple[Task, Any]], rule: AdmissionRule, *, after: Any
    ) -> list[GroupId] | None:
        """Wait for a slot, then admit as many of these `(task, cursor)` as there are slots; see the port."""
        who, ledger = self._me(), self.store.ledger

        def attempt() -> list[GroupId] | str | None:
            found = ledger.admit_next(who, tasks, rule, after)
            if found is None:
                self.store.entries.settle_due(who)  # leases are for those who lease to return
            return found

        found = await self._until("slots", attempt)
        return None if isinstance(found, str) else found

    async def readmit(self, rule: AdmissionRule, *, max_retries: int) -> GroupId | None:
        """The earliest group that is due again, once a slot is free for it; None when none is due. See the port."""
        who, ledger = self._me(), self.store.ledger
        found = await self._until("slots", lambda: ledger.readmit(who, rule, max_retries))
        return None if isinstance(found, str) else found

    async def free_slots(self, rule: AdmissionRule) -> int:
        """How many groups could be admitted now without waiting."""
        who = self._me()
        return await self._writer.submit(lambda: self.store.ledger.free_slots(who, rule))

    async def open_admissions(self) -> list[GroupId]:
        """Groups admitted but neither put nor refunded that no other live process works on, in ledger order."""
        who = self._me()
        return await self._writer.submit(lambda: self.store.ledger.open_groups(who))

    async def refund(self, group: GroupId, reason: Refund) -> None:
        """Give a slot back, once per group."""
        who = self._me()
        await self._writer.submit(lambda: self.store.entries.refund(who, group, Refund(reason).value))

    async def cursor(self) -> Any:
        """Task cursor committed with the last admission; None at the start."""
        who = self._me()
        return await self._writer.submit(lambda: self.store.ledger.cursor(who))

    async def failures(self) -> Mapping[tuple[str, str], int]:
        """(task set, task key) → how many of its groups in a row failed until now; the others are left out."""
        who = self._me()
        return await self._writer.submit(lambda: self.store.ledger.failures(who.run))

    # ---- entries

    async def put(
        self,
        raw: Group,
        shaped: Group | None = None,
        *,
        dropped_by: str = "",
        refund: Refund | None = None,
        buffer: str = MAIN,
        deadline_s: float | None = None,
    ) -> str:
        """Store a closed group and its first revision; see the port.

        Without `shaped` and `dropped_by` it stays `raw` until `revise`. While a reward is unknown it is `waiting`, for
        `deadline_s` (default `buffer.reward_deadline_s`), then it expires.
        """
        [entry] = await self._put([(raw, shaped)], buffer, deadline_s, dropped_by, refund)
        return entry

    async def put_many(
        self, groups: Sequence[tuple[Group, Group | None]], *, buffer: str = MAIN, deadline_s: float | None = None
    ) -> list[str]:
        """Store (raw, shaped) groups in one transaction, all or none; see the port."""
        return await self._put(groups, buffer, deadline_s) if groups else []

    async def _put(
        self,
        groups: Sequence[tuple[Group, Group | None]],
        buffer: str,
        deadline_s: float | None,
        dropped_by: str = "",
        refund: Refund | None = None,
    ) -> list[str]:
        who = self._me()
        patience = self.settings.reward_deadline_s if deadline_s is None else deadline_s
        puts = [Put(parcel, dropped_by, buffer, patience, refund) for parcel in make_parcels(groups)]
        outcomes = await self._writer.submit(Items(self._store_puts, [(who, put) for put in puts]))
        for (raw, shaped), put, (_, ready) in zip(groups, puts, outcomes, strict=True):
            if ready is not None:
                self._keep_fresh(ready, put.parcel.revision, shaped or raw)
        return [entry for entry, _ in outcomes]

    def _store_puts(self, asked: Sequence[tuple[Incarnation, Put]]) -> list[tuple[str, int | None]]:
        """On the writer's thread: those of one incarnation together."""
        return [
            outcome
            for who, part in itertools.groupby(asked, key=lambda each: each[0])
            for outcome in self.store.entries.put(who, [put for _, put in part])
        ]

    async def stock(self, groups: Sequence[Group], *, buffer: str) -> int:
        """Store groups that nobody sampled in a named buffer of this run, in one transaction; they take no slot.

        Returns:
            How many of them are new: it is idempotent by id.
        """
        who, parcels = self._me(), make_parcels([(group, group) for group in groups])

        def work() -> int:
            self.store.runs.check(who)
            put = self.store.entries.insert_all_free
            return sum(put(parcels, buffer=buffer, scope=who.run, state=EntryState.READY))

        return await self._writer.submit(work)

    async def stocked(self, buffer: str) -> Mapping[str, int]:
        """How many groups of each task set were ever stocked for this run in a named buffer."""
        who = self._me()
        return await self._writer.submit(lambda: self.store.entries.count_by_taskset(who, buffer))

    async def shortage(self, buffer: str, ahead: int) -> int | None:
        """Wait until fewer than `ahead` stocked groups are unused; how many are missing, None once the run is over."""
        who, store = self._me(), self.store

        def look() -> int | str | None:
            if store.runs.is_finished(store.runs.check(who).run):
                return NO_MORE
            return max(0, ahead - store.entries.count_unused(who, buffer, ahead)) or None

        found = await self._until("stock", look)
        return None if isinstance(found, str) else found

    def _keep_fresh(self, seq: int, revision: int, group: Group) -> None:
        self._fresh[seq] = (revision, group)
        if len(self._fresh) > NUM_FRESH:
            self._fresh.popitem(last=False)

    async def revise(self, entry: str, group: Group, *, operators: Sequence[str] = ()) -> int:
        """Add a revision, and return its number; `operators` defaults to those its records name."""
        who, names = self._me(), tuple(operators) or operators_of(group)
        return await self._writer.submit(lambda: self.store.entries.revise(who, entry, group, names))

    async def lease(
        self,
        num: int,
        *,
        buffer: str = MAIN,
        min_version: int = 0,
        max_staleness: int | None = None,
        ahead: int | None = None,
        wait: bool = True,
        order: LeaseOrder = "priority",
        step: int | None = None,
        max_uses: int = 1,
        again: bool = False,
        cooldown: int = 0,
    ) -> Leases:
        """Take up to `num` ready entries, and a few urgent ones on top; see the port."""
        who, urgent = self._me(), 0 if again or not self.urgent_ratio else max(1, int(num * self.urgent_ratio))
        if self.deterministic and not again:
            ahead, order = 0 if ahead is None else ahead, "age"
        is_ranked = not self.deterministic and order in ("priority", "age")
        wanted = Order(
            num, urgent, buffer, min_version, max_staleness, ahead, order, step, max_uses, again, cooldown, is_ranked
        )  # fmt: skip
        is_final = not wait or (self.filled is not None and buffer not in self.filled)
        num_stale = 0

        def attempt() -> tuple[list[Grant], dict[int, Group], dict[int, Stored]] | None:
            nonlocal num_stale
            grants, num_dropped = self.store.uses.lease(who, wanted, is_final)
            num_stale += num_dropped
            return None if grants is None else (grants, *self._find(grants))

        def give_back(answer: tuple[list[Grant], dict[int, Group], dict[int, Stored]]) -> int:
            return self.store.uses.give_back(who, [(grant.entry, grant.use_no) for grant in answer[0]])

        num_damaged = 0
        while True:
            grants, groups, stored = await self._until("entries", attempt, give_back)
            try:  # on this thread: the writer's has others to serve, and held the database meanwhile
                groups |= decode_all(stored, {grant.seq: grant.entry for grant in grants})
                break
            except Damaged as damage:  # without these others may be leased
                taken_out = self._writer.submit(partial(self._take_out, who, grants, damage))
                num_damaged += await asyncio.shield(taken_out)
        leases = Leases([_to_lease(grant, groups[grant.seq]) for grant in grants])
        if num_stale:
            leases.metrics["num_stale_dropped"] = float(num_stale)
        if num_damaged:
            leases.metrics["num_damaged_dropped"] = float(num_damaged)
        return leases

    def _find(self, grants: Sequence[Grant]) -> tuple[dict[int, Group], dict[int, Stored]]:
        """Entry's position → what was granted, from memory, and as it is stored."""
        groups: dict[int, Group] = {}
        for grant in grants:
            revision, group = self._fresh.pop(grant.seq, (-1, None))
            if group is not None and revision == grant.revision:
                groups[grant.seq] = group
        missing = {grant.seq: grant.revision for grant in grants if grant.seq not in groups}
        return groups, self.store.entries.load(missing) if missing else {}

    def _take_out(self, who: Incarnation, grants: Sequence[Grant], damage: Damaged) -> int:
        """Return what was granted together with entries that cannot be read, and drop those; their number."""
        self.store.uses.give_back(who, [(grant.entry, grant.use_no) for grant in grants])
        return self.store.entries.drop_damaged(who, damage)

    async def renew(self) -> None:
        """Heartbeat; the writer's thread also beats by itself as long as the process lives."""
        who = self._me()
        await self._writer.submit(lambda: self.store.runs.renew(self.store.runs.check(who)))

    async def secure(self) -> None:
        """What was committed until now outlives a power cut once this returns; see the port."""
        await asyncio.to_thread(self.store.db.secure)

    async def ack(self, uses: Sequence[tuple[str, int]], *, checkpoint: str, step: int) -> None:
        """The checkpoint on disk contains these (entry, use_no); idempotent."""
        who = self._me()
        await self._writer.submit(lambda: self.store.uses.ack(who, uses, checkpoint, step))

    async def give_back(self, uses: Sequence[tuple[str, int]] | None = None, *, dropped_by: str = "") -> int:
        """Return leases untrained (all of this consumer, when None); the number returned. See the port."""
        who = self._me()
        return await self._writer.submit(lambda: self.store.uses.give_back(who, uses, dropped_by))

    async def amend(self, entry: str, patch: Mapping[str, Any], *, by: str, key: str) -> str:
        """Change what is not yet trained; `applied`, `deferred`, `reissued` or `expired`.

        The patch holds `reward`, `reward_parts`, `is_valid`, `priority`, `metrics`, `info` or `tags`, for all or
        under `members: {number: {…}}` for the experiences of one rollout.
        """
        who = self._me()
        return await self._writer.submit(lambda: self.store.amendments.amend(who, entry, patch, by, key))

    async def amendments(self, entry: str) -> Sequence[Mapping[str, Any]]:
        """Who amended an entry, how, and what came of it, oldest first."""
        store = self.store
        return await self._writer.submit(lambda: amendments_of(store.db, store.entries.locate(entry)[0]))

    async def end(self, reason: str) -> None:
        """No more groups will come: every waiting reader wakes."""
        who = self._me()
        await self._writer.submit(lambda: self.store.runs.end(who, reason))

    async def finish(self, reason: str) -> None:
        """The trainer wants no more: everybody who waits wakes."""
        who = self._me()
        await self._writer.submit(lambda: self.store.runs.finish(who, reason))

    # ---- looking

    async def browse(self, *, buffer: str | None = None, state: str | None = None, limit: int = 100) -> list[EntryInfo]:
        """Newest first."""
        return await self._writer.submit(lambda: self.store.entries.browse(buffer, state, limit))

    async def read(self, entry: str, *, revision: int | None = None) -> Group:
        """One entry, its newest revision by default."""
        return await self._writer.submit(lambda: self.store.read(entry, revision))

    async def stats(self) -> Mapping[str, float]:
        """Depth and uses per state, admitted, refunded (and why), open, late, age; of the open run, or of all."""
        run = self.who.run if self.who else None
        return await self._writer.submit(lambda: self.store.entries.stats(run))

    async def check_conservation(self) -> Mapping[str, int]:
        """Raise StoreError when anything was lost or doubled; see CONTRACTS C3."""
        return await self._writer.submit(lambda: check_conservation(self.store.db))

    async def export_jsonl(self, path: str | Path, *, buffer: str | None = None) -> int:
        """Write every entry's newest revision as one JSON object per line, beside it a manifest; the number written."""
        wanted = Filter() if buffer is None else equals("buffer", buffer)
        done = await asyncio.to_thread(export_entries, self.store, wanted, Path(path), kind=JSONL)
        return done.num_entries

    async def import_jsonl(self, path: str | Path, *, buffer: str) -> int:
        """Add exported entries that can be trained on to a named buffer, for every run; the number that are new.

        What was deleted since the export, or from this buffer, is left out.
        """
        number, gone = 0, deleted_since(Path(path))
        for line in import_lines(Path(path)):
            if line.get("entry") in gone:
                continue
            if line.get("state") not in (EntryState.READY, EntryState.SPENT, EntryState.RAW) or "group" not in line:
                continue
            group = from_plain(line["group"])
            parcel, state = make_parcel(group, group), EntryState(line["state"])
            if parcel.summary.is_waiting:
                raise RecordError(str(group.id), "an unknown reward", "rewards in all imported entries")
            state = EntryState.READY if state is EntryState.SPENT else state
            marks = marks_of(group)

            def insert(parcel: Parcel = parcel, state: EntryState = state, marks: set[str] = marks) -> bool:
                put = self.store.entries.insert_free
                return not are_deleted(self.store.db, marks) and put(parcel, buffer=buffer, scope="", state=state)

            number += await self._writer.submit(insert)
        return number

    # ---- versions

    async def begin_version(self, step: int) -> int:
        """Reserve the next version number (never reused, also after a crash)."""
        who = self._me()
        return await self._writer.submit(lambda: self.store.versions.begin(who, step))

    async def commit_version(self, update: WeightUpdate) -> None:
        """The weights are there to be fetched: admission counts with them from now on."""
        who = self._me()
        await self._writer.submit(lambda: self.store.versions.commit(who, update))

    async def latest_version(self) -> WeightUpdate | None:
        """The newest committed version on the surviving line."""
        who = self._me()
        return await self._writer.submit(lambda: self.store.versions.latest(who.run))

    async def wait_version(self, newer_than: int) -> WeightUpdate | None:
        """Wait for a newer one; None once the run was finished."""
        who, store = self._me(), self.store

        def look() -> WeightUpdate | str | None:
            update = store.versions.latest(store.runs.check(who).run, newer_than)
            return update or (NO_MORE if store.runs.is_finished(who.run) else None)

        found = await self._until("versions", look)
        return None if isinstance(found, str) else found

    async def floor_version(self, max_staleness: int) -> int:
        """The oldest version at most `max_staleness` published steps behind the newest, on the surviving line."""
        who = self._me()
        return await self._writer.submit(lambda: self.store.versions.floor(who.run, max_staleness))

    async def resume_at(
        self, *, step: int, version: int, consumed: Sequence[tuple[str, int]], checkpoint: str, strict: bool
    ) -> None:
        """Bring the store to a checkpoint; see the port. What was lost is due again: call `readmit`."""
        who = self._me()
        self._fresh.clear()
        again = self.deterministic

        def work() -> None:
            self.store.resume_at(who, step, version, consumed, checkpoint, strict, makes_all_again=again)

        await self._writer.submit(work)

    # ---- steering

    async def steer(self, run: str, action: str, *, by: str, fields: Mapping[str, Any] | None = None) -> int:
        """Ask a run to `pause`, `resume`, `stop` or `set` fields; the number of the row."""
        return await self._writer.submit(lambda: self.store.control.steer(run, action, fields or {}, by))

    async def control(self) -> list[Mapping[str, Any]]:
        """Unacknowledged rows of the control table: `id`, `action`, `fields`, `by`, `at_s`; oldest first."""
        who = self._me()
        return await self._writer.submit(lambda: self.store.control.pending(who.run))

    async def ack_control(self, row: int, *, by: str, outcome: str = "done") -> None:
        """Say that a row was carried out, or why not."""
        who = self._me()
        await self._writer.submit(lambda: self.store.control.ack(who, row, by, outcome))

    async def control_history(self, run: str) -> list[Mapping[str, Any]]:
        """Every row of a run, with who acknowledged it, when and with what outcome."""
        return await self._writer.submit(lambda: self.store.control.history(run))

    # ---- ending

    async def close(self) -> None:
        """Flush and close; others may take over what this process had admitted. Calls that wait are refused."""
        if self._writer.has_stopped:
            return
        who = self.who
        if who is not None:
            with suppress(StoreError):  # it is missed after `lease_s` too, and what ends the run is said already
                await self._writer.submit(lambda: self.store.runs.leave(who))
        await asyncio.to_thread(self._writer.stop)
        self._wake({topic for topic, _ in tuple(self._waiters)})
        self.store.db.close()

    def abandon(self) -> None:
        """End without a word, as a killed process would: nothing queued is written. For crash tests."""
        self._writer.stop(abandon=True)


def _to_lease(grant: Grant, group: Group) -> Lease:
    return Lease(
        entry=grant.entry,
        revision=grant.revision,
        use_no=grant.use_no,
        group=group,
        staleness=grant.staleness,
        is_urgent=grant.is_urgent,
    )
