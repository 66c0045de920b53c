"""Readers that may fail: what failed is written down, and hides nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from vsrtune.core.errors import VsrtuneError
from vsrtune.model.snapshot import Problem

T = TypeVar("T")


class Attempts:
    """The problems of some readers, in the order in which they were met."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def attempt(self, reader: str, read: Callable[[], T], default: T) -> T:
        """``read``'s result; when it fails, a Problem of ``reader`` and ``default``."""
        try:
            return read()
        except VsrtuneError as error:
            what = str(error)
        except OSError as error:
            what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        except (ValueError, LookupError) as error:
            what = f"unexpected content: {error}"
        self.problems.append(Problem(reader, what))
        return default
