"""Worker processes that verify answers within a wall-clock bound, and die when they do not."""

from __future__ import annotations

import asyncio
import atexit
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

START_S = 60.0
"""How long a worker may take to prepare for a kind of request: it imports a computer algebra system."""


class VerifierFailed(Exception):
    """The verifier gave no verdict: it timed out, died, or raised. Its text says which."""


class Worker:
    """One process. Not thread-safe: a thread of the pool owns it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._warm: set[str] = set()

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        """Send a request and wait for its reply; starting and preparing the worker do not count.

        Raises:
            VerifierFailed: No reply in time (the process is killed; the next request starts another), or it died.
        """
        if self._process is None or self._process.poll() is not None:
            self.kill()
            self._start()
        kind = f"{request['verifier']} {request.get('recipe', {}).get('generator')}"
        if kind not in self._warm:
            self._exchange({**request, "of": request["verifier"], "verifier": "prepare"}, START_S)
            self._warm.add(kind)
        return self._exchange(request, timeout_s)

    def _exchange(self, request: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        process, deadline = self._process, time.monotonic() + timeout_s
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode({**request, "timeout_s": timeout_s}) + b"\n")
            process.stdin.flush()
            reply = self._read_line(process.stdout.fileno(), deadline)
        except BrokenPipeError:
            reply = b""
        if reply is None:
            self.kill()
            raise VerifierFailed(f"no verdict within {timeout_s:g} s; the worker was killed")
        if not reply.endswith(b"\n"):
            self.kill()
            raise VerifierFailed(f"the worker died ({process.returncode})")
        return msgspec.json.decode(reply)

    def _start(self) -> None:
        self._warm.clear()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "triune.tasks.verify_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )

    @staticmethod
    def _read_line(descriptor: int, deadline: float) -> bytes | None:
        """A line, a line cut short by the process's end, or None when time is up."""
        reply, poll = b"", select.poll()
        poll.register(descriptor, select.POLLIN)
        while not reply.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return None
            piece = os.read(descriptor, 65536)
            if not piece:
                break
            reply += piece
        return reply

    def kill(self) -> None:
        """End the process and all it started, at once."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream:
                stream.close()


class Verifiers:
    """A pool of workers. Each is started when first needed and belongs to one waiting thread.

    The bound holds for the verification itself: a request may wait longer than that when all workers are busy, at most
    the bound of those before it.
    """

    def __init__(self, num_workers: int) -> None:
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="verify")
        self._own = threading.local()
        self._workers: list[Worker] = []

    async def verify(self, request: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        """The worker's reply; raises VerifierFailed."""
        reply = await asyncio.wrap_future(self._threads.submit(self._ask, request, timeout_s))
        if "error" in reply:
            raise VerifierFailed(reply["error"])
        return reply

    def _ask(self, request: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        worker = getattr(self._own, "worker", None)
        if worker is None:
            worker = self._own.worker = Worker()
            self._workers.append(worker)
        return worker.ask(request, timeout_s)

    def close(self) -> None:
        """Kill all workers."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()


_pools: dict[tuple[int, int], Verifiers] = {}


def shared_verifiers(num_workers: int) -> Verifiers:
    """The pool of this process with so many workers, made when first asked for and closed at exit."""
    key = (os.getpid(), num_workers)
    if key not in _pools:
        _pools[key] = Verifiers(num_workers)
        atexit.register(_pools[key].close)
    return _pools[key]
