"""What was checked and how it went, for people and for `selfcheck.json`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    from triune.selfcheck.rig import Rig


class Status(StrEnum):
    """How a check ended. A warning is something a run survives but seldom profits from."""

    PASSED = "passed"
    WARNED = "warned"
    FAILED = "failed"
    SKIPPED = "skipped"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What one check found.

    Attributes:
        status: How it ended.
        found: What was seen; for a failure the cause, for a skipped check the reason.
        fix: What to do; empty when there is nothing to do.
        numbers: What was measured.
    """

    status: Status
    found: str
    fix: str = ""
    numbers: Mapping[str, float] = {}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A check with its verdict.

    Attributes:
        name: The check's.
        proves: What holds when it passes.
        status: How it ended.
        found: What was seen, or the cause.
        fix: What to do.
        numbers: What was measured.
        seconds: How long it took.
    """

    name: str
    proves: str
    status: Status
    found: str
    fix: str
    numbers: Mapping[str, float]
    seconds: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All findings, in the order of the checks."""

    name: str
    model: str
    config_hash: str
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def is_right(self) -> bool:
        """Whether nothing failed."""
        return not self.of(Status.FAILED)

    def of(self, status: Status) -> list[Finding]:
        """Findings that ended so."""
        return [finding for finding in self.findings if finding.status is status]

    def to_json(self) -> bytes:
        """The file `selfcheck.json`."""
        content: dict[str, Any] = {"is_right": self.is_right, **msgspec.structs.asdict(self)}
        return msgspec.json.format(msgspec.json.encode(content)) + b"\n"


class Check(Protocol):
    """A function of the rig with a name and a sentence."""

    check_name: str
    proves: str

    def __call__(self, rig: Rig) -> Awaitable[Verdict]: ...


def check(name: str, proves: str) -> Callable[[Any], Any]:
    """Name a check, and say what holds when it passes."""

    def mark(function: Any) -> Any:
        function.check_name, function.proves = name, proves
        return function

    return mark


def passed(found: str, **numbers: float) -> Verdict:
    """It holds."""
    return Verdict(status=Status.PASSED, found=found, numbers=numbers)


def failed(cause: str, fix: str, **numbers: float) -> Verdict:
    """It does not hold: a run would compute something wrong."""
    return Verdict(status=Status.FAILED, found=cause, fix=fix, numbers=numbers)


def warned(cause: str, fix: str, **numbers: float) -> Verdict:
    """A run would be right, and learn nothing or waste its time."""
    return Verdict(status=Status.WARNED, found=cause, fix=fix, numbers=numbers)


def skipped(because: str) -> Verdict:
    """There is nothing to check here."""
    return Verdict(status=Status.SKIPPED, found=because)
