"""The page `docs/papers.md`: which paper became which brick, and which tests hold the brick to it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from triune import registry

ROOT = Path(__file__).parents[1]
KINDS = ("algorithm", "advantage", "policy_loss", "kl", "entropy", "critic", "sampling")
MUST_CITE = ("algorithm", "advantage", "policy_loss", "kl", "entropy", "critic")
"""Kinds of which every brick but `none` names its source; a sampling strategy names one where there is one."""
MOST_TESTS = 3
COMPARES = re.compile(r"agree|hand|golden|gradient|formula|reference|slow|expected|exact|numpy|is_half|is_the")
"""What names of tests say that hold a brick against numbers from elsewhere."""
GENERIC = {
    "every setting of every loss, KL, entropy and critic brick": (
        "tests/proofs/test_proofs_gradients.py",
        "tests/proofs/test_proofs_expected_gradients.py",
        "tests/invariance/test_algorithms_invariance.py",
        "tests/invariance/test_algorithms_ranks.py",
    ),
}


@dataclass(frozen=True)
class Source:
    """One citation in a brick's docstring."""

    kind: str
    name: str
    text: str

    @property
    def paper(self) -> str:
        """arXiv number, or what stands in its place."""
        found = re.search(r"arXiv:(\d{4}\.\d{4,5})", self.text)
        return found.group(1) if found else self.text


def bricks() -> Iterator[tuple[str, str, Any]]:
    """Kind, name and class of every built-in brick that may cite."""
    for kind in KINDS:
        for name in registry.names(kind):
            target = registry.find(kind, name, kind)
            if name != "none" and target.__module__.startswith("triune."):
                yield kind, name, target


def sources(kind: str, name: str, target: Any) -> list[Source]:
    """What the paragraph "Source: …" of a docstring cites, split at its semicolons."""
    found = re.search(r"^Source: (.+?)(?:\n\s*\n|\Z)", inspect.getdoc(target) or "", re.M | re.S)
    text = " ".join(found.group(1).split()).rstrip(".") if found else ""
    return [Source(kind, name, part.strip()) for part in text.split(";") if part.strip()]


# ----------------------------------------------------------------------------------------------------------- tests


@dataclass(frozen=True)
class Use:
    """A test that uses a brick: itself, or through a table or function of its file."""

    test: str
    is_direct: bool
    num_others: int


@cache
def uses_by_module() -> dict[str, list[Use]]:
    """`triune.…` module → tests that use something imported from it."""
    found: dict[str, list[Use]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "house" in path.parts:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        origins = _imports(tree)
        words = {node: _words(node) for node in tree.body}
        defined = {name: node for node in tree.body for name in _defines(node)}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                test = f"{path.relative_to(ROOT).as_posix()}::{node.name}"
                direct = {origins[name] for name in words[node] if name in origins}
                reached = {origins[name] for name in _reached(node, words, defined) if name in origins}
                for module in sorted(reached):
                    found.setdefault(module, []).append(Use(test, module in direct, len(reached) - 1))
    return found


def _imports(tree: ast.Module) -> dict[str, str]:
    """Name → module of triune it was imported from."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("triune."):
            found |= {alias.asname or alias.name: node.module for alias in node.names}
    return found


def _words(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _defines(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _reached(node: ast.AST, words: dict[ast.stmt, set[str]], defined: dict[str, ast.stmt]) -> set[str]:
    """Names that a test uses itself or through what its file defines."""
    seen: set[str] = set()
    todo = list(words[node])  # type: ignore[index]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += words[defined[name]] if name in defined else ()
    return seen


@cache
def tests_of_kind(kind: str) -> list[str]:
    """Tests that run over all names of a kind."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "house" in path.parts:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                decorators = " ".join(ast.unparse(one) for one in node.decorator_list)
                if f"registry.names('{kind}')" in decorators:
                    found.append(f"{path.relative_to(ROOT).as_posix()}::{node.name}")
    return found


def tests_of(kind: str, name: str, target: Any) -> list[str]:
    """Up to three tests of a brick: those that compare it with something else, and among them those about it alone.

    An algorithm's are those that run every algorithm.
    """
    if kind == "algorithm":
        return tests_of_kind(kind)[:MOST_TESTS]

    def rank(use: Use) -> tuple[bool, bool, int, bool]:
        test = use.test.split("::")[1]
        return not COMPARES.search(test), name not in test, use.num_others, not use.is_direct

    ranked = sorted(uses_by_module().get(target.__module__, []), key=rank)
    return [use.test for use in ranked][:MOST_TESTS] or tests_of_kind(kind)[:MOST_TESTS]


# ------------------------------------------------------------------------------------------------------------ page


def papers_page(note: str) -> str:
    """Paper → brick → tests, by arXiv number, then other sources by name."""
    lines = [
        note,
        "# Papers",
        "",
        "Which paper became which brick, and where the brick is held to it. A brick's own page "
        "([reference](reference/bricks.md), or `triune show NAME`) says what it does with the paper's open questions. "
        "Run a test with `pytest FILE -k NAME`; at most three are named.",
    ]
    for what, files in GENERIC.items():
        named = ", ".join(f"`{file}`" for file in files)
        lines += ["", f"Generated for {what}, beside the tests named below: {named}."]
    lines += ["", "| paper | cited as | brick | tests |", "|---|---|---|---|"]
    rows = [
        (source, tests_of(kind, name, target))
        for kind, name, target in bricks()
        for source in sources(kind, name, target)
    ]
    for source, tests in sorted(rows, key=lambda row: (not row[0].paper[0].isdigit(), row[0].paper)):
        number = source.paper
        paper = f"[{number}](https://arxiv.org/abs/{number})" if number != source.text else ""
        named = "<br>".join(f"`{test}`" for test in tests)
        lines.append(f"| {paper} | {_cited(source.text)} | {source.kind} `{source.name}` | {named} |")
    return "\n".join(lines) + "\n"


def _cited(text: str) -> str:
    """A citation without its number."""
    for pattern in (r"[:,]? ?\(arXiv:\d{4}\.\d{4,5}\)", r"[:,]? ?arXiv:\d{4}\.\d{4,5}"):
        text = re.sub(pattern, "", text)
    return text.replace("( ", "(").strip(" ,:").replace("|", "\\|")
