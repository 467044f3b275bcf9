"""House rules about files and imports, read from the source."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "triune"
MODULES = sorted(SOURCE.rglob("*.py"))
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "core", "misc"}
TORCH_ROOMS = ("algorithms", "models", "trainer", "sync", "explorer/engines", "testing", "cli/doctor.py")
MAY_ENTER_BY_ANY_DOOR = {"config", "launcher", "selfcheck", "cli", "testing"}


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(tree: ast.Module) -> list[str]:
    """Every module that the file imports anywhere, except under TYPE_CHECKING."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            skipped.update(inner for statement in node.body for inner in ast.walk(statement))
    found: list[str] = []
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return found


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_no_module_has_a_name_that_says_nothing():
    bad = [name_of(path) for path in MODULES if FORBIDDEN_NAMES & set(path.with_suffix("").parts)]
    assert not bad


def test_torch_lives_in_few_rooms():
    bad = [
        name_of(path)
        for path in MODULES
        if not name_of(path).startswith(TORCH_ROOMS)
        and any(name.split(".")[0] in ("torch", "peft") for name in imports_of(tree_of(path)))
    ]
    assert not bad, f"torch is imported outside {', '.join(TORCH_ROOMS)}"


def test_no_file_uses_pickle():
    for path in MODULES:
        names = {name.split(".")[0] for name in imports_of(tree_of(path))}
        assert not names & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, name_of(path)


def test_a_room_is_entered_by_its_front_door():
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir()}
    bad = []
    for path in MODULES:
        if room_of(path) in MAY_ENTER_BY_ANY_DOOR:
            continue
        for name in imports_of(tree_of(path)):
            parts = name.split(".")
            if parts[0] == "triune" and len(parts) > 2 and parts[1] in rooms and parts[1] != room_of(path):
                bad.append(f"{name_of(path)} imports {name}")
    assert not bad, "write `from triune.room import thing`"


def test_torch_load_reads_weights_only():
    for path in MODULES:
        for call in (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)):
            if ast.unparse(call.func) == "torch.load":
                assert "weights_only=True" in ast.unparse(call), name_of(path)


def test_exception_is_swallowed_at_few_boundaries():
    """At most five times a room (one for each thread, process or loop whose failures become data).

    A handler that raises again is no boundary; a bare `except:` is nowhere.
    """
    rooms: dict[str, list[str]] = {}
    for path in MODULES:
        for handler in (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ExceptHandler)):
            assert handler.type is not None, f"{name_of(path)}:{handler.lineno} is a bare except"
            named = set(re.findall(r"\w+", ast.unparse(handler.type)))
            if named & {"Exception", "BaseException"} and not any(isinstance(n, ast.Raise) for n in ast.walk(handler)):
                rooms.setdefault(room_of(path), []).append(name_of(path))
    for room, places in rooms.items():
        assert len(places) <= 5, f"{room} swallows Exception in {places}"


def test_no_stub_and_no_leftover_is_shipped():
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        for word in ("NotImplementedError", "TODO", "FIXME", "XXX"):
            assert word not in text, f"{name_of(path)} holds {word}"


def tracked_texts() -> list[Path]:
    kinds = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".jinja", ".json", ""}
    folders = ["src", "tests", "docs", "examples", "benchmarks", "recipes", ".ci"]
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.is_file()]
    return [path for path in files if path.suffix in kinds and "__pycache__" not in path.parts]


def test_no_machine_path_and_no_package_index_host_is_written_down():
    pattern = re.compile(r"/(?:home|root|work|Users)/\w+/|--(?:extra-)?index-url|file:///\w+/|find-links")
    for path in tracked_texts():
        if path == Path(__file__) or path.stat().st_size > 2_000_000:
            continue
        found = pattern.search(path.read_text(encoding="utf-8", errors="ignore"))
        assert not found, f"{path.relative_to(ROOT)} holds {found.group()}"


def test_the_core_has_at_most_sixteen_direct_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert len(project["dependencies"]) <= 16


def test_every_dependency_is_pinned_in_the_constraints():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    }
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    names = {re.split(r"[\[>=<!~ ]", name)[0].lower().replace("_", "-") for name in wanted}
    assert names <= pinned


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_says_what_it_is_about(path):
    tree = tree_of(path)
    assert not tree.body or ast.get_docstring(tree), f"{name_of(path)} has no docstring"
