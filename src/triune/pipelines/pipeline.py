"""Run operators in order: counted, timed, with faults contained."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import msgspec

from triune.ports import Operator
from triune.records import Experience, Group
from triune.registry import snake_case


class Shaped(msgspec.Struct, frozen=True, kw_only=True):
    """What a pipeline made of a group.

    Attributes:
        group: The new revision; None when an operator dropped it.
        dropped_by: That operator's name.
        metrics: `pipeline/NAME/…` for every operator that ran, and `time/pipeline_s`.
        error: First failure inside an operator, one line; "" when there was none.
    """

    group: Group | None
    dropped_by: str = ""
    metrics: Mapping[str, float] = {}
    error: str = ""


class Pipeline:
    """Operators in order.

    An operator is a brick or a plain function. One whose first parameter is called `experience` sees experiences one by
    one, any other sees the group. Either returns what it was given, a changed copy, or None to drop it; a group left
    without records is dropped. A fault in user code never ends the run: an experience whose operator raised becomes
    invalid and leaves the statistics; when a group operator raises, the group is dropped by it. Both are counted and
    reported.

    An operator's name joins the lineage of exactly the records it changed.

    Args:
        operators: In the order in which they run; the group advantage last.
        clock: Seconds, for the metrics.
    """

    def __init__(self, operators: Sequence[Operator], *, clock: Callable[[], float] = perf_counter) -> None:
        self._stages = [_Stage(operator) for operator in operators]
        self._clock = clock

    @property
    def names(self) -> list[str]:
        """Operator names, in order."""
        return [stage.name for stage in self._stages]

    def apply(self, group: Group) -> Shaped:
        """Shape one group; never raises for what an operator did."""
        metrics: dict[str, float] = {}
        start = before = self._clock()
        current, dropped_by, first_error = group, "", ""
        for stage in self._stages:
            after, error, num_errors = stage.run(current)
            now = self._clock()
            metrics[stage.time_key] = now - before
            metrics[stage.drop_key] = float(after is None)
            metrics[stage.error_key] = float(num_errors)
            before, first_error = now, first_error or error
            if after is None:
                dropped_by = stage.name
                break
            current = after
        metrics["time/pipeline_s"] = before - start
        return Shaped(group=None if dropped_by else current, dropped_by=dropped_by, metrics=metrics, error=first_error)


class _Stage:
    """One operator with its name and scope."""

    def __init__(self, operator: Any) -> None:
        self.operator, self.name = operator, _name_of(operator)
        self.is_per_experience = _first_parameter(operator) == "experience"
        self.time_key = f"pipeline/{self.name}/time_s"
        self.drop_key = f"pipeline/{self.name}/drop_ratio"
        self.error_key = f"pipeline/{self.name}/errors"

    def run(self, group: Group) -> tuple[Group | None, str, int]:
        """The new group (None = dropped), the first failure in one line, and how many there were."""
        if self.is_per_experience:
            return self._each(group)
        try:
            after = self.operator(group)
            if after is None or after is group:
                return after, "", 0
            after = self._signed(group, _checked(after, Group))
            return after if after.records else None, "", 0
        except Exception as error:
            return None, self._report(str(group.id), error), 1

    def _each(self, group: Group) -> tuple[Group | None, str, int]:
        kept, errors = [], []
        for record in group.records:
            try:
                after = self.operator(record)
                if after is None:
                    continue
                kept.append(after if after is record else self._sign(_checked(after, type(record))))
            except Exception as error:
                errors.append(self._report(str(getattr(record, "id", group.id)), error))
                if isinstance(record, Experience):
                    kept.append(self._sign(record.replace(is_valid=False)))
        first = errors[0] if errors else ""
        if not kept:
            return None, first, len(errors)
        return group.with_records(kept), first, len(errors)

    def _signed(self, before: Group, after: Group) -> Group:
        known = {id(record) for record in before.records}
        return after.with_records([row if id(row) in known else self._sign(row) for row in after.records])

    def _sign(self, record: Any) -> Any:
        if not isinstance(record, Experience):
            return record
        return msgspec.structs.replace(record, operators=(*record.operators, self.name))

    def _report(self, where: str, error: Exception) -> str:
        return f"{where}: operator {self.name!r} failed ({type(error).__name__}: {error})"


def _name_of(operator: Any) -> str:
    mark = getattr(operator, "__brick__", None)
    if mark is not None:
        return mark[1]
    return snake_case(getattr(operator, "__name__", type(operator).__name__))


def _first_parameter(operator: Any) -> str:
    try:
        return next(iter(inspect.signature(operator).parameters), "")
    except ValueError:  # compiled code that does not say
        return ""


def _checked(result: Any, wanted: type) -> Any:
    if not isinstance(result, wanted):
        raise TypeError(f"it returned {type(result).__name__}, expected {wanted.__name__} or None")
    return result
