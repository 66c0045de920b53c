# SPDX-License-Identifier: GPL-2.0-or-later
"""vsrtune's own files, which are written whole or not at all. Functions raise OSError."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
from pathlib import Path
from typing import Any, TypeVar

from vsrtune.core.codec import decode, encode
from vsrtune.core.errors import VsrtuneError
from vsrtune.core.untrusted import json_value
from vsrtune.host.filesystem import LiveRoot
from vsrtune.host.procfs import parse_stat

T = TypeVar("T")

# Far more than such a file has. Logs, which are larger, say their own limit.
MAX_SIZE = 64 << 20
_FALLOC_FL_KEEP_SIZE = 1
# Directories that only vsrtune uses.
OURS = frozenset({Path("/var/lib/vsrtune"), Path("/run/vsrtune/bench")})
# Errors of a full file system. Any other error of claim means that it cannot claim space.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def read_file(path: Path, most: int = MAX_SIZE) -> bytes:
    """The whole content. Raises OSError; EFBIG for a file that is too large to be vsrtune's."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most >> 20} MiB", str(path))
    return data


def replace_file(path: Path, data: bytes, mode: int, room: int = 0) -> None:
    """Replace ``path`` by a new file: it has the old content or the new one, also after a crash of
    the host. Only one process at a time may do this. ``room`` bytes behind the data are claimed
    for later appends; if that fails, the old file stays. Raises OSError; if that is an error of the
    directory, the new file may be in place already."""
    _replace(path, path.with_name(path.name + ".new"), data, mode, room, lasting=True)


def create_file(path: Path, data: bytes, mode: int) -> None:
    """Create ``path``, whole or not at all, also after a crash of the host. Raises OSError;
    FileExistsError when something is there."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        # link(2) never replaces a file.
        os.link(new, path)
    finally:
        new.unlink(missing_ok=True)
    fsync_directory(path.parent)


def private_directory(path: Path) -> None:
    """Make a directory that only its owner may enter, with its parents. An existing directory of
    OURS is closed to others; one that an operator chose stays as it is."""
    if not path.is_dir():
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fsync_directory(path.parent)
    elif path in OURS and path.stat().st_mode & 0o077:
        path.chmod(0o700)


def open_private(path: Path, flags: int) -> int:
    """A descriptor of a file that only its owner may read, so that nobody else can lock it either
    (flock(2) requires no more than that). O_CREAT makes the file. A file that others may read is
    closed to them. Raises OSError; ELOOP for a symbolic link."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(fd).st_mode & 0o077:
            os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd


def claim(fd: int, offset: int, length: int) -> None:
    """Claim disk space for ``length`` bytes of the file from ``offset`` on, without making it
    longer. Space that is claimed already costs nothing. Does nothing on file systems that cannot
    claim space. Raises OSError when there is no room."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_int64
    while libc.fallocate64(fd, _FALLOC_FL_KEEP_SIZE, size(offset), size(length)) < 0:
        code = ctypes.get_errno()
        if code in FULL:
            raise OSError(code, os.strerror(code))
        if code != errno.EINTR:
            return


def replace_volatile(path: Path, data: bytes, mode: int) -> None:
    """As ``replace_file``, for a file that a crash of the host removes anyway (/run): it does not
    wait for a disk. Makes the directory when it is missing. Several processes may do this at a
    time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, path.with_name(f".{path.name}.{os.getpid()}.new"), data, mode, 0, lasting=False)


def tell_others(path: Path, told: tuple[Any, ...]) -> None:
    """Replace the file in which this process tells others of something, for as long as it lives;
    remove it when there is nothing to tell. Raises OSError."""
    if not told:
        path.unlink(missing_ok=True)
        return
    pid = os.getpid()
    data = {"pid": pid, "start_time": _start_time(pid), "told": encode(told)}
    replace_volatile(path, json.dumps(data, ensure_ascii=False).encode(), 0o644)


def told_by_daemon(path: Path, of: type[T]) -> tuple[T, ...]:
    """What the running daemon tells in such a file; empty when none runs, or the file is damaged
    or not for this user."""
    try:
        data = json_value(read_file(path).decode("utf-8", "replace"))
        if data["start_time"] != _start_time(int(data["pid"])):
            return ()
        found: tuple[T, ...] = decode(tuple[of, ...], data["told"])  # type: ignore[valid-type]
        return found
    except (OSError, ValueError, LookupError, TypeError, VsrtuneError):
        return ()


def _start_time(pid: int) -> int:
    return parse_stat(LiveRoot().read(f"/proc/{pid}/stat")).start_time


def _replace(path: Path, new: Path, data: bytes, mode: int, room: int, *, lasting: bool) -> None:
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(new, flags, mode)
        try:
            write_all(fd, data)
            if room:
                claim(fd, len(data), room)
            if lasting:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(new, path)
        if lasting:
            fsync_directory(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def write_all(fd: int, data: bytes) -> None:
    """Write all of ``data``, in as many pieces as the kernel takes."""
    while data:
        data = data[os.write(fd, data) :]


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
