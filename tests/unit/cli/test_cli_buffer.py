"""`triune buffer …` on what a newcomer gets wrong: a message with a next step, and an exit code that scripts see."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from triune.cli import boundary
from triune.testing.filled_stores import make_store

CHATS = [
    {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]},
    {"title": "none"},
]


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_store(tmp_path).rename(tmp_path / "s.sqlite")


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = boundary.run(["buffer", *words])
    found = capsys.readouterr()
    return code, found.out + found.err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("query", "s.sqlite", "rewrd > 0.9"), 2, "did you mean `reward`?"),
        (("query", "s.sqlite", "reward >"), 2, "character 9"),
        (("query", "s.sqlite", "reward > 99"), 0, "newest 0 entries"),
        (("query", "s.sqlite", "reward > 99", "--count"), 0, "0 entries"),
        (("query", "s.sqlite", "data.user_id = ann", "--count"), 0, "2 entries"),
        (("show", "s.sqlite", "nope"), 1, "list them with `triune buffer ls`"),
        (("why", "s.sqlite", "nonsense"), 2, "copy one from `triune buffer ls`"),
        (("why", "s.sqlite", "r/train/t0/0/9.0"), 1, "the entry has no such record"),
        (("step", "s.sqlite", "1"), 2, "name one"),
        (("step", "s.sqlite", "9", "--of", "r"), 1, "a step from 1 to 1"),
        (("step", "s.sqlite", "1", "--of", "other"), 1, "a run that trained: r"),
        (("ls", "none"), 2, "no run and no store here"),
        (("export", "s.sqlite", "out.csv"), 2, ".jsonl or .parquet"),
        (("export", "s.sqlite", "out.jsonl", "--where", "reward > 99"), 1, "nothing fits 'reward > 99'"),
        (("import", "s.sqlite", "none.jsonl", "--into", "past"), 1, "cannot be read"),
        (("import", "s.sqlite", "empty.jsonl", "--into", "past"), 1, "the file has no rows"),
        (("import", "s.sqlite", "chats.jsonl", "--into", "past"), 2, "name the model"),
        (("gc", "s.sqlite", "--yes"), 2, "nothing says what to delete"),
    ],
)
def test_what_a_newcomer_gets_wrong_is_answered_with_a_next_step(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, says: str
):
    Path("empty.jsonl").write_text("\n")
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    found, text = said(capsys, *words)
    assert (found, says in text) == (code, True), text
    assert "caused by" not in text or "cannot be read" in text


def test_a_refused_row_is_named_by_file_and_line_and_makes_the_exit_code_1(capsys: pytest.CaptureFixture[str]):
    Path("chats.jsonl").write_text("\n\n".join(map(json.dumps, CHATS)))
    code, text = said(capsys, "import", "s.sqlite", "chats.jsonl", "--into", "past", "--model", "triune/nano")
    assert code == 1
    assert "1 x fields title; expected a known format, first in chats.jsonl:3" in text
    assert "1 of 1 new sequences have no behaviour log-probs" in text
    [reject] = map(json.loads, Path("chats.jsonl.rejects.jsonl").read_text().splitlines())
    assert (reject["file"], reject["row"], reject["data"]) == ("chats.jsonl", 3, CHATS[1])
