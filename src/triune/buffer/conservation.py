"""The conservation law of CONTRACTS C3, as one check that is run after every crash test."""

from __future__ import annotations

from triune.buffer.database import Database
from triune.errors import StoreError

_NONE_EXPECTED = {
    "two active uses under one number": (
        "SELECT count(*) FROM (SELECT 1 FROM uses WHERE state != 'returned' "
        "GROUP BY entry, consumer, use_no HAVING count(*) > 1) AS x"
    ),
    "entries of a run whose granted uses differ from their rows": (
        "SELECT count(*) FROM entries e WHERE scope != '' AND granted != "
        "(SELECT count(*) FROM uses u WHERE u.entry = e.seq AND u.consumer = e.scope AND u.state != 'returned')"
    ),
    "entries of a run whose acknowledged uses differ from their rows": (
        "SELECT count(*) FROM entries e WHERE scope != '' AND acked != "
        "(SELECT count(*) FROM uses u WHERE u.entry = e.seq AND u.consumer = e.scope "
        "AND u.state != 'returned' AND u.state = 'acked')"  # the first condition names the index to use
    ),
    "uses beyond an entry's limit": (
        "SELECT count(*) FROM (SELECT 1 FROM uses u JOIN entries e ON e.seq = u.entry WHERE u.state != 'returned' "
        "GROUP BY u.entry, u.consumer HAVING count(*) > max(e.max_uses)) AS x"
    ),
    "spent entries with uses left": (
        "SELECT count(*) FROM entries WHERE scope != '' AND (state = 'spent') != (acked >= max_uses) "
        "AND NOT (state = 'evicted' AND reason = 'redacted')"
    ),
    "entries without their raw revision": (
        "SELECT count(*) FROM entries e WHERE state != 'evicted' AND NOT EXISTS "
        "(SELECT 1 FROM revisions r WHERE r.entry = e.seq AND r.revision = 0)"
    ),
    "entries without their newest revision": (
        "SELECT count(*) FROM entries e WHERE state != 'evicted' AND NOT EXISTS "
        "(SELECT 1 FROM revisions r WHERE r.entry = e.seq AND r.revision = e.revision)"
    ),
    "evicted entries whose bytes were not freed": (
        "SELECT count(*) FROM entries e WHERE state = 'evicted' AND reason != 'redacted' AND EXISTS "
        "(SELECT 1 FROM revisions r WHERE r.entry = e.seq)"
    ),
    "evicted entries that were urgent or in use, or without a reason": (
        "SELECT count(*) FROM entries WHERE state = 'evicted' AND reason != 'redacted' "
        "AND (class != 0 OR granted != 0 OR reason = '')"
    ),
    "put admissions without an entry": (
        "SELECT count(*) FROM admissions WHERE state = 'put' "
        "AND seq NOT IN (SELECT admission FROM entries WHERE admission IS NOT NULL)"
    ),
    "slots held by entries that ended untrained": (
        "SELECT count(*) FROM admissions a JOIN entries e ON e.admission = a.seq WHERE a.state != 'refunded' "
        "AND e.state IN ('dropped', 'expired', 'evicted') AND NOT (e.reason = 'redacted' AND EXISTS "
        "(SELECT 1 FROM uses u WHERE u.entry = e.seq AND u.state != 'returned'))"
    ),
    "refunded slots of entries that may be trained on": (
        "SELECT count(*) FROM admissions a JOIN entries e ON e.admission = a.seq WHERE a.state = 'refunded' "
        "AND e.state IN ('waiting', 'raw', 'shaping', 'ready', 'spent')"
    ),
    "runs whose admissions differ from their ledger": (
        "SELECT count(*) FROM runs r WHERE admitted != (SELECT count(*) FROM admissions a WHERE a.run = r.run) OR "
        "refunded != (SELECT count(*) FROM admissions a WHERE a.run = r.run AND a.state = 'refunded')"
    ),
    "groups with two open admissions": (
        "SELECT count(*) FROM (SELECT 1 FROM admissions WHERE state != 'refunded' "
        "GROUP BY run, taskset, task_key, visit HAVING count(*) > 1) AS x"
    ),
}


def check_conservation(db: Database) -> dict[str, int]:
    """Check that nothing was lost or doubled; the numbers that were compared.

    puts = waiting + raw + shaping + ready + spent + dropped + expired + evicted, and per consumer
    granted uses = leased + acked + returned, each against a counter that commits with the event itself. So are evicted
    entries, per reason (`evicted/oldest`, …).

    Raises:
        StoreError: A sum does not add up; names all that do not.
    """
    counters = db.counters()
    numbers = {"puts": counters.get("puts", 0)}
    wrong: list[str] = []
    states = dict(db.all("SELECT state, count(*) FROM entries GROUP BY state"))
    if sum(states.values()) != numbers["puts"]:
        wrong.append(f"{numbers['puts']} puts but {states}")
    uses: dict[str, dict[str, int]] = {}
    for consumer, state, number in db.all("SELECT consumer, state, count(*) FROM uses GROUP BY consumer, state"):
        uses.setdefault(consumer, {})[state] = number
    for name, granted in counters.items():
        if name.startswith("granted/"):
            consumer = name.removeprefix("granted/")
            numbers[name] = granted
            if sum(uses.pop(consumer, {}).values()) != granted:
                wrong.append(f"{granted} uses granted to {consumer} but other rows")
    wrong += [f"uses of {consumer} that nobody granted" for consumer in uses]
    evicted = dict(db.all("SELECT reason, count(*) FROM entries WHERE state = 'evicted' GROUP BY reason"))
    counted = {name.removeprefix("evicted/"): n for name, n in counters.items() if n and name.startswith("evicted/")}
    if evicted != counted:
        wrong.append(f"evictions counted as {counted} but entries {evicted}")
    numbers |= {f"evicted/{reason}": number for reason, number in counted.items()}
    for what, sql in _NONE_EXPECTED.items():
        row = db.one(sql)
        if row and row[0]:
            wrong.append(f"{row[0]} x {what}")
    if wrong:
        raise StoreError(
            f"conservation law in {db.where}", "; ".join(wrong), "nothing lost, nothing twice", "report this"
        )
    return {**numbers, **{f"entries/{state}": number for state, number in states.items()}}
