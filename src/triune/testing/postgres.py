"""A throw-away PostgreSQL server, from the binaries of the machine, for tests and trials."""

from __future__ import annotations

import atexit
import functools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triune.buffer.stores.postgres import Postgres

URL_VARIABLE = "TRIUNE_POSTGRES_URL"
"""Names a running server whose database tests may fill with schemas; without it they start one of their own."""

MISSING = f"no PostgreSQL server: install Debian's package `postgresql`, or set {URL_VARIABLE}"

_OPTIONS = "-c listen_addresses= -c max_connections=300 -c fsync=off -c unix_socket_directories={socket}"
"""Without fsync a killed server still loses nothing, because the machine lives on; only a power cut would hurt."""


_GONE_S = 10.0
"""How long killed processes may take to be gone."""


def find_binaries() -> Path | None:
    """The folder of `initdb` and `pg_ctl`, of the newest version; None where PostgreSQL is not installed."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    on_path = shutil.which("initdb")
    folders = [*([Path(on_path).parent] if on_path else []), *folders]
    return next((path for path in reversed(folders) if (path / "pg_ctl").exists()), None)


class PostgresServer:
    """A server in a temporary folder, reached by a socket there. Root's servers run as somebody else."""

    def __init__(self, binaries: Path) -> None:
        """Make the folder and an empty cluster."""
        self.binaries = binaries
        self.folder = Path(tempfile.mkdtemp(prefix="triune-pg-", dir="/tmp"))  # sockets allow 107 characters
        self._user = _unprivileged()
        if self._user is not None:
            os.chown(self.folder, self._user, -1)
        flags = ("--username=triune", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync")
        self._call("initdb", "--pgdata", str(self.folder / "data"), *flags)

    @property
    def url(self) -> str:
        """Of its database, for its owner."""
        return f"postgresql://triune@/postgres?host={self.folder}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        options = _OPTIONS.format(socket=self.folder)
        self._call(
            "pg_ctl", "start", "-w", "-D", str(self.folder / "data"), "-l", str(self.folder / "log"), "-o", options
        )

    def stop(self, mode: str = "fast") -> None:
        """Stop it; `immediate` is a crash: it recovers at the next start."""
        self._call("pg_ctl", "stop", "-w", "-D", str(self.folder / "data"), "-m", mode)

    def processes(self) -> list[int]:
        """Numbers of the server's process and of those it started."""
        server = int((self.folder / "data" / "postmaster.pid").read_text().split()[0])
        return [server, *_children_of(server)]

    def kill(self) -> None:
        """SIGKILL to all its processes, as when the machine ends; `start` recovers it."""
        os.kill(self.processes()[0], signal.SIGSTOP)  # so that it starts no other meanwhile
        pids = self.processes()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _GONE_S
        while any(_is_alive(pid) for pid in pids):
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes {pids} of the server do not end")
            time.sleep(0.005)
        for stale in ("data/postmaster.pid", ".s.PGSQL.5432", ".s.PGSQL.5432.lock"):
            (self.folder / stale).unlink(missing_ok=True)  # its number may be somebody else's by the next start

    def remove(self) -> None:
        """Stop it, if it runs, and delete its folder."""
        if (self.folder / "data" / "postmaster.pid").exists():
            self.stop("immediate")
        shutil.rmtree(self.folder, ignore_errors=True)

    def _call(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            (str(self.binaries / program), *arguments),
            user=self._user,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / "errors").open("ab"),
            check=False,
        )
        if done.returncode:
            said = (self.folder / "errors").read_text(errors="replace")
            raise RuntimeError(f"{program} failed with {done.returncode}: {said}")


def _children_of(parent: int) -> list[int]:
    """Its child processes, from Linux's /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(_status_of(stat)[1]) == parent:
                found.append(int(stat.parent.name))
    return found


def _is_alive(pid: int) -> bool:
    try:
        return _status_of(Path(f"/proc/{pid}/stat"))[0] not in "ZX"
    except OSError:
        return False


def _status_of(stat: Path) -> list[str]:
    """State and parent, and what follows, of a process: what is behind its name in brackets."""
    return stat.read_text().rpartition(")")[2].split()


def _unprivileged() -> int | None:
    """Who runs the server: nobody else, or, as PostgreSQL refuses root, `postgres` or `nobody`."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_uid
        except KeyError:
            continue
    return None


@functools.cache
def server_url() -> str | None:
    """The URL of the server that this process's tests use, started at the first call; None where there is none."""
    given = os.environ.get(URL_VARIABLE)
    if given:
        return given
    binaries = find_binaries()
    if binaries is None:
        return None
    server = PostgresServer(binaries)
    atexit.register(server.remove)
    server.start()
    return server.url


@dataclass(frozen=True, kw_only=True)
class OnTestServer:
    """The store `postgres` on `server_url()`, a schema per folder."""

    def __call__(self, folder: Path, clock: Callable[[], float] | None = time.time) -> Any:
        """Open it, and make its schema when it is missing."""
        return Postgres(url=server_url() or "", reconnect_s=20.0)(folder, clock)
