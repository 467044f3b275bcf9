"""Named places where a process can be killed on purpose, so that tests prove that resuming loses nothing.

`TRIUNE_FAILPOINT=buffer.put.inside:3` sends SIGKILL to the process when it passes `buffer.put.inside` for the third
time; `buffer.put.inside:3:raise` raises there instead. Several are separated by commas. Without the variable a
failpoint costs one comparison.

Names in use: `buffer.put.inside`, `buffer.admit.inside`, `buffer.ack.inside`, `buffer.amend.leased`,
`buffer.commit_version.inside`, `buffer.segments.before_commit`, `buffer.gc.after_commit`, `trainer.publish.after`,
`trainer.checkpoint.before_rename`, `trainer.checkpoint.after_rename`, `explorer.swap.mid`,
`launcher.stages.between`.
"""

from __future__ import annotations

import os
import signal
import threading

from triune.errors import ConfigError, TriuneError


class FailpointReached(TriuneError):
    """Raised by a failpoint whose action is `raise`; only tests ask for it."""


_armed: dict[str, tuple[int, str]] = {}
_passed: dict[str, int] = {}
_lock = threading.Lock()


def arm_failpoints(text: str) -> None:
    """Replace all failpoints by those of `name:count[:kill|raise]`, comma-separated; an empty text disarms all."""
    armed: dict[str, tuple[int, str]] = {}
    for spec in filter(None, text.split(",")):
        name, _, rest = spec.partition(":")
        count, _, action = rest.partition(":")
        if not count.isdigit() or int(count) < 1 or action not in ("", "kill", "raise"):
            raise ConfigError("TRIUNE_FAILPOINT", repr(spec), "name:count[:kill|raise]")
        armed[name] = (int(count), action or "kill")
    _armed.clear()
    _armed.update(armed)
    _passed.clear()


def failpoint(name: str) -> None:
    """Do nothing, unless this name is armed and this is the chosen pass.

    Raises:
        FailpointReached: The action is `raise`.
    """
    if not _armed or name not in _armed:
        return
    count, action = _armed[name]
    with _lock:
        _passed[name] = _passed.get(name, 0) + 1
        if _passed[name] != count:
            return
    if action == "raise":
        raise FailpointReached(f"failpoint {name}", f"pass {count}")
    os.kill(os.getpid(), signal.SIGKILL)


arm_failpoints(os.environ.get("TRIUNE_FAILPOINT", ""))
