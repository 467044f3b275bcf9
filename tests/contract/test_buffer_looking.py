"""Filters, lineage, statistics, exports, imports, deletion and verification mean the same on every store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import triune.buffer
from triune.buffer import OpenBuffer, to_plain
from triune.buffer.imports import import_file
from triune.buffer.notebook import verify_at
from triune.buffer.query import Filter
from triune.buffer.query_parser import parse_filter
from triune.buffer.redaction import delete
from triune.buffer.stores.postgres import MARK
from triune.buffer.verify import verify
from triune.errors import ConfigError
from triune.testing.buffers import BufferWorld, run
from triune.testing.buffers import fill as fill_groups
from triune.testing.filled_stores import fill
from triune.testing.postgres import MISSING, OnTestServer, server_url

FILTERS = {
    "": "t0 t1 t2 t3 a",
    "state IN (ready, spent) AND NOT urgent": "t0 t2 a",
    "reason LIKE 'DROP!_flat%' OR reward BETWEEN 0.2 AND 0.3": "t1 t2",
    "version >= 0 AND staleness = 1 AND age < 1h": "t0 t1 t2",
    "uses = 1 AND leased = 0 AND num_records > 1": "t0",
    "NOT (scope = r AND buffer = expert) AND reward IS NOT NULL": "t0 t1 t2 t3",
    "tags = gold OR data.user_id IN (bob, cy)": "t1 t3 a",
}


@pytest.fixture
def looking(world: BufferWorld) -> OpenBuffer:
    """The store in which everything happened once."""
    buffer = world.open()
    run(fill(buffer))
    return OpenBuffer(buffer.store)


def test_a_filter_finds_the_same(looking: OpenBuffer):
    for text, keys in FILTERS.items():
        assert " ".join(row.group.task_key for row in looking.entries(text)) == keys, text
    assert [row.group.task_key for row in looking.query("reward >= 0.5", limit=1)] == ["t3"]


def test_every_row_fits_what_its_own_columns_say(looking: OpenBuffer):
    for row in looking:
        text = f"reward = {row.reward} AND staleness = {row.staleness} AND uses = {row.uses} AND state = {row.state}"
        assert parse_filter(text).fits(row)
        assert row.entry in [found.entry for found in looking.entries(text)]


def test_lineage_leads_to_the_step_and_back(looking: OpenBuffer):
    found = looking.why("r/train/t0/0")
    assert [(use.step, use.checkpoint, use.state) for use in found.uses] == [(1, "step-1", "acked")]
    assert [(version.version, version.step, version.state) for version in found.versions] == [(0, 0, "committed")]
    assert [revision.operators for revision in found.revisions] == [(), ("advantage",)]
    assert [use.entry for use in looking.step(1, run="r")] == ["r/train/t0/0"]


def test_statistics_are_the_same(looking: OpenBuffer):
    found = looking.stats()
    assert {(d.buffer, d.state): d.num_records for d in found.depth} == {
        ("expert", "ready"): 1, ("main", "dropped"): 2, ("main", "ready"): 2, ("main", "spent"): 2,
        ("main", "waiting"): 2,
    }  # fmt: skip
    assert found.staleness == {0: 1, 1: 1}
    assert sum(found.rewards["policy"].counts) == 4
    assert found.totals["puts"] == 5


def test_what_is_exported_is_imported_once_and_equal(looking: OpenBuffer, tmp_path: Path):
    looking.export(tmp_path / "out.parquet", "buffer = main AND state IN (ready, spent)")
    for expected in ((2, 0), (0, 2)):
        found = import_file(looking.store, tmp_path / "out.parquet", into="past", reader=_no_reader, tags=["old"])
        assert (found.num_new, found.num_duplicate) == expected
    for row in looking.entries("buffer = past"):
        before, after = (looking.read(name) for name in (f"r/train/{row.group.task_key}/0", row.entry))
        for one, other in zip(before.experiences, after.experiences, strict=True):
            plain = to_plain(one) | {"id": "", "info": {}}
            assert to_plain(other) | {"id": "", "info": {}} == plain


def test_deletion_leaves_balanced_books(looking: OpenBuffer):
    assert looking.verify().findings == ()
    found = delete(looking.store, parse_filter("data.user_id = ann"), by="x", is_dry=False)
    assert found.states == {"spent": 1, "ready": 1}
    assert looking.verify().findings == ()
    assert delete(looking.store, Filter(), by="x", is_dry=True).num_entries == 3


def test_an_entry_that_is_amended_while_it_is_checked_is_no_contradiction(
    world: BufferWorld, monkeypatch: pytest.MonkeyPatch
):
    async def work():
        buffer = await world.start()
        [entry, _] = await fill_groups(buffer, 2)
        who, db, asked = buffer.who, buffer.store.db, list[str]()
        assert who is not None

        def read_then_amend(sql: str, parameters: Any = (), read: Any = db.all) -> list[Any]:
            rows = read(sql, parameters)
            if "FROM entries WHERE seq >" in sql and not asked:
                asked.append(sql)
                buffer.store.amendments.amend(who, entry, {"members": {"0": {"reward": 3.0}}}, "judge", "k")
            return rows

        with monkeypatch.context() as patch:
            patch.setattr(db, "all", read_then_amend)
            result = verify(buffer.store)
        assert (await buffer.read(entry)).experiences[0].reward == 3.0
        assert (result.findings, result.num_entries, result.num_blobs) == ((), 2, 6)

    run(work())


def test_damage_is_found_with_its_entry(looking: OpenBuffer):
    with looking.store.db.transaction():
        looking.store.db.execute(
            "UPDATE revisions SET blob = ? WHERE entry = 3 AND revision = 1", (b"TRIO" + b"x" * 20,)
        )
        looking.store.db.execute("UPDATE entries SET num_records = 7 WHERE seq = 2")
        looking.store.db.execute("DELETE FROM revisions WHERE entry = 1 AND revision = 1")
    findings = {(finding.check, finding.entry) for finding in looking.verify().findings}
    assert findings == {
        ("blobs", "r/train/t2/0"), ("rows", "r/train/t1/0"), ("references", "r/train/t0/0"), ("conservation", ""),
    }  # fmt: skip


def _no_reader(*_: object) -> tuple[()]:
    return ()


@pytest.mark.postgres
def test_a_server_is_opened_by_its_address_and_schema(tmp_path: Path):
    url = server_url()
    if url is None:
        pytest.skip(MISSING)
    world = BufferWorld(OnTestServer(), tmp_path)
    run(fill(world.open()))
    world.end()
    schema = (tmp_path / MARK).read_text().strip()
    with triune.buffer.open(f"{url}&schema={schema}") as buffer:
        assert len(list(buffer)) == 5
        assert buffer.step(1, run="r")[0].entry == "r/train/t0/0"
    assert verify_at(f"{url}&schema={schema}").findings == ()
    with pytest.raises(ConfigError, match=r"0 schemas named; expected one: a schema is a buffer; add `\?schema=NAME`"):
        triune.buffer.open(url)
