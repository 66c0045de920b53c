"""The `vsrtune` commands that stand in Markdown: in fenced and indented blocks, and in code
spans. Used by the unit tests and, on the installed documents, in the lab."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

_SPAN = re.compile(r"`(vsrtune(?: [^`]*)?)`")
_FENCE = re.compile(r"^\s*```")
_JOINED = ("&&", "||", "|", ";", ">", ">>", "2>", "&")


@dataclass(frozen=True)
class Command:
    """One command: its words after ``vsrtune``, its line, and whether it stands in a block,
    where it must be complete."""

    words: tuple[str, ...]
    line: int
    block: bool


def commands(text: str) -> Iterator[Command]:
    """Every command of a document."""
    fenced = False
    held, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if _FENCE.match(line):
            fenced = not fenced
            continue
        if fenced or line.startswith("    "):
            start = start if held else number
            held += line.strip()
            if held.endswith("\\"):
                held = held[:-1]
                continue
            yield from _of_block(held, start)
            held = ""
        else:
            for match in _SPAN.finditer(line):
                yield Command(tuple(shlex.split(match[1])[1:]), number, block=False)


def _of_block(line: str, number: int) -> Iterator[Command]:
    if "vsrtune" not in line:
        return
    try:
        words = shlex.split(line.removeprefix("# "), comments=True)
    except ValueError:
        return
    one: list[str] = []
    for word in [*words, ";"]:
        ended = word.endswith(";") and word != ";"
        if word in _JOINED or ended:
            one += [word.rstrip(";")] if ended else []
            if one[:1] == ["vsrtune"]:
                yield Command(tuple(one[1:]), number, block=True)
            one = []
        else:
            one.append(word)
