# SPDX-License-Identifier: GPL-2.0-or-later
"""A frame of `vsrtune top` on a terminal of a given size.

Every row takes one line, so the rows that fit are known beforehand: a line tells the number of
those that do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import RenderableType
from rich.layout import Layout
from rich.text import Text

from vsrtune.core.text import printable
from vsrtune.views import top_tables
from vsrtune.views.host_view import ThreadView
from vsrtune.views.layout import cells, elide, fit
from vsrtune.views.tables import Table, filled
from vsrtune.views.top_frame import CpuRow, DropRow, Frame

# From this width on the threads have the left half for themselves.
WIDE = 150

_GAP = 1
_SPACE = " " * _GAP
_BUSY = 0.9
_WAITS = 0.1
# Styles of cells by column, given the ThreadView, CpuRow or DropRow of the row.
_THREAD_STYLES: Mapping[str, Callable[[ThreadView], str]] = {
    "CPU": lambda view: "bold red" if view.beside_interrupts else "",
    "%CPU": lambda view: "bold" if (view.use.load or 0) >= _BUSY else "",
    "%wait": lambda view: "bold yellow" if (view.use.wait or 0) >= _WAITS else "",
    "%budget": lambda v: "bold red" if v.use.throttled else "yellow" if v.pending else "",
}
_CPU_STYLES: Mapping[str, Callable[[CpuRow], str]] = {
    "for": lambda row: "cyan" if row.use.startswith("interrupts") else "",
    "%busy": lambda row: "bold yellow" if (row.busy or 0) >= _BUSY else "",
    "%soft": lambda row: "bold yellow" if (row.softirq or 0) >= _BUSY else "",
}
_DROP_STYLES: Mapping[str, Callable[[DropRow], str]] = {
    "drops/s": lambda row: "bold red" if row.rate else "dim",
}


@dataclass(frozen=True, slots=True)
class ScreenTable:
    """One table of the screen. ``least`` is the number of rows that it gets before others get
    more. ``noun`` names rows that are left out. ``styles`` gives the styles of columns, from the
    ``sources`` of the rows. ``order`` lists rows by importance, where that is not their own
    order."""

    table: Table
    least: int
    noun: str
    sources: Sequence[Any] = ()
    styles: Mapping[str, Callable[[Any], str]] = field(default_factory=dict)
    order: Sequence[int] = ()

    @property
    def lines(self) -> int:
        """Lines that the whole table takes."""
        return 1 + len(self.table.rows)

    def rows(self, height: int) -> list[int]:
        """The rows that ``height`` lines show. When rows are left out, one line is kept to say
        how many."""
        every = range(len(self.table.rows))
        if len(every) < height:
            return list(every)
        return sorted((self.order or every)[: max(height - 2, 0)])

    def style(self, row: int, head: str) -> str:
        """The style of one cell."""
        return self.styles[head](self.sources[row]) if head in self.styles else ""

    def left_out(self, shown: Sequence[int]) -> str:
        """The line about rows that are left out."""
        table = self.table
        text = f"{len(table.rows) - len(shown)} more {self.noun} do not fit here"
        shown_guests = {table.rows[n][0] for n in shown}
        unseen = {row[0] for row in table.rows} - shown_guests
        if self.noun != "threads" or not unseen:
            return text
        return f"{text}: {len(unseen)} of {len(shown_guests | unseen)} guests are not shown"


def view(frame: Frame, width: int, height: int) -> Layout:
    """The frame in ``width`` columns and ``height`` lines."""
    threads = ScreenTable(
        top_tables.thread_table(frame), 7, "threads", frame.threads, _THREAD_STYLES
    )
    order = _cpu_order(frame)
    others = [
        ScreenTable(top_tables.cpu_table(frame), 4, "CPUs", frame.cpus, _CPU_STYLES, order),
        *(
            ScreenTable(t, 2, "guests")
            for t in filled(top_tables.rate_table(frame), top_tables.bottleneck_table(frame))
        ),
        ScreenTable(top_tables.drop_table(frame), 3, "places", frame.drops, _DROP_STYLES),
        *(ScreenTable(t, 2, "notes") for t in filled(top_tables.note_table(frame))),
    ]
    body = Layout(name="body")
    if width >= WIDE:
        half = width * 11 // 20
        left, right = Layout(name="left", size=half), Layout(name="right")
        body.split_row(left, Layout(" ", name="gap", size=1), right)
        _stack(left, [threads], half, height - 1)
        _stack(right, others, width - half - 1, height - 1)
    else:
        parts = [others[0], threads, *others[1:]]
        _stack(body, parts, width, height - 1)
    whole = Layout(name="top")
    whole.split_column(Layout(_head(frame, width), name="head", size=1), body)
    return whole


def share_out(parts: Sequence[tuple[int, int]], room: int) -> list[int]:
    """Lines for each part, given the (least, wanted) lines of each. Every part gets its least
    first, then the rest; earlier parts come before later ones."""
    given = []
    for least, wanted in parts:
        given.append(min(least, wanted, max(room, 0)))
        room -= given[-1]
    for n, (_, wanted) in enumerate(parts):
        more = min(wanted - given[n], max(room, 0))
        given[n] += more
        room -= more
    return given


def _stack(into: Layout, parts: Sequence[ScreenTable], width: int, room: int) -> None:
    """Stack parts, each as high as it may be, with empty lines below."""
    heights = share_out([(1 + p.least, p.lines) for p in parts], room)
    shown = [
        Layout(_render(table_part, lines, width), name=f"{n}", size=lines)
        for n, (table_part, lines) in enumerate(zip(parts, heights, strict=True))
        if lines > 0
    ]
    into.split_column(*shown, Layout(" ", name="rest"))


def _head(frame: Frame, width: int) -> Text:
    text = Text(
        printable(top_tables.headline(frame)), style="bold", no_wrap=True, overflow="ellipsis"
    )
    keys = "q: quit"
    if cells(text.plain) + len(keys) + 2 <= width:
        text.append(" " * (width - cells(text.plain) - len(keys)))
        text.append(keys, style="not bold dim")
    return text


def _render(table_part: ScreenTable, height: int, width: int) -> RenderableType:
    table = table_part.table
    if not table.columns:
        return Text(table.title, style="reverse", no_wrap=True, overflow="ellipsis")
    shown = table_part.rows(height)
    first = "limit of" if table.title == "Bottlenecks" else table.columns[0]
    rows = [table.rows[n] for n in shown]
    table = replace(table, columns=(first, *table.columns[1:]), rows=rows)
    grid = fit(table, width, _GAP)
    lines = [Text(_SPACE.join(grid.row(table.columns)).ljust(width), style="reverse")]
    for n, row in zip(shown, rows, strict=True):
        styles = (table_part.style(n, table.columns[place]) for place in grid.places)
        styled = zip(grid.row(row), styles, strict=True)
        lines.append(Text(_SPACE).join(Text(cell, style=style) for cell, style in styled))
    if len(shown) < len(table_part.table.rows):
        lines.append(Text(elide(table_part.left_out(shown), width), style="dim italic"))
    return Text("\n", no_wrap=True, overflow="crop").join(lines)


def _cpu_order(frame: Frame) -> list[int]:
    """CPUs that serve interrupts first, then those with the busiest threads."""

    def rank(n: int) -> tuple[bool, float, float, int]:
        row = frame.cpus[n]
        load = sum(r.load or 0.0 for r in row.residents)
        return not row.use.startswith("interrupts"), -load, -(row.busy or 0.0), n

    return sorted(range(len(frame.cpus)), key=rank)
