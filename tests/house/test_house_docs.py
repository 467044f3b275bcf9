"""House rules about the documentation: every block is executed or validated, generated pages are fresh, links hold."""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
import types
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from docs import generate  # noqa: E402

from triune.config import load_run_file  # noqa: E402

PAGES = sorted(path for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^([ \t]*)```(\w*)\n(.*?)^\1```", re.M | re.S)
BASE = {"tasks": {"use": "arithmetic"}, "trainer": {"steps": 1, "tasks_per_step": 2}}
KNOWN = {
    "make",
    "triune",
    "pip",
    "git",
    "cd",
    "python",
    "pytest",
    "tensorboard",
    "export",
    "kill",
    "cat",
    "ls",
    "curl",
    "jq",
}


def blocks(language: str) -> list[tuple[Path, int, str]]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            if match.group(2) == language:
                found.append((page, text[: match.start()].count("\n") + 1, textwrap.dedent(match.group(3))))
    return found


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def pages_with(language: str) -> list[str]:
    return sorted({name_of(page) for page, _, _ in blocks(language)})


def write_named_files(page: str, folder: Path) -> None:
    """A block whose first line is `# name.py` (or .yaml) is the file of that name."""
    for language in ("python", "yaml"):
        for where, _, code in blocks(language):
            named = re.match(r"# ([\w./]+\.(?:py|yaml))\n", code)
            if named and name_of(where) == page:
                (folder / named.group(1)).write_text(code, encoding="utf-8")


@pytest.mark.parametrize("page", pages_with("python"))
def test_every_python_block_of_a_page_runs_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    write_named_files(page, tmp_path)
    module = types.ModuleType("docs_page")  # dataclasses look their module up by name
    monkeypatch.setitem(sys.modules, "docs_page", module)
    for where, line, code in blocks("python"):
        if name_of(where) == page:
            exec(compile("\n" * line + code, str(where), "exec"), vars(module))


@pytest.mark.parametrize("page", pages_with("yaml"))
def test_every_yaml_block_of_a_page_is_a_valid_run_file_or_part_of_one(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_KEY", "x")
    write_named_files(page, tmp_path)
    for where, _, code in blocks("yaml"):
        if name_of(where) != page:
            continue
        part = yaml.safe_load(code)
        for key, value in () if "stages" in part else BASE.items():
            if key == "trainer" and key in part:
                part[key] = {**value, **part[key]}
            part.setdefault(key, value)
        load_run_file(part)


def test_every_shell_line_starts_with_a_known_command():
    from triune.cli.app import app, buffer_app

    commands = {c.name or c.callback.__name__ for c in app.registered_commands if c.callback} | {"buffer"}
    buffers = {c.name for c in buffer_app.registered_commands}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for page, line, code in blocks("bash"):
        for text in code.replace("\\\n", " ").splitlines():
            words = [word for word in shlex.split(text, comments=True) if "=" not in word or word.startswith("-")]
            if not words:
                continue
            where = f"{name_of(page)}:{line}: {text}"
            assert words[0] in KNOWN, where
            if words[0] == "triune" and len(words) > 1 and not words[1].startswith("-"):
                assert words[1] in commands, where
                assert words[1] != "buffer" or words[2] in buffers, where
            if words[0] == "make":
                assert set(words[1:]) <= targets, where


@pytest.mark.parametrize("page", [name_of(page) for page in PAGES])
def test_links_to_files_of_the_repository_hold(page):
    path = ROOT / page
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{page} links to {target}"


def test_commands_in_running_text_exist():
    """`triune word` between backticks is a command."""
    from triune.cli.app import app

    commands = {c.name or c.callback.__name__ for c in app.registered_commands if c.callback} | {"buffer"}
    for page in PAGES:
        for word in re.findall(r"`triune ([a-z]\w*)", page.read_text(encoding="utf-8")):
            assert word in commands, f"{name_of(page)}: triune {word}"


@pytest.mark.parametrize("page", list(generate.pages()), ids=lambda page: page.name)
def test_a_generated_page_is_fresh(page):
    assert page.is_file(), "run `make docs`"
    assert page.read_text(encoding="utf-8") == generate.pages()[page], "run `make docs`"


def test_every_case_has_a_test_whose_name_says_it():
    missing = [number for number in generate.CASES if number not in generate.tests_by_case()]
    assert not missing, f"no test says case_{missing[0]:02d}; all missing: {missing}"


def test_every_example_run_file_is_valid(monkeypatch):
    monkeypatch.chdir(ROOT)
    for file in sorted((ROOT / "examples").glob("*.yaml")):
        load_run_file(file)
