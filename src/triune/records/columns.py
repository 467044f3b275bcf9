"""Arrays of many sequences as few: one column per name, concatenated along the first axis.

A column is described in the header by `[name, dtype, tail, rows, offset, size]`: numpy's dtype string (`"bits"` for a
packed mask), the shape after the first axis, the numbers of the sequences that have it (None = all), its place.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from triune.errors import WireError

BITS = "bits"
_ALIGNMENT = 8
_FILL = [bytes(count) for count in range(_ALIGNMENT)]

Description = tuple[str, str, tuple[int, ...], list[int] | None, int, int]


class Joined(NamedTuple):
    """All arrays of sequences that have the same ones, end to end: what a check has put together need not be again.

    Attributes:
        lengths: Of the sequences.
        columns: Name (`tokens`, `streams.advantages`, …) → the arrays of all sequences, in order.
    """

    lengths: list[int]
    columns: Mapping[str, np.ndarray]


class ColumnWriter:
    """Collects arrays by name and lays them out one after the other, each on an 8-byte boundary."""

    def __init__(self, num_sequences: int) -> None:
        self.num_sequences = num_sequences
        self.descriptions: list[Description] = []
        self.chunks: list[Any] = []  # bytes, or contiguous arrays that nobody need copy before they are joined
        self._size = 0

    def add(
        self,
        name: str,
        arrays: Sequence[np.ndarray],
        rows: Sequence[int] | None = None,
    ) -> None:
        """Add one column of arrays that share dtype and tail; `rows` are their sequences, None = all in order."""
        self.add_joined(name, arrays[0] if len(arrays) == 1 else np.concatenate(arrays), rows)

    def add_joined(self, name: str, joined: np.ndarray, rows: Sequence[int] | None = None) -> None:
        """Add one column whose arrays lie end to end already."""
        if joined.dtype.kind == "b":
            code, data = BITS, np.packbits(joined)
        elif joined.dtype.kind in "iuf":
            if sys.byteorder == "big":
                joined = joined.astype(joined.dtype.newbyteorder("<"))
            code, data = _code_of(joined.dtype), joined if joined.flags.c_contiguous else np.ascontiguousarray(joined)
        else:
            raise WireError(name, f"an array of {joined.dtype}", "numbers", "keep free-form values in `info`")
        some = None if rows is None or len(rows) == self.num_sequences else list(rows)
        size = data.nbytes
        self.descriptions.append((name, code, joined.shape[1:], some, self._size, size))
        if size:
            self.chunks.append(data)
        fill = -size % _ALIGNMENT
        if fill:
            self.chunks.append(_FILL[fill])
        self._size += size + fill

    def add_mixed(self, found: Iterable[tuple[int, str, np.ndarray]]) -> None:
        """Add arrays that only some sequences have, or that differ in dtype or tail, as (row, name, array)."""
        columns: dict[tuple[str, Any, tuple[int, ...]], tuple[list[int], list[np.ndarray]]] = {}
        for row, name, array in found:
            rows, arrays = columns.setdefault((name, array.dtype, array.shape[1:]), ([], []))
            rows.append(row)
            arrays.append(array)
        for (name, _, _), (rows, arrays) in columns.items():
            self.add(name, arrays, rows)


_CODES: dict[Any, str] = {}
_DTYPES: dict[str, Any] = {}


def _code_of(dtype: Any) -> str:
    """numpy's name of a dtype, which it spells anew at every call."""
    code = _CODES.get(dtype)
    if code is None:
        code = _CODES[dtype] = dtype.str
    return code


def read_columns(
    data: memoryview, descriptions: Sequence[Sequence[Any]], lengths: Sequence[int]
) -> list[dict[str, Any]]:
    """For each sequence its arrays by name, read-only, as views of `data` (masks are unpacked once per column).

    Columns named `a.b` end in a mapping `a` under the name `b`.

    Raises:
        WireError: A column does not lie inside the data, or is not as long as its sequences.
    """
    found: list[dict[str, Any]] = [{} for _ in lengths]
    ends = _ends(lengths)
    for description in descriptions:
        name, rows = description[0], description[3]
        column_ends = ends if rows is None else _ends([lengths[row] for row in rows])
        targets = found if rows is None else [found[row] for row in rows]
        section, dot, rest = name.partition(".")
        if dot:
            name, targets = rest, [target.setdefault(section, {}) for target in targets]
        column = read_column(data, description, column_ends[-1] if column_ends else 0)
        start = 0
        for end, arrays in zip(column_ends, targets, strict=True):
            arrays[name] = column[start:end]
            start = end
    return found


def _ends(lengths: Sequence[int]) -> list[int]:
    total, ends = 0, []
    for length in lengths:
        total += length
        ends.append(total)
    return ends


def read_column(data: memoryview, description: Sequence[Any], total: int) -> np.ndarray:
    """One column whole, `total` long; read-only, a view of `data` unless it is a mask.

    Raises:
        WireError: It does not lie inside the data, or is not as long as its sequences.
    """
    name, code, tail, _, offset, size = description
    if offset < 0 or size < 0 or offset + size > len(data):
        raise WireError(
            "wire", f"column {name!r} ends at byte {offset + size} of {len(data)}", "columns inside the blob"
        )
    if code == BITS:
        column = _read_bits(data[offset : offset + size], total * math.prod(tail))
    else:
        dtype = _DTYPES.get(code) or _DTYPES.setdefault(code, np.dtype(code))
        column = np.frombuffer(data[offset : offset + size], dtype)
    if tail:
        return column.reshape(total, *tail)
    return column if len(column) == total else column.reshape(total)


def _read_bits(data: memoryview, count: int) -> np.ndarray:
    if not 0 <= count <= 8 * len(data):  # numpy would fill up with False
        raise WireError("wire", f"a mask of {8 * len(data)} bits", f"{count}, one for each token")
    column = np.unpackbits(np.frombuffer(data, np.uint8), count=count).view(np.bool_)
    column.flags.writeable = False
    return column
