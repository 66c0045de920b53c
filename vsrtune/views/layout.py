# SPDX-License-Identifier: GPL-2.0-or-later
"""Tables as lines of text that fit a width. Pure.

A table that is too wide first loses its ``spare`` columns, the last one named first, and names
that are very long are cut. Then its ``text`` columns take what the others leave, and only when that
is too little are the widest of the others cut. What is cut ends in an ellipsis, and no word is
broken without one.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from vsrtune.core.text import printable
from vsrtune.views.tables import Table

ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
# A column of sentences that is narrower than this cannot be read.
_LEAST_TEXT = 18
_LEAST = 4
# A name of up to 255 characters must not take the place of what is said of it.
_LONG_NAME = 32
_INDENT = 2


def cells(text: str) -> int:
    """The columns of a terminal that the text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in text
    )


def elide(text: str, width: int) -> str:
    """The text, cut with an ellipsis when it is wider than ``width``."""
    if cells(text) <= width:
        return text
    kept = text[: max(width - 1, 0)]
    while cells(kept) > width - 1 and kept:
        kept = kept[:-1]
    return kept.rstrip() + ELLIPSIS if width > 0 else ""


def pad(text: str, width: int, *, right: bool = False) -> str:
    """The text, cut or filled to ``width``."""
    text = elide(text, width)
    fill = " " * (width - cells(text))
    return fill + text if right else text + fill


@dataclass(frozen=True, slots=True)
class Grid:
    """A table fitted to a width: the ``places`` of its columns that are shown, and their
    ``widths``."""

    table: Table
    places: tuple[int, ...]
    widths: tuple[int, ...]

    def row(self, texts: Sequence[str]) -> list[str]:
        """The texts of the shown columns, each on one line as wide as its column."""
        heads = self.table.columns
        return [
            pad(printable(texts[place]), width, right=heads[place] in self.table.right)
            for place, width in zip(self.places, self.widths, strict=True)
        ]


def fit(table: Table, width: int | None, gap: int = 2) -> Grid:
    """The columns of the table that fit ``width`` with ``gap`` blanks between them, and how wide
    they are. None: as wide as they want to be."""
    rows = [table.columns, *([printable(text) for text in row] for row in table.rows)]
    wanted = [max(cells(row[place]) for row in rows) for place in range(len(table.columns))]
    places = list(range(len(table.columns)))

    def too_much() -> int:
        whole = sum(wanted[place] for place in places) + gap * (len(places) - 1)
        return 0 if width is None else max(whole - width, 0)

    for head in reversed(table.spare):
        if too_much() and head in table.columns:
            places.remove(table.columns.index(head))
    texts = [place for place in places if _is_text(table, place)]
    others = [place for place in places if place not in texts]
    _shrink(wanted, others, too_much(), _LONG_NAME)
    _shrink(wanted, texts, too_much(), _LEAST_TEXT)
    _shrink(wanted, others, too_much(), _LEAST)
    _shrink(wanted, places, too_much(), 1)
    return Grid(table, tuple(places), tuple(wanted[place] for place in places))


def _is_text(table: Table, place: int) -> bool:
    return table.columns[place] in table.text or not table.columns[place]


def _shrink(widths: list[int], places: Sequence[int], by: int, least: int) -> None:
    """Take ``by`` columns of these places in all, always from the widest, down to ``least``."""
    for _ in range(by):
        widest = max(places, key=lambda place: widths[place], default=None)
        if widest is None or widths[widest] <= least:
            return
        widths[widest] -= 1


def lines(table: Table, width: int | None = None) -> list[str]:
    """The table: title, heads and rows in columns two spaces apart. None: however wide it is,
    each row on one line."""
    told = wrap(printable(table.title), width)
    if not table.columns:
        return told
    grid = fit(table, None if width is None else width - _INDENT)
    wrapped = [table.wraps and _is_text(table, place) for place in grid.places]
    heads = [table.columns] if any(table.columns) else []
    for row in (*heads, *table.rows):
        parts = [
            wrap(printable(row[place]), room) if wrapped[n] else [cell]
            for n, (place, room, cell) in enumerate(
                zip(grid.places, grid.widths, grid.row(row), strict=True)
            )
        ]
        for n in range(max(map(len, parts))):
            texts = (
                pad(part[n] if n < len(part) else "", room)
                for part, room in zip(parts, grid.widths, strict=True)
            )
            told.append((" " * _INDENT + "  ".join(texts)).rstrip())
    return told


def wrap(text: str, width: int | None, indent: str = "") -> list[str]:
    """The text in lines of at most ``width``, broken between words; ``indent`` begins all but the
    first. A word that is too long for a line is cut with an ellipsis."""
    if width is None or cells(text) <= width:
        return [text]
    first, *words = text.split() or [""]
    told = [text[: len(text) - len(text.lstrip())] + first]
    for word in words:
        if cells(f"{told[-1]} {word}") <= width:
            told[-1] += f" {word}"
        else:
            told.append(indent + word)
    return [elide(line, width) for line in told]
