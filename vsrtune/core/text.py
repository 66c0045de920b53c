# SPDX-License-Identifier: GPL-2.0-or-later
"""Text for people: times as policies and messages write them (``8ms``, ``200us``), and the
printable form of foreign text."""

from __future__ import annotations

import re
from fractions import Fraction

from vsrtune.core.errors import VsrtuneError

_UNITS = {"ns": 1, "us": 1_000, "µs": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
TIME_PATTERN = r"^\s*[0-9]{1,18}(\.[0-9]{1,18})?\s*(ns|us|µs|ms|s)\s*$"
_TIME = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(ns|us|µs|ms|s)", re.ASCII)


def parse_time(text: str) -> int:
    """Nanoseconds of ``8ms``, ``0.5 s``, ``200us``. Raises VsrtuneError."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise VsrtuneError(f"{text!r} is not a time", hint="write a number and its unit, as 10ms")
    exact = Fraction(match[1]) * _UNITS[match[2]]
    if exact.denominator != 1:
        raise VsrtuneError(
            f"{text!r} is no whole number of nanoseconds", hint="write fewer decimals"
        )
    return int(exact)


def time_text(nanoseconds: int) -> str:
    """The shortest way to write a time: ``8ms``, ``1.5ms``, ``200us``, ``1024ns``."""
    for unit, size in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if nanoseconds >= size and nanoseconds % (size // 1000) == 0:
            return f"{nanoseconds / size:g}{unit}"
    return f"{nanoseconds}ns"


def counted(number: int, noun: str) -> str:
    """``1 guest``, ``2 guests``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def printable(text: str) -> str:
    """The text, with everything escaped that a terminal or a reader would not show as written:
    bytes that are not UTF-8 (os.fsdecode), control characters, which move a terminal's cursor or
    set its title, and characters that reverse the direction of text."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """As ``printable``, for several lines. All but the first are indented, so that none passes for
    a message of its own."""
    return "\n  ".join(map(printable, text.split("\n")))
