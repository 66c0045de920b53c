"""The journal: the settings that we changed on the host and their originals, safe against crashes.

Append-only JSON lines, fsynced one by one (``journal_records`` defines them). A file belongs to
one boot: every setting that we write is volatile, so the journal discards entries of another boot
and counts them in ``Journal.discarded``.

A crash during the write of a line leaves it at the end of the file without its newline. Such a
line is ignored: the host is written only after its record is complete. The header is written
before any record, so a torn header means that the host was not written. Any other unreadable line
is corruption: JournalError, and the host stays as it is.

A file of another version of the format (``VERSION``) is renamed if it is of another boot. If it
is of this boot, it stays where it is, for the version that can read it, and the journal takes no
records (``Journal.foreign``): the present settings of the host may be tuned, and must not become
originals.

One process writes at a time (``jsonl_log.take_lock``).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from vsrtune.core.closing import Closing
from vsrtune.core.errors import JournalError, Lasting, VsrtuneError
from vsrtune.core.untrusted import json_value
from vsrtune.execute.jsonl_log import take_lock
from vsrtune.host.state_files import (
    FULL,
    claim,
    fsync_directory,
    open_private,
    private_directory,
    read_file,
    replace_file,
    write_all,
)
from vsrtune.model.journal_records import (
    VERSION,
    Entry,
    Fold,
    applied,
    compacted,
    entry_record,
    header_record,
    intent_record,
    step_record,
    target_record,
    torn_header,
    undo_action,
)
from vsrtune.model.plan import Action
from vsrtune.model.stepdown import Step
from vsrtune.model.targets import Target, ThreadCgroup, Value

DEFAULT_PATH = Path("/var/lib/vsrtune/journal.jsonl")
# A journal is compacted when it has more than MAX_SIZE bytes, or more than MAX_RATIO times the
# bytes of its live entries (and more than TINY).
MAX_SIZE = 1 << 20
MAX_RATIO = 10
TINY = 16 << 10
_VERSION = str(VERSION)
# Room for lines that are longer than estimated.
_SLACK = 4096
_HOW_TO_REPAIR = (
    "nothing was changed on the host; move the file away to go on without undo "
    "information, or remove the bad line if the rest is wanted"
)


class Journal(Closing):
    """The open journal of this boot, locked. Use as a context manager, or ``close``.

    ``discarded`` counts entries of another boot. ``set_aside`` is the new name of a file of
    another boot and version. ``foreign`` is the reason why nothing can be recorded or undone: the
    file is of this boot and of another version. ``budgets_end`` is on the clock of
    ``time.monotonic``: until then the kernel may have bandwidth booked for threads that the
    previous writer of the journal took out of class deadline.

    Every method that appends raises JournalError when the record did not reach the disk; the
    caller must then not write to the host.
    """

    def __init__(self, path: Path, boot_id: str, lock: int) -> None:
        """Use ``Journal.open``."""
        self.path = path
        self.discarded = 0
        self.set_aside: Path | None = None
        self.foreign: JournalError | None = None
        self.budgets_end = 0.0
        self._boot_id = boot_id
        self._lock = lock
        self._fold = Fold()
        self._fd = -1
        self._size = 0
        self._weigh_at = 0
        # The end of the claimed disk space, and the space that undo needs, by target and in all.
        self._claimed = 0
        self._rooms: dict[Target, int] = {}
        self._undo_space = 0
        self._broken = ""

    @classmethod
    def open(cls, path: Path, boot_id: str) -> Journal:
        """Lock and read the journal, and make it and its directory if they are missing. A journal
        of another version is opened as well (``foreign``, ``set_aside``).

        Raises JournalError when another process holds it, when it is corrupt, or when it cannot
        be written.
        """
        try:
            private_directory(path.parent)
            lock = take_lock(path)
        except OSError as error:
            raise _unwritable(path, error) from error
        journal = cls(path, boot_id, lock)
        try:
            journal._load()
        except BaseException:
            journal.close()
            raise
        return journal

    def entries(self, guests: frozenset[str] | None = None) -> tuple[Entry, ...]:
        """Live entries in the order of their first write, of all guests or of some."""
        if guests is None:
            return tuple(self._fold.live.values())
        by_guest = self._fold.by_guest
        return tuple(e for g in sorted(guests) for e in by_guest.get(g, {}).values())

    def guests(self) -> frozenset[str]:
        """The guests that have live entries."""
        return frozenset(guest for guest, entries in self._fold.by_guest.items() if entries)

    def applied(self, guests: frozenset[str] | None = None) -> dict[Target, Value]:
        """The values that we last wrote and read back, by target, for all guests or for some."""
        return applied(self.entries(guests))

    def entry(self, target: Target) -> Entry | None:
        """The live entry of a target; None when it has none."""
        return self._fold.live.get(target)

    def original(self, target: Target) -> Value | None:
        """The value that undo restores for a target; None when it has no live entry."""
        return None if target not in self._fold.live else self._fold.live[target].original

    def intent(self, action: Action, original: Value | None = None) -> None:
        """Record that ``action.after`` is about to be written. ``original`` is the value that
        undo restores, if it is not the one that follows from the records so far (``Fold``)."""
        self._fold_checked(action.target, lambda fold: fold.intent(action, original))
        self._append(intent_record(action, original))
        self._fold.intent(action, original)
        self._reckon(action.target)

    def adopt(self, entry: Entry) -> None:
        """Record a finished entry of a target that has none."""
        self._append(entry_record(entry))
        self._fold.entry(entry)
        self._reckon(entry.target)

    def done(self, target: Target) -> None:
        """Record that the value of the last intent is on the host."""
        self._finish("done", target)

    def revert(self, target: Target) -> None:
        """Record that the value before the last intent is on the host again."""
        self._finish("revert", target)

    def drop(self, target: Target, why: str) -> None:
        """Forget a target, for the reason ``why``."""
        if target in self._fold.live:
            self._finish("drop", target, why)

    @property
    def steps(self) -> dict[str, Step]:
        """The guests that are stepped down, and how far."""
        return dict(self._fold.steps)

    def step(self, guest: str, step: Step | None) -> None:
        """Record how far a guest is stepped down; None: it is tuned as its policy says."""
        if self._fold.steps.get(guest) != step:
            self._append(step_record(guest, step))
            self._fold.step(guest, step)
            self._compact_if_grown()

    def reserve(self, actions: Iterable[Action]) -> None:
        """Claim disk space to apply and later undo ``actions``, and to undo everything before, so
        that a disk that fills up meanwhile stops none of that half-way. Raises JournalError when
        there is not enough space. File systems that cannot reserve space are accepted."""
        need = sum(2 * _room(action) for action in actions)
        if not need:
            return
        self._check_version()
        need += self._undo_space + _SLACK
        try:
            claim(self._fd, self._size, need)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self._claimed = self._size + need

    def close(self) -> None:
        """Release the lock. The entries stay in the file."""
        for fd in (self._fd, self._lock):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock = -1

    # -- reading

    def _load(self) -> None:
        try:
            data = read_file(self.path)
        except FileNotFoundError:
            data = b""
        except OSError as error:
            raise _unwritable(self.path, error) from error
        try:
            fold, same_boot = read(self.path, data, self._boot_id)
        except _ForeignError as error:
            self.foreign = error
            return
        if not same_boot:
            self._set_aside(data)
            self.discarded = len(fold.live)
            self._replace(Fold())
            return
        self._fold = fold
        try:
            self._open_file()
            whole = data.rfind(b"\n") + 1
            if whole != len(data):
                os.ftruncate(self._fd, whole)
                os.fsync(self._fd)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self._size = whole
        for target in fold.live:
            self._reckon(target)
        # Another version may have claimed less, and the cut of a torn end gives all of it back.
        with contextlib.suppress(OSError):
            if fold.live:
                claim(self._fd, self._size, self._undo_space + _SLACK)
        # The file is as old as its last record. If the clock was set back, the wait is all of
        # the lag, and no longer.
        age = max(0.0, time.time() - os.fstat(self._fd).st_mtime)
        self.budgets_end = time.monotonic() + fold.lag - age
        self._compact_if_grown()

    def _set_aside(self, data: bytes) -> None:
        """Keep a file of another version, which nothing needs, under another name."""
        version = "" if torn_header(data) else _header(self.path, data.split(b"\n")[0])[0]
        if version in ("", _VERSION):
            return
        name = self.path.with_name(f"{self.path.name}.version-{_for_name(version)}")
        try:
            os.replace(self.path, name)
            fsync_directory(self.path.parent)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self.set_aside = name

    def _open_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._fd = open_private(self.path, os.O_WRONLY | os.O_APPEND)

    # -- writing

    def _finish(
        self, kind: Literal["done", "revert", "drop"], target: Target, why: str = ""
    ) -> None:
        self._fold_checked(target, lambda fold: getattr(fold, kind)(target))
        record = target_record(kind, target)
        self._append({**record, "why": why} if why else record)
        getattr(self._fold, kind)(target)
        self._reckon(target)
        self._compact_if_grown()

    def _fold_checked(self, target: Target, step: Any) -> None:
        """Find a record out of turn, which is our own defect, before it is in the file. A record
        concerns one target only, so the check needs no others."""
        trial = Fold()
        known = self._fold.live.get(target)
        if known is not None:
            trial.put(known)
        step(trial)

    def _reckon(self, target: Target) -> None:
        """Keep the space that undo of all entries needs in ``_undo_space``: a sum over all
        entries for every change would cost more than the change."""
        self._undo_space -= self._rooms.pop(target, 0)
        entry = self._fold.live.get(target)
        if entry is not None:
            self._rooms[target] = _room(undo_action(entry))
            self._undo_space += self._rooms[target]

    def _check_version(self) -> None:
        if self.foreign is not None:
            raise self.foreign.with_traceback(None)

    def _append(self, record: dict[str, Any]) -> None:
        self._check_version()
        if self._broken:
            raise JournalError(
                f"an earlier write failed: {self._broken}",
                where=str(self.path),
                hint="restart vsrtune once the disk is well",
            )
        data = _line(record)
        try:
            write_all(self._fd, data)
        except OSError as error:
            try:
                os.ftruncate(self._fd, self._size)
            except OSError:
                self._broken = str(error)
            raise _unwritable(self.path, error) from error
        try:
            os.fsync(self._fd)
        except OSError as error:
            # The content of the disk is unknown now, and a second fsync would not tell it.
            self._broken = str(error)
            raise _unwritable(self.path, error) from error
        self._size += len(data)

    def _compact_if_grown(self) -> None:
        if self._fold.live and self._size < self._weigh_at:
            return
        live = sum(len(_line(r)) for r in compacted(self._fold))
        empty = len(_line(header_record(self._boot_id)))
        grown = self._size > MAX_SIZE or self._size > max(TINY, MAX_RATIO * live)
        if (not live and self._size > empty) or (grown and self._size > 2 * live + empty):
            # The old file is complete and has its room; a failed compaction costs only space.
            with contextlib.suppress(JournalError):
                self._replace(self._fold)
        # Weighing reads all entries: the more there are, the rarer it is.
        self._weigh_at = self._size + max(TINY, self._size // 2)

    def _replace(self, fold: Fold) -> None:
        """Write ``fold`` to a new file and put it in the journal's place."""
        records = [header_record(self._boot_id), *compacted(fold)]
        data = b"".join(map(_line, records))
        # A pass in progress goes on with as much room as it had.
        room = max(self._undo_space + _SLACK, self._claimed - self._size) if fold.live else 0
        try:
            replace_file(self.path, data, 0o600, room)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self._fold = fold
        self._size = len(data)
        self._claimed = self._size + room
        try:
            self._open_file()
        except OSError as error:
            self._broken = str(error)
            raise _unwritable(self.path, error) from error


def read_fold(path: Path, boot_id: str) -> Fold:
    """The content of the journal, read without the lock, for commands that only show it.

    A missing journal, or one of another boot, holds nothing. Raises JournalError when it
    is corrupt, unreadable, or of this boot and another version.
    """
    try:
        data = read_file(path)
    except FileNotFoundError:
        return Fold()
    except OSError as error:
        raise JournalError(
            f"cannot be read: {error.strerror}", where=str(path), hint="run as root"
        ) from error
    fold, same_boot = read(path, data, boot_id)
    return fold if same_boot else Fold()


def read_entries(path: Path, boot_id: str) -> tuple[Entry, ...]:
    """The live entries of ``read_fold``."""
    return tuple(read_fold(path, boot_id).live.values())


def read(path: Path, data: bytes, boot_id: str) -> tuple[Fold, bool]:
    """The fold of a file's content, and whether it is of this boot. A file that is empty,
    or has a torn header, is of no boot. The records of a file of another boot never raise,
    because nothing in them is needed. Raises JournalError."""
    fold = Fold()
    if torn_header(data):
        return fold, False
    lines = data.split(b"\n")[:-1] or [data]
    version, boot = _header(path, lines[0])
    same_boot = boot in (boot_id, "")
    if version != _VERSION:
        if same_boot:
            raise _foreign(path, version)
        return fold, False
    for number, line in enumerate(lines[1:], start=2):
        try:
            fold.record(json_value(line))
        except (VsrtuneError, ValueError, TypeError, AttributeError, KeyError) as error:
            if not same_boot:
                continue
            raise JournalError(
                f"line {number} is corrupt: {error}", where=str(path), hint=_HOW_TO_REPAIR
            ) from error
    return fold, same_boot


def _header(path: Path, line: bytes) -> tuple[str, str]:
    """The version and the boot of a header; the boot is "" when another version names none.
    Raises JournalError."""
    try:
        data = json_value(line)
        version = str(data["version"])
        return version, str(data["boot_id"] if version == _VERSION else data.get("boot_id", ""))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise JournalError(
            "line 1 is corrupt: it is not a journal's header",
            where=str(path),
            hint=_HOW_TO_REPAIR,
        ) from error


class _ForeignError(JournalError):
    """The journal is of this boot and of another version."""


def _foreign(path: Path, version: str) -> _ForeignError:
    return _ForeignError(
        f"version {version} of the journal's format has what another vsrtune set since this "
        f"host booted; this vsrtune knows version {VERSION}, so it can neither undo these "
        "settings nor tell them from what was there before: it changes nothing on the host",
        where=str(path),
        hint="the file stays there: install the vsrtune that wrote it and run `vsrtune undo`, "
        "or reboot the host; if you move the file away, what is set now counts as untuned",
    )


def _for_name(version: str) -> str:
    """A version as a part of a file's name."""
    return "".join(c if c.isalnum() else "_" for c in version)[:20]


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _room(action: Action) -> int:
    """The bytes that a change takes in the file: its intent, and results that are shorter. A move
    between cgroups has a second change around it, which keeps the affinity."""
    changes = 2 if isinstance(action.target, ThreadCgroup) else 1
    return 2 * changes * len(_line(intent_record(action)))


def _unwritable(path: Path, error: OSError) -> JournalError:
    hints = {
        errno.ENOSPC: "free space on that file system",
        errno.EDQUOT: "free space on that file system",
        errno.EROFS: "remount that file system read-write",
        errno.EACCES: "run as root",
        errno.EPERM: "run as root",
    }
    return JournalError(
        f"the journal cannot be written ({os.strerror(error.errno or 0)}), so the host is not "
        "written either",
        where=str(path),
        hint=hints.get(error.errno or 0, "see the kernel log"),
        lasting=Lasting.TRANSIENT if error.errno in FULL else Lasting.PERMANENT,
    )
