"""The process that verifies answers: `python -m triune.tasks.verify_worker` reads a JSON line, writes a JSON line.

A process of its own because a computer algebra system can hang on one expression, in C code, where neither a thread
nor a signal handler helps. It is killed from outside, and kills itself by the default action of SIGALRM should the
one outside be gone. Model text is never evaluated as Python here by us; memory is bounded.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

MEMORY_BYTES = 4 * 2**30
GRACE_S = 1.0


def prepare(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Import and load what requests of this kind need, so that their bound is for them alone."""
    if request["of"] == "math":
        verify_math({"truth": "$1$", "answer": "$1$"})
    elif request["of"] == "reasoning_gym":
        from triune.tasks.generators import Recipe, load_generator

        load_generator(msgspec.convert(request["recipe"], Recipe))
    return {}


def verify_math(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Whether two mathematical answers are equal; `error` when the reference cannot be read."""
    import math_verify

    truth = math_verify.parse(request["truth"], parsing_timeout=None)  # type: ignore[arg-type]
    if not truth:
        return {"error": f"the reference answer {request['truth']!r} is no mathematics"}
    answer = math_verify.parse(request["answer"], parsing_timeout=None)  # type: ignore[arg-type]
    equal = math_verify.verify(truth, answer, timeout_seconds=None, raise_on_error=True)
    return {"score": float(equal), "metrics": {"answer_found": float(bool(answer))}}


def verify_generated(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """The score that a generator of reasoning-gym gives."""
    from triune.tasks.generators import Recipe, score

    recipe = msgspec.convert(request["recipe"], Recipe)
    value, raised = score(recipe, request["recipe"]["row"], request["answer"])
    return {"score": value, "metrics": {"scorer_raised": float(raised)}}


def verify_format(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Whether a regular expression matches an answer; it was compiled once where it was configured."""
    compiled = re.compile(request["pattern"], re.DOTALL)
    match = compiled.fullmatch if request["match"] == "whole" else compiled.search
    return {"score": float(match(request["answer"]) is not None)}


VERIFIERS: dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {
    "prepare": prepare,
    "math": verify_math,
    "reasoning_gym": verify_generated,
    "format": verify_format,
}


def answer_line(line: bytes) -> Mapping[str, Any]:
    """Verify one request; an exception becomes its `error`: the boundary of this process."""
    request = msgspec.json.decode(line)
    signal.setitimer(signal.ITIMER_REAL, request["timeout_s"] + GRACE_S)
    try:
        return VERIFIERS[request["verifier"]](request)
    except (Exception, RecursionError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    """Serve until the other end closes."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not look like a reply
    for line in sys.stdin.buffer:
        replies.write(msgspec.json.encode(answer_line(line)) + b"\n")


if __name__ == "__main__":
    main()
