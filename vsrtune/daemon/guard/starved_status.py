# SPDX-License-Identifier: GPL-2.0-or-later
"""The starving threads that the guard found, in a file for other processes (`vsrtune show`)."""

from __future__ import annotations

import json
import os
from pathlib import Path

from vsrtune.core.codec import decode, encode
from vsrtune.core.errors import VsrtuneError
from vsrtune.core.untrusted import json_value
from vsrtune.host.filesystem import LiveRoot
from vsrtune.host.procfs import parse_stat
from vsrtune.host.state_files import read_file, replace_volatile
from vsrtune.model.daemon_state import Starved

STARVED_PATH = Path("/run/vsrtune/starved.json")


def write_starved(starved: tuple[Starved, ...], path: Path = STARVED_PATH) -> None:
    """Replace the file, or remove it when nothing starves. Raises OSError."""
    if not starved:
        path.unlink(missing_ok=True)
        return
    pid = os.getpid()
    data = {"pid": pid, "start_time": _start_time(pid), "told": encode(starved)}
    replace_volatile(path, json.dumps(data, ensure_ascii=False).encode(), 0o644)


def read_starved(path: Path = STARVED_PATH) -> tuple[Starved, ...]:
    """The starving threads as the running daemon reports them; empty when none runs, or the file
    is damaged or not for this user."""
    try:
        data = json_value(read_file(path).decode("utf-8", "replace"))
        if data["start_time"] != _start_time(int(data["pid"])):
            return ()
        return decode(tuple[Starved, ...], data["told"])
    except (OSError, ValueError, LookupError, TypeError, VsrtuneError):
        return ()


def _start_time(pid: int) -> int:
    return parse_stat(LiveRoot().read(f"/proc/{pid}/stat")).start_time
