"""Where a revision's bytes are: in its row."""

from __future__ import annotations

from collections.abc import Sequence

from triune.buffer.database import Database


class Blobs:
    """The only way to and from `revisions.blob`: what a row holds need not be the bytes themselves.

    Call it inside a transaction.
    """

    def __init__(self, db: Database) -> None:
        self.db = db

    def keep(self, seq: int, revision: int, blob: bytes) -> bytes:
        """Take a revision's bytes; what its row holds of them."""
        return blob

    def load(self, rows: Sequence[tuple[int, int, bytes]]) -> list[bytes]:
        """The bytes of rows (entry's position, revision, what the row holds), in their order."""
        return [held for _, _, held in rows]

    def forget(self, seq: int) -> None:
        """The entry's revisions were taken away."""
