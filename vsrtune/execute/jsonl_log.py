# SPDX-License-Identifier: GPL-2.0-or-later
"""A log on disk, which the journal and the ledgers keep their records in.

Append-only JSON lines, fsynced as they are written. The first line is a header with the version of
the format. A log of nothing is an empty file, so that a unit of systemd can ask for it
(ConditionFileNotEmpty); its first record brings the header along.

A crash during the write of a line leaves it at the end of the file without its newline. Such a
line is cut off: nothing that it stands for was done. A file that ends within its first line is
an empty log. Any other unreadable line is corruption: JournalError, and the file stays as it is.

One process writes at a time: it holds an exclusive flock on a file beside the log, because a
rewrite replaces the log itself. A process that inherits the descriptor shares the lock, which is
free only after both.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shlex
import time
from collections.abc import Collection, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vsrtune.core.closing import Closing
from vsrtune.core.errors import JournalError, Lasting, VsrtuneError
from vsrtune.core.untrusted import json_value
from vsrtune.host.state_files import (
    FULL,
    claim,
    open_private,
    private_directory,
    read_file,
    replace_file,
    write_all,
)

# A log is rewritten when it has more than MAX_SIZE bytes, or more than MAX_RATIO times the bytes
# of its live records (and more than TINY).
MAX_SIZE = 1 << 20
MAX_RATIO = 10
TINY = 16 << 10
# Bytes of a log: no more are written, claimed or read. 16,000 realtime threads claim 80 MiB.
LARGEST = 512 << 20
# Errors that pass once guests end or somebody makes room.
_NO_ROOM = FULL | {errno.EFBIG}
# Errors of a name that is no file's.
_MISNAMED = frozenset({errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR})
# How a header begins.
_HEADER = b'{"r":"header","version":'


@dataclass(frozen=True, slots=True)
class LogNames:
    """What errors call a log. ``busy`` says who has it open ({process}), and ``wait`` what to do
    about that."""

    name: str
    busy: str
    wait: str


class LockedError(JournalError):
    """Another process has the log open."""


class Records(Protocol):
    """What the records of a log amount to."""

    @property
    def live(self) -> Sized:
        """What is in force. The log is rewritten once that is nothing."""
        ...

    def record(self, data: Any) -> None:
        """Apply one decoded record. Raises VsrtuneError, ValueError, LookupError, TypeError or
        AttributeError for one that is malformed or out of turn."""
        ...

    def compacted(self) -> list[dict[str, Any]]:
        """Records that amount to the same."""
        ...


class JsonlLog(Closing):
    """A log that is locked by this process. Close it after use.

    First ``read`` it, then ``resume`` or ``rewrite`` it; ``append`` comes after these. Every
    method raises JournalError when the file cannot be read or written. After ``append`` has
    raised, the caller must not write to the host.
    """

    def __init__(
        self,
        path: Path,
        names: LogNames,
        header: Mapping[str, Any],
        *,
        lock: int | None = None,
        wait: float = 0.0,
    ) -> None:
        """Take the lock, waiting up to ``wait`` seconds, and make the directory if it is missing.
        ``lock`` is the descriptor of a lock that is held already. Raises LockedError when another
        process holds it."""
        self.path = path
        self.lock_descriptor = -1
        self._names = names
        self._header = line(header)
        self._file = -1
        self._size = 0
        # The end of the claimed disk space.
        self._claimed = 0
        self._weigh_at = 0
        self._broken = ""
        try:
            private_directory(path.parent)
            self.lock_descriptor = _take_lock(path, names, wait) if lock is None else lock
        except OSError as error:
            raise self.unwritable(error) from error
        # The pid serves only the message of LockedError: a full disk may cost it.
        with contextlib.suppress(OSError):
            os.ftruncate(self.lock_descriptor, 0)
            os.pwrite(self.lock_descriptor, f"{os.getpid()}\n".encode(), 0)

    def read(self) -> bytes:
        """The content; nothing when there is no file."""
        return read_log(self.path)

    def resume(self, data: bytes) -> None:
        """Continue the file, whose content is ``data``: its torn end is cut off. One that a disk
        error has made read-only holds what is in force, but takes no record until ``rewrite``."""
        whole = data.rfind(b"\n") + 1
        try:
            try:
                self._open_file()
            except OSError as error:
                if error.errno != errno.EROFS:
                    raise
                self._broken = str(error)
                self._file = open_private(self.path, os.O_RDONLY)
            if not self._broken and whole != len(data):
                os.ftruncate(self._file, whole)
                os.fsync(self._file)
        except OSError as error:
            raise self.unwritable(error) from error
        self._size = whole

    def append(self, *records: Mapping[str, Any]) -> None:
        """Add records, which are on disk when this returns. If one does not fit, all are taken out
        again; after a failed fsync no record is accepted any more."""
        if self._broken:
            raise JournalError(
                f"an earlier write failed: {self._broken}",
                where=str(self.path),
                hint="restart vsrtune once the disk is well",
            )
        data = b"".join(map(line, records))
        data = data if self._size else self._header + data
        self._check_size(len(data))
        try:
            write_all(self._file, data)
        except OSError as error:
            try:
                # Otherwise the next line would be read as the rest of this one.
                os.ftruncate(self._file, self._size)
            except OSError:
                self._broken = str(error)
            raise self.unwritable(error) from error
        try:
            os.fsync(self._file)
        except OSError as error:
            # The content of the disk is unknown now, and a second fsync would not tell it.
            self._broken = str(error)
            raise self.unwritable(error) from error
        self._size += len(data)

    @property
    def room(self) -> int:
        """How many bytes are claimed behind the last record."""
        return max(0, self._claimed - self._size)

    def claim(self, length: int) -> None:
        """Claim disk space for the next ``length`` bytes. File systems that cannot reserve space
        are accepted."""
        self._check_size(length)
        try:
            claim(self._file, self._size, length)
        except OSError as error:
            raise self.unwritable(error) from error
        self._claimed = self._size + length

    def compact_if_grown(self, records: Records, room: int = 0) -> None:
        """Rewrite a file most of which is not live, or nothing of it. A rewrite that fails costs
        only space while the old file is in place: it is complete, and keeps its room. Otherwise
        the next ``append`` raises."""
        if records.live and self._size < self._weigh_at:
            return
        live = sum(len(line(r)) for r in records.compacted())
        grown = self._size > MAX_SIZE or self._size > max(TINY, MAX_RATIO * live)
        least = 2 * live + len(self._header)
        if (not live and self._size) or (grown and self._size > least):
            with contextlib.suppress(JournalError):
                self.rewrite(records, room)
        # Weighing reads all records: the more there are, the rarer it is.
        self._weigh_at = self._size + max(TINY, self._size // 2)

    def rewrite(self, records: Records, room: int = 0) -> None:
        """Write ``records`` to a new file, with ``room`` bytes claimed behind them, or all that
        are still claimed, and put it in the log's place. When that fails with the new file in
        place already, no record is accepted any more: a crash may bring either file back."""
        data = b"".join(map(line, records.compacted()))
        data = self._header + data if data else data
        # A pass in progress goes on with as much room as it had.
        room = max(room, self.room) if records.live else 0
        try:
            replace_file(self.path, data, 0o600, room)
        except OSError as error:
            if not self._in_place():
                self._broken = str(error)
            raise self.unwritable(error) from error
        self._size = len(data)
        self._claimed = self._size + room
        try:
            self._open_file()
        except OSError as error:
            self._broken = str(error)
            raise self.unwritable(error) from error
        self._broken = ""

    @property
    def broken(self) -> bool:
        """Whether no record is accepted, until ``rewrite`` has made a new file."""
        return bool(self._broken)

    def age(self) -> float:
        """Seconds since the last record; 0 when the clock was set back since."""
        return max(0.0, time.time() - os.fstat(self._file).st_mtime)

    def close(self) -> None:
        """Close the file and, unless another process shares the lock, unlock it."""
        for descriptor in (self._file, self.lock_descriptor):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self.lock_descriptor = -1

    def _check_size(self, length: int) -> None:
        """Refuse what would make a file that ``read_log`` refuses."""
        if self._size + length > LARGEST:
            raise self.unwritable(OSError(errno.EFBIG, ""))

    def _in_place(self) -> bool:
        """Whether the open file is the one that the path names."""
        try:
            return os.path.samestat(os.fstat(self._file), os.lstat(self.path))
        except OSError:
            return False

    def _open_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._file = open_private(self.path, os.O_WRONLY | os.O_APPEND)

    def unwritable(self, error: OSError) -> JournalError:
        """The error for a file that the system does not let us write."""
        space = f"free space on that file system: df {self.path.parent}"
        no_directory = f"something in {self.path.parent} is no directory; name another place"
        hints = {
            errno.ENOSPC: space,
            errno.EDQUOT: space,
            errno.EFBIG: f"it may have {LARGEST >> 20} MiB: name fewer guests in policies",
            errno.EROFS: "remount that file system read-write",
            errno.EACCES: "run as root",
            errno.EPERM: "run as root",
            errno.ELOOP: "it, or the lock beside it, is a symbolic link; name the file itself",
            errno.ENOTDIR: no_directory,
            errno.EEXIST: no_directory,
        }
        return JournalError(
            f"{self._names.name} cannot be written ({os.strerror(error.errno or 0)}), so the host "
            "is not written either",
            where=str(self.path),
            hint=hints.get(error.errno or 0, "see the kernel log"),
            lasting=Lasting.TRANSIENT if error.errno in _NO_ROOM else Lasting.PERMANENT,
        )


def read_log(path: Path) -> bytes:
    """The content of a log, read without its lock; nothing when there is no file. Raises
    JournalError when it cannot be read."""
    try:
        if path.exists() and not path.is_file():
            # To open a FIFO would wait for ever.
            raise OSError(errno.EINVAL, "it is no regular file")
        return read_file(path, LARGEST)
    except FileNotFoundError:
        return b""
    except OSError as error:
        if isinstance(error, PermissionError):
            hint = "run as root"
        elif error.errno in _MISNAMED:
            hint = "name the file that was used before, or a new one"
        else:
            # Beside a log that is damaged a new one would make what vsrtune has set the original.
            hint = (
                "with another file, what vsrtune has changed would count as what was there before "
                "it (a reboot ends all settings)"
            )
            if error.errno != errno.EFBIG:
                hint = f"see the kernel log; {hint}"
        raise JournalError(
            f"cannot be read: {error.strerror}", where=str(path), hint=hint
        ) from error


def is_empty(data: bytes) -> bool:
    """Whether a file has no line yet: it ends within its first one."""
    return b"\n" not in data and (data.startswith(_HEADER) or _HEADER.startswith(data))


def read_header(data: bytes) -> dict[str, Any]:
    """The header of a log; {} when its first line is none."""
    try:
        found = json_value(data.partition(b"\n")[0])
    except ValueError:
        return {}
    return found if isinstance(found, dict) and "version" in found else {}


def read_records(path: Path, data: bytes, records: Records) -> None:
    """Apply every whole line after the header to ``records``. Raises JournalError, with the number
    of the line, for one that cannot be read."""
    for number, text in enumerate(data.split(b"\n")[1:-1], start=2):
        try:
            records.record(json_value(text))
        except (VsrtuneError, ValueError, TypeError, AttributeError, LookupError) as error:
            raise corrupt(path, number, str(error)) from error


def corrupt(path: Path, number: int, what: str) -> JournalError:
    """The error for a line that cannot be read."""
    return JournalError(
        f"line {number} is corrupt: {what}",
        where=str(path),
        hint="nothing was changed on the host; remove the bad line if the rest is wanted, or move "
        "the file away: what is lost with it has to be put back by hand",
    )


def holder(path: Path) -> str:
    """The other process, the daemon as a rule, that holds the log now; "" when none does."""
    try:
        fd = _open_lock(path, os.O_RDWR)
    except OSError:
        return ""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(fd)
    finally:
        os.close(fd)
    return ""


def locked(path: Path, names: LogNames, process: str) -> LockedError:
    """The error for a log that ``process`` holds."""
    return LockedError(
        names.busy.format(process=process),
        where=str(path),
        hint=names.wait,
        lasting=Lasting.TRANSIENT,
    )


def last_record(data: bytes, kinds: Collection[str]) -> dict[str, Any]:
    """The last whole record of one of these kinds; {} when there is none."""
    for text in reversed(data.split(b"\n")[:-1]):
        found = json_value(text)
        if isinstance(found, dict) and found.get("r") in kinds:
            return found
    return {}


def _take_lock(path: Path, names: LogNames, wait: float) -> int:
    fd = _open_lock(path, os.O_RDWR | os.O_CREAT)
    end = time.monotonic() + wait
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise locked(path, names, _holder(fd)) from None
            time.sleep(0.1)
    except BaseException:
        os.close(fd)
        raise


def _open_lock(path: Path, flags: int) -> int:
    file = path.with_name(path.name + ".lock")
    try:
        return open_private(file, flags)
    except OSError as error:
        if error.errno != errno.EROFS or not file.exists():
            raise
        return open_private(file, os.O_RDONLY)  # flock(2) requires no more


def _holder(fd: int) -> str:
    import psutil  # imported late: 20 ms

    pid = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
    with contextlib.suppress(psutil.Error, ValueError):
        return f"process {pid} ({shlex.join(psutil.Process(int(pid)).cmdline())})"
    return f"process {pid}"


def line(record: Mapping[str, Any]) -> bytes:
    """A record as it stands in the file."""
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"
