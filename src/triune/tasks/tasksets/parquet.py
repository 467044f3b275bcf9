"""Rows of Parquet files."""

from __future__ import annotations

from dataclasses import dataclass

from triune.errors import TaskError
from triune.registry import brick
from triune.tasks.arrow import ArrowRows
from triune.tasks.files import find_files, hash_files
from triune.tasks.taskset import Taskset


@brick("taskset")
@dataclass(frozen=True, kw_only=True)
class Parquet(Taskset):
    """Parquet files with one schema, read into memory as one Arrow table.

    Attributes:
        path: A file, or a glob such as `data/train-*.parquet`.
        columns: Read only these; None = all.
    """

    path: str
    columns: list[str] | None = None

    def open(self, seed: int, where: str) -> ArrowRows:
        """Read the files; raises TaskError."""
        import pyarrow
        from pyarrow import parquet

        paths = find_files(self.path, f"{where}.path")
        try:
            table = pyarrow.concat_tables([parquet.read_table(path, columns=self.columns) for path in paths])
        except (pyarrow.ArrowException, OSError) as error:
            raise TaskError(f"{where}.path", f"{self.path} ({error})", "Parquet files with one schema") from error
        return ArrowRows(table, self.path, self.fields.get("id", "id"), hash_files(paths))

    def _first_fields(self) -> frozenset[str] | None:
        import pyarrow
        from pyarrow import parquet

        try:
            names = frozenset(parquet.read_schema(find_files(self.path, "")[0]).names)
        except (pyarrow.ArrowException, OSError, TaskError):
            return None
        return names if self.columns is None else names & frozenset(self.columns)
