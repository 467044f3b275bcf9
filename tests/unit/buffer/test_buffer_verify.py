"""Damage of every kind is found, with the entry's name, and is never a traceback."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest

import triune.buffer
from triune.buffer import StoredBuffer
from triune.buffer.notebook import verify_at
from triune.buffer.overlay import apply_overlay, compare, encode_overlay
from triune.errors import ConfigError, StoreError, WireError
from triune.records import GroupId
from triune.testing.filled_stores import in_buffer, make_store
from triune.testing.groups import make_group, with_mean_advantages


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_store(tmp_path)


def harm(path: Path, sql: str, *parameters: object) -> None:
    connection = sqlite3.connect(path)
    connection.execute(sql, parameters)
    connection.commit()
    connection.close()


def found(path: Path) -> list[tuple[str, str, str]]:
    return [(finding.check, finding.entry, finding.found) for finding in verify_at(path).findings]


def test_a_sound_store_has_no_findings_and_says_what_was_read(path: Path):
    result = verify_at(path)
    assert result.findings == ()
    assert (result.num_entries, result.num_blobs) == (5, 9)
    assert result.num_bytes > 1000


@pytest.mark.parametrize(("entry", "revision"), [("r/train/t0/0", 0), ("r/train/t0/0", 1), ("r/train/t1/0", 0)])
@pytest.mark.parametrize("place", [0.02, 0.5, 0.98])
def test_a_flipped_bit_in_any_blob_is_found_with_its_entry(path: Path, entry: str, revision: int, place: float):
    where = "entry = (SELECT seq FROM entries WHERE entry = ?) AND revision = ?"
    connection = sqlite3.connect(path)
    (blob,) = connection.execute(f"SELECT blob FROM revisions WHERE {where}", (entry, revision)).fetchone()
    connection.close()
    damaged = bytearray(blob)
    damaged[int(place * len(blob))] ^= 0x10
    harm(path, f"UPDATE revisions SET blob = ? WHERE {where}", bytes(damaged), entry, revision)
    findings = found(path)
    assert findings
    assert {(check, name) for check, name, _ in findings} == {("blobs", entry)}
    assert any(text.startswith(f"revision {revision}: ") for _, _, text in findings)


def test_a_flipped_byte_in_the_file_itself_is_found(path: Path):
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    content = bytearray(path.read_bytes())
    at = content.index(b"secret of bob")
    content[at] ^= 0xFF
    path.write_bytes(content)
    assert [(check, name) for check, name, _ in found(path)] == [("blobs", "r/train/t1/0")]


def test_whatever_byte_is_flipped_there_is_a_message_and_no_traceback(path: Path):
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    sound, numbers, num_found = path.read_bytes(), random.Random(7), 0
    for _ in range(60):
        content = bytearray(sound)
        for _ in range(numbers.choice((1, 30))):
            content[numbers.randrange(len(content))] ^= numbers.randrange(1, 256)
        path.write_bytes(content)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        findings = verify_at(path).findings
        num_found += bool(findings)
        assert all(finding.found and finding.do for finding in findings)
    assert num_found > 10


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
def test_a_truncated_file_is_a_finding_and_stays_as_it_was(path: Path, share: float):
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    content = path.read_bytes()[: int(share * path.stat().st_size)]
    path.write_bytes(content)
    [(check, _, text)] = found(path)
    assert check == "file"
    assert "its end is missing" in text
    assert path.read_bytes() == content


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
def test_a_run_on_a_truncated_file_is_refused_with_a_message(path: Path, share: float):
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])

    async def work(buffer: StoredBuffer) -> None:
        await buffer.open_run("r", config_hash="", data_hash="")
        await buffer.lease(4, wait=False)
        for info in await buffer.browse():
            await buffer.read(info.entry)

    with pytest.raises(StoreError, match=r"damaged .* expected a writable SQLite database; keep a copy, then salvage"):
        in_buffer(path.parent, work)


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0", b"\0" * 8192, b"milk and eggs" * 50])
def test_an_emptied_or_overwritten_file_is_a_finding_and_no_new_store_is_made_of_it(path: Path, content: bytes):
    path.write_bytes(content)
    [(check, _, text)] = found(path)
    assert check == "file"
    assert "cut off, overwritten, or no SQLite database" in text
    assert path.read_bytes() == content


def test_pages_of_noise_are_findings(path: Path):
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    content = bytearray(path.read_bytes())
    content[8192:] = bytes(byte ^ 0xA5 for byte in content[8192:])
    path.write_bytes(content)
    findings = found(path)
    assert findings
    assert {check for check, _, _ in findings} <= {"file", "rows", "blobs", "references", "conservation"}


@pytest.mark.parametrize(
    ("sql", "check", "entry", "says"),
    [
        ("DELETE FROM revisions WHERE entry = 1 AND revision = 1", "references", "r/train/t0/0", "a use of a revision"),
        ("DELETE FROM entries WHERE seq = 1", "references", "number 1", "a use of an entry"),
        ("DELETE FROM admissions WHERE seq = 1", "references", "r/train/t0/0", "the slot of an admission"),
        ("UPDATE entries SET scope = 'x' WHERE seq = 3", "references", "r/train/t2/0", "a run in whose name"),
        (
            "UPDATE entries SET reward = 7 WHERE seq = 3",
            "rows",
            "r/train/t2/0",
            "reward 7.0 in its row, 0.25 in its blob",
        ),
        ("UPDATE entries SET num_records = 9 WHERE seq = 3", "rows", "r/train/t2/0", "9 records in its row, 2 in its"),
        ("UPDATE entries SET entry = 'r/train/tx/0' WHERE seq = 3", "blobs", "r/train/tx/0", "is of r/train/t2/0"),
        ("UPDATE counters SET value = 9 WHERE name = 'puts'", "conservation", "", "9 puts but"),
        ("UPDATE versions SET record = x'c1' WHERE version = 1", "blobs", "", "version 1: "),
    ],
)
def test_what_contradicts_itself_is_found(path: Path, sql: str, check: str, entry: str, says: str):
    harm(path, sql)
    assert [text for kind, name, text in found(path) if (kind, name) == (check, entry) and says in text]


def test_reading_a_damaged_entry_names_it_and_what_to_do(path: Path):
    harm(path, "UPDATE revisions SET blob = x'00' WHERE entry = 3")
    with triune.buffer.open(path) as buffer, pytest.raises(Exception, match=r"entry 'r/train/t2/0': it cannot be read"):
        list(buffer.groups())


def test_where_there_is_no_store_there_is_nothing_to_verify(tmp_path: Path):
    with pytest.raises(ConfigError, match="no run and no store here"):
        verify_at(tmp_path / "none")


def test_an_overlay_has_a_checksum_and_one_of_before_is_still_read():
    raw = make_group(GroupId("r", "train", "a", 0))
    shaped = with_mean_advantages(raw)
    assert shaped is not None
    difference = compare(raw, shaped)
    assert difference is not None
    blob = encode_overlay(raw, shaped, difference)
    for old_or_new in (blob, blob[8:]):
        assert apply_overlay(raw, old_or_new).experiences[0].operators == ("advantage",)
    for at in range(len(blob)):
        damaged = bytearray(blob)
        damaged[at] ^= 0x01
        with pytest.raises(WireError):
            apply_overlay(raw, bytes(damaged))
