"""Filters: what fits, that SQL and Python agree, and what is said about a text that is no filter."""

from __future__ import annotations

from pathlib import Path

import pytest

import triune.buffer
from triune.buffer import OpenBuffer, Store, StoredBuffer
from triune.buffer.entry_walk import PAGE, count_that_fit, read_entry, rows_that_fit, walk
from triune.buffer.query import Filter, conjunction, equals
from triune.buffer.query_columns import COLUMNS, EntryRow
from triune.buffer.query_parser import parse_filter
from triune.errors import ConfigError
from triune.records import Group, GroupId
from triune.testing.filled_stores import in_buffer, make_store
from triune.testing.groups import make_group


@pytest.fixture(scope="module")
def buffer(tmp_path_factory: pytest.TempPathFactory) -> OpenBuffer:
    return triune.buffer.open(make_store(tmp_path_factory.mktemp("store")))


def keys(buffer: OpenBuffer, text: str) -> list[str]:
    return [row.group.task_key for row in buffer.entries(text)]


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("", ["t0", "t1", "t2", "t3", "a"]),
        ("state = ready", ["t2", "a"]),
        ("state IN (spent, 'dropped')", ["t0", "t1"]),
        ("NOT state = ready", ["t0", "t1", "t3"]),
        ("state != ready AND reward >= 0.5", ["t0", "t1", "t3"]),
        ("state = spent OR state = dropped AND reward < 1", ["t0"]),
        ("(state = spent OR state = dropped) AND reward <= 0.5", ["t0"]),
        ("NOT (state = ready OR reward = 0.5)", ["t1", "t3"]),
        ("NOT (state = ready AND source = policy)", ["t0", "t1", "t3", "a"]),
        ("reward BETWEEN 0.2 AND 0.6", ["t0", "t2"]),
        ("reward NOT BETWEEN 0.2 AND 0.6", ["t1", "t3", "a"]),
        ("source = expert", ["a"]),
        ("scope = r AND buffer = 'expert'", ["a"]),
        ("reason LIKE 'DROP%'", ["t1"]),
        ("version = -1", ["a"]),
        ("version >= 0 AND staleness = 1", ["t0", "t1", "t2"]),
        ("staleness = 0", ["t3", "a"]),
        ("uses > 0", ["t0"]),
        ("leased > 0", []),
        ("urgent", []),
        ("NOT urgent AND num_records = 1", ["a"]),
        ("age < 1h", ["t0", "t1", "t2", "t3", "a"]),
        ("age > 7d", []),
        ("run = r AND taskset = answers", ["a"]),
        ("task_key IN (t0, t3)", ["t0", "t3"]),
        ("task_key LIKE 't_' AND NOT task_key = 't1'", ["t0", "t2", "t3"]),
        ("entry = 'r/train/t2/0'", ["t2"]),
        ("tags = gold", ["a"]),
        ("tags != gold AND buffer = main", ["t0", "t1", "t2", "t3"]),
        ("tags IS NOT NULL", ["a"]),
        ("operators = advantage", ["t0", "t2"]),
        ("stop = done AND num_tokens > 15", ["t0", "t1", "t2", "t3"]),
        ("data.user_id = ann", ["t0", "t2"]),
        ("data.user_id = 'ann' AND state = ready", ["t2"]),
        ("data.user_id IS NULL", ["a"]),
        ("data.answer = 42 AND data.user_id LIKE 'A%'", ["t0", "t2"]),
        ("data.answer = '42' AND data.user_id = bob", ["t1"]),
        ("data.answer > 41.5 AND data.user_id = bob", ["t1"]),
        ("data.none = 1 OR NOT data.none = 1", []),
        ('data.note = "secret of bob"', ["t1"]),
    ],
)
def test_a_filter_finds_what_it_says(buffer: OpenBuffer, text: str, fits: list[str]):
    assert keys(buffer, text) == fits


@pytest.mark.parametrize("name", [name for name, column in COLUMNS.items() if column.sql])
def test_sql_and_python_agree_on_every_column_of_the_store(buffer: OpenBuffer, name: str):
    everything = [row for row, _ in walk(buffer.store, Filter())]
    values = {getattr(row, COLUMNS[name].field) for row in everything} - {None}
    for value in values if name != "age" else {100.0}:
        literal = str(value).lower() if COLUMNS[name].kind in ("flag", "number") else f"'{value}'"
        signs = ("=", "!=") if COLUMNS[name].kind != "number" else ("=", "!=", "<", "<=", ">", ">=")
        for sign in signs:
            for text in (f"{name} {sign} {literal}", f"NOT {name} {sign} {literal}", f"{name} IS NULL"):
                wanted = parse_filter(text)
                assert wanted.is_exact
                in_sql = [row.entry for row, _ in walk(buffer.store, wanted)]
                assert in_sql == [row.entry for row in everything if wanted.fits(row)], text


def test_a_quote_in_a_text_stays_a_text(buffer: OpenBuffer):
    assert keys(buffer, "reason = 'x'' OR ''1'' = ''1'") == []
    assert keys(buffer, "entry = '''; DROP TABLE entries; --'") == []
    assert len(keys(buffer, "")) == 5
    condition, parameters = parse_filter("state = ready AND reason LIKE 'a%'").where()
    assert "ready" not in condition
    assert sorted(map(str, parameters.values())) == ["a%", "ready"]


def test_wildcards_and_their_escape_mean_the_same_to_both(buffer: OpenBuffer):
    assert keys(buffer, "reason LIKE 'drop!_flat%'") == ["t1"]
    assert keys(buffer, "reason LIKE 'drop!%'") == []
    assert keys(buffer, "data.note LIKE 'secret!_of%'") == []
    assert keys(buffer, "data.note LIKE 'SECRET_of%bob'") == ["t1"]


def test_the_newest_come_first_and_no_more_than_asked(buffer: OpenBuffer):
    assert [row.group.task_key for row in buffer.query("reward >= 0", limit=2)] == ["a", "t3"]


def test_filters_are_joined_by_and(buffer: OpenBuffer):
    both = conjunction(parse_filter("state = ready OR state = spent"), Filter(), equals("data.user_id", "ann"))
    assert both.text == "(state = ready OR state = spent) AND (data.user_id = 'ann')"
    assert keys(buffer, both.text) == [row.group.task_key for row, _ in walk(buffer.store, both)] == ["t0", "t2"]


def test_a_walk_goes_on_where_a_page_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert PAGE > 5
    with triune.buffer.open(make_store(tmp_path)) as buffer:
        monkeypatch.setattr("triune.buffer.entry_walk.PAGE", 2)
        assert keys(buffer, "data.user_id = ann OR tags = gold") == ["t0", "t2", "a"]
        assert [row.group.task_key for row in buffer.query("", limit=9)] == ["a", "t3", "t2", "t1", "t0"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rewrd > 0", r"character 1: no column 'rewrd'; expected one of .*; did you mean `reward`"),
        ("task = 7", r"no column 'task'; .*did you mean `task_key`"),
        ("user = ann", r"did you mean `data.user_id`"),
        ("state = redy", r"character 9: state compared with redy; expected one of waiting.*; did you mean 'ready'"),
        ("reward > high", r"reward compared with high; expected a number; reward: mean"),
        ("task_key = 7", r"task_key compared with 7; expected text; write '7'"),
        ("reward = 2h", r"only age is a time"),
        ("urgent = 1", r"expected true or false; write `urgent` or `NOT urgent`"),
        ("urgent > true", r"urgent has no order"),
        ("reward", r"found 'the end' after reward; expected = != <"),
        ("reward >", r"character 9: found 'the end'; expected a value"),
        ("reward = NULL", r"write `IS NULL`"),
        ("reward IS 3", r"expected NULL"),
        ("reward > 1 reward < 2", r"character 12: found 'reward'; expected AND, OR or the end; join"),
        ("(reward > 1", r"expected `\)`; close the bracket"),
        ("reward > 1)", r"remove the bracket"),
        ("reward BETWEEN 1 OR 2", r"write `BETWEEN low AND high`"),
        ("state IN ready", r"expected `\(`; write `IN"),
        ("state IN (ready", r"close the list"),
        ("reason = 'open", r"cannot read .*close the quote"),
        ("task_key = 3f2a", r"put quotes around it: '3f2a'"),
        ("reward; DROP TABLE entries", r"cannot read ';"),
        ("reward LIKE '1%'", r"expected a text column"),
        ("reason LIKE 'a!'", r"write `!!`"),
        ("data. = 1", r"no column 'data.'"),
        ("AND", r"found 'AND'; expected a column"),
    ],
)
def test_what_is_no_filter_is_refused_with_a_place_and_a_suggestion(text: str, says: str):
    with pytest.raises(ConfigError, match=says) as caught:
        parse_filter(text)
    assert caught.value.do, "what to do"
    assert caught.value.expected, "what was expected"


# --------------------------------------------------------------------------------------------- what is read


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Task keys of the entries whose records were read."""
    found: list[str] = []

    def note(store: Store, row: EntryRow, revision: int | None = None) -> Group:
        found.append(row.group.task_key)
        return read_entry(store, row, revision)

    monkeypatch.setattr("triune.buffer.entry_walk.read_entry", note)
    return found


@pytest.mark.parametrize(
    ("text", "fits", "reads"),
    [
        ("state = ready AND data.user_id = ann", ["t2"], ["t2", "a"]),
        ("data.user_id = ann AND task_key = t2", ["t2"], ["t2"]),
        ("run = r AND taskset = answers AND tags = gold", ["a"], ["a"]),
        ("run = other AND data.user_id = ann", [], []),
        ("reward >= 0 OR data.user_id = ann", ["t0", "t1", "t2", "t3", "a"], []),
        ("state IN (dropped, spent) AND NOT (data.user_id = ann OR reward > 0.5)", [], ["t0"]),
        ("task_key IN (t0, t1) OR data.user_id = cy", ["t0", "t1", "t3"], ["t2", "t3", "a"]),
    ],
)
def test_records_are_read_of_those_entries_only_whose_columns_leave_the_filter_open(
    buffer: OpenBuffer, read: list[str], text: str, fits: list[str], reads: list[str]
):
    assert keys(buffer, text) == fits
    assert read == reads


@pytest.mark.parametrize(
    ("text", "num"),
    [
        ("task_key = t2 AND data.user_id = ann", 1),
        ("taskset = answers AND tags = gold", 1),
        ("run = other AND stop = done", 0),
        ("task_key IN (t0, t3) AND NOT task_key = t0 AND num_tokens > 0", 2),
    ],
)
def test_the_database_narrows_by_what_the_name_says(buffer: OpenBuffer, text: str, num: int):
    with buffer.store.db.transaction():
        assert len(rows_that_fit(buffer.store.db, parse_filter(text))) == num


def test_a_search_stops_at_its_limit(buffer: OpenBuffer, read: list[str]):
    assert [row.group.task_key for row in buffer.query("data.answer = 42", limit=2)] == ["a", "t3"]
    assert read == ["a", "t3"]
    assert buffer.query("data.answer = 42", limit=0) == []


@pytest.mark.parametrize("key", ["a_b", "aXb", "a%b", "a/b", "ü!"])
def test_a_name_with_signs_is_found_and_no_other(tmp_path: Path, key: str):
    names = ["a_b", "aXb", "a%b", "a/b", "ü!"]

    async def work(buffer: StoredBuffer) -> None:
        await buffer.open_run("r", config_hash="", data_hash="")
        await buffer.stock([make_group(GroupId("r", "t", name, 0)) for name in names], buffer="odd")

    in_buffer(tmp_path, work)
    with triune.buffer.open(tmp_path / "buffer.sqlite") as found:
        assert keys(found, f"task_key = '{key}' AND run = r") == [key]
        assert keys(found, f"task_key != '{key}'") == [name for name in names if name != key]


@pytest.mark.parametrize("text", ["", "state = ready", "data.user_id = ann"])
def test_what_fits_is_counted_as_it_is_found(buffer: OpenBuffer, text: str):
    assert count_that_fit(buffer.store, parse_filter(text)) == len(keys(buffer, text))
