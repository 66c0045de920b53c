# SPDX-License-Identifier: GPL-2.0-or-later
"""A ledger: the changes of this host that have to be put back, on disk before they are made.

The user adds an entry before it changes the host, and marks the entry done after it has put the
change back or no longer has to. Entries that are left tell the next start what to put back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from vsrtune.core.closing import Closing
from vsrtune.core.errors import JournalError, VsrtuneError
from vsrtune.execute.jsonl_log import (
    JsonlLog,
    LogNames,
    corrupt,
    is_empty,
    read_header,
    read_log,
    read_records,
)

VERSION = 1
# A process that still cleans up after a killed user gets this long.
LOCK_SECONDS = 10.0
_HEADER = {"r": "header", "version": VERSION}

Cleaner = Callable[[dict[str, Any]], object]


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """A change to put back: ``kind`` names the cleaner, ``data`` is for the cleaner."""

    id: int
    kind: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failure:
    """An entry that could not be resolved; it stays in the ledger."""

    entry: LedgerEntry
    what: str

    def __str__(self) -> str:
        return f"{self.entry.kind}: {self.what}"


class Pending:
    """The pending entries by id (``live``), and the ``last`` id that was given."""

    def __init__(self) -> None:
        self.live: dict[int, LedgerEntry] = {}
        self.last = 0

    def record(self, data: Any) -> None:
        """Apply one decoded record. Raises ValueError, KeyError or TypeError."""
        if "add" in data:
            entry = LedgerEntry(int(data["add"]), str(data["kind"]), dict(data["data"]))
            self.live[entry.id] = entry
            self.last = max(self.last, entry.id)
        else:
            done = data["done"]
            for number in done if isinstance(done, list) else (done,):
                self.live.pop(int(number), None)

    def entries(self) -> list[LedgerEntry]:
        """The entries, oldest first."""
        return [self.live[number] for number in sorted(self.live)]

    def compacted(self) -> list[dict[str, Any]]:
        """Records that add exactly these entries."""
        return [_added(e.id, e.kind, e.data) for e in self.entries()]


class Ledger(Closing):
    """The open ledger. Use as a context manager, or ``close``. ``names`` is what errors call it."""

    names = LogNames("the ledger", "{process} is using the ledger", "wait for its end")

    def __init__(self, log: JsonlLog, pending: Pending) -> None:
        """Use ``open``."""
        self.path = log.path
        self._log = log
        self._pending = pending

    @classmethod
    def open(cls, path: Path, *, lock: int | None = None, wait: float = LOCK_SECONDS) -> Self:
        """Lock and read the ledger, waiting up to ``wait`` seconds for the lock.

        ``lock`` is the descriptor of a lock that is held already (the guard's). Raises LockedError
        when somebody else has the ledger open, JournalError when it cannot be read or written, or
        is of another version.
        """
        log = JsonlLog(path, cls.names, _HEADER, lock=lock, wait=wait)
        try:
            data = log.read()
            pending = read(path, data)
            if is_empty(data):
                log.rewrite(pending)
            else:
                log.resume(data)
                log.compact_if_grown(pending)
        except BaseException:
            log.close()
            raise
        return cls(log, pending)

    @property
    def lock_descriptor(self) -> int:
        """The descriptor that holds the lock, for a process that inherits it."""
        return self._log.lock_descriptor

    def add(self, kind: str, data: Mapping[str, Any]) -> int:
        """Record a change that must be put back, before it is made. ``data`` is JSON. Returns the
        id for ``done``. Raises JournalError; the caller must then change nothing."""
        number = self._pending.last + 1
        self._append(_added(number, kind, data))
        return number

    def done(self, *entries: int) -> None:
        """Mark entries as put back, or as no longer in need of it: all of them, or none if this
        process is killed meanwhile. Ids that are not pending are ignored. Raises JournalError."""
        done = [entry for entry in entries if entry in self._pending.live]
        if done:
            self._append({"done": done[0] if len(done) == 1 else done})
            self._log.compact_if_grown(self._pending)

    def pending(self) -> list[LedgerEntry]:
        """The pending entries, oldest first."""
        return self._pending.entries()

    def resolve(self, cleaners: Mapping[str, Cleaner]) -> list[Failure]:
        """Put back all pending entries, newest first, with the cleaner of their kind.

        A failure does not stop the others. Failed entries are returned and stay pending.
        """
        failures = []
        for entry in reversed(self.pending()):
            try:
                cleaner = cleaners.get(entry.kind)
                if cleaner is None:
                    raise VsrtuneError("nothing in this version knows how to undo it")
                cleaner(entry.data)
                self.done(entry.id)
            except Exception as error:  # whatever a cleaner raises, the others must run
                failures.append(Failure(entry, str(error) or repr(error)))
        return failures

    def close(self) -> None:
        """Close the ledger and, unless a guard shares the lock, unlock it."""
        self._log.close()

    def _append(self, record: dict[str, Any]) -> None:
        self._log.append(record)
        self._pending.record(record)


def read_pending(path: Path) -> list[LedgerEntry]:
    """The pending entries, oldest first, read without the lock. A missing file has none. Raises
    JournalError when the file cannot be read, or is of another version."""
    return read(path, read_log(path)).entries()


def read(path: Path, data: bytes) -> Pending:
    """What is pending according to a file's content. Raises JournalError."""
    pending = Pending()
    if is_empty(data):
        return pending
    version = str(read_header(data).get("version", ""))
    if not version:
        raise corrupt(path, 1, "it is not a ledger's header")
    if version != str(VERSION):
        raise JournalError(
            f"version {version} of the ledger's format is another vsrtune's; this vsrtune knows "
            f"version {VERSION}, so it can put nothing back and changes nothing on the host",
            where=str(path),
            hint="the file stays there: install the vsrtune that wrote it",
        )
    read_records(path, data, pending)
    return pending


def _added(number: int, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
    return {"add": number, "kind": kind, "data": data}
