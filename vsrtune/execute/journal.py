# SPDX-License-Identifier: GPL-2.0-or-later
"""The journal: the settings that we changed on the host and their originals, safe against crashes.

A log (``jsonl_log``) of the records that ``journal_records`` defines. A file belongs to one boot:
every setting that we write is volatile, so the journal discards entries of another boot and counts
them in ``Journal.discarded``.

A file of another version of the format (``VERSION``) is renamed if it is of another boot. If it
is of this boot, or has a record of this boot whose kind only a later vsrtune knows, it stays where
it is, for the version that can read it, and the journal takes no records (``Journal.foreign``):
the present settings of the host may be tuned, and must not become originals.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from vsrtune.core.closing import Closing
from vsrtune.core.errors import JournalError, UnknownError, VsrtuneError
from vsrtune.execute.jsonl_log import (
    JsonlLog,
    LogNames,
    corrupt,
    holder,
    is_empty,
    last_record,
    line,
    locked,
    read_header,
    read_log,
    read_records,
)
from vsrtune.host.state_files import fsync_directory
from vsrtune.model.guest import TIMED, Sched
from vsrtune.model.journal_records import (
    VERSION,
    Entry,
    Fold,
    applied,
    entry_record,
    header_record,
    intent_record,
    step_record,
    target_record,
    undo_action,
)
from vsrtune.model.plan import Action
from vsrtune.model.stepdown import Step
from vsrtune.model.targets import Target, ThreadCgroup, Value, decode_target

DEFAULT_PATH = Path("/var/lib/vsrtune/journal.jsonl")
_VERSION = str(VERSION)
# Room for lines that are longer than estimated.
_SLACK = 4096
_NAMES = LogNames(
    "the journal",
    "{process} is using the journal",
    "if that is the daemon, let it do the work (systemctl reload vsrtune) or stop it first "
    "(systemctl stop vsrtune)",
)


class Journal(Closing):
    """The open journal of this boot, locked. Use as a context manager, or ``close``.

    ``discarded`` counts entries of another boot. ``set_aside`` is the new name of a file of
    another boot and version. ``foreign`` is the reason why nothing can be recorded or undone: the
    file is of this boot and another vsrtune's. ``budgets_end`` is on the clock of
    ``time.monotonic``: until then the kernel may have bandwidth booked for threads that the
    previous writer of the journal took out of class deadline.

    Every method that appends raises JournalError when the record did not reach the disk; the
    caller must then not write to the host.
    """

    def __init__(self, log: JsonlLog, boot_id: str) -> None:
        """Use ``Journal.open``."""
        self.path = log.path
        self.discarded = 0
        self.set_aside: Path | None = None
        self.foreign: JournalError | None = None
        self.budgets_end = 0.0
        self._log = log
        self._boot_id = boot_id
        self._fold = Fold()
        # The space that undo needs, by target and in all.
        self._rooms: dict[Target, int] = {}
        self._undo_space = 0
        self._in_pass = False

    @classmethod
    def open(cls, path: Path, boot_id: str) -> Journal:
        """Lock and read the journal, and make it and its directory if they are missing. A journal
        of another version is opened as well (``foreign``, ``set_aside``).

        Raises JournalError when another process holds it, when it is corrupt, or when it cannot
        be written.
        """
        journal = cls(JsonlLog(path, _NAMES, header_record(boot_id)), boot_id)
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

    def finished(self, target: Target) -> Entry | None:
        """The live entry of a target, unless a write of it is unfinished."""
        entry = self.entry(target)
        return entry if entry is not None and entry.state == "done" else None

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
        """Record a finished entry, in place of one that its target may have."""
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
        self.drop_all([target], why)

    def drop_all(self, targets: Iterable[Target], why: str) -> None:
        """Forget targets, for the reason ``why``. The disk is waited for once."""
        gone = [target for target in targets if target in self._fold.live]
        if gone:
            self._append(*({**target_record("drop", target), "why": why} for target in gone))
            for target in gone:
                self._fold.drop(target)
                self._reckon(target)
            self._compact_if_grown()

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
        """Claim disk space to apply and later undo ``actions``, and to undo everything before, with
        steps down, so that a disk that fills up meanwhile stops none of that half-way. Raises
        JournalError when there is not enough space. File systems that cannot reserve space are
        accepted."""
        need = sum(_room(action) * (1 + _writes_back(action.after)) for action in actions)
        if not need:
            return
        self._check_version()
        self._log.claim(need + self._undo_space + _SLACK)

    def renew(self) -> None:
        """Accept records again after a failure that left the content of the file unknown: put a new
        file with what is in force in its place. Does nothing while the file is trusted. Raises
        JournalError."""
        if self._log.broken:
            self._log.rewrite(self._fold, self._undo_space + _SLACK)

    def ensure(self, action: Action) -> None:
        """Before the first write of a target in a pass: claim what this one takes beyond what
        ``reserve`` knew of. The host's value may have masks of threads, which no plan has. Raises
        JournalError when undo of all would not fit any more."""
        need = _room(action) * (1 + _writes_back(action.after)) + self._undo_space
        if action.target not in self._fold.live and need > self._log.room:
            self._log.claim(need + _SLACK)

    @contextlib.contextmanager
    def one_pass(self) -> Iterator[None]:
        """Keep what is claimed until the end of a pass, also while no entry is live: a pass may
        release all that there is before it tunes, or its first write may fail. At the end, claim
        what undo of the rest needs by now, if the disk has it."""
        self._in_pass = True
        try:
            yield
        finally:
            self._in_pass = False
            self._claim_undo()
            self._compact_if_grown()

    def close(self) -> None:
        """Release the lock. The entries stay in the file."""
        self._log.close()

    # -- reading

    def _load(self) -> None:
        data = self._log.read()
        try:
            fold, same_boot = read(self.path, data, self._boot_id)
        except _ForeignError as error:
            self.foreign = error
            return
        if not same_boot:
            self._set_aside(data)
            self.discarded = len(fold.live)
            self._log.rewrite(self._fold)
            return
        self._fold = fold
        self._log.resume(data)
        for target in fold.live:
            self._reckon(target)
        # Another version may have claimed less, and the cut of a torn end gives all of it back.
        self._claim_undo()
        # The file is as old as its last record. If the clock was set back, the wait is all of
        # the lag, and no longer.
        self.budgets_end = time.monotonic() + fold.lag - self._log.age()
        self._compact_if_grown()

    def _set_aside(self, data: bytes) -> None:
        """Keep a file of another version, which nothing needs, under another name."""
        version = str(read_header(data).get("version", _VERSION))
        if version == _VERSION:
            return
        name = self.path.with_name(f"{self.path.name}.version-{_for_name(version)}")
        try:
            os.replace(self.path, name)
            fsync_directory(self.path.parent)
        except OSError as error:
            raise self._log.unwritable(error) from error
        self.set_aside = name

    # -- writing

    def _finish(self, kind: Literal["done", "revert"], target: Target) -> None:
        self._fold_checked(target, lambda fold: getattr(fold, kind)(target))
        self._append(target_record(kind, target))
        getattr(self._fold, kind)(target)
        self._reckon(target)
        self._compact_if_grown()

    def _fold_checked(self, target: Target, step: Any) -> None:
        """Find a record out of turn before it is in the file: our own defect, or a record follows
        one that could not be written. Raises JournalError. A record concerns one target only, so
        the check needs no others."""
        trial = Fold()
        known = self._fold.live.get(target)
        if known is not None:
            trial.put(known)
        try:
            step(trial)
        except VsrtuneError as error:
            hint = "run `vsrtune undo` once the disk can be written"
            raise JournalError(error.what, where=str(target), hint=hint) from error

    def _reckon(self, target: Target) -> None:
        """Keep the space that undo of all entries needs in ``_undo_space``: a sum over all
        entries for every change would cost more than the change."""
        self._undo_space -= self._rooms.pop(target, 0)
        entry = self._fold.live.get(target)
        if entry is not None:
            writes = _writes_back(entry.written)
            self._rooms[target] = _room(undo_action(entry)) * writes
            self._undo_space += self._rooms[target]

    def _check_version(self) -> None:
        if self.foreign is not None:
            raise self.foreign.with_traceback(None)

    def _append(self, *records: dict[str, Any]) -> None:
        self._check_version()
        self._log.append(*records)

    def _claim_undo(self) -> None:
        with contextlib.suppress(JournalError):
            if self._fold.live:
                self._log.claim(self._undo_space + _SLACK)

    def _compact_if_grown(self) -> None:
        # A file of nothing is written without room.
        if self._in_pass and not self._fold.live:
            return
        self._log.compact_if_grown(self._fold, self._undo_space + _SLACK)


def check_free(path: Path) -> None:
    """Raise LockedError when another process holds the journal, be its file there or not."""
    process = holder(path)
    if process:
        raise locked(path, _NAMES, process)


def read_fold(path: Path, boot_id: str) -> Fold:
    """The content of the journal, read without the lock, for commands that only show it.

    A missing journal, or one of another boot, holds nothing. Raises JournalError when it
    is corrupt, unreadable, or of this boot and another version.
    """
    fold, same_boot = read(path, read_log(path), boot_id)
    return fold if same_boot else Fold()


def last_change(path: Path, boot_id: str) -> tuple[float, str] | None:
    """When vsrtune last changed a setting on this boot (seconds since the epoch), and what it did;
    None when it has set none, or all are undone. Raises JournalError as ``read_fold``."""
    data = read_log(path)
    words = {"done": "set", "entry": "set", "revert": "taken back", "drop": "released"}
    found = last_record(data, words) if read(path, data, boot_id)[1] else {}
    if not found:
        return None
    why = f" ({found['why']})" if found.get("why") else ""
    return path.stat().st_mtime, f"{decode_target(found['target'])} {words[found['r']]}{why}"


def read_entries(path: Path, boot_id: str) -> tuple[Entry, ...]:
    """The live entries of ``read_fold``."""
    return tuple(read_fold(path, boot_id).live.values())


def read(path: Path, data: bytes, boot_id: str) -> tuple[Fold, bool]:
    """The fold of a file's content, and whether it is of this boot. A file that is empty,
    or has a torn header, is of no boot. The records of a file of another boot never raise,
    because nothing in them is needed. Raises JournalError."""
    fold = Fold()
    if is_empty(data):
        return fold, False
    header = read_header(data)
    version, boot = str(header.get("version")), str(header.get("boot_id", ""))
    if not header or (version == _VERSION and "boot_id" not in header):
        raise corrupt(path, 1, "it is not a journal's header")
    same_boot = boot in (boot_id, "")
    if version != _VERSION:
        if same_boot:
            raise _foreign(path, f"version {version} of the journal's format")
        return fold, False
    try:
        read_records(path, data, fold)
    except JournalError as error:
        if same_boot and isinstance(error.__cause__, UnknownError):
            raise _foreign(path, f"a record ({error.__cause__})") from error
        if same_boot:
            raise
    return fold, same_boot


class _ForeignError(JournalError):
    """The journal is of this boot and another vsrtune's."""


def _foreign(path: Path, what: str) -> _ForeignError:
    return _ForeignError(
        f"{what} has what another vsrtune set since this host booted; this vsrtune does "
        "not know it, so it can neither undo these settings nor tell them from what was there "
        "before: it changes nothing on the host",
        where=str(path),
        hint="the file stays there: install the vsrtune that wrote it and run `vsrtune undo`, "
        "or reboot the host; if you move the file away, what is set now counts as untuned",
    )


def _for_name(version: str) -> str:
    """A version as a part of a file's name."""
    return "".join(c if c.isalnum() else "_" for c in version)[:20]


def _writes_back(written: Value) -> int:
    """How many writes may follow on a full disk: undo, and before it two steps down of a thread
    that is realtime or has a budget."""
    return 3 if isinstance(written, Sched) and written.cls in TIMED else 1


def _room(action: Action) -> int:
    """The bytes that a change takes in the file: its intent, and results that are shorter. A move
    between cgroups has a second change around it, which keeps the affinity."""
    changes = 2 if isinstance(action.target, ThreadCgroup) else 1
    return 2 * changes * len(line(intent_record(action)))
