"""Who has the journal: one process at a time, by an exclusive flock on ``<path>.lock``.

It stands beside the journal, because a compaction replaces the journal's inode.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from vsrtune.core.errors import JournalError, Lasting
from vsrtune.host.state_files import open_private


def take_lock(path: Path) -> int:
    """Take the lock and leave our pid in it: the descriptor that holds it. Raises
    JournalError when another process has it, OSError when it cannot be made."""
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
    # The pid only serves the message above: a full disk may cost it.
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
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    text = b" ".join(words).decode(errors="replace").strip()
    return f" ({text})" if text else ""
