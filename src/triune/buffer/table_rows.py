"""Records as rows of a table, one sequence each, and back: what Parquet files and dataset folders hold.

A row's own columns are for people and other tools; `rest` and `group` hold as JSON what else there is, so that nothing
is lost on the way back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from triune.buffer.query_columns import EntryRow
from triune.buffer.transfer import from_plain, to_plain
from triune.errors import RecordError
from triune.records import Experience, Group, Pair, Record

_ARRAYS = ("tokens", "action_mask", "logprobs", "versions")
_PLAIN = ("id", "reward", "is_valid", "stop", "source", "operators")


def table_schema() -> Any:
    """The columns, as a pyarrow schema."""
    import pyarrow as arrow

    text, reals = arrow.string(), arrow.list_(arrow.float32())
    message = arrow.struct([("role", text), ("content", text)])
    return arrow.schema(
        [
            *((name, text) for name in ("id", "entry", "kind", "buffer", "state", "taskset", "task_key", "task")),
            ("number", arrow.int32()),
            ("messages", arrow.list_(message)),
            ("reward", arrow.float64()),
            ("reward_parts", text),
            ("is_valid", arrow.bool_()),
            ("stop", text),
            ("source", text),
            ("operators", arrow.list_(text)),
            ("tokens", arrow.list_(arrow.int32())),
            ("action_mask", arrow.list_(arrow.bool_())),
            ("logprobs", reals),
            ("versions", arrow.list_(arrow.int32())),
            ("advantages", reals),
            ("rest", text),
            ("group", text),
        ]
    )


def to_rows(entry: EntryRow, group: Group) -> Iterator[dict[str, Any]]:
    """One row per sequence: a pair makes two, of kind `chosen` and `rejected`."""
    common = {
        "entry": entry.entry,
        "buffer": entry.buffer,
        "state": entry.state,
        "taskset": group.task.taskset,
        "task_key": group.task.key,
        "task": _json(group.task.data),
        "group": _json(
            {
                "id": str(group.id),
                "task": {name: getattr(group.task, name) for name in ("workflow", "reward", "info")},
                "info": group.info,
                "unknown": group.unknown,
            }
        ),
    }
    for number, record in enumerate(group.records):
        for kind, row in _rows_of(record):
            yield {**common, "number": number, "kind": kind, **row}


def _rows_of(record: Record) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(record, Experience):
        yield "experience", _row(record)
    elif isinstance(record, Pair):
        about = {name: getattr(record, name) for name in ("weight", "margin", "by", "info", "unknown")}
        yield "chosen", _row(record.chosen, pair=about)
        yield "rejected", _row(record.rejected)
    else:
        rest = {"info": record.info, "unknown": record.unknown}
        yield "text", {"id": record.id, "tokens": record.tokens, "rest": _json(rest)}


def _row(one: Experience, **more: Any) -> dict[str, Any]:
    names = set(one.__struct_fields__) - {*_ARRAYS, *_PLAIN, "reward_parts", "streams", "messages"}
    rest: dict[str, Any] = {name: getattr(one, name) for name in sorted(names)} | more
    rest["streams"] = {name: stream for name, stream in one.streams.items() if name != "advantages"}
    messages = [{"role": m.get("role"), "content": m.get("content")} for m in one.messages]
    if any(m.keys() - {"role", "content"} or not isinstance(m.get("content"), str) for m in one.messages):
        rest["messages"] = one.messages
        messages = [m if isinstance(m["content"], str) else {**m, "content": _json(m["content"])} for m in messages]
    advantages = one.advantages
    if advantages is not None and advantages.dtype != np.float32:
        advantages, rest["streams"]["advantages"] = None, advantages
    return {
        **{name: getattr(one, name) for name in _ARRAYS},
        "id": str(one.id),
        "reward": one.reward,
        "reward_parts": _json(one.reward_parts),
        "is_valid": one.is_valid,
        "stop": str(one.stop),
        "source": str(one.source),
        "operators": list(one.operators),
        "messages": messages,
        "advantages": advantages,
        "rest": _json(rest),
    }


def _json(value: Any) -> str:
    return json.dumps(to_plain(value), ensure_ascii=False, default=str)


def from_rows(rows: Sequence[Mapping[str, Any]]) -> Group:
    """Invert `to_rows` for the rows of one entry.

    Raises:
        RecordError: A column is missing or of the wrong kind.
    """
    try:
        first = rows[0]
        about = json.loads(first["group"])
        task = {
            "key": first["task_key"],
            "taskset": first["taskset"],
            "data": json.loads(first["task"]),
            **about["task"],
        }
        records = [_plain_record(list(part)) for _, part in groupby(rows, key=lambda row: row["number"])]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        found = f"{type(error).__name__}: {error}"
        raise RecordError("table row", found, "a row of `triune buffer export`") from error
    return from_plain(
        {"id": about["id"], "task": task, "records": records, "info": about["info"], "unknown": about["unknown"]}
    )


def _plain_record(rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    kind = rows[0]["kind"]
    if kind == "text":
        rest = json.loads(rows[0]["rest"])
        return {"kind": "text", "id": rows[0]["id"], "tokens": rows[0]["tokens"], **rest}
    if kind == "experience":
        return {"kind": "experience", **_plain_experience(rows[0])[0]}
    halves = {row["kind"]: _plain_experience(row) for row in rows}
    return {"kind": "pair", **halves["chosen"][1], "chosen": halves["chosen"][0], "rejected": halves["rejected"][0]}


def _plain_experience(row: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The experience, and what its row says of the pair it is in."""
    rest = json.loads(row["rest"])
    pair = rest.pop("pair", {})
    plain = {name: row[name] for name in (*_ARRAYS, *_PLAIN)}
    plain |= {"messages": row["messages"] or [], "reward_parts": json.loads(row["reward_parts"]), **rest}
    if row["advantages"] is not None:
        plain["streams"] = {**rest["streams"], "advantages": row["advantages"]}
    return plain, pair
