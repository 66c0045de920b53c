"""Python's collector of cycles, told how little it has to do here.

Snapshots and plans are frozen values: none refers to itself, and each is freed as soon as
nobody has it. Left to its own rules the collector goes through all of them again and again
while a large host is looked at, and finds nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_THRESHOLD = (100_000, 20, 50)


def rarely() -> None:
    """Let it work rarely in this process."""
    gc.set_threshold(*_THRESHOLD)


def tidy(work: Callable[[], T]) -> Callable[[], T]:
    """``work``, and what it has left of values that refer to themselves is freed at once. For
    reading YAML, which leaves many, and is done so seldom that they would lie for days."""

    def tidied() -> T:
        try:
            return work()
        finally:
            gc.collect()

    return tidied
