"""What the cache still holds of earlier requests, so that no prompt is run twice under the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

PromptKey = tuple[str, bytes]


@dataclass(frozen=True, eq=False)
class _Prompt:
    row: int
    logits: Tensor  # [n, V] of the forward that ran it
    index: int


@dataclass(frozen=True, eq=False)
class _Session:
    row: int
    prompt: np.ndarray  # the row holds keys and values of these ids …
    sampled: np.ndarray  # … and then of these

    def starts(self, ids: np.ndarray) -> int:
        """How many of these ids the row holds; 0 unless they go on from all that it holds."""
        middle, end = len(self.prompt), len(self.prompt) + len(self.sampled)
        if end >= len(ids) or not np.array_equal(ids[:middle], self.prompt):
            return 0
        return end if np.array_equal(ids[middle:end], self.sampled) else 0


class Prefixes:
    """Which row begins with which prompt, and which row a session's last turn left behind.

    Nothing is copied aside: an entry lives until its row is overwritten, and all entries die with the weights.
    """

    def __init__(self) -> None:
        self._prompts: dict[PromptKey, _Prompt] = {}
        self._sessions: dict[str, _Session] = {}
        self._prompt_of_row: dict[int, PromptKey] = {}
        self._session_of_row: dict[int, str] = {}

    def clear(self) -> None:
        """Forget everything: the weights changed."""
        self.__init__()

    def forget_row(self, row: int) -> None:
        """The row is about to be overwritten."""
        key = self._prompt_of_row.pop(row, None)
        if key is not None:
            self._prompts.pop(key, None)
        session = self._session_of_row.pop(row, None)
        if session is not None:
            self._sessions.pop(session, None)

    def remembers(self, row: int) -> bool:
        """Whether anything would be lost by overwriting a row."""
        return row in self._prompt_of_row or row in self._session_of_row

    def add_prompt(self, key: PromptKey, row: int, logits: Tensor, index: int) -> None:
        """The row begins with this prompt, and these are the logits after it."""
        old = self._prompts.get(key)
        if old is not None:
            self._prompt_of_row.pop(old.row, None)
        self._prompts[key] = _Prompt(row, logits, index)
        self._prompt_of_row[row] = key

    def find_prompt(self, key: PromptKey) -> tuple[int, Tensor] | None:
        """A row that begins with this prompt, and its logits [V]."""
        found = self._prompts.get(key)
        return None if found is None else (found.row, found.logits[found.index])

    def add_session(self, session: str, row: int, prompt: np.ndarray, sampled: np.ndarray) -> None:
        """A turn of this session ended and its row holds these ids."""
        self._set_session(session, _Session(row, prompt, sampled))

    def _set_session(self, session: str, found: _Session) -> None:
        old = self._sessions.get(session)
        if old is not None:
            self._session_of_row.pop(old.row, None)
        self._sessions[session] = found
        self._session_of_row[found.row] = session

    def find_session(self, session: str, prompt: np.ndarray) -> tuple[int, int] | None:
        """Row and length to go on from, when the prompt extends what the session's last turn left."""
        found = self._sessions.get(session)
        num = 0 if found is None else found.starts(prompt)
        return (found.row, num) if found is not None and num else None

    def move(self, source: int, target: int) -> None:
        """A row's content is in another place now."""
        self.forget_row(target)
        key = self._prompt_of_row.pop(source, None)
        if key is not None:
            old = self._prompts[key]
            self.add_prompt(key, target, old.logits, old.index)
        session = self._session_of_row.pop(source, None)
        if session is not None:
            old = self._sessions[session]
            self._set_session(session, _Session(target, old.prompt, old.sampled))
