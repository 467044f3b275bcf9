"""Where segments lie: a folder, or an object store through fsspec. Both know only whole names and places in them."""

from __future__ import annotations

import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from triune.errors import ConfigError, MissingDependency, StoreError

MARK = "segments.json"
"""Lies beside the segments of a buffer, so that an empty mount is not taken for lost segments."""

_PART = 1 << 20
"""Bytes of zeros written at once."""


class Span(NamedTuple):
    """A range of bytes in a segment."""

    name: str
    start: int
    size: int


class Place(ABC):
    """Where the segments of one buffer lie.

    Every call raises StoreError when the place itself fails (disk full, no permission, no network).

    Attributes:
        where: For messages.
        appends: Whether a segment may grow after it was written.
    """

    appends: bool

    def __init__(self, where: str) -> None:
        self.where = where

    @abstractmethod
    def is_marked(self) -> bool:
        """Whether segments of this buffer belong here."""

    @abstractmethod
    def mark(self, text: str) -> None:
        """Say that they do; makes the folder."""

    @abstractmethod
    def append(self, name: str, start: int, blobs: Sequence[bytes]) -> bool:
        """Write blobs one after the other, from a position that is the end (0 = a new segment), and see to it that they
        survive a power cut; False when there is no such segment any more."""

    @abstractmethod
    def read(self, spans: Sequence[Span]) -> list[bytes | None]:
        """What lies there, less where a segment ends before; None where there is no such segment."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Every segment's number of bytes."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """A segment's number of bytes; None where there is none of that name."""

    @abstractmethod
    def wipe(self, name: str, spans: Sequence[tuple[int, int]]) -> None:
        """Overwrite ranges (start, size) with zeros; when it returns the old bytes are gone."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Take a segment away; nothing where there is none."""


class LocalFolder(Place):
    """A folder, which several processes may share."""

    appends = True

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder

    def is_marked(self) -> bool:
        """Whether the folder has its mark."""
        return (self.folder / MARK).is_file()

    def mark(self, text: str) -> None:
        """Make the folder and its mark."""
        with _asked(self.where):
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = self.folder / f"{MARK}.{uuid.uuid4().hex}"
            partial.write_text(text, encoding="utf-8")
            partial.replace(self.folder / MARK)
            _sync_folder(self.folder)

    def append(self, name: str, start: int, blobs: Sequence[bytes]) -> bool:
        """Write at the end, and to the disk."""
        flags = os.O_WRONLY | (0 if start else os.O_CREAT | os.O_EXCL)
        with _asked(self.where):
            try:
                file = os.open(self.folder / name, flags, 0o666)
            except FileNotFoundError:
                if start and self.is_marked():
                    return False
                raise
            try:
                for blob in blobs:
                    start += _write(file, start, blob)
                os.fsync(file)
            finally:
                os.close(file)
            if flags & os.O_CREAT:
                _sync_folder(self.folder)
        return True

    def read(self, spans: Sequence[Span]) -> list[bytes | None]:
        """What lies there; each file is opened once."""
        found: list[bytes | None] = [None] * len(spans)
        by_name: dict[str, list[int]] = {}
        for number, span in enumerate(spans):
            by_name.setdefault(span.name, []).append(number)
        with _asked(self.where):
            for name, numbers in by_name.items():
                try:
                    file = os.open(self.folder / name, os.O_RDONLY)
                except FileNotFoundError:
                    continue
                try:
                    for number in numbers:
                        found[number] = _read(file, spans[number].start, spans[number].size)
                finally:
                    os.close(file)
        return found

    def sizes(self) -> dict[str, int]:
        """Of the files that end in `.seg`."""
        with _asked(self.where):
            return {path.name: path.stat().st_size for path in self.folder.glob("*.seg")}

    def size(self, name: str) -> int | None:
        """Of the file."""
        with _asked(self.where):
            try:
                return (self.folder / name).stat().st_size
            except FileNotFoundError:
                return None

    def wipe(self, name: str, spans: Sequence[tuple[int, int]]) -> None:
        """Write zeros over them, in place and to the disk."""
        zeros = bytes(_PART)
        with _asked(self.where):
            file = os.open(self.folder / name, os.O_WRONLY)
            try:
                for start, size in spans:
                    for at in range(start, start + size, _PART):
                        _write(file, at, zeros[: min(_PART, start + size - at)])
                os.fsync(file)
            finally:
                os.close(file)

    def delete(self, name: str) -> None:
        """Overwrite it, as its blocks stay on the disk, and unlink it."""
        size = self.size(name)
        if size is not None:
            self.wipe(name, [(0, size)])
            with _asked(self.where):
                (self.folder / name).unlink(missing_ok=True)
                _sync_folder(self.folder)


def _write(file: int, start: int, blob: bytes) -> int:
    view = memoryview(blob)
    while view:
        written = os.pwrite(file, view, start)
        start, view = start + written, view[written:]
    return len(blob)


def _read(file: int, start: int, size: int) -> bytes:
    parts = []
    while size > 0 and (part := os.pread(file, size, start)):
        parts.append(part)
        start, size = start + len(part), size - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


class ObjectFolder(Place):
    """A prefix in any store that fsspec knows. An object is written once, so a segment is what one transaction kept."""

    appends = False

    def __init__(self, fs: Any, prefix: str, where: str) -> None:
        super().__init__(where)
        self.fs, self.prefix = fs, prefix.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self.prefix}/{name}"

    def is_marked(self) -> bool:
        """Whether its mark is there."""
        return self._ask(lambda: self.fs.isfile(self._path(MARK)))

    def mark(self, text: str) -> None:
        """Write its mark."""
        self._put(MARK, text.encode())

    def append(self, name: str, start: int, blobs: Sequence[bytes]) -> bool:
        """Write the object; `start` is 0."""
        assert start == 0, "objects do not grow"
        self._put(name, b"".join(blobs))
        return True

    def read(self, spans: Sequence[Span]) -> list[bytes | None]:
        """All ranges at once, where the store can do that."""
        if not spans:
            return []
        paths = [self._path(span.name) for span in spans]
        starts, ends = [span.start for span in spans], [span.start + span.size for span in spans]
        found = self._ask(lambda: self.fs.cat_ranges(paths, starts, ends, on_error="return"))
        for each in found:
            if isinstance(each, BaseException) and not isinstance(each, FileNotFoundError):
                raise _failed(self.where, each) from each
        return [None if isinstance(each, BaseException) else bytes(each) for each in found]

    def sizes(self) -> dict[str, int]:
        """Of the objects that end in `.seg`."""

        def look() -> dict[str, Any]:
            self.fs.invalidate_cache()
            return self.fs.find(self.prefix, detail=True)

        found = self._ask(look)
        return {path.rsplit("/", 1)[-1]: int(info["size"]) for path, info in found.items() if path.endswith(".seg")}

    def size(self, name: str) -> int | None:
        """Of the object."""

        def look() -> int | None:
            try:
                return int(self.fs.info(self._path(name))["size"])
            except FileNotFoundError:
                return None

        return self._ask(look)

    def wipe(self, name: str, spans: Sequence[tuple[int, int]]) -> None:
        """Write the object anew, with zeros there."""
        content = bytearray(self._ask(lambda: self.fs.cat_file(self._path(name))))
        for start, size in spans:
            content[start : start + size] = bytes(len(content[start : start + size]))
        self._put(name, bytes(content))

    def delete(self, name: str) -> None:
        """Remove the object."""

        def remove() -> None:
            try:
                self.fs.rm_file(self._path(name))
            except FileNotFoundError:
                return

        self._ask(remove)

    def _put(self, name: str, content: bytes) -> None:
        def put() -> None:
            self.fs.makedirs(self.prefix, exist_ok=True)
            self.fs.pipe_file(self._path(name), content)

        self._ask(put)

    def _ask(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:  # the boundary to fsspec's many stores, each with errors of its own
            raise _failed(self.where, error) from error


@contextmanager
def _asked(where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _failed(where, error) from error


def _failed(where: str, error: BaseException) -> StoreError:
    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    do = "free space, or look at its permissions and whether it is mounted, then resume; what was committed is kept"
    return StoreError(f"segments in {where}", f"the place fails ({reason})", "one that can be read and written", do)


def check_url(url: str) -> str:
    """Raise ValueError for what must not be copied into the store; the URL."""
    if "://" in url and urlsplit(url).password is not None:
        raise ValueError("found a password, which would be copied into the store; expected it in fsspec's own settings")
    return url


def is_relative(url: str) -> bool:
    """Whether it is a folder that is found from another one."""
    return "://" not in url and not Path(url).expanduser().is_absolute()


def open_place(url: str, beside: Path, buffer: str) -> Place:
    """The place of a buffer's segments: the folder of its name in `url`, which may be relative to `beside`.

    Raises:
        ConfigError: fsspec does not know such a URL.
        MissingDependency: The package for it is not installed.
    """
    scheme, _, rest = url.partition("://")
    if not rest or scheme in ("file", "local"):
        return LocalFolder(beside / Path(rest or url).expanduser() / buffer)
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise MissingDependency(
            "buffer.segments.url", f"fsspec is not installed ({error})", "", "pip install 'triune[segments]'"
        ) from error
    try:
        fs, path = url_to_fs(url)
    except ImportError as error:
        found = f"{scheme}:// needs a package of its own ({error})"
        raise MissingDependency("buffer.segments.url", found, "", "install the package it names") from error
    except (ValueError, TypeError) as error:
        expected = "a folder, or a URL that fsspec knows"
        raise ConfigError("buffer.segments.url", f"{url!r} ({error})", expected, "correct it") from error
    return ObjectFolder(fs, f"{path.rstrip('/')}/{buffer}", f"{url.rstrip('/')}/{buffer}")
