"""Files that grow by lines, and what a killed process leaves at their end."""

from __future__ import annotations

import os


def cut_torn_line(fd: int) -> None:
    """Remove what follows the last newline: the half-written row of a process or disk that died.

    Args:
        fd: A file open for reading and writing.
    """
    size = os.fstat(fd).st_size
    end = size
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end != size:
        os.ftruncate(fd, end)
