"""Every algorithm of the zoo really runs on the shipped model: it samples or reads, updates, measures and exports."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import triune
from triune import registry
from triune.testing.zoo_runs import zoo_run


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zoo")


@pytest.mark.parametrize("algorithm", registry.names("algorithm"))
def test_the_zoo_runs_two_steps(algorithm: str, rows: Path):
    config = zoo_run(algorithm, rows, steps=2, size=4)
    config["eval"]["tasks"]["size"] = 8
    summary = triune.run(config)
    assert summary["status"] == "finished"
    assert summary["steps"] == 2
    lines = (rows / "runs" / config["name"] / "metrics.jsonl").read_text().splitlines()
    steps = {row["step"]: row for row in map(json.loads, lines) if row["role"] == "trainer" and row["step"]}
    assert sorted(steps) == [1, 2]
    for row in steps.values():
        assert row["num_updates"] == 1 or row["value_loss"] >= 0
        assert math.isfinite(row["loss"])
        assert row["num_action_tokens"] > 0
