"""`triune.run`: a run from Python, also inside a notebook."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from triune.config import RunConfig, StagedConfig, load_run_file
from triune.launcher.folder import Start
from triune.launcher.local import Request, launch
from triune.launcher.stages import run_stages

T = TypeVar("T")


def run(
    config: str | Path | Mapping[str, Any] | RunConfig | StagedConfig,
    *,
    workflow: Any = None,
    reward: Any = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    restart: bool = False,
) -> dict[str, Any]:
    """Explore and train until the run's steps are done.

    Functions are used as they are, so they may be closures or notebook cells; they run inline, in this process.

    Args:
        config: A YAML file, a mapping of the same shape, or a loaded configuration.
        workflow: `(task, model)` or `(task, model, reward)`, plain or async; stands above what the task sets name.
        reward: `(task, answer) -> float | Reward`, likewise.
        overrides: `a.b=c` changes.
        resume: Go on from the newest checkpoint.
        restart: Begin again; an existing folder of this name is moved aside.

    Returns:
        What `summary.json` says: `status`, `steps`, `metrics` (first and last values), `export`, `curve`, …
        Of a run with stages, that of the whole, with one entry per stage under `stages`.

    Raises:
        ConfigError: The configuration cannot be run.
        RunFailed: A role failed.
    """
    loaded = config if isinstance(config, RunConfig | StagedConfig) else load_run_file(config, overrides)
    start = Start.RESUME if resume else Start.RESTART if restart else Start.NEW
    if isinstance(loaded, StagedConfig):
        return outside_of_loops(lambda: run_stages(loaded, start=start, workflow=workflow, reward=reward))
    request = Request(config=loaded, roles=("explorer", "trainer"), start=start, workflow=workflow, reward=reward)
    return outside_of_loops(lambda: launch(request))


def outside_of_loops(work: Callable[[], T]) -> T:
    """Call `work` where no event loop runs: here, or (in a notebook) in a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="triune-run")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
