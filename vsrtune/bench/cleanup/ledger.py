# SPDX-License-Identifier: GPL-2.0-or-later
"""The ledger of changes that a bench must put back on this host.

The file is in /run: everything that a bench changes ends with a restart of the kernel, as does
its ledger. The guard inherits the lock, so the lock is free only after the cleaning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from vsrtune.execute.jsonl_log import LogNames
from vsrtune.execute.ledger import LOCK_SECONDS, Ledger

DEFAULT_PATH = Path("/run/vsrtune/bench/ledger.jsonl")


class BenchLedger(Ledger):
    """The open ledger of the bench."""

    names = LogNames(
        "the ledger of the bench",
        "another bench is running, or is being cleaned up after: {process}",
        "wait for its end",
    )

    @classmethod
    def open(
        cls, path: Path = DEFAULT_PATH, *, lock: int | None = None, wait: float = LOCK_SECONDS
    ) -> Self:
        """As ``Ledger.open``."""
        return super().open(path, lock=lock, wait=wait)
