"""Names of guests and devices are others' words: what of them may be shown."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with everything that a terminal or a reader would not show as it is written out:
    bytes that are no UTF-8 (os.fsdecode), control characters, which move a terminal's cursor
    or set its title, and those that turn the direction of what follows."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """The same for a text of several lines. All but the first are indented, so that none
    passes for a message of its own."""
    return "\n  ".join(map(printable, text.split("\n")))
