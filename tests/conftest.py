"""What every test finds: torch as it starts, whatever the test before set for the whole process."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def exact_float32_products() -> Iterator[None]:
    """Undo a policy's `float32_matmul`, which lasts as long as the process and changes the fourth digit.

    Only a CPU that multiplies bfloat16 in hardware takes `medium` literally, so a test that forgot it would pass on one
    machine and fail on the next.
    """
    yield
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_float32_matmul_precision("highest")
