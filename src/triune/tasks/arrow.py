"""Rows of an Arrow table: what Parquet files and Hugging Face data sets are read as."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from triune.tasks.taskset import check_unique_ids

if TYPE_CHECKING:
    import pyarrow


class ArrowRows:
    """Rows of a table, turned into Python values a block at a time."""

    has_keys = False
    block = 64

    def __init__(self, table: pyarrow.Table, source: str, id_field: str, content_hash: str) -> None:
        self._table, self._source = table, source
        self.size: int | None = table.num_rows
        self.content_hash = content_hash
        if id_field in table.column_names:
            check_unique_ids(enumerate(table.column(id_field).to_pylist()), self)

    def read(self, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
        """Rows by number, as dictionaries."""
        if isinstance(numbers, range) and numbers.step == 1:
            return self._table.slice(numbers.start, len(numbers)).to_pylist()
        return self._table.take(list(numbers)).to_pylist()

    def place(self, number: int) -> str:
        """`source: row n`, counted from 0 as in the table."""
        return f"{self._source}: row {number}"


def hash_table(table: pyarrow.Table) -> str:
    """Hash over a table's schema and cells, whatever its chunks."""
    import pyarrow

    total = hashlib.blake2b(str(table.schema.remove_metadata()).encode(), digest_size=16)
    for start in range(0, table.num_rows, 4096):
        piece = table.slice(start, 4096).replace_schema_metadata(None).combine_chunks()
        for batch in piece.to_batches() or []:
            # `take` copies the slice, so that no offset and no neighbouring row gets into the bytes.
            total.update(batch.take(pyarrow.array(range(batch.num_rows))).serialize())
    return total.hexdigest()
