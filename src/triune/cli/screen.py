"""Tables on the screen, plain lines in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows: as a table on a terminal, tab-separated with full text in a pipe."""
    if not sys.stdout.isatty():
        if title:
            print(title)
        elif any(columns):
            print("\t".join(columns))
        for row in rows:
            print("\t".join(row))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title or None, box=box.SIMPLE, title_justify="left", show_header=any(columns))
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    Console(highlight=False).print(made)
