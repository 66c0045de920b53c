# SPDX-License-Identifier: GPL-2.0-or-later
"""Tables and sentences on the screen.

On a terminal they are as wide as it is: what does not fit is cut or continued on the next line.
Everywhere else, and with ``--wide``, nothing is, so that a pipe into grep or awk sees whole rows.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from vsrtune.core.errors import VsrtuneError, each
from vsrtune.core.text import printable

if TYPE_CHECKING:
    from vsrtune.views.tables import Table

_PATIENCE = 2.0  # seconds
_STYLES: dict[str, dict[str, Any]] = {
    "plain": {"bold": True},
    "good": {"bold": True, "fg": "green"},
    "warn": {"bold": True, "fg": "yellow"},
    "bad": {"bold": True, "fg": "red"},
}


def width(*, err: bool = False) -> int | None:
    """The width of the terminal; None when nobody looks at one."""
    stream = sys.stderr if err else sys.stdout
    return shutil.get_terminal_size().columns if stream.isatty() else None


def show(tables: Iterable[Table], *, wide: bool = False) -> None:
    """Print tables on standard output, an empty line between them."""
    from vsrtune.views import layout

    for number, table in enumerate(tables):
        title, *rest = layout.lines(table, None if wide else width())
        told = "\n".join([click.style(title, **_STYLES[table.tone]), *rest])
        click.echo(("\n" if number else "") + told)


def complain(*errors: VsrtuneError) -> None:
    """Print errors, or each of the errors that one stands for, on standard error."""
    for one in itertools.chain.from_iterable(map(each, errors)):
        where = f"{printable(one.where)}: " if one.where else ""
        for kind, text in (("error", f"{where}{one.what}"), ("hint", one.hint)):
            first, *more = text.split("\n")
            for line in [f"vsrtune: {kind}: {first}", *(f"  {m}" for m in more)] if text else ():
                say(line, err=True)


def print_json(value: object) -> None:
    """Print data, or values that ``encode`` knows, as JSON on standard output."""
    import json

    from vsrtune.core.codec import encode

    click.echo(json.dumps(encode(value), indent=2, ensure_ascii=False))


def say(text: str, *, err: bool = False, wide: bool = False, cut: bool = False) -> None:
    """Print a sentence, made printable because names in it may come from others. On a terminal
    it goes on in the next line, or with ``cut`` ends at the edge."""
    room = None if wide else width(err=err)
    text = printable(text)
    if room is not None and 2 * len(text) > room:
        from vsrtune.views import layout

        if cut and layout.cells(text) > room:
            # A long name before the colon leaves room for what is said of it.
            name, colon, said = text.partition(": ")
            text = layout.elide(layout.elide(name, room // 3) + colon + said, room)
        text = "\n".join(layout.wrap(text, room, "  "))
    click.echo(text, err=err)


@contextlib.contextmanager
def patience(doing: str) -> Iterator[None]:
    """Say on a terminal what takes longer than _PATIENCE."""
    timer = threading.Timer(_PATIENCE, say, (f"vsrtune: {doing} ...",), {"err": True})
    timer.daemon = True
    if width(err=True) is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
