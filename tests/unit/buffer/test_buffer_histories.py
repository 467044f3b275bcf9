"""Random histories against a model of a few lines: what it says is ready, leased, spent or open, the store says too."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from triune.buffer import StoredBuffer
from triune.ports import AdmissionRule, Refund, WeightUpdate
from triune.records import GroupId, Task
from triune.testing import postgres
from triune.testing.buffers import BACKENDS, SEGMENTS, BufferWorld
from triune.testing.groups import make_group, with_mean_advantages

NUM_PER_STEP, STALENESS = 3, 1
RULE = AdmissionRule(max_staleness=STALENESS, fresh=NUM_PER_STEP)


class Histories(RuleBasedStateMachine):
    """The model: names of groups by where they are, the line of versions, and what the last checkpoint holds."""

    backend = "sqlite"

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.world = BufferWorld(BACKENDS[self.backend], self.folder, SEGMENTS.get(self.backend))
        self.loop = asyncio.new_event_loop()
        self.open: list[str] = []
        self.ready: dict[str, int] = {}  # → version that sampled it
        self.leased: dict[str, int] = {}
        self.acked: dict[str, int] = {}
        self.gone: set[str] = set()
        self.due: list[str] = []
        self.order: list[str] = []  # ledger order
        self.line: list[int] = []  # surviving versions
        self.step = self.num_tasks = self.num_versions = self.num_keys = self.epoch = 0
        self.checkpoint: tuple[int, list[int], dict[str, int]] = (0, [], {})

    def do(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 10))

    def launch(self) -> StoredBuffer:
        buffer = self.world.open()
        assert self.do(buffer.open_run("r", config_hash="", data_hash="")) == self.epoch
        self.epoch += 1
        return buffer

    @initialize()
    def start(self) -> None:
        self.buffer = self.launch()
        self.publish()

    def teardown(self) -> None:
        self.world.end()
        self.loop.close()
        shutil.rmtree(self.folder)

    @property
    def num_held(self) -> int:
        return len(self.open) + len(self.ready) + len(self.leased) + len(self.acked)

    @property
    def num_free(self) -> int:
        return max(0, (len(self.line) + STALENESS) * NUM_PER_STEP - self.num_held)

    # ---- the explorer

    @rule()
    def admit(self) -> None:
        if self.num_free == 0:
            return
        group = self.do(self.buffer.admit(Task(key=f"t{self.num_tasks}"), RULE, cursor=self.num_tasks))
        self.num_tasks += 1
        self.open.append(str(group))
        self.order.append(str(group))

    @rule()
    def readmit(self) -> None:
        if self.due and self.num_free == 0:
            return
        group = self.do(self.buffer.readmit(RULE, max_retries=100))
        assert (None if group is None else str(group)) == (self.due[0] if self.due else None)
        if group is not None:
            self.due.pop(0)
            self.open.append(str(group))
            self.order.remove(str(group))
            self.order.append(str(group))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), is_dropped=st.booleans(), times=st.integers(1, 2))
    def put(self, data: st.DataObject, is_dropped: bool, times: int) -> None:
        entry = data.draw(st.sampled_from(self.open))
        raw = make_group(GroupId.parse(entry), version=self.line[-1])
        for _ in range(times):
            if is_dropped:
                self.do(self.buffer.put(raw, dropped_by="flat"))
            else:
                self.do(self.buffer.put(raw, with_mean_advantages(raw)))
        self.open.remove(entry)
        if is_dropped:
            self.gone.add(entry)
        else:
            self.ready[entry] = self.line[-1]

    @precondition(lambda self: self.open)
    @rule(data=st.data(), reason=st.sampled_from([Refund.INVALID, Refund.STALE]))
    def refund(self, data: st.DataObject, reason: Refund) -> None:
        entry = data.draw(st.sampled_from(self.open))
        self.do(self.buffer.refund(GroupId.parse(entry), reason))
        self.do(self.buffer.refund(GroupId.parse(entry), reason))
        self.open.remove(entry)
        if reason is Refund.STALE:
            self.due = sorted([*self.due, entry], key=self.order.index)
        else:
            self.gone.add(entry)

    # ---- the trainer

    @rule()
    def lease(self) -> None:
        floor = self.line[max(0, len(self.line) - 1 - STALENESS)]
        by_ledger = sorted(self.ready, key=self.order.index)
        fresh = [entry for entry in by_ledger if self.ready[entry] >= floor]
        leases = self.do(self.buffer.lease(NUM_PER_STEP, max_staleness=STALENESS, wait=False))
        assert [lease.entry for lease in leases] == fresh[:NUM_PER_STEP]
        for lease in leases:
            assert lease.staleness == len(self.line) - 1 - self.line.index(self.ready[lease.entry])
            self.leased[lease.entry] = self.ready.pop(lease.entry)
        for entry in by_ledger:
            if self.ready.get(entry, floor) < floor:
                del self.ready[entry]
                self.due = sorted([*self.due, entry], key=self.order.index)

    @rule()
    def publish(self) -> None:
        version = self.do(self.buffer.begin_version(self.step))
        assert version == self.num_versions
        self.do(self.buffer.commit_version(WeightUpdate(version=version, step=self.step, digest="", dtype="float32")))
        self.num_versions += 1
        self.step += 1
        self.line.append(version)

    @precondition(lambda self: self.leased)
    @rule(is_acknowledged=st.booleans())
    def save(self, is_acknowledged: bool) -> None:
        """A checkpoint, after which the process may be killed before it acknowledges."""
        self.acked |= self.leased
        self.checkpoint = (self.step, list(self.line), dict(self.acked))
        uses = [(entry, 1) for entry in self.leased]
        self.leased = {}
        if is_acknowledged:
            self.do(self.buffer.ack(uses, checkpoint=f"step-{self.step}", step=self.step))
        else:
            self.resume(strict=True)

    @precondition(lambda self: self.leased)
    @rule(data=st.data(), dropped_by=st.sampled_from(["", "flat"]))
    def give_back(self, data: st.DataObject, dropped_by: str) -> None:
        entry = data.draw(st.sampled_from(sorted(self.leased)))
        assert self.do(self.buffer.give_back([(entry, 1)], dropped_by=dropped_by)) == 1
        version = self.leased.pop(entry)
        if dropped_by:
            self.gone.add(entry)
        else:
            self.ready[entry] = version

    # ---- people

    @precondition(lambda self: self.ready or self.leased)
    @rule(data=st.data())
    def amend(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(sorted({*self.ready, *self.leased})))
        self.num_keys += 1
        patch = {"members": {"0": {"reward": float(self.num_keys + 1)}}}
        expected = "applied" if entry in self.ready else "deferred"
        for _ in range(2):
            assert self.do(self.buffer.amend(entry, patch, by="ann", key=f"k{self.num_keys}")) == expected
        if expected == "deferred":  # so that the model need not know of reissued entries
            self.do(self.buffer.give_back([(entry, 1)]))
            self.ready[entry] = self.leased.pop(entry)
        [first, *_] = self.do(self.buffer.read(entry)).experiences
        assert first.reward == self.num_keys + 1

    # ---- crashes

    @rule(strict=st.booleans())
    def resume(self, strict: bool) -> None:
        self.world.crash(self.buffer)
        self.buffer = self.launch()
        self.step, line, consumed = self.checkpoint
        version = line[-1] if line else -1
        uses = [(entry, 1) for entry in consumed]
        self.do(self.buffer.resume_at(step=self.step, version=version, consumed=uses, checkpoint="c", strict=strict))
        self.line = list(line)
        self.ready |= self.leased | {entry: v for entry, v in self.acked.items() if entry not in consumed}
        self.leased, self.acked = {}, dict(consumed)
        is_dropping = strict or not line
        lost = [entry for entry, v in self.ready.items() if v > version]
        for entry in lost:
            if is_dropping:
                del self.ready[entry]
            else:
                self.ready[entry] = version
        self.due = sorted({*self.due, *self.open, *(lost if is_dropping else ())}, key=self.order.index)
        self.open = []
        if not self.line:
            self.publish()

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "buffer"):
            return
        self.do(self.buffer.check_conservation())
        states = {info.entry: info.state.value for info in self.do(self.buffer.browse(limit=10**6))}
        for entry in self.ready:
            assert states[entry] == "ready"
        for entry in self.leased:
            assert states[entry] == "ready"
        for entry in self.acked:
            assert states[entry] == "spent"
        stats = self.do(self.buffer.stats())
        assert stats["uses/leased"] == len(self.leased)
        assert stats["uses/acked"] == len(self.acked)
        assert stats["open"] == len(self.open)
        assert stats["admitted"] - stats["refunded"] == self.num_held
        assert self.do(self.buffer.free_slots(RULE)) == self.num_free


class HistoriesInMemory(Histories):
    backend = "memory"


class HistoriesInSegments(Histories):
    backend = "segments"


class HistoriesOnServer(Histories):
    backend = "postgres"

    def __init__(self) -> None:
        if postgres.server_url() is None:
            pytest.skip(postgres.MISSING)
        super().__init__()


def _settings(num: int) -> settings:
    return settings(
        max_examples=num,
        phases=(Phase.generate,),
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


TestHistories = Histories.TestCase
TestHistories.settings = _settings(25)
TestHistoriesInMemory = HistoriesInMemory.TestCase
TestHistoriesInMemory.settings = _settings(10)
TestHistoriesInSegments = HistoriesInSegments.TestCase
TestHistoriesInSegments.settings = _settings(6)
TestHistoriesOnServer = pytest.mark.postgres(HistoriesOnServer.TestCase)
TestHistoriesOnServer.settings = _settings(25)
