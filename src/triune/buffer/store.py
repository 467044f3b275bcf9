"""The seam between the asynchronous buffer and a database: every call is synchronous and inside one transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from triune.buffer import resume
from triune.buffer.amendments import Amendments, Reshape
from triune.buffer.candidates import Priority
from triune.buffer.capacity import Capacity, Policy
from triune.buffer.choosing import Choosing
from triune.buffer.config import SegmentSettings
from triune.buffer.control import Control
from triune.buffer.database import Database
from triune.buffer.entries import Entries
from triune.buffer.ledger import AdmissionLedger
from triune.buffer.runs import Incarnation, Runs
from triune.buffer.segments import Blobs
from triune.buffer.uses import Uses
from triune.buffer.versions import Versions
from triune.records import Group


class Store:
    """All nouns of the buffer over one database. Call its parts only inside `db.transaction()`."""

    def __init__(
        self,
        db: Database,
        *,
        lease_s: float = 60.0,
        reissue_s: float = 86400.0,
        reward_deadline_s: float = 86400.0,
        reshape: Reshape | None = None,
        min_group: int | None = None,
        priority: Priority | None = None,
        shares: Mapping[str, float] | None = None,
        capacity: int | None = None,
        evict: Policy = "oldest",
        segments: SegmentSettings | None = None,
    ) -> None:
        self.db = db
        self.runs = Runs(db, lease_s)
        self.ledger = AdmissionLedger(db, self.runs)
        self.blobs = Blobs(db, segments)
        self.entries = Entries(db, self.runs, self.ledger, self.blobs, reward_deadline_s)
        self.versions = Versions(db, self.runs)
        self.choosing = Choosing(db, self.versions, priority=priority, shares=shares)
        self.uses = Uses(db, self.runs, self.entries, self.versions, self.choosing)
        self.capacity = Capacity(db, self.entries, self.choosing, limit=capacity, policy=evict)
        self.amendments = Amendments(db, self.runs, self.entries, reshape, reissue_s, min_group)
        self.entries.on_put = self.capacity.after_put
        self.entries.on_deadline = self.amendments.close
        self.entries.on_deferred = self.amendments.settle
        self.uses.on_settled = self.amendments.settle
        self.control = Control(db, self.runs)

    def resume_at(
        self,
        who: Incarnation,
        step: int,
        version: int,
        consumed: Sequence[tuple[str, int]],
        checkpoint: str,
        strict: bool,
        makes_all_again: bool = False,
    ) -> None:
        """See `resume.resume_at`."""
        resume.resume_at(
            self.db,
            self.entries,
            self.uses,
            self.versions,
            self.runs.check(who),
            step=step,
            version=version,
            consumed=consumed,
            checkpoint=checkpoint,
            strict=strict,
            makes_all_again=makes_all_again,
        )
        self.runs.settle(who)

    def read(self, entry: str, revision: int | None) -> Group:
        """One revision of an entry, the newest by default."""
        return self.entries.read(self.entries.locate(entry)[0], revision)
