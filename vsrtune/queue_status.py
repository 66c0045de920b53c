"""What the daemon knows and no command can see by itself, for other processes: its adaptive
queues (/run/vsrtune/queues.json), threads that starve (/run/vsrtune/starved.json).

Only as true as the daemon that wrote it is alive.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TypeVar

from vsrtune.core.codec import decode, encode
from vsrtune.core.errors import VsrtuneError
from vsrtune.core.untrusted import json_value
from vsrtune.host.filesystem import HostRoot, LiveRoot
from vsrtune.host.procfs import parse_stat
from vsrtune.host.state_files import read_file, replace_volatile
from vsrtune.model.daemon_state import QueueState, Starved

DEFAULT_PATH = Path("/run/vsrtune/queues.json")
STARVED_PATH = Path("/run/vsrtune/starved.json")

T = TypeVar("T")


def write(
    states: tuple[QueueState, ...] | tuple[Starved, ...],
    path: Path = DEFAULT_PATH,
    root: HostRoot | None = None,
) -> None:
    """Replace the file; it is removed when there is nothing to tell. Raises OSError."""
    if not states:
        path.unlink(missing_ok=True)
        return
    pid = os.getpid()
    data = {
        "pid": pid,
        "start_time": _start_time(root or LiveRoot(), pid),
        "told": encode(states),
    }
    replace_volatile(path, json.dumps(data, ensure_ascii=False).encode(), 0o644)


def read(path: Path = DEFAULT_PATH, root: HostRoot | None = None) -> tuple[QueueState, ...]:
    """What the daemon that runs tells of its queues; nothing when none runs, or the file is
    damaged or not for this user."""
    return _read(tuple[QueueState, ...], path, root)


def read_starved(path: Path = STARVED_PATH, root: HostRoot | None = None) -> tuple[Starved, ...]:
    """As ``read``, of threads that starve."""
    return _read(tuple[Starved, ...], path, root)


def _read(kind: type[tuple[T, ...]], path: Path, root: HostRoot | None) -> tuple[T, ...]:
    try:
        data = json_value(read_file(path).decode("utf-8", "replace"))
        if data["start_time"] != _start_time(root or LiveRoot(), int(data["pid"])):
            return ()
        return decode(kind, data["told"])
    except (OSError, ValueError, LookupError, TypeError, VsrtuneError):
        return ()


def _start_time(root: HostRoot, pid: int) -> int:
    return parse_stat(root.read(f"/proc/{pid}/stat")).start_time
