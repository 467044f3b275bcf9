"""Amends whatever a trainer holds, until a failpoint kills it: `python -m benchmarks.crash_amend RUN`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from triune.buffer import BufferSettings, open_buffer


async def amend(run_dir: Path) -> None:
    """Put a note to every entry that can be leased, again and again; some are leased at that moment."""
    section = json.loads((run_dir / "run.resolved.json").read_text())["config"]["buffer"]
    buffer = open_buffer(BufferSettings.model_validate({"store": section["store"]}), run_dir)
    await buffer.join_run(run_dir.name, timeout_s=60)
    number = 0
    while True:
        for info in await buffer.browse(state="ready"):
            number += 1
            await buffer.amend(info.entry, {"info": {"seen": number}}, by="campaign", key=f"{info.entry}/{number}")
        await asyncio.sleep(0.01)


if __name__ == "__main__":
    asyncio.run(amend(Path(sys.argv[1])))
