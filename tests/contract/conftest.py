"""The store under test: every backend in turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from triune.testing.buffers import BACKENDS, BufferWorld


@pytest.fixture(params=BACKENDS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BufferWorld]:
    """Processes over one store."""
    found = BufferWorld(BACKENDS[request.param], tmp_path)
    yield found
    found.end()
