"""Memory of a long run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

PLUGIN = str(Path(__file__).with_name("e2e_plugin.py"))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_case_48_memory_does_not_grow_with_steps(bench: Any, tmp_path: Path):
    path = tmp_path / "rss"
    bench.run(
        plugins=[PLUGIN],
        monitor={"sinks": ["jsonl", {"use": "rss", "path": str(path)}], "curve": False},
        explorer={"engine": {"use": "liar"}},
        trainer={"steps": 900, "tasks_per_step": 2, "save_every": 50},
    )
    steps, rss = np.loadtxt(path).T
    assert steps[-1] == 900
    late = steps > 400  # series of metrics, allocator pools and the cache of the store are full by then
    slope = np.polyfit(steps[late], rss[late], 1)[0]
    assert slope < 3000, f"{slope:.0f} bytes a step"
