"""Run the checks one after another; what one of them raises is its own failure."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from triune.config import RunConfig, config_hash, load_config
from triune.errors import ConfigError, TriuneError
from triune.launcher.door import outside_of_loops
from triune.selfcheck.report import Check, Finding, Report, Verdict, failed, skipped


def selfcheck(
    config: str | Path | Mapping[str, Any] | RunConfig,
    *,
    workflow: Any = None,
    reward: Any = None,
    overrides: Sequence[str] = (),
    only: Iterable[str] = (),
    tell: Callable[[str], None] = lambda name: None,
) -> Report:
    """Prove that what a run of this configuration would compute is right.

    Makes a few groups of real rollouts with the run's own parts, trains single steps on them in a folder that is
    removed, and compares. The run's folder, store and weights are not touched.

    Args:
        config: A YAML file, a mapping of the same shape, or a loaded configuration.
        workflow: As in `triune.run`.
        reward: As in `triune.run`.
        overrides: `a.b=c` changes.
        only: Names of checks; all when empty.
        tell: Called with the name of every check before it begins.

    Raises:
        ConfigError: The configuration cannot be run, or no check has that name.
        TriuneError: The run could not begin: no such model, malformed tasks.
    """
    from triune.selfcheck.checks import CHECKS

    loaded = config if isinstance(config, RunConfig) else load_config(config, overrides)
    chosen = _chosen(CHECKS, tuple(only))
    return outside_of_loops(lambda: asyncio.run(_selfcheck(loaded, workflow, reward, chosen, tell)))


def _chosen(checks: Sequence[Check], only: Sequence[str]) -> list[Check]:
    names = [check.check_name for check in checks]
    for name in only:
        if name not in names:
            raise ConfigError("--only", f"no check is called {name!r}", f"some of {', '.join(names)}")
    return [check for check in checks if not only or check.check_name in only]


async def _selfcheck(
    config: RunConfig, workflow: Any, reward: Any, checks: Sequence[Check], tell: Callable[[str], None]
) -> Report:
    from triune.selfcheck.rig import Rig

    began = time.perf_counter()
    runs = Path(config.runs_dir)
    runs.mkdir(parents=True, exist_ok=True)
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix=".selfcheck-", dir=runs, ignore_cleanup_errors=True) as folder:
        rig = Rig(config, Path(folder), workflow=workflow, reward=reward)
        try:
            tell("loading the model")
            await rig.open()
            for check in checks:
                tell(check.check_name)
                findings.append(await _finding(check, rig))
        finally:
            await rig.close()
    return Report(
        name=config.name,
        model=config.model.path,
        config_hash=config_hash(config),
        findings=tuple(findings),
        seconds=time.perf_counter() - began,
    )


async def _finding(check: Check, rig: Any) -> Finding:
    began = time.perf_counter()
    try:
        verdict = await check(rig)
    except Exception as error:  # the boundary: whatever breaks inside a check is what it found
        verdict = _verdict_of(error, check, rig)
    return Finding(
        name=check.check_name,
        proves=check.proves,
        status=verdict.status,
        found=verdict.found,
        fix=verdict.fix,
        numbers=verdict.numbers,
        seconds=time.perf_counter() - began,
    )


def _verdict_of(error: Exception, check: Check, rig: Any) -> Verdict:
    if error is rig.sampling_error and (rig.is_stored or check.check_name != "rollouts"):
        return skipped(rig.sampling_error.found if rig.is_stored else "nothing was sampled; see `rollouts`")
    if isinstance(error, TriuneError):
        expected = f"; expected {error.expected}" if error.expected else ""
        return failed(f"{error.where}: {error.found}{expected}", error.do or "mend what the message names")
    return failed(
        f"{type(error).__name__}: {error}", "run again with --debug, and report it when the cause is not yours"
    )
