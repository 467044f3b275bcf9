"""Where errors become messages and exit codes."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Sequence

import typer

from triune.errors import TriuneError

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Run the command line; returns the exit code.

    0 done, 2 what the user wrote cannot be run, 1 the run failed, 130 interrupted. With `--debug` (or TRIUNE_DEBUG=1)
    tracebacks are shown.
    """
    from triune.cli.app import app

    debug = "--debug" in arguments or os.environ.get("TRIUNE_DEBUG", "") not in ("", "0")
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        code = app(args=arguments, prog_name="triune", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        print("triune: interrupted", file=sys.stderr)
        return INTERRUPTED
    except typer.Exit as leave:
        return leave.exit_code
    except TriuneError as error:
        if debug:
            traceback.print_exc()
        print(message(error), file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except Exception as error:
        show = getattr(error, "show", None)
        if show is not None:  # a usage error of typer's, with its own message
            show()
            return int(getattr(error, "exit_code", 2))
        print(_unexpected(error, debug), file=sys.stderr)
        return 1
    return code if isinstance(code, int) else 0


def message(error: TriuneError) -> str:
    """An error in its four parts, and the errors that caused it."""
    lines = [f"triune: {error.where}"]
    for label, text in (("found", error.found), ("expected", error.expected), ("do", error.do)):
        if text:
            lines.append(f"  {label + ':':<10}" + text.replace("\n", "\n          "))
    cause = error.__cause__
    if isinstance(cause, TriuneError):
        lines.append("caused by " + message(cause).removeprefix("triune: "))
    elif cause is not None and f"{cause}" not in error.found:
        lines.append(f"caused by {type(cause).__name__}: {cause}")
    return "\n".join(lines)


def _unexpected(error: Exception, debug: bool) -> str:
    """Name a fault of Triune's own (or of user code that nothing caught), with a file that holds the traceback."""
    text = "".join(traceback.format_exception(error))
    if debug:
        return text
    with tempfile.NamedTemporaryFile(
        "w", prefix="triune-", suffix=".traceback", delete=False, encoding="utf-8"
    ) as file:
        file.write(text)
    return (
        f"triune: unexpected {type(error).__name__}\n  found:    {error}\n"
        "  expected: no such error; this is a fault of Triune's or of code it called\n"
        f"  do:       read {file.name}, or run again with --debug"
    )
