"""The synchronous front door: by run, by file, by address; without torch; its example is true."""

from __future__ import annotations

import asyncio
import doctest
import json
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

import triune.buffer
from triune.buffer import BufferSettings, StoredBuffer, notebook, open_buffer
from triune.buffer.stores.postgres import Postgres
from triune.errors import ConfigError, StoreError
from triune.testing import postgres
from triune.testing.buffers import publish
from triune.testing.filled_stores import fill, in_buffer, make_store, put


def make_run(folder: Path, store: dict[str, object] | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    spec = store or {"use": "sqlite", "path": None}
    config = {"name": folder.name, "buffer": {"store": spec}}
    (folder / "run.resolved.json").write_text(json.dumps({"config": config}))


def test_the_example_in_the_docstring_runs_and_prints_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def two(buffer: StoredBuffer) -> None:
        await buffer.open_run("quickstart", config_hash="", data_hash="")
        await publish(buffer, 0)
        for key in ("t0", "t1"):
            await put(buffer, key, (1.0, 0.0), 0)

    in_buffer(tmp_path / "runs" / "quickstart", two)
    make_run(tmp_path / "runs" / "quickstart")
    monkeypatch.chdir(tmp_path)
    examples = doctest.DocTestFinder().find(notebook.open, "open", globs={})
    runner = doctest.DocTestRunner()
    for example in examples:
        runner.run(example)
    results = runner.summarize(verbose=False)
    assert (results.attempted, results.failed) == (2, 0)


@pytest.mark.parametrize("where", ["runs/r", "r", "runs/r/buffer.sqlite", "sqlite:///runs/r/buffer.sqlite"])
def test_a_store_is_found_by_run_name_file_and_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str):
    make_store(tmp_path / "runs" / "r")
    make_run(tmp_path / "runs" / "r")
    monkeypatch.chdir(tmp_path)
    with triune.buffer.open(where) as buffer:
        assert len(list(buffer)) == 5
        assert buffer.run == ("r" if "sqlite" not in where else "")


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a store in which everything happened once."""
    if request.param == "sqlite":
        return str(make_store(tmp_path))
    url = postgres.server_url()
    if url is None:
        pytest.skip(postgres.MISSING)
    store = Postgres(url=url, schema=f"look_{uuid.uuid4().hex[:8]}")

    async def work() -> None:
        buffer = open_buffer(BufferSettings(store=store), tmp_path)
        await fill(buffer)
        await buffer.close()

    asyncio.run(work())
    return f"{url}{'&' if '?' in url else '?'}schema={store.schema}"


def test_five_lines_look_into_a_file_or_a_server_s_schema_without_torch(address: str):
    code = (
        "import sys, triune.buffer\n"
        f"with triune.buffer.open({address!r}) as buffer:\n"
        "    ready = buffer.query('state = ready', limit=5)\n"
        "    groups, uses = list(buffer.groups('data.user_id = ann')), buffer.why('r/train/t0/0').uses\n"
        "    print(len(ready), len(groups), len(uses), buffer.stats().totals['puts'], "
        "[m for m in ('torch', 'transformers', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2 2 1 5.0 []"


def test_statistics_count_depth_age_staleness_and_rewards_per_source(tmp_path: Path):
    with triune.buffer.open(make_store(tmp_path)) as buffer:
        found = buffer.stats()
    assert [(d.buffer, d.state, d.num_entries, d.num_records) for d in found.depth] == [
        ("expert", "ready", 1, 1), ("main", "dropped", 1, 2), ("main", "ready", 1, 2), ("main", "spent", 1, 2),
        ("main", "waiting", 1, 2),
    ]  # fmt: skip
    assert found.staleness == {0: 1, 1: 1}
    assert list(found.age_s) == ["min", "median", "p90", "max"]
    policy = found.rewards["policy"]
    assert (policy.edges[0], policy.edges[-1], sum(policy.counts), policy.num_unknown) == (0.25, 1.0, 4, 0)
    assert (policy.counts[0], policy.counts[3], policy.counts[-1]) == (1, 1, 2)
    assert policy.mean == pytest.approx((0.5 + 1 + 0.25 + 1) / 4)
    assert found.rewards["expert"].counts == (1,)


def test_a_new_file_is_made_only_when_asked_and_only_by_its_ending(tmp_path: Path):
    with pytest.raises(ConfigError, match="no run and no store here"):
        triune.buffer.open(tmp_path / "new.sqlite")
    with pytest.raises(ConfigError, match="no run and no store here"):
        triune.buffer.open(tmp_path / "new", makes=True)
    assert not list(tmp_path.iterdir())
    with triune.buffer.open(tmp_path / "new.sqlite", makes=True) as buffer:
        assert list(buffer) == []
    with triune.buffer.open(tmp_path / "new.sqlite") as buffer:
        assert buffer.verify().findings == ()


def test_what_is_no_store_is_refused_with_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "new")
    make_run(tmp_path / "runs" / "gone", {"use": "memory"})
    with pytest.raises(ConfigError, match=r"none: no run and no store here; expected one of gone, new, or a run's"):
        triune.buffer.open("none")
    with pytest.raises(ConfigError, match=r"no buffer.sqlite yet"):
        triune.buffer.open("new")
    with pytest.raises(ConfigError, match="only in memory"):
        triune.buffer.open("gone")
    (tmp_path / "notes.sqlite").write_text("milk and eggs" * 99)
    with pytest.raises(StoreError, match="not a database"):
        triune.buffer.open("notes.sqlite")
    (tmp_path / "runs" / "new" / "run.resolved.json").write_text("{")
    with pytest.raises(ConfigError, match="no configuration of a run"):
        triune.buffer.open("new")
