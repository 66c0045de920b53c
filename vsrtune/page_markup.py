"""HTML that cannot be broken by what it tells: every text is escaped unless it is Markup,
and only ``element`` makes Markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

# Elements that have no end.
_VOID = ("meta", "link")


class Markup(str):
    """HTML as it is."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: str) -> Markup:
    """One element. Children that are no Markup are text. An attribute's name may end in an
    underscore (``class_``), and has ``_`` for ``-``; an empty one is left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value
    )
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def join(children: Iterable[str]) -> Markup:
    """Siblings, one after the other."""
    return Markup("".join(c if isinstance(c, Markup) else escape(c) for c in children))


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """A table with a head; nothing at all without rows."""
    body = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
    if not body:
        return Markup()
    head = element("tr", *(element("th", text, scope="col") for text in heads))
    return element(
        "div",
        element(
            "table",
            element("caption", caption) if caption else Markup(),
            element("thead", head),
            element("tbody", *body),
        ),
        class_="wide",
    )
