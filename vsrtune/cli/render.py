"""Tables on the screen: rich on a terminal, aligned plain text everywhere else.

Plain text is never wrapped or cut, so that a pipe into grep or awk sees whole
rows; it also spares a script the start-up time of rich.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from vsrtune.core.text import printable
from vsrtune.views.tables import Table

_STYLES = {"plain": "bold", "good": "bold green", "warn": "bold yellow", "bad": "bold red"}


def show(tables: Iterable[Table]) -> None:
    """Print tables on standard output."""
    if sys.stdout.isatty():
        _show_rich(tables)
    else:
        sys.stdout.write("\n".join(plain(t) for t in tables))


def plain(table: Table) -> str:
    """A table as text: title, heads and rows in columns two spaces apart."""
    lines = [printable(table.title)]
    rows = [tuple(map(printable, row)) for row in table.rows]
    grid = [table.columns, *rows] if table.columns else []
    widths = [max(len(row[i]) for row in grid) for i in range(len(table.columns))]
    for row in grid:
        cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines) + "\n"


def _show_rich(tables: Iterable[Table]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(highlight=False)
    for table in tables:
        console.print(Text(printable(table.title), style=_STYLES[table.tone]))
        if not table.columns:
            continue
        grid = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for column in table.columns:
            grid.add_column(Text(column), overflow="fold")
        for row in table.rows:
            # Text and not str: names of guests may contain what rich takes for markup.
            grid.add_row(*(Text(printable(cell)) for cell in row))
        console.print(grid)
        console.print()
