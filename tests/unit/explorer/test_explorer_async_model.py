"""The discrete-event model that `bench_async` is held against."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import async_model  # noqa: E402


def test_the_model_reproduces_the_published_figures_and_stays_below_the_closed_form():
    found = async_model.speed_ups(steps=40, seeds=2)
    for name, published in async_model.PUBLISHED.items():
        assert found[name] == pytest.approx(published, rel=0.1), name
    sync = async_model.SETTINGS["sync drain"]
    most = async_model.limit(sync, async_model.step_time(sync, steps=40, seeds=2))
    assert max(found.values()) <= most * 1.05


def test_the_model_keeps_its_staleness_bounds():
    for setting in async_model.SETTINGS.values():
        model = async_model.Model(setting, 0)
        model.run(15)
        assert max(model.trained_staleness) <= setting.staleness
        if setting.style == "drain":
            assert model.refunded == 0


def test_the_model_imports_nothing_of_triune():
    tree = ast.parse((BENCHMARKS / "async_model.py").read_text())
    names = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    names |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert not any(name.startswith("triune") for name in names)
