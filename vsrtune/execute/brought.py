# SPDX-License-Identifier: GPL-2.0-or-later
"""Journals the pins that guests bring along, so that an undo takes them away."""

from __future__ import annotations

from collections.abc import Iterable

from vsrtune.core.errors import VsrtuneError
from vsrtune.execute.journal import Journal
from vsrtune.model.guest import Guest
from vsrtune.model.journal_records import undo_action
from vsrtune.model.snapshot import Snapshot
from vsrtune.plan.brought_pins import entries


def adopt_brought(snapshot: Snapshot, guests: Iterable[Guest], journal: Journal) -> None:
    """Journal the pins that guests have brought. Raises JournalError."""
    names = frozenset(guest.ref for guest in guests if guest.carried)
    if not names:
        return
    known = journal.entries(names)
    new = entries((g for g in guests if g.ref in names), snapshot.host, known)
    journal.reserve(map(undo_action, new))
    for entry in new:
        journal.adopt(entry)


def refuse_brought(snapshot: Snapshot) -> None:
    """Raises VsrtuneError when guests have brought pins, of an untuned host by its journal."""
    for entry in entries(snapshot.guests, snapshot.host, ()):
        raise VsrtuneError(
            "the guest has brought this pin of vsrtune's along, so the host is not untuned",
            where=str(entry.target),
            hint="run `vsrtune undo`, then try again",
        )
