"""One notification per committed transaction, heard by every other open buffer over the same schema."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any

import psycopg

from triune.buffer.database import TOPICS
from triune.errors import StoreError

Hear = Callable[[set[str]], None]

RETRY_S = 0.5
"""Pause between two attempts to reach a server that is gone."""


class News:
    """A connection and a thread of their own that listen; what the buffer itself announced is left out."""

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], channel: str, writer: str, hear: Hear) -> None:
        self._connect, self._channel, self._writer, self._hear = connect, channel, writer, hear
        self._bell, self._rope = socket.socketpair()
        self._stops = threading.Event()
        self._pid = 0
        first = self._listening()  # before anybody waits, so that nothing is missed
        self._thread = threading.Thread(target=self._run, args=(first,), name="triune-buffer-news", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Of the server's process that tells us."""
        return self._pid

    def _listening(self) -> psycopg.Connection[Any]:
        connection = self._connect()
        try:
            connection.execute(f'LISTEN "{self._channel}"'.encode())
        except psycopg.Error:
            connection.close()
            raise
        self._pid = connection.info.backend_pid
        return connection

    def _run(self, connection: psycopg.Connection[Any]) -> None:
        while not self._stops.is_set():
            with contextlib.suppress(psycopg.Error, OSError), contextlib.closing(connection):
                self._follow(connection)
            again = self._come_back()
            if again is None:
                return
            connection = again
            self._hear(set(TOPICS))  # whatever happened meanwhile

    def _come_back(self) -> psycopg.Connection[Any] | None:
        while not self._stops.is_set():
            try:
                return self._listening()
            except (psycopg.Error, StoreError):
                self._stops.wait(RETRY_S)
        return None

    def _follow(self, connection: psycopg.Connection[Any]) -> None:
        line = connection.pgconn
        with selectors.DefaultSelector() as sockets:
            sockets.register(line.socket, selectors.EVENT_READ)
            sockets.register(self._bell, selectors.EVENT_READ)
            while not self._stops.is_set():
                heard: set[str] = set()
                while (notice := line.notifies()) is not None:
                    writer, *topics = notice.extra.decode().split()
                    if writer != self._writer:
                        heard |= TOPICS.intersection(topics)
                if heard:
                    self._hear(heard)
                sockets.select()
                if not self._stops.is_set():
                    line.consume_input()

    def stop(self) -> None:
        """End the thread and close its connection."""
        if not self._stops.is_set():
            self._stops.set()
            self._rope.send(b".")
            self._thread.join()
            self._bell.close()
            self._rope.close()
