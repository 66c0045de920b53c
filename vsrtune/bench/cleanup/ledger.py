"""The ledger of changes that a bench must put back on this host.

The file is in /run: everything that a bench changes ends with a restart of the kernel, as does
its ledger. The guard inherits the lock, so the lock is free only after the cleaning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from vsrtune.execute import jsonl_log
from vsrtune.execute.jsonl_log import LOCK_SECONDS

DEFAULT_PATH = Path("/run/vsrtune/bench/ledger.jsonl")


class BenchLedger(jsonl_log.Ledger):
    """The open ledger of the bench."""

    busy = ("another bench is running, or is being cleaned up after", "wait for its end")
    unusable = (
        "the ledger of the bench cannot be used",
        "a bench needs root, and writes down here what it must put back",
    )

    @classmethod
    def open(
        cls, path: Path = DEFAULT_PATH, *, lock: int | None = None, wait: float = LOCK_SECONDS
    ) -> Self:
        """As ``jsonl_log.Ledger.open``."""
        return super().open(path, lock=lock, wait=wait)
