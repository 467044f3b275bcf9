"""Bring the store back to a checkpoint (CONTRACTS C4)."""

from __future__ import annotations

from collections.abc import Sequence

from triune.buffer.content import REDACTED
from triune.buffer.database import Database
from triune.buffer.entries import Entries
from triune.buffer.runs import Incarnation
from triune.buffer.uses import Uses
from triune.buffer.versions import Versions
from triune.ports import EntryState, Refund

_NONE = -2
"""Below every version, also that of what no policy sampled."""


def resume_at(
    db: Database,
    entries: Entries,
    uses: Uses,
    versions: Versions,
    who: Incarnation,
    *,
    step: int,
    version: int,
    consumed: Sequence[tuple[str, int]],
    checkpoint: str,
    strict: bool,
    makes_all_again: bool = False,
) -> None:
    """Acknowledge what the checkpoint contains, return every other use, and lose the versions after it.

    Groups that were being made, and with `strict` those that lost versions sampled, give their slots back and are due
    again (`readmit`), in ledger order and as slots allow: the checkpoint has fewer than there were at the crash.
    With `makes_all_again` so is everything else that is not trained on, and what was dropped since: in a deterministic
    run, which groups are made together decides the last bits of their log-probs, so that a step is made as a whole.
    A use acknowledged by a later checkpoint (gone, or not chosen) is returned too: it is not in these weights.
    """
    uses.ack(who, consumed, checkpoint, step)
    kept = {(entries.locate(entry)[0], use_no) for entry, use_no in consumed}
    rows = db.all(
        "SELECT id, entry, use_no FROM uses WHERE consumer = ?1 AND state = 'leased' "
        "UNION ALL SELECT id, entry, use_no FROM uses WHERE consumer = ?1 AND state = 'acked' AND step > ?2",
        (who.run, step),
    )
    uses.take_back(who, [(use, seq) for use, seq, use_no in rows if (seq, use_no) not in kept])
    _drop_deleted(db, entries, who)
    versions.lose_after(who.run, version)
    entries.ledger.recall_open(who)
    if strict or version < 0:  # without a surviving version there is none to count staleness from
        _drop_lost(db, entries, who, _NONE if makes_all_again else version)
        if makes_all_again:
            _recall_dropped(db, who, version)
    else:
        db.execute(
            "UPDATE entries SET newest_version = ?1, "
            "oldest_version = CASE WHEN oldest_version < ?1 THEN oldest_version ELSE ?1 END "
            "WHERE scope = ?2 AND newest_version > ?1",
            (version, who.run),
        )
    db.touched |= {"entries", "slots", "versions"}


def _drop_lost(db: Database, entries: Entries, who: Incarnation, version: int) -> None:
    """Drop what lost versions sampled; its groups are due again. What nobody sampled and took no slot stays."""
    rows = db.all(
        "SELECT seq FROM entries WHERE scope = ? AND newest_version > ? AND granted = 0 AND "
        "state IN ('waiting', 'raw', 'shaping', 'ready') AND (admission IS NOT NULL OR newest_version >= 0)",
        (who.run, version),
    )
    for (seq,) in rows:
        entries.discard(who.run, seq, EntryState.DROPPED, Refund.LOST.value, Refund.LOST, is_due=True)


def _drop_deleted(db: Database, entries: Entries, who: Incarnation) -> None:
    """Take out what was deleted after a step used it that is gone now: ready again, it would be leased empty.

    It gives its slot back when no step that is left was trained on it.
    """
    rows = db.all(
        "SELECT seq, state, granted, admission FROM entries "
        "WHERE scope = ? AND reason = ? AND state IN ('ready', 'evicted')",
        (who.run, REDACTED),
    )
    for seq, state, granted, admission in rows:
        refund = None if granted else Refund.DROPPED
        if state == EntryState.READY:
            entries.discard(who.run, seq, EntryState.EVICTED, REDACTED, refund)
        elif refund is not None and admission is not None:
            entries.ledger.refund(who.run, admission, refund.value)


def _recall_dropped(db: Database, who: Incarnation, version: int) -> None:
    """What operators or the sampling dropped of groups that `version` or a later one sampled is due again too."""
    db.execute(
        "UPDATE admissions AS a SET is_due = 1 WHERE run = ?1 AND state = 'refunded' "
        "AND reason IN ('dropped', 'invalid', 'too_small') AND seq IN "
        "(SELECT ledger FROM entries WHERE scope = ?1 AND state = 'dropped' AND newest_version >= ?2) "
        "AND NOT EXISTS (SELECT 1 FROM admissions b WHERE b.run = a.run AND b.taskset = a.taskset "
        "AND b.task_key = a.task_key AND b.visit = a.visit AND b.round > a.round)",
        (who.run, max(version, 0)),
    )
