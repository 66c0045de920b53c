"""Measured loads, kept for other processes and the next start: /run/vsrtune/load.json.

Written by the daemon alone, in which they are measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from vsrtune.core.codec import encode
from vsrtune.core.errors import ObserveError
from vsrtune.core.untrusted import kept
from vsrtune.host.state_files import read_file, replace_volatile
from vsrtune.model.guest import ThreadKey
from vsrtune.model.load import measured
from vsrtune.model.snapshot import Snapshot

DEFAULT_PATH = Path("/run/vsrtune/load.json")

_VERSION = 1


@dataclass(frozen=True, slots=True)
class ThreadLoad:
    """One thread's windows, as in model.Thread."""

    key: ThreadKey
    load: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Loads:
    """The file's content. ``moves``: threads that were moved from one CPU to another since the
    daemon started, ``last_moves`` those of the last pass that moved any, ``last_time`` when that
    was, in seconds since the epoch."""

    boot_id: str
    threads: tuple[ThreadLoad, ...] = ()
    moves: int = 0
    last_moves: int = 0
    last_time: float = 0.0
    version: int = _VERSION

    @property
    def by_thread(self) -> dict[ThreadKey, tuple[float, ...]]:
        """The windows of each thread."""
        return {t.key: t.load for t in self.threads}


def parse(text: str, boot_id: str) -> Loads:
    """Read the file's text. Text that is damaged, of another version or of another boot counts
    as empty: it is measured again."""
    return kept(Loads(boot_id), text)


def load(boot_id: str, path: Path = DEFAULT_PATH) -> Loads:
    """The file; empty when there is none."""
    try:
        return parse(read_file(path).decode("utf-8", "replace"), boot_id)
    except OSError:
        return Loads(boot_id)


def save(loads: Loads, path: Path = DEFAULT_PATH) -> None:
    """Replace the file. Raises ObserveError."""
    try:
        replace_volatile(path, json.dumps(encode(loads)).encode(), 0o644)
    except OSError as error:
        raise ObserveError(
            f"cannot remember the measured loads: {error.strerror}",
            where=str(path),
            hint="vsrtune show and plan do without them; make room or permissions there",
        ) from error


def with_loads(snapshot: Snapshot, path: Path = DEFAULT_PATH) -> Snapshot:
    """The snapshot with the loads that the daemon has measured, if it has."""
    loads = load(snapshot.host.boot_id, path).by_thread
    return measured(snapshot, loads) if loads else snapshot
