"""Write the generated pages: `python -m docs.generate` (`--check` only says which are stale).

docs/reference/config.md    every key of a run file, from the settings' docstrings
docs/reference/bricks.md    every brick with its fields, from the bricks' docstrings
docs/reference/commands.md  help texts of the command line
docs/reliability.md         which test shows which way of going wrong
docs/papers.md              which paper became which brick, and which tests hold it to that
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

from docs.papers import papers_page
from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROOT = Path(__file__).parents[1]
GENERATED = "<!-- Written by `make docs` from the source; change the docstrings there. -->"


@cache
def pages() -> dict[Path, str]:
    """Path → text of every generated page."""
    return {
        ROOT / "docs/reference/config.md": config_page(),
        ROOT / "docs/reference/bricks.md": bricks_page(),
        ROOT / "docs/reference/commands.md": commands_page(),
        ROOT / "docs/reliability.md": reliability_page(),
        ROOT / "docs/papers.md": papers_page(GENERATED),
    }


# ------------------------------------------------------------------------------------------------------ config


def config_page() -> str:
    """Every key of a run file."""
    from triune.config import RunConfig

    lines = [
        GENERATED,
        "# Keys of a run file",
        "",
        "A run file is YAML. Unknown keys are errors, never ignored. On the command line `a.b=c` changes one key. "
        "`triune check FILE` prints every value of a run and where it came from.",
        "",
        "Keys of type *brick* take `name`, or `{use: name, field: value}`; without `use` they change fields of the "
        "default. Bricks and their fields are in [bricks.md](bricks.md).",
        "",
        "## Top level",
        "",
        *_table(RunConfig, ""),
    ]
    for name, model in _sections(RunConfig, ""):
        lines += ["", f"## `{name}`", "", _first_paragraph(model), "", *_table(model, f"{name}.")]
    return "\n".join(lines) + "\n"


def _sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    seen = set()
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner is not None and inner not in seen:
            seen.add(inner)
            suffix = ".NAME" if "dict" in str(field.annotation) else ""
            yield f"{prefix}{name}{suffix}", inner
            if prefix == "":
                yield from _sections(inner, f"{name}{suffix}.")


def _table(model: type[BaseModel], prefix: str) -> list[str]:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        kind, default = _cell(_type(field)), _cell(_default(field))
        rows.append(f"| `{prefix}{name}` | {kind} | {default} | {_cell(field.description or '')} |")
    return rows


def _type(field: FieldInfo) -> str:
    from triune.cli.describe import metadata_text, type_text

    inner = _model_in(field.annotation)
    if inner is not None:
        return "mapping of sections" if "dict" in str(field.annotation) else "section"
    return metadata_text(type_text(field.annotation), field.metadata)


def _default(field: FieldInfo) -> str:
    from triune.cli.describe import value_text

    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, BaseModel):
        return ""
    text = value_text(_named(default))
    return f"`{text}`" if text else ""


def _named(value: Any) -> Any:
    """`{use: x}` in a default is shown as `x`."""
    if isinstance(value, dict) and set(value) == {"use"}:
        return value["use"]
    return [_named(item) for item in value] if isinstance(value, list | tuple) else value


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_in(part)) is not None), None)


# ------------------------------------------------------------------------------------------------------ bricks


def bricks_page() -> str:
    """Every built-in brick."""
    from triune import registry
    from triune.cli.bricks import built_ins

    lines = [
        GENERATED,
        "# Bricks",
        "",
        "A brick is a small replaceable part that is its own configuration. `triune show NAME` prints one with its "
        "source. [Add your own](../howto/my_first_workflow.md) with `@brick(kind)` in a file listed under `plugins:`.",
    ]
    for kind in registry.HOMES:
        lines += ["", f"## {kind}"]
        for page in built_ins(kind):
            lines += ["", f"### {kind} `{page.name}`", "", page.doc]
            if page.fields:
                lines += ["", "| field | type | default | meaning |", "|---|---|---|---|"]
                for field in page.fields:
                    default = "required" if field.default == "required" else f"`{field.default}`"
                    lines.append(f"| `{field.name}` | {_cell(field.type)} | {_cell(default)} | {_cell(field.doc)} |")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------------- commands


def commands_page() -> str:
    """Help texts, as they are written in the source."""
    from triune.cli.app import app, buffer_app

    lines = [GENERATED, "# Commands", "", str(app.info.help).strip(), "", str(app.info.epilog)]
    commands = [("triune", command) for command in app.registered_commands]
    commands += [("triune buffer", command) for command in buffer_app.registered_commands]
    for prefix, command in commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__
        text = re.sub(r"(?m)^    ", "", command.callback.__doc__ or "").strip()
        lines += ["", f"## `{prefix} {name}`", "", text]
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------- reliability

CASES = {
    1: "temperature other than 1 in log-probs",
    2: "truncated sampling (top-p, top-k, min-p)",
    3: "retokenised ids get no behaviour log-prob",
    4: "dropout off in log-prob passes",
    5: "log-probs independent of micro-batch; sampler-trainer gap is logged",
    6: "engine or cache keeps old weights",
    7: "temperature 0 in training",
    8: "teacher at another temperature or template",
    9: "replicas sharing a seed",
    10: "decode then encode changes ids",
    11: "template that strips past thinking",
    12: "mask at the generation prompt and the stop token",
    13: "pad id equal to eos id",
    14: "side of padding",
    15: "assistant turns inside the prompt",
    16: "one length budget, overlong is counted",
    18: "gradients equal for every micro-batch and rank count",
    19: "accumulation divided twice",
    20: "padding changes the loss",
    21: "nothing trainable in a batch",
    22: "several backward passes before one step",
    23: "low-precision optimiser state",
    24: "group of one; zero spread",
    25: "groups shrink after failures",
    26: "a group with different tasks",
    27: "options of averaging and scaling",
    28: "flat groups and KL",
    29: "whitening",
    31: "gradients of KL estimators",
    32: "KL metrics: coefficient, padding",
    33: "verifiers: signals, threads, endless expressions",
    34: "verifier failure is invalid, not 0",
    35: "rewards of odd types",
    36: "raw, weighted and partial rewards are logged",
    38: "kill -9 and resume",
    39: "order after a resume",
    40: "data changed between runs",
    41: "versions of rollouts around a resume",
    42: "half-written checkpoints, optimiser state",
    43: "rollouts of an earlier run",
    44: "stragglers, partial groups, poison tasks",
    45: "end of data, short last batch",
    46: "a background task dies",
    47: "an aborted generation",
    48: "memory over steps",
    49: "nothing trainable arrives",
    50: "LoRA in the exported model",
    51: "evaluation: seed, every item once",
    52: "options that do nothing",
    53: "a failed component and the exit code",
    54: "timeouts are the limit they say",
    55: "blocking user code",
    56: "the queue is durable",
    57: "one argument of a brick keeps the others' defaults",
    58: "values rewritten behind the user's back",
    59: "plug-ins that do not import",
    60: "truncation marked on every path",
    61: "which batch size does what",
}
"""Ways of going wrong that this version guards against, by number."""


@cache
def tests_by_case() -> dict[int, list[str]]:
    """Case → `file::test` of the tests whose name holds `case_NN`."""
    found: dict[int, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith("test_"):
                continue
            numbers = "_".join(re.findall(r"case_(\d+(?:_\d+)*)", node.name)).split("_")
            for number in sorted({int(number) for number in numbers if number}):
                found.setdefault(number, []).append(f"{path.relative_to(ROOT).as_posix()}::{node.name}")
    return found


def reliability_page() -> str:
    """Case → tests."""
    lines = [
        GENERATED,
        "# Reliability",
        "",
        "Frameworks of this kind fail silently: the run goes on, the curve moves, the gradient is wrong. Each case "
        "below was seen in practice. The tests beside it fail when the fault comes back; run one with "
        "`pytest FILE -k NAME`.",
        "",
        "| case | what goes wrong | tests |",
        "|---|---|---|",
    ]
    tests = tests_by_case()
    for number, title in CASES.items():
        named = "<br>".join(f"`{name}`" for name in tests.get(number, []))
        lines.append(f"| {number} | {title} | {named} |")
    return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------------------------------------- shared


def _first_paragraph(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").strip().split("\n\n")[0].split())


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def main(arguments: list[str]) -> int:
    """Write stale pages, or name them with `--check`."""
    stale = [path for path, text in pages().items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{'stale' if '--check' in arguments else 'written'}: {path.relative_to(ROOT)}")
        if "--check" not in arguments:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pages()[path], encoding="utf-8")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
