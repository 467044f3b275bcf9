"""What a buffer holds, by hash: finds an entry again by its tokens, whoever made it, without reading the others."""

from __future__ import annotations

from collections.abc import Sequence

from triune.buffer.content import entry_hash
from triune.buffer.entry_walk import PAGE, read_entry, rows_that_fit
from triune.buffer.query import equals
from triune.buffer.store import Store


class Contents:
    """The hashes of one buffer's entries as they were put, kept in the store for the next time.

    Who puts an entry computes no hash; whoever looks for one hashes what has come since the last look. So an import
    costs as much into a large buffer as into a small one.
    """

    def __init__(self, store: Store, buffer: str) -> None:
        self.store, self.db, self.buffer = store, store.db, buffer

    def catch_up(self) -> None:
        """Hash everything that has come, a page in each transaction: neither memory nor the write lock is held long.

        Raises:
            StoreError: An entry is damaged; names it.
        """
        while self.db.attempt(self.hash_page) == PAGE:
            pass

    def hash_page(self) -> int:
        """Hash the next page of entries that have come; their number. Call it inside a transaction."""
        last = self.db.one("SELECT max(entry) FROM contents WHERE buffer = ?", (self.buffer,))
        after = last[0] if last is not None and last[0] is not None else 0
        rows = rows_that_fit(self.db, equals("buffer", self.buffer), after=after, num=PAGE)
        hashes = [(row.seq, self.buffer, entry_hash(read_entry(self.store, row, 0))) for row in rows]
        self.db.execute_many("INSERT INTO contents(entry, buffer, hash) VALUES (?, ?, ?)", hashes)
        return len(rows)

    def known(self, hashes: Sequence[str]) -> set[str]:
        """Those that an entry of the buffer has, evicted and deleted ones aside. Call it inside a transaction."""
        rows = self.db.all(
            "SELECT c.hash FROM contents c JOIN entries e ON e.seq = c.entry "
            f"WHERE c.buffer = ? AND c.hash IN ({', '.join('?' * len(hashes)) or 'NULL'}) AND e.state != 'evicted'",
            (self.buffer, *hashes),
        )
        return {name for (name,) in rows}

    def add(self, entry: str, content: str) -> None:
        """Note the hash of an entry that was just stored. Call it in the same transaction, after `hash_page`."""
        self.db.execute(
            "INSERT INTO contents(entry, buffer, hash) SELECT seq, buffer, ? FROM entries WHERE entry = ?",
            (content, entry),
        )
