"""A ledger: the changes of this host that have to be put back, on disk before they are made.

Append-only JSON lines. The user adds an entry before it changes the host, and marks the entry
done after it has put the change back or no longer has to. Entries that are left tell the next
start what to put back. A last line without its newline was never complete, so no change followed
it, and the ledger cuts it off. Any other unreadable line is an error.

One user at a time: the process that has the ledger open holds an exclusive flock beside it. A
process that inherits the descriptor shares the lock, which is free only after both.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from vsrtune.core.closing import Closing
from vsrtune.core.errors import JournalError, Lasting, VsrtuneError
from vsrtune.core.untrusted import json_value
from vsrtune.host.state_files import FULL, open_private, private_directory, read_file, replace_file

# A process that still cleans up after a killed user gets this long.
LOCK_SECONDS = 10.0
# A larger file is written anew when most of it is about entries that are done.
_LARGE = 64 << 10

Cleaner = Callable[[dict[str, Any]], None]


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


class Ledger(Closing):
    """The open ledger. Use as a context manager, or ``close``.

    ``busy`` is the error when somebody else has it open, ``unusable`` begins the error when the
    file cannot be used; each has a hint what to do next.
    """

    busy = ("another process is using it", "wait for its end")
    unusable = ("the ledger cannot be used", "run as root")

    def __init__(
        self, path: Path, lock: int, file: int, entries: dict[int, LedgerEntry], last: int
    ) -> None:
        self.path = path
        self.lock_descriptor = lock
        self._file = file
        self._entries = entries
        self._last = last

    @classmethod
    def open(cls, path: Path, *, lock: int | None = None, wait: float = LOCK_SECONDS) -> Self:
        """Lock and read the ledger, waiting up to ``wait`` seconds for the lock.

        ``lock`` is the descriptor of a lock that is held already (the guard's). Raises
        VsrtuneError when somebody else has the ledger open, or it cannot be read or written.
        """
        opened: list[int] = []
        try:
            private_directory(path.parent)
            if lock is None:
                opened.append(lock := cls._take_lock(path, wait))
            file = open_private(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            opened.append(file)
            text = read_file(path)
            whole = text[: text.rfind(b"\n") + 1]
            entries, last = parse(path, whole)
            # With nothing pending a new file begins; the lock makes us its only user.
            os.ftruncate(file, len(whole) if entries else 0)
            pending = b"".join(_line(_added(entry)) for entry in entries.values())
            if len(whole) > max(_LARGE, 4 * len(pending)):
                os.close(opened.pop())
                replace_file(path, pending, 0o600)
                file = open_private(path, os.O_RDWR | os.O_APPEND)
                opened.append(file)
        except BaseException as error:
            for descriptor in opened:
                os.close(descriptor)
            if isinstance(error, OSError):
                raise cls._broken(path, error) from error
            raise
        return cls(path, lock, file, entries, last)

    def add(self, kind: str, data: Mapping[str, Any]) -> int:
        """Record a change that must be put back, before it is made. ``data`` is JSON. Returns the
        id for ``done``. Raises VsrtuneError; the caller must then change nothing."""
        self._last += 1
        entry = LedgerEntry(self._last, kind, dict(data))
        self._append(_added(entry))
        self._entries[entry.id] = entry
        return entry.id

    def done(self, *entries: int) -> None:
        """Mark entries as put back, or as no longer in need of it: all of them, or none if this
        process is killed meanwhile. Ids that are not pending are ignored."""
        pending = [entry for entry in entries if entry in self._entries]
        if pending:
            self._append({"done": pending[0] if len(pending) == 1 else pending})
            for entry in pending:
                del self._entries[entry]

    def pending(self) -> list[LedgerEntry]:
        """The pending entries, oldest first."""
        return [self._entries[number] for number in sorted(self._entries)]

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
        for descriptor in (self._file, self.lock_descriptor):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self.lock_descriptor = -1

    def _append(self, record: Mapping[str, Any]) -> None:
        line = _line(record)
        try:
            size = os.fstat(self._file).st_size
            written = os.write(self._file, line)
            if written != len(line):
                # Otherwise the next line would be read as the rest of this one.
                os.ftruncate(self._file, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file)
        except OSError as error:
            raise self._broken(self.path, error) from error

    @classmethod
    def _take_lock(cls, path: Path, wait: float) -> int:
        descriptor = open_private(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT)
        end = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if time.monotonic() < end:
                    time.sleep(0.1)
                    continue
                os.close(descriptor)
                what, hint = cls.busy
                raise VsrtuneError(
                    what, where=str(path), hint=hint, lasting=Lasting.TRANSIENT
                ) from None
            except BaseException:
                os.close(descriptor)
                raise

    @classmethod
    def _broken(cls, path: Path, error: OSError) -> VsrtuneError:
        what, hint = cls.unusable
        if error.errno in FULL:
            hint = f"make room: df {path.parent}"
        return VsrtuneError(f"{what}: {error.strerror or error}", where=str(path), hint=hint)


def read_pending(path: Path) -> list[LedgerEntry]:
    """The pending entries, oldest first, read without the lock. A missing file has none. Raises
    VsrtuneError when the file cannot be read."""
    try:
        text = read_file(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise VsrtuneError(
            f"cannot be read: {error.strerror}", where=str(path), hint="run as root"
        ) from error
    entries, _ = parse(path, text[: text.rfind(b"\n") + 1])
    return [entries[number] for number in sorted(entries)]


def parse(path: Path, text: bytes) -> tuple[dict[int, LedgerEntry], int]:
    """The pending entries, and the last id that was given. Raises VsrtuneError."""
    entries: dict[int, LedgerEntry] = {}
    last = 0
    for number, line in enumerate(text.splitlines(), 1):
        try:
            record = json_value(line)
            if "add" in record:
                entry = LedgerEntry(int(record["add"]), str(record["kind"]), dict(record["data"]))
                entries[entry.id] = entry
                last = max(last, entry.id)
            else:
                done = record["done"]
                for number_done in done if isinstance(done, list) else (done,):
                    entries.pop(int(number_done), None)
        except (ValueError, KeyError, TypeError) as error:
            raise VsrtuneError(
                "this line cannot be read",
                where=f"{path}:{number}",
                hint="remove the line; what it stood for must be put back by hand",
            ) from error
    return entries, last


def _added(entry: LedgerEntry) -> dict[str, Any]:
    return {"add": entry.id, "kind": entry.kind, "data": entry.data}


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def take_lock(path: Path) -> int:
    """Take the lock of a journal and write our pid into it. Returns the descriptor that holds the
    lock. Raises JournalError when another process has it, OSError when it cannot be made."""
    fd = open_private(_name(path), os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise JournalError(
            f"process {holder} is using the journal{_command(holder)}",
            where=str(path),
            hint="if that is the daemon, let it do the work (systemctl reload vsrtune) or "
            "stop it first (systemctl stop vsrtune)",
            lasting=Lasting.TRANSIENT,
        ) from None
    except OSError:
        os.close(fd)
        raise
    # The pid serves only the message above: a full disk may cost it.
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def in_use(path: Path) -> bool:
    """Whether another process, the daemon as a rule, holds the journal now."""
    try:
        fd = os.open(_name(path), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _name(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _command(pid: str) -> str:
    import psutil  # imported late: 20 ms

    with contextlib.suppress(psutil.Error, ValueError):
        return f" ({shlex.join(psutil.Process(int(pid)).cmdline())})"
    return ""
