"""`triune ls` and `triune show`."""

from __future__ import annotations

import difflib
from pathlib import Path

import typer

from triune import registry
from triune.cli.describe import BrickPage, describe
from triune.cli.screen import table
from triune.errors import ConfigError


def kind_of(word: str) -> str:
    """`algorithms`, `policy_losses`, `policy-loss` → kind.

    Raises:
        ConfigError: No such kind; proposes the nearest.
    """
    plain = word.replace("-", "_").lower()
    for kind in registry.HOMES:
        if plain in (kind, f"{kind}s", f"{kind}es", f"{kind.removesuffix('y')}ies"):
            return kind
    near = difflib.get_close_matches(plain, list(registry.HOMES), n=1)
    do = f"did you mean {near[0]!r}?" if near else "list them with `triune ls`"
    raise ConfigError("ls", f"no kind of brick is called {word!r}", ", ".join(registry.HOMES), do)


def load_plugin_files(files: list[str]) -> None:
    """Import plug-ins named on the command line."""
    from triune.config.plugins import load_plugins

    load_plugins(files, Path.cwd())


def pages(kind: str) -> list[BrickPage]:
    """Pages of all bricks of a kind."""
    return [describe(kind, name) for name in registry.names(kind)]


def built_ins(kind: str) -> list[BrickPage]:
    """Pages of the bricks that ship with Triune."""
    return [page for page in pages(kind) if ":" not in page.name]


def list_bricks(word: str | None, plugins: list[str]) -> None:
    """Print kinds, or the bricks of one."""
    load_plugin_files(plugins)
    if word is None:
        rows = [(kind, str(len(registry.names(kind))), ", ".join(registry.names(kind))) for kind in registry.HOMES]
        table("kinds of bricks (list one with `triune ls KIND`)", ("kind", "", "names"), rows)
        return
    kind = kind_of(word)
    table(f"{kind} (explain one with `triune show NAME`)", ("use", ""), [(p.name, p.summary) for p in pages(kind)])


def show_brick(name: str, with_source: bool, plugins: list[str]) -> None:
    """Print the pages of all bricks of that name.

    Raises:
        ConfigError: No such brick.
    """
    load_plugin_files(plugins)
    for number, page in enumerate(_find(name)):
        if number:
            typer.echo("")
        _print(page, with_source)


def _find(name: str) -> list[BrickPage]:
    if ":" in name:
        target = registry.find("operator", name, "show")
        kind = getattr(target, "__brick__", ("brick", ""))[0]
        return [describe(kind, name)]
    kind_word, slash, use = name.rpartition("/")
    kinds = [kind_of(kind_word)] if slash else [kind for kind in registry.HOMES if use in registry.names(kind)]
    if not kinds:
        known = sorted({known for kind in registry.HOMES for known in registry.names(kind)})
        near = difflib.get_close_matches(name, known, n=1)
        do = f"did you mean {near[0]!r}?" if near else "list them with `triune ls`"
        raise ConfigError("show", f"no brick is called {name!r}", "a name of `triune ls`, or module:attr", do)
    return [describe(kind, use) for kind in kinds]


def _print(page: BrickPage, with_source: bool) -> None:
    typer.echo(typer.style(f"{page.kind} {page.name}", bold=True) + f"   {page.path}")
    if page.doc:
        typer.echo(f"\n{page.doc}\n")
    if page.fields:
        table("", ("field", "type", "default", ""), [(f.name, f.type, f.default, f.doc) for f in page.fields])
    if with_source:
        typer.echo(f"\n# {page.file}\n{page.source}")
