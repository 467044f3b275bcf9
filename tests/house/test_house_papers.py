"""House rules about sources: every method says which paper it is, and the page of papers names tests that exist."""

from __future__ import annotations

import ast
import re
import statistics
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from docs import papers  # noqa: E402

BRICKS = {f"{kind}-{name}": (kind, name, target) for kind, name, target in papers.bricks()}
every_brick = pytest.mark.parametrize(("kind", "name", "target"), BRICKS.values(), ids=BRICKS)
PAGE = (ROOT / "docs/papers.md").read_text(encoding="utf-8")


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@every_brick
def test_a_method_says_where_it_comes_from(kind, name, target):
    if kind in papers.MUST_CITE:
        assert papers.sources(kind, name, target), (
            f"{kind} {name}: end the docstring with `Source: NAME, arXiv:0000.00000, eq. 0.` "
            'or `Source: Author year, "Title".`'
        )


@every_brick
def test_the_page_of_papers_has_every_source_with_a_test(kind, name, target):
    rows = [line for line in PAGE.splitlines() if f"| {kind} `{name}` |" in line]
    for source in papers.sources(kind, name, target):
        of_paper = [row for row in rows if source.paper in row]
        assert of_paper, f"docs/papers.md lacks {source.paper} for {kind} {name}; run `make docs`"
        assert "::test_" in of_paper[0], f"no test uses {kind} {name}: write one that imports {target.__module__}"


def test_every_test_that_the_page_of_papers_names_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)
    assert named
    for file, test in named:
        assert (ROOT / file).is_file(), file
        assert not test or test in names_in(file), f"{file} has no {test}; run `make docs`"


def test_a_source_is_split_at_semicolons_and_read_over_line_ends():
    class Brick:
        """Does a thing.

        Source: PPO, arXiv:1707.06347, eq. 7; Williams 1992, "Simple
        algorithms".

        Attributes:
            none: None.
        """

    found = papers.sources("policy_loss", "brick", Brick)
    assert [source.paper for source in found] == ["1707.06347", 'Williams 1992, "Simple algorithms"']


def test_the_median_brick_file_has_under_sixty_lines():
    lengths = [
        len(path.read_text(encoding="utf-8").splitlines())
        for folder in ("advantages", "policy_losses", "kls", "entropies", "critics", "samplings", "zoo")
        for path in (ROOT / "src/triune/algorithms" / folder).glob("[a-z]*.py")
    ]
    assert len(lengths) > 50
    assert statistics.median(lengths) < 60, f"the median brick file has {statistics.median(lengths)} lines"
