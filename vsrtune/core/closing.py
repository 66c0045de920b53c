# SPDX-License-Identifier: GPL-2.0-or-later
"""A context manager base for classes with ``close``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Closes itself when the ``with`` block ends, also after an exception."""

    @abstractmethod
    def close(self) -> None:
        """Release what is held. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
