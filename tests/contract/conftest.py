"""The store under test: every backend in turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from triune.testing import postgres
from triune.testing.buffers import BACKENDS, SEGMENTS, BufferWorld

NAMED = [pytest.param(name, marks=[pytest.mark.postgres] if name == "postgres" else []) for name in BACKENDS]


@pytest.fixture(params=NAMED)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BufferWorld]:
    """Processes over one store."""
    if request.param == "postgres" and postgres.server_url() is None:
        pytest.skip(postgres.MISSING)
    found = BufferWorld(BACKENDS[request.param], tmp_path, SEGMENTS.get(request.param))
    yield found
    found.end()
