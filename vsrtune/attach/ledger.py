# SPDX-License-Identifier: GPL-2.0-or-later
"""The ledger of switches and of the devices, guests and groups that they made.

An entry of kind STEP is a step that was begun and not retired, ORIGIN a device that vsrtune made,
CLONE a guest that it made, ENDED a clone that it has to remove with its files, GROUP the name
of a group whose create is complete, and ASKED an interface that a guest has back although it may
still release it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vsrtune.attach.plan.clone_model import Clone
from vsrtune.attach.plan.steps import Card, Origin
from vsrtune.core.codec import decode
from vsrtune.execute.jsonl_log import LogNames
from vsrtune.execute.ledger import Ledger, LedgerEntry

DEFAULT_PATH = Path("/var/lib/vsrtune/attach.jsonl")

STEP, ORIGIN, CLONE, ENDED, GROUP = "step", "origin", "clone", "ended", "group"
ASKED = "asked"


class AttachLedger(Ledger):
    """It outlives a boot, like the persistent definitions that name these devices."""

    names = LogNames(
        "the ledger of attachments",
        "another switch is under way, or is being recovered: {process}",
        "wait for its end",
    )

    def of(self, *kinds: str) -> list[LedgerEntry]:
        """The pending entries of these kinds, oldest first."""
        return [entry for entry in self.pending() if entry.kind in kinds]

    def origins(self) -> Iterator[tuple[LedgerEntry, Origin]]:
        """The Origin of every device that vsrtune made and has not removed."""
        return ((entry, decode(Origin, entry.data)) for entry in self.of(ORIGIN))

    def clones(self, kind: str = CLONE) -> Iterator[tuple[LedgerEntry, Clone]]:
        """Every guest that vsrtune made and has not ended, or (ENDED) has to remove."""
        return ((entry, decode(Clone, entry.data)) for entry in self.of(kind))

    def groups(self) -> Iterator[tuple[LedgerEntry, str]]:
        """Every group that was created and not deleted, by its name."""
        return ((entry, str(entry.data["name"])) for entry in self.of(GROUP))

    def asked(self) -> Iterator[tuple[LedgerEntry, Card]]:
        """Every interface that a guest may still release, in the run that ``data["run"]`` names."""
        return ((entry, decode(Card, entry.data["card"])) for entry in self.of(ASKED))
