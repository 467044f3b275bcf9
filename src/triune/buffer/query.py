"""Filters: an SQL-like expression, read by us into parameterised SQL and a check of what only the records say.

    filter      := filter OR filter | filter AND filter | NOT filter | ( filter ) | test
    test        := column (= | != | < | <= | > | >=) value | column [NOT] IN (value, …) | column [NOT] LIKE 'a%'
                 | column [NOT] BETWEEN value AND value | column IS [NOT] NULL | flag
    value       := 12 | 0.5 | 2h | 'text' | text | true | false

As in SQL, a comparison with NULL is never true, and neither is its NOT. LIKE ignores the case of ASCII letters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from triune.buffer.query_columns import COLUMNS, DATA, FROM_NAME, EntryRow, value_of
from triune.records import Group, GroupId

Value = str | float | int | bool


class Test(NamedTuple):
    """One comparison: `op` is one of `= < <= > >= in like between null`."""

    column: str
    op: str
    values: tuple[Value, ...]
    is_negated: bool = False


class Both(NamedTuple):
    """All parts hold (`AND`) or one of them does (`OR`)."""

    is_and: bool
    parts: tuple[Node, ...]


Node = Test | Both


def negate(node: Node) -> Node:
    """NOT, moved to the tests, so that what SQL cannot say may be left out of it."""
    if isinstance(node, Test):
        return node._replace(is_negated=not node.is_negated)
    return Both(not node.is_and, tuple(negate(part) for part in node.parts))


class Filter:
    """A filter that was read.

    Attributes:
        text: As the user wrote it; "" = everything.
        is_exact: Whether `where` alone answers.
    """

    def __init__(self, text: str = "", node: Node | None = None) -> None:
        self.text, self._node = text, node
        columns = {test.column for test in _tests(node)}
        self.is_exact = all(name in COLUMNS and COLUMNS[name].sql for name in columns)

    def where(self) -> tuple[str, Mapping[str, Any]]:
        """A condition over `entries e` with its parameters `:q0`, `:q1`, … (and `:now`).

        Every entry that fits fulfils it; where it is not `is_exact`, others may too: ask `fits`.
        """
        parameters: dict[str, Any] = {}
        return ("1 = 1" if self._node is None else _to_sql(self._node, parameters)), parameters

    def decide(self, row: EntryRow) -> bool | None:
        """Whether an entry fits, as far as its row alone tells; None = its records must be read (`fits`)."""
        return True if self._node is None else _decide(self._node, row)

    def fits(self, row: EntryRow, group: Group | None = None) -> bool:
        """Whether an entry fits; `group` is needed where `decide` answers None."""
        return self._node is None or _fits(self._node, row, group)


def _tests(node: Node | None) -> Iterator[Test]:
    if isinstance(node, Test):
        yield node
    elif node is not None:
        for part in node.parts:
            yield from _tests(part)


# -------------------------------------------------------------------------------------------------- in SQL

_NEGATED = {"=": "<>", "<": ">=", "<=": ">", ">": "<=", ">=": "<"}


def _to_sql(node: Node, parameters: dict[str, Any]) -> str:
    if isinstance(node, Both):
        return "(" + (" AND " if node.is_and else " OR ").join(_to_sql(part, parameters) for part in node.parts) + ")"
    column = COLUMNS.get(node.column)
    if node.column in FROM_NAME and node.op in ("=", "in") and not node.is_negated:
        return "(" + " OR ".join(_in_name(node.column, str(value), parameters) for value in node.values) + ")"
    if column is None or not column.sql:
        return "1 = 1"
    names = [_keep(int(value) if column.kind == "flag" else value, parameters) for value in node.values]
    sql, no = column.sql, "NOT " if node.is_negated else ""
    if node.op == "null":
        return f"{sql} IS {no}NULL"
    if node.op == "in":
        return f"{sql} {no}IN ({', '.join(names)})"
    if node.op == "between":
        return f"{sql} {no}BETWEEN {names[0]} AND {names[1]}"
    if node.op == "like":
        return f"lower({sql}) {no}LIKE lower({names[0]}) ESCAPE '!'"
    return f"{sql} {_NEGATED[node.op] if node.is_negated else node.op} {names[0]}"


def _keep(value: Value, parameters: dict[str, Any]) -> str:
    """Add a parameter; how SQL names it."""
    name = f"q{len(parameters)}"
    parameters[name] = value
    return f":{name}"


def _in_name(column: str, value: str, parameters: dict[str, Any]) -> str:
    """A condition that every entry fulfils whose name has `value` in the place of a column, and few others."""
    part = str(GroupId(value, "", "", 0)).partition("/")[0]
    if column == "run":  # names are compared byte by byte, so the index of names serves; 0 comes after /
        return f"(e.entry >= {_keep(f'{part}/', parameters)} AND e.entry < {_keep(f'{part}0', parameters)})"
    escaped = re.sub("([!%_])", r"!\1", part)
    return f"e.entry LIKE {_keep(f'%/{escaped}/%', parameters)} ESCAPE '!'"


# ----------------------------------------------------------------------------------------------- in Python


def _decide(node: Node, row: EntryRow) -> bool | None:
    """True or False where the row settles it, else None: SQL's logic of three values."""
    if isinstance(node, Test):
        column = COLUMNS.get(node.column)
        is_known = node.column in FROM_NAME or (column is not None and bool(column.field))
        return _fits(node, row, None) if is_known else None
    parts = [_decide(part, row) for part in node.parts]
    settles = not node.is_and  # one part that holds settles an OR, one that does not an AND
    return settles if settles in parts else None if None in parts else node.is_and


def _fits(node: Node, row: EntryRow, group: Group | None) -> bool:
    if isinstance(node, Both):
        return (all if node.is_and else any)(_fits(part, row, group) for part in node.parts)
    value = value_of(node.column, row, group)
    if isinstance(value, tuple):
        found = not value if node.op == "null" else any(_holds(node, one) for one in value)
        return found != node.is_negated
    if node.op == "null":
        return (value is None) != node.is_negated
    return value is not None and _holds(node, value) != node.is_negated


def _holds(test: Test, value: Any) -> bool:
    if test.op == "like":
        return isinstance(value, str) and _pattern(str(test.values[0])).fullmatch(value) is not None
    if test.op in ("=", "in"):
        return any(_same(value, wanted) for wanted in test.values)
    if any(isinstance(value, str) != isinstance(wanted, str) for wanted in test.values):
        return False
    try:
        if test.op == "between":
            return test.values[0] <= value <= test.values[1]
        return _ORDER[test.op](value, test.values[0])
    except TypeError:  # a field of a row that is a list or a mapping
        return False


_ORDER: Mapping[str, Any] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def _same(value: Any, wanted: Value) -> bool:
    """Equal, or a number and a text that spells it: fields of rows are both, and a deletion must not miss one."""
    if isinstance(value, str) != isinstance(wanted, str):
        return str(value).lower() == str(wanted).lower()
    return value == wanted


def _pattern(like: str) -> re.Pattern[str]:
    """SQL's LIKE: `%` any text, `_` one character, `!` takes the next one literally."""
    parts, escaped = [], False
    for character in like:
        if character == "!" and not escaped:
            escaped = True
            continue
        wild = {"%": ".*", "_": "."}.get(character) if not escaped else None
        parts.append(wild or re.escape(character))
        escaped = False
    return re.compile("".join(parts), re.IGNORECASE | re.ASCII | re.DOTALL)


def conjunction(*filters: Filter) -> Filter:
    """All of them; those without text are left out."""
    given = [one for one in filters if one._node is not None]
    text = " AND ".join(f"({one.text})" if len(given) > 1 else one.text for one in given)
    nodes = tuple(one._node for one in given if one._node is not None)
    return Filter(text, Both(True, nodes) if len(nodes) > 1 else nodes[0] if nodes else None)


def equals(column: str, value: str) -> Filter:
    """One column is one text; `column` is one of `COLUMNS` or `data.NAME`."""
    assert column in COLUMNS or column.startswith(DATA), column
    quoted = value.replace("'", "''")
    return Filter(f"{column} = '{quoted}'", Test(column, "=", (value,)))


def any_of(parts: Sequence[Node], *, is_and: bool) -> Node:
    """One node of several, or the only one."""
    return parts[0] if len(parts) == 1 else Both(is_and, tuple(parts))
