"""What the daemon's adaptive queues are doing, for other processes: /run/vsrtune/queues.json.

Only as true as the daemon that wrote it is alive.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from vsrtune.bounded import json_value
from vsrtune.codec import decode, encode
from vsrtune.durable import read_file, replace_volatile
from vsrtune.errors import VsrtuneError
from vsrtune.proc import parse_stat
from vsrtune.rootfs import HostRoot, LiveRoot
from vsrtune.state import QueueState

DEFAULT_PATH = Path("/run/vsrtune/queues.json")


def write(
    states: tuple[QueueState, ...], path: Path = DEFAULT_PATH, root: HostRoot | None = None
) -> None:
    """Replace the file; it is removed when there is nothing to tell. Raises OSError."""
    if not states:
        path.unlink(missing_ok=True)
        return
    pid = os.getpid()
    data = {
        "pid": pid,
        "start_time": _start_time(root or LiveRoot(), pid),
        "queues": encode(states),
    }
    replace_volatile(path, json.dumps(data, ensure_ascii=False).encode(), 0o644)


def read(path: Path = DEFAULT_PATH, root: HostRoot | None = None) -> tuple[QueueState, ...]:
    """What the daemon that runs tells; nothing when none runs, or the file is damaged or
    not for this user."""
    try:
        data = json_value(read_file(path).decode("utf-8", "replace"))
        if data["start_time"] != _start_time(root or LiveRoot(), int(data["pid"])):
            return ()
        return decode(tuple[QueueState, ...], data["queues"])
    except (OSError, ValueError, LookupError, TypeError, VsrtuneError):
        return ()


def _start_time(root: HostRoot, pid: int) -> int:
    return parse_stat(root.read(f"/proc/{pid}/stat")).start_time
