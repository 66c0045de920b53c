"""What the tool says about itself: on stderr, each step with the time it took."""

from __future__ import annotations

import sys
import time

_start = time.monotonic()


def step(text: str) -> None:
    _say(f"lab [{time.monotonic() - _start:6.1f} s] {text}")


def block(title: str, lines: list[str]) -> None:
    """Quote a log, so that it cannot be taken for the command's own output."""
    _say(f"lab: --- {title}")
    for line in lines:
        _say(f"  | {line}")
    _say(f"lab: --- end of {title}")


def error(text: str, hint: str | None = None) -> None:
    _say(f"lab: error: {text}")
    if hint is not None:
        _say(f"lab: hint: {hint}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
