"""A run on one machine: explorer and trainer in this process, or one of them here and the other beside it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from triune.config import check_same_run, save_resolved
from triune.errors import ConfigError
from triune.launcher.explorer_side import feeds_itself
from triune.launcher.folder import RunFolder, Start
from triune.launcher.request import Request
from triune.launcher.roles import interruptible
from triune.launcher.session import Session
from triune.launcher.shared_store import check_name_is_free
from triune.monitor import RunInfo, RunMonitor


def launch(request: Request) -> dict[str, Any]:
    """Run the roles to their end.

    Returns:
        What `summary.json` says.

    Raises:
        RunFailed: A role failed; `summary.json` says so too.
        KeyboardInterrupt: A signal ended it; the run can be resumed.
    """
    config = request.config
    _check_channel(request)
    folder = _open_folder(request)
    try:
        if "trainer" in request.roles:
            save_resolved(config, folder.path)
        monitor = RunMonitor(
            config.monitor,
            RunInfo(name=config.name, folder=folder.path, steps=config.trainer.steps, roles=request.roles),
        )
        return asyncio.run(_live(request, folder.path, monitor))
    finally:
        folder.release()


def _open_folder(request: Request) -> RunFolder:
    config = request.config
    if "trainer" not in request.roles:
        return RunFolder.join(config.runs_dir, config.name, role="explorer")
    if request.start is Start.RESUME and not request.allow_changes and config.run_dir.is_dir():
        check_same_run(config, config.run_dir)
    if request.start is not Start.RESUME:
        check_name_is_free(config)
    return RunFolder.open(config.runs_dir, config.name, request.start, roles=request.roles)


def _check_channel(request: Request) -> None:
    """Two processes cannot share weights or rows in memory."""
    config = request.config
    if request.roles == ("explorer", "trainer") or (request.roles == ("trainer",) and feeds_itself(config)):
        return
    for key, brick, instead in (
        ("sync.channel", config.sync.channel, "files"),
        ("buffer.store", config.buffer.store, "sqlite"),
    ):
        if getattr(brick, "__brick__", ("", ""))[1] == "memory":
            raise ConfigError(
                f"{key}.use",
                f"found memory, with the {request.roles[0]} in a process of its own",
                f"{instead}: something that processes share",
                f"write `{key}={instead}` for both commands",
            )


async def _live(request: Request, folder: Path, monitor: RunMonitor) -> dict[str, Any]:
    """Build, run, close; whatever happens, the summary says how it ended."""
    this = asyncio.current_task()
    assert this is not None
    session = Session(request, folder, monitor)
    with interruptible(this, session.stop) as signals:
        try:
            reason = await session.run()
            results = await session.results()
            status = "interrupted" if signals else "finished"
            path = monitor.finish(status, signals[0] if signals else reason, **results)
        except asyncio.CancelledError:
            this.uncancel()
            monitor.finish("interrupted", f"{signals[0] if signals else 'cancelled'}; go on with --resume")
            raise KeyboardInterrupt(*signals[:1]) from None
        except BaseException as error:
            monitor.finish("failed", str(error) or type(error).__name__, error=error)
            raise
        finally:
            await session.close()
        if signals:
            raise KeyboardInterrupt(signals[0])
        return json.loads(path.read_text(encoding="utf-8"))
