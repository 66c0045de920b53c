# SPDX-License-Identifier: GPL-2.0-or-later
"""Forgets settings of what no longer exists."""

from __future__ import annotations

from contextlib import suppress

from vsrtune.core.errors import VanishedError, WriteError
from vsrtune.execute.comparison import is_gone
from vsrtune.execute.host_writer import LiveSysOps
from vsrtune.execute.journal import Journal
from vsrtune.model.guest import TIMED, Sched
from vsrtune.model.journal_records import Entry, ours
from vsrtune.model.present import PresentValues
from vsrtune.model.snapshot import SnapshotSlice
from vsrtune.model.targets import Target, ThreadSched


def forget(
    observed: SnapshotSlice, ops: LiveSysOps, journal: Journal
) -> list[tuple[Target, Sched | WriteError | None]]:
    """Drop the journal entries of the guests of ``observed`` whose targets no longer exist. Each
    comes with the class that its process gave back (``drop_vanished``), or why it could not. Raises
    JournalError.

    A guest missing from the snapshot is no proof, because its reader may have
    failed: the target itself is read.
    """
    present = PresentValues(observed.alone())
    out: list[tuple[Target, Sched | WriteError | None]] = []
    for entry in journal.entries(observed.names):
        target = entry.target
        if present.shows(target) or not is_gone(target, ops):
            continue
        try:
            out.append((target, _take_back(target, ops, journal)))
        except WriteError as error:
            out.append((target, error))
    gone = [target for target, taken in out if not isinstance(taken, WriteError)]
    journal.drop_all(gone, "vanished")
    return out


def drop_vanished(target: Target, ops: LiveSysOps, journal: Journal) -> Sched | None:
    """Forget a target that is gone. A thread that called execve(2) goes on with its class as the
    main thread of its process, and gives it back first. Returns that class, None otherwise. Raises
    WriteError when that fails; the entry stays then, and JournalError."""
    taken = _take_back(target, ops, journal)
    journal.drop(target, "vanished")
    return taken


def _take_back(target: Target, ops: LiveSysOps, journal: Journal) -> Sched | None:
    entry = journal.entry(target)
    if entry is not None and isinstance(target, ThreadSched):
        with suppress(VanishedError):
            return _take_from_heir(target, entry, ops, journal)
    return None


def _take_from_heir(
    target: ThreadSched, entry: Entry, ops: LiveSysOps, journal: Journal
) -> Sched | None:
    heir = ops.heir(target)
    if heir is None or journal.entry(heir) is not None:
        return None
    now = ops.read(heir)
    # Only root gives these classes; the ordinary ones tell nothing.
    if not isinstance(now, Sched) or now.cls not in TIMED:
        return None
    written = [e.written for e in (entry, entry.committed) if e is not None]
    if now == entry.original or not any(ours(value, now) for value in written):
        return None
    ops.write(heir, entry.original)
    return now
