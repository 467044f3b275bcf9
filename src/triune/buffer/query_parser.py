"""Reads a filter's text; every error says where, what was expected, and what was probably meant."""

from __future__ import annotations

import difflib
import re
from typing import NamedTuple

from triune.buffer.query import Filter, Node, Test, Value, any_of, negate
from triune.buffer.query_columns import COLUMNS, DATA, Column
from triune.errors import ConfigError

_TOKEN = re.compile(
    r"""\s*(?:(?P<text>'(?:[^']|'')*'|"(?:[^"]|"")*")
    |(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?P<unit>[smhd])?(?![\w.])
    |(?P<word>[A-Za-z_][\w./@:+-]*)
    |(?P<sign><=|>=|!=|<>|==|=|<|>|\(|\)|,))""",
    re.VERBOSE,
)
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_WORDS = ("and", "or", "not", "in", "like", "between", "is", "null", "true", "false")
_COMPARISONS = {"=": "=", "==": "=", "!=": "=", "<>": "=", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
_NEEDED = "a value: a number, 'text', true or false"


class _Token(NamedTuple):
    kind: str
    text: str
    at: int
    value: Value = ""
    unit: str = ""

    @property
    def keyword(self) -> str:
        return self.text.lower() if self.kind == "word" and self.text.lower() in _WORDS else ""


def parse_filter(text: str | None) -> Filter:
    """Read a filter; None or nothing but blanks = everything.

    Raises:
        ConfigError: Unknown column, bad syntax, or a value that its column never has; says what was probably meant.
    """
    return Filter() if text is None or not text.strip() else Filter(text.strip(), _Parser(text).parse())


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.at, self.tokens = text, 0, list[_Token]()
        self._read_tokens()

    def _read_tokens(self) -> None:
        at = 0
        while at < len(self.text.rstrip()):
            match = _TOKEN.match(self.text, at)
            if match is None:
                at += len(self.text[at:]) - len(self.text[at:].lstrip())
                rest = self.text[at : at + 20]
                do = "close the quote" if rest[0] in "'\"" else f"put quotes around it: '{rest.split()[0]}'"
                raise self._error(at, f"cannot read {rest!r}", "columns, values, AND, OR, NOT and brackets", do)
            self.tokens.append(_token(match))
            at = match.end()
        self.tokens.append(_Token("end", "the end", len(self.text)))

    def _error(self, at: int, found: str, expected: str, do: str = "") -> ConfigError:
        do = do or "see the columns in `triune buffer query --help`"
        return ConfigError(f"filter {self.text!r}, character {at + 1}", found, expected, do)

    @property
    def token(self) -> _Token:
        return self.tokens[self.at]

    def _next(self) -> _Token:
        token = self.token
        self.at += token.kind != "end"
        return token

    def _takes(self, *words: str) -> bool:
        """Whether the next token is one of these keywords or signs; then it is consumed."""
        is_there = (self.token.keyword or (self.token.text if self.token.kind == "sign" else "")) in words
        self.at += is_there
        return is_there

    # ---- grammar

    def parse(self) -> Node:
        node = self._either()
        if self.token.kind != "end":
            do = "remove the bracket" if self.token.text == ")" else "join two tests with AND or OR"
            raise self._error(self.token.at, f"found {self.token.text!r}", "AND, OR or the end", do)
        return node

    def _either(self) -> Node:
        parts = [self._all()]
        while self._takes("or"):
            parts.append(self._all())
        return any_of(parts, is_and=False)

    def _all(self) -> Node:
        parts = [self._one()]
        while self._takes("and"):
            parts.append(self._one())
        return any_of(parts, is_and=True)

    def _one(self) -> Node:
        if self._takes("not"):
            return negate(self._one())
        if self._takes("("):
            node = self._either()
            if not self._takes(")"):
                raise self._error(self.token.at, f"found {self.token.text!r}", "`)`", "close the bracket")
            return node
        return self._test()

    def _test(self) -> Node:
        column = self._column()
        if self._takes("is"):
            is_negated = self._takes("not")
            if not self._takes("null"):
                raise self._error(self.token.at, f"found {self.token.text!r}", "NULL", "write `IS NULL`, or `= value`")
            return Test(column.name, "null", (), is_negated)
        is_negated = self._takes("not")
        if self._takes("in"):
            return Test(column.name, "in", self._list(column), is_negated)
        if self._takes("like"):
            return Test(column.name, "like", (self._pattern(column),), is_negated)
        if self._takes("between"):
            low = self._value(column)
            if not self._takes("and"):
                raise self._error(self.token.at, f"found {self.token.text!r}", "AND", "write `BETWEEN low AND high`")
            return Test(column.name, "between", (low, self._value(column)), is_negated)
        sign = self.token
        if is_negated or sign.text not in _COMPARISONS:
            if column.kind == "flag" and not is_negated:
                return Test(column.name, "=", (True,))
            raise self._error(
                sign.at, f"found {sign.text!r} after {column.name}", "= != < <= > >= IN LIKE BETWEEN IS", ""
            )
        self._next()
        self._check_order(column, sign)
        return Test(column.name, _COMPARISONS[sign.text], (self._value(column),), sign.text in ("!=", "<>"))

    def _check_order(self, column: Column, sign: _Token) -> None:
        if column.kind in ("many", "flag") and _COMPARISONS[sign.text] != "=":
            raise self._error(sign.at, f"{sign.text} of {column.name}", "= or !=", f"{column.name} has no order")

    def _column(self) -> Column:
        token = self._next()
        name = token.text.lower() if token.text.lower() in COLUMNS else token.text
        if token.kind != "word" or token.keyword:
            raise self._error(token.at, f"found {token.text!r}", "a column", _near(token.text))
        if name in COLUMNS:
            return COLUMNS[name]
        if name.startswith(DATA) and len(name) > len(DATA):
            return Column(name, "any", "")
        raise self._error(token.at, f"no column {name!r}", f"one of {', '.join(COLUMNS)}, data.NAME", _near(name))

    # ---- values

    def _list(self, column: Column) -> tuple[Value, ...]:
        if not self._takes("("):
            raise self._error(self.token.at, f"found {self.token.text!r}", "`(`", "write `IN (a, b)`")
        values = [self._value(column)]
        while self._takes(","):
            values.append(self._value(column))
        if not self._takes(")"):
            raise self._error(self.token.at, f"found {self.token.text!r}", "`,` or `)`", "close the list")
        return tuple(values)

    def _pattern(self, column: Column) -> str:
        token = self._next()
        if token.kind not in ("text", "word") or column.kind in ("number", "flag"):
            raise self._error(token.at, f"{column.name} LIKE {token.text}", "a text column and 'text%'", "")
        pattern = str(token.value)
        if (len(pattern) - len(pattern.rstrip("!"))) % 2:
            do = "write `!!` for the sign itself"
            raise self._error(token.at, "`!` at the end, which takes the next character literally", "`!!`", do)
        return pattern

    def _value(self, column: Column) -> Value:
        token = self._next()
        if token.kind not in ("text", "number", "word") or token.keyword not in ("", "true", "false"):
            do = "write `IS NULL`" if token.keyword == "null" else f"for text write '{token.text}'"
            raise self._error(token.at, f"found {token.text!r}", _NEEDED, "" if token.kind == "end" else do)
        value: Value = token.keyword == "true" if token.keyword else token.value
        self._check_kind(column, token, value)
        if token.unit:
            return float(value) * _UNITS[token.unit]
        return value

    def _check_kind(self, column: Column, token: _Token, value: Value) -> None:
        is_text, is_flag = isinstance(value, str), isinstance(value, bool)
        where, found = token.at, f"{column.name} compared with {token.text}"
        if column.kind == "number" and (is_text or is_flag):
            raise self._error(where, found, "a number", f"{column.name}: {column.about}")
        if column.kind in ("text", "many") and not is_text:
            raise self._error(where, found, "text", f"write '{token.text}'")
        if column.kind == "flag" and not is_flag:
            raise self._error(where, found, "true or false", f"write `{column.name}` or `NOT {column.name}`")
        if token.unit and column.name != "age":
            raise self._error(where, found, "a plain number", "only age is a time")
        if column.choices and value not in column.choices:
            near = difflib.get_close_matches(str(value), column.choices, n=1)
            do = f"did you mean '{near[0]}'?" if near else "choose one of them"
            raise self._error(where, found, f"one of {', '.join(column.choices)}", do)


def _token(match: re.Match[str]) -> _Token:
    kind = match.lastgroup or ""
    if match["number"] is not None:
        text = match["number"]
        value: Value = int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
        return _Token("number", text + (match["unit"] or ""), match.start("number"), value, match["unit"] or "")
    text = match[kind]
    value = text[1:-1].replace(text[0] * 2, text[0]) if kind == "text" else text
    return _Token(kind, text, match.start(kind), value)


def _near(name: str) -> str:
    known = {"step": "version", "task": "task_key", "key": "task_key", "id": "entry", "user": f"{DATA}user_id"}
    near = difflib.get_close_matches(name.lower(), COLUMNS, n=1)
    guess = known.get(name.lower()) or (near[0] if near else "")
    return f"did you mean `{guess}`?" if guess else "a field of the task's row is `data.NAME`"
