"""Experience moves between stores and tools without loss, once each, and can be deleted for good."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import triune.buffer
from triune.buffer import OpenBuffer, StoredBuffer, to_plain
from triune.buffer.imports import Imported, import_file
from triune.buffer.manifest import read_manifest
from triune.buffer.query_parser import parse_filter
from triune.buffer.redaction import Deleted, delete
from triune.buffer.sqlite import open_database
from triune.buffer.store import Store
from triune.errors import ConfigError, StoreError, TaskError
from triune.records import Group, GroupId, Media, Pair, Record, RolloutId, Source, Task, Text, encode_group
from triune.testing.filled_stores import fill, in_buffer, make_store
from triune.testing.groups import make_experience


def imported(buffer: OpenBuffer, path: Path, **options: Any) -> Imported:
    return import_file(buffer.store, path, **{"into": "past", "reader": read_text, **options})


def read_text(format: str, group: GroupId, task: Task) -> Sequence[Record]:
    """A reader without a tokenizer: as many tokens as there are characters in the answer."""
    if format == "pairs":
        if not set(PAIR) <= task.data.keys():
            raise TaskError(str(group), f"only {', '.join(task.data)}", "chosen and rejected")
        halves = [make_experience(RolloutId(group, n), answer=len(task.data[name])) for n, name in enumerate(PAIR)]
        return [Pair(chosen=halves[0], rejected=halves[1])]
    messages = task.data["messages"]
    if messages[-1]["role"] != "assistant":
        raise TaskError(str(group), "`messages` do not end with the assistant's", "the answer as the last message")
    one = make_experience(RolloutId(group, 0), answer=len(messages[-1]["content"]), source=Source.EXPERT)
    return [one.replace(logprobs=np.full(len(one), np.nan, np.float32), versions=np.full(len(one), -1, np.int32))]


PAIR = ("chosen", "rejected")


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rich_group() -> Group:
    """Every optional field of an experience, so that a lost one is seen."""
    id_ = GroupId("r", "train", "rich/1", 3)
    one = make_experience(RolloutId(id_, 0))
    length = len(one)
    one = one.replace(
        raw_logprobs=one.logprobs - 1,
        temperature=np.full(length, 0.5, np.float32),
        streams={
            "advantages": np.linspace(0, 1, length, dtype=np.float32),
            "teacher_ids": np.arange(2 * length, dtype=np.int32).reshape(length, 2),
        },
        reward_parts={"a": 0.5, "b": 1.0},
        parents=("x/y/z/0",),
        operators=("one", "two"),
        priority=2.5,
        metrics={"m": 1.0},
        info={"tags": ["t"], "deep": {"list": [1, None, "ü"]}},
        messages=(
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": "ho"},
        ),
        tools=({"name": "f"},),
        media=(Media(sha256="0", mime="image/png", uri="u", start=0, stop=1),),
    )
    two = make_experience(RolloutId(id_, 1), reward=0.0).replace(is_valid=False, temperature=0.7)
    task = Task(key="rich/1", data={"q": "ü", "n": [1, 2]}, workflow={"use": "math"}, info={"i": 1})
    return Group(id=id_, task=task, records=(one, two), info={"g": 1})


def odd_groups() -> list[Group]:
    pair_id, text_id = GroupId("r", "pairs", "p", 0), GroupId("r", "texts", "t", 0)
    chosen, rejected = (make_experience(RolloutId(pair_id, n), answer=3 + n) for n in range(2))
    pair = Pair(chosen=chosen, rejected=rejected, weight=0.5, margin=1.5, by="ann", info={"tags": ["human"]})
    text = Text(id="r/texts/t/0/0", tokens=np.arange(9, dtype=np.int32), info={"tags": ["book"]})
    return [
        Group(id=pair_id, task=Task(key="p", taskset="pairs"), records=(pair, pair)),
        Group(id=text_id, task=Task(key="t", taskset="texts"), records=(text,)),
    ]


@pytest.fixture
def source(tmp_path: Path) -> OpenBuffer:
    async def work(buffer: StoredBuffer) -> None:
        await fill(buffer)
        await buffer.stock([rich_group(), *odd_groups()], buffer="odd")

    in_buffer(tmp_path / "source", work)
    return triune.buffer.open(tmp_path / "source" / "buffer.sqlite")


@pytest.fixture
def target(tmp_path: Path) -> OpenBuffer:
    async def work(buffer: StoredBuffer) -> None:
        await buffer.open_run("next", config_hash="", data_hash="")

    in_buffer(tmp_path / "target", work)
    return triune.buffer.open(tmp_path / "target" / "buffer.sqlite")


# ------------------------------------------------------------------------------------------------ there and back


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet", "out"])
def test_what_is_exported_comes_back_as_it_was(source: OpenBuffer, target: OpenBuffer, tmp_path: Path, name: str):
    report = source.export(tmp_path / name, "state IN (ready, spent)")
    assert (report.num_entries, report.num_records) == (6, 10)
    found = imported(target, tmp_path / name)
    assert (found.num_entries, found.num_new, found.num_refused, found.reasons) == (6, 6, 0, {})
    for row in source.entries("state IN (ready, spent)"):
        before, after = to_plain(source.read(row.entry)), to_plain(target.read(row.entry))
        assert after == before
        for one, other in zip(source.read(row.entry).records, target.read(row.entry).records, strict=True):
            if hasattr(one, "streams"):
                assert {k: v.dtype for k, v in one.streams.items()} == {k: v.dtype for k, v in other.streams.items()}
    assert {row.state for row in target} == {"ready"}
    again = imported(target, tmp_path / name)
    assert (again.num_new, again.num_duplicate) == (0, 6)


def test_a_manifest_says_what_of_which_run_under_which_filter_with_hashes(source: OpenBuffer, tmp_path: Path):
    source.export(tmp_path / "out.parquet", "reward > 0.3 AND buffer = main")
    manifest = read_manifest(tmp_path / "out.parquet.manifest.json")
    assert manifest is not None
    assert (manifest.kind, manifest.runs, manifest.filter) == ("parquet", ["r"], "reward > 0.3 AND buffer = main")
    assert list(manifest.entries) == ["r/train/t0/0", "r/train/t1/0", "r/train/t3/0"]
    assert all(len(hashes) == 2 and len(set(hashes)) == 2 for hashes in manifest.entries.values())
    assert (manifest.num_entries, manifest.num_records) == (3, 6)
    assert list(manifest.files) == ["out.parquet"]
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.parquet", "out.parquet.manifest.json"]


def test_a_dataset_folder_is_one_that_datasets_loads(source: OpenBuffer, tmp_path: Path, monkeypatch: Any):
    datasets = pytest.importorskip("datasets")
    source.export(tmp_path / "set", "buffer = main AND state = ready")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    loaded = datasets.load_dataset(str(tmp_path / "set"), cache_dir=str(tmp_path / "cache"), split="train")
    assert loaded["reward"] == [0.5, 0.0]
    assert loaded[0]["messages"][-1] == {"role": "assistant", "content": "42"}


def test_an_export_holds_one_page_in_memory_and_leaves_nothing_when_it_fails(
    source: OpenBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("triune.buffer.entry_walk.PAGE", 2)
    monkeypatch.setattr("triune.buffer.export.ROW_GROUP", 3)
    assert source.export(tmp_path / "out.parquet").num_rows == 16
    source.store.db.execute("UPDATE revisions SET blob = x'78' WHERE entry = 4")
    for name in ("bad.jsonl", "bad.parquet", "bad"):
        with pytest.raises(StoreError, match=r"entry 'r/train/t3/0': it cannot be read .*`triune buffer verify`"):
            source.export(tmp_path / name)
    assert not list(tmp_path.glob("bad*"))


def test_an_export_refuses_a_name_without_a_format_and_a_folder_with_something_in_it(
    source: OpenBuffer, tmp_path: Path
):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep")
    for name, says in (
        ("out.csv", r"\.jsonl or \.parquet"),
        ("full", "there is a folder"),
        ("no/out.jsonl", "make it"),
    ):
        with pytest.raises(ConfigError, match=says):
            source.export(tmp_path / name)
    assert (tmp_path / "full" / "mine.txt").read_text() == "keep"


# -------------------------------------------------------------------------------------------------------- importing


def test_tags_filter_and_states_decide_what_is_imported_and_the_rest_is_counted(
    source: OpenBuffer, target: OpenBuffer, tmp_path: Path
):
    source.export(tmp_path / "all.jsonl", "buffer = main")
    wanted = parse_filter("reward > 0.3 AND data.user_id != cy")
    found = imported(target, tmp_path / "all.jsonl", wanted=wanted, tags=["old", "good"])
    assert (found.num_new, found.num_filtered, found.num_refused) == (1, 1, 2)
    assert found.reasons == {
        "state dropped; expected one of ready, spent, raw": 1,
        "state waiting; expected one of ready, spent, raw": 1,
    }
    assert [row.entry for row in target.entries("tags = old AND tags = good AND buffer = past")] == ["r/train/t0/0"]
    rejects = [json.loads(line) for line in Path(found.rejects).read_text().splitlines()]
    assert [(reject["row"], reject["data"]["entry"]) for reject in rejects] == [
        (2, "r/train/t1/0"), (4, "r/train/t3/0")
    ]  # fmt: skip


def test_another_project_with_the_same_names_is_stored_beside_it(target: OpenBuffer, tmp_path: Path):
    for number in (1, 2):
        make_store(tmp_path / f"p{number}")
        with triune.buffer.open(tmp_path / f"p{number}" / "buffer.sqlite") as buffer:
            if number == 2:
                group = buffer.read("r/train/t2/0")
                longer = [row.replace(tokens=row.tokens + 1) for row in group.experiences]
                blob = encode_group(group.with_records(longer))
                buffer.store.db.execute(
                    "UPDATE revisions SET blob = ?, is_whole = 1 "
                    "WHERE entry = (SELECT seq FROM entries WHERE entry = 'r/train/t2/0')",
                    (blob,),
                )
            buffer.export(tmp_path / f"{number}.jsonl", "state = ready AND buffer = main")
        assert imported(target, tmp_path / f"{number}.jsonl").num_new == 1
    names = [row.entry for row in target]
    assert names[0] == "r/train/t2/0"
    assert names[1].startswith("r@")
    assert [str(row.id.rollout.group) for row in target.read(names[1]).experiences] == [names[1]] * 2
    assert imported(target, tmp_path / "2.jsonl").num_duplicate == 1


def test_chats_and_sharegpt_become_answers_that_only_imitation_learns_from(target: OpenBuffer, tmp_path: Path):
    chat = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}], "user_id": 7}]
    talk = [
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "good day"}], "system": "Be."}
    ]
    found = imported(target, write(tmp_path / "chats.jsonl", chat + talk + chat), tags=["web"])
    assert (found.num_new, found.num_duplicate, found.num_refused) == (2, 1, 0)
    assert (found.num_sequences, found.num_without_behaviour) == (2, 2)
    first, second = target.groups("tags = web")
    assert first.task.data["user_id"] == 7
    assert [m["role"] for m in second.task.data["messages"]] == ["system", "user", "assistant"]
    assert {row.source for row in target} == {"expert"}
    assert not first.experiences[0].streams["advantages"].any()


def test_pairs_are_detected_and_the_format_can_be_forced(target: OpenBuffer, tmp_path: Path):
    rows = [{"prompt": "p", "chosen": "yes", "rejected": "perhaps"}]
    assert imported(target, write(tmp_path / "a.jsonl", rows)).num_sequences == 2
    assert isinstance(next(target.groups()).records[0], Pair)
    both = [{"prompt": "q", "chosen": "a", "rejected": "bb", "messages": [{"role": "assistant", "content": "abc"}]}]
    assert imported(target, write(tmp_path / "b.jsonl", both), format="chat").num_sequences == 1
    with pytest.raises(ConfigError, match=r"'xml'; expected one of entries, chat"):
        imported(target, tmp_path / "b.jsonl", format="xml")


def test_bad_rows_are_refused_with_their_number_reason_and_content_and_the_good_ones_stored(
    target: OpenBuffer, tmp_path: Path
):
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    rows = [
        good,
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": "hello"},
        {"messages": [{"content": "a"}]},
        {"conversations": [{"from": "alien", "value": "a"}]},
        {"title": "?"},
    ]
    path = write(tmp_path / "mixed.jsonl", rows)
    with path.open("a") as file:
        file.write("\n{broken\n")
    found = imported(target, path)
    assert (found.num_new, found.num_refused) == (1, 6)
    rejects = [json.loads(line) for line in (tmp_path / "mixed.jsonl.rejects.jsonl").read_text().splitlines()]
    assert [reject["row"] for reject in rejects] == [2, 3, 4, 5, 6, 8], "lines of the file; the seventh is empty"
    assert {reject["file"] for reject in rejects} == {str(path)}
    assert sorted(found.first.values()) == [f"{path}:{row}" for row in (2, 3, 4, 5, 6, 8)]
    reasons = " | ".join(reject["reason"] for reject in rejects)
    for part in ("do not end with", "a list of messages", "`role` and", "'alien'", "fields title", "no JSON object"):
        assert part in reasons


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("group", "records", 0, "tokens"), 5),
        (("group", "records", 0, "logprobs"), [[1.0]]),
        (("group", "records"), [7]),
        (("group", "task"), "t"),
        (("group", "unknown"), [1]),
        (("group", "id"), "t0"),
        (("entry",), {"a": 1}),
        (("state",), ["ready"]),
    ],
)
def test_an_entry_with_a_field_of_the_wrong_kind_is_refused_or_stored_but_never_a_traceback(
    source: OpenBuffer, target: OpenBuffer, tmp_path: Path, where: tuple[Any, ...], value: Any
):
    source.export(tmp_path / "out.jsonl", "task_key = t2")
    line = json.loads((tmp_path / "out.jsonl").read_text())
    part = line
    for name in where[:-1]:
        part = part[name]
    part[where[-1]] = value
    found = imported(target, write(tmp_path / "bad.jsonl", [line]))
    assert found.num_refused == int(where != ("entry",))
    assert target.verify().findings == ()


TEXTS: dict[str, Any] = {
    "chat": lambda a: {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": a}]},
    "sharegpt": lambda a: {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": a}]},
    "pairs": lambda a: {"prompt": "a", "chosen": a, "rejected": f"no {a}"},
}


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow"])
@pytest.mark.parametrize("format", TEXTS)
def test_texts_come_from_lines_lists_and_tables_and_bad_rows_are_named_by_file_and_row(
    target: OpenBuffer, tmp_path: Path, kind: str, format: str
):
    rows = [TEXTS[format]("b" * n) for n in (1, 2, 3)]
    rows[1] = {name: [{"x": "1"}] if isinstance(value, list) else [{"role": "?"}] for name, value in rows[0].items()}
    if kind in ("parquet", "arrow") and format == "pairs":
        rows[1] = {"prompt": "a", "chosen": "b", "rejected": None}  # a column has one type
    path = save_rows(tmp_path / f"rows.{kind}", rows)
    found = imported(target, path, format=format)
    assert (found.num_new, found.num_refused) == (2, 1)
    assert list(found.first.values()) == [f"{path}:2"]
    assert list(found.reasons) == list(found.first)
    past = [to_plain(group) for group in target.groups()]
    target.export(tmp_path / "again.parquet")
    with triune.buffer.open(tmp_path / "third.sqlite", makes=True) as third:
        assert imported(third, tmp_path / "again.parquet").num_new == 2
        assert [to_plain(group) for group in third.groups()] == past


def save_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the format that the name says."""
    import pyarrow as arrow
    from pyarrow import ipc, parquet

    table = arrow.Table.from_pylist(rows) if path.suffix in (".parquet", ".arrow") else None
    if path.suffix == ".jsonl":
        write(path, rows)
    elif table is None:
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        with ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    return path


def test_an_arrow_file_of_exported_rows_brings_them_back(source: OpenBuffer, target: OpenBuffer, tmp_path: Path):
    from pyarrow import ipc, parquet

    source.export(tmp_path / "out.parquet", "state IN (ready, spent)")
    table = parquet.read_table(tmp_path / "out.parquet")
    with ipc.new_file(str(tmp_path / "out.arrow"), table.schema) as file:
        file.write_table(table)
    assert imported(target, tmp_path / "out.arrow").num_new == 6
    for row in source.entries("state IN (ready, spent)"):
        assert to_plain(target.read(row.entry)) == to_plain(source.read(row.entry))


def test_files_that_are_missing_unknown_or_broken_are_named(target: OpenBuffer, tmp_path: Path):
    (tmp_path / "x.parquet").write_bytes(b"no table")
    for name, error, says in (
        ("none.jsonl", StoreError, "cannot be read"),
        ("x.parquet", StoreError, "no parquet file"),
        ("x.txt", ConfigError, r"\.jsonl, \.json, \.parquet"),
    ):
        with pytest.raises(error, match=says):
            imported(target, tmp_path / name)
    with pytest.raises(ConfigError, match=r"rows with title, text; expected entries: .*chat: "):
        imported(target, write(tmp_path / "odd.jsonl", [{"title": "a", "text": "b"}]))


def test_a_file_that_changed_since_its_export_is_refused(source: OpenBuffer, target: OpenBuffer, tmp_path: Path):
    source.export(tmp_path / "out.jsonl")
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(StoreError, match=r"as its manifest says; export it again, or remove the manifest"):
        imported(target, tmp_path / "out.jsonl")
    (tmp_path / "out.jsonl.manifest.json").unlink()
    assert imported(target, tmp_path / "out.jsonl").num_new == 6


# --------------------------------------------------------------------------------------------------------- deleting


def deleted(buffer: OpenBuffer, text: str, *, is_dry: bool = False) -> Deleted:
    return delete(buffer.store, parse_filter(text), by="dpo", is_dry=is_dry)


def test_a_dry_run_says_what_would_be_deleted_and_changes_nothing(source: OpenBuffer):
    before = [to_plain(row)["state"] for row in source]
    found = deleted(source, "data.user_id = ann", is_dry=True)
    assert (found.num_entries, found.states) == (2, {"spent": 1, "ready": 1})
    assert [to_plain(row)["state"] for row in source] == before
    assert source.read("r/train/t2/0").records


def test_a_deleted_users_words_are_nowhere_in_the_store_and_every_count_still_adds_up(tmp_path: Path):
    path = make_store(tmp_path)
    with triune.buffer.open(path) as buffer:
        assert b"secret of ann" in everything_in(tmp_path)
        buffer.store.db.execute("PRAGMA secure_delete = OFF")  # as SQLite is built by itself; some builds differ
        found = deleted(buffer, "data.user_id = ann")
        assert b"secret of ann" not in everything_in(tmp_path)
        assert b"secret of bob" in everything_in(tmp_path)
        assert (found.num_entries, found.num_leased) == (2, 0)
        assert {row.group.task_key: (row.state, row.reason) for row in buffer.entries("buffer = main")} == {
            "t0": ("spent", "redacted"), "t1": ("dropped", "drop_flat_groups"),
            "t2": ("evicted", "redacted"), "t3": ("waiting", ""),
        }  # fmt: skip
        assert buffer.verify().findings == ()
        assert [use.step for use in buffer.why("r/train/t0/0").uses] == [1]
        assert deleted(buffer, "data.user_id = ann").num_entries == 0


def everything_in(folder: Path) -> bytes:
    """The store's bytes: pages, free pages and log."""
    return b"".join(file.read_bytes() for file in folder.glob("buffer.sqlite*"))


def test_a_deletion_says_when_a_reader_keeps_the_bytes_on_the_disk_and_the_next_one_takes_them(tmp_path: Path):
    path = make_store(tmp_path)
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM runs").fetchone()
    with OpenBuffer(Store(open_database(path, busy_timeout_s=0.05))) as buffer:
        found = deleted(buffer, "data.user_id = ann")
        assert (found.num_entries, found.left_in) == (2, f"{path}-wal")
        assert b"secret of ann" in everything_in(tmp_path)
        reader.close()
        found = deleted(buffer, "data.user_id = ann")
        assert (found.num_entries, found.left_in) == (0, "")
        assert b"secret of ann" not in everything_in(tmp_path)


def test_what_a_trainer_holds_is_left_and_counted(tmp_path: Path):
    async def lease(buffer: StoredBuffer) -> None:
        await fill(buffer)
        await buffer.lease(1, step=1)

    in_buffer(tmp_path, lease)
    with triune.buffer.open(tmp_path / "buffer.sqlite") as buffer:
        for is_dry in (True, False):
            found = deleted(buffer, "data.user_id = ann", is_dry=is_dry)
            assert (found.num_entries, found.num_leased) == (1, 1)
        assert buffer.read("r/train/t2/0").records


def test_exports_note_a_deletion_and_no_import_brings_it_back(source: OpenBuffer, target: OpenBuffer, tmp_path: Path):
    source.export(tmp_path / "out.jsonl", "buffer = main AND state IN (ready, spent)")
    source.export(tmp_path / "set", "state = ready")
    source.export(tmp_path / "lost.jsonl", "state = ready")
    (tmp_path / "lost.jsonl.manifest.json").unlink()
    found = deleted(source, "task_key = t2")
    assert found.manifests == {
        str(tmp_path / "out.jsonl.manifest.json"): 1, str(tmp_path / "set" / "manifest.json"): 1
    }  # fmt: skip
    assert found.lost_manifests == (str(tmp_path / "lost.jsonl.manifest.json"),)
    manifest = read_manifest(tmp_path / "out.jsonl.manifest.json")
    assert manifest is not None
    assert [(note.by, note.entries) for note in manifest.redactions] == [("dpo", ["r/train/t2/0"])]
    after = imported(target, tmp_path / "out.jsonl")
    assert (after.num_new, after.reasons) == (
        1,
        {"deleted since it was exported; expected an entry that may be used": 1},
    )
    (tmp_path / "out.jsonl.manifest.json").unlink()
    again = imported(source, tmp_path / "out.jsonl")
    assert "deleted from this buffer before; expected an entry that may be used" in again.reasons


def test_a_deleted_row_of_text_comes_back_under_no_other_name_and_with_no_other_tokens(
    target: OpenBuffer, tmp_path: Path
):
    chat = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}], "user_id": 7}]
    imported(target, write(tmp_path / "chats.jsonl", chat))
    assert deleted(target, "data.user_id = 7").num_entries == 1
    says = {"deleted from this buffer before; expected an entry that may be used": 1}
    for name, into in (("chats.jsonl", "past"), ("copy.jsonl", "past"), ("other.jsonl", "elsewhere")):
        again = imported(target, write(tmp_path / name, chat), into=into)
        assert (again.num_new, again.reasons) == (0, says), name
    anonymous = [{"messages": chat[0]["messages"]}]
    assert imported(target, write(tmp_path / "anonymous.jsonl", anonymous)).reasons == says

    def other_tokens(*arguments: Any) -> Sequence[Record]:
        return [one.replace(tokens=one.tokens + 1) for one in read_text(*arguments)]  # type: ignore[union-attr]

    again = imported(target, write(tmp_path / "chats-2.jsonl", chat), reader=other_tokens)
    assert (again.num_new, again.reasons) == (0, says)
    chat[0]["messages"][1]["content"] = "something else"
    assert imported(target, write(tmp_path / "news.jsonl", chat)).num_new == 1


def test_a_deleted_entry_that_a_resume_gives_back_is_not_leased_and_frees_its_slot(tmp_path: Path):
    make_store(tmp_path)
    with triune.buffer.open(tmp_path / "buffer.sqlite") as buffer:
        deleted(buffer, "task_key = t0")

    async def resume(buffer: StoredBuffer) -> list[str]:
        await buffer.open_run("r", config_hash="", data_hash="")
        await buffer.resume_at(step=0, version=0, consumed=[], checkpoint="step-0", strict=False)
        leases = await buffer.lease(9, wait=False)
        await buffer.check_conservation()
        return [lease.entry for lease in leases]

    assert in_buffer(tmp_path, resume) == ["r/train/t2/0"]
    with triune.buffer.open(tmp_path / "buffer.sqlite") as buffer:
        [row] = buffer.entries("task_key = t0")
        assert (row.state, row.reason) == ("evicted", "redacted")


def test_a_person_s_words_in_an_amendment_are_deleted_too(tmp_path: Path):
    async def amend(buffer: StoredBuffer) -> None:
        await fill(buffer)
        await buffer.amend("r/train/t2/0", {"info": {"remark": "very private"}}, by="ann", key="k")

    in_buffer(tmp_path, amend)
    with triune.buffer.open(tmp_path / "buffer.sqlite") as buffer:
        deleted(buffer, "task_key = t2")
        assert buffer.why("r/train/t2/0").amendments[0].patch == {}
    assert b"very private" not in everything_in(tmp_path)
