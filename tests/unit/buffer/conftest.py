"""The store of tests that need no particular one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from triune.buffer.stores.memory import Memory
from triune.testing.buffers import BufferWorld


@pytest.fixture
def world(tmp_path: Path) -> Iterator[BufferWorld]:
    """Processes over one store."""
    found = BufferWorld(Memory(), tmp_path)
    yield found
    found.end()
