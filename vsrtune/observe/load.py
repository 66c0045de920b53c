# SPDX-License-Identifier: GPL-2.0-or-later
"""Measures the CPU time that threads demand, a few file reads at a time.

It reads /proc/TID/schedstat itself, because the data that a pass shows of an unchanged thread may
be older than the pass.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vsrtune.core.codec import encode
from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import ObserveError
from vsrtune.core.untrusted import kept
from vsrtune.host.filesystem import HostRoot
from vsrtune.host.state_files import read_file, replace_volatile
from vsrtune.model.guest import ThreadKey
from vsrtune.model.load import (
    LEAST_NS,
    Reading,
    Windows,
    data_plane,
    measured,
    merged,
    moved,
    parse_schedstat,
)
from vsrtune.model.snapshot import Snapshot

LOAD_PATH = Path("/run/vsrtune/load.json")

_VERSION = 2


@dataclass(frozen=True, slots=True)
class ThreadLoad:
    """One thread's windows, as in model.guest.Thread."""

    key: ThreadKey
    load: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Loads:
    """The content of the file."""

    boot_id: str
    threads: tuple[ThreadLoad, ...] = ()
    version: int = _VERSION

    @property
    def by_thread(self) -> dict[ThreadKey, tuple[float, ...]]:
        """The windows of each thread."""
        return {t.key: t.load for t in self.threads}


def load(boot_id: str, path: Path = LOAD_PATH) -> Loads:
    """The content of the file; empty when it cannot be read, is damaged, of another version or of
    another boot, because loads can be measured again."""
    try:
        return kept(Loads(boot_id), read_file(path).decode("utf-8", "replace"))
    except OSError:
        return Loads(boot_id)


def save(loads: Loads, path: Path = LOAD_PATH) -> None:
    """Replace the file. Raises ObserveError."""
    try:
        replace_volatile(path, json.dumps(encode(loads)).encode(), 0o644)
    except OSError as error:
        raise ObserveError(
            f"cannot remember the measured loads: {error.strerror}",
            where=str(path),
            hint="vsrtune show and plan do without them; make room or permissions there",
        ) from error


def with_loads(snapshot: Snapshot, path: Path = LOAD_PATH) -> Snapshot:
    """The snapshot with the loads that the daemon measured, if any."""
    loads = load(snapshot.host.boot_id, path).by_thread
    return measured(snapshot, loads) if loads else snapshot


# Threads read in one pass. Those longest due come first, so with very many threads the windows
# grow longer, and the pass does not.
BATCH = 1000


class LoadMeter:
    """Loads of the data plane threads of one host. ``clock`` gives nanoseconds, ``least_ns`` is
    the least length of a window."""

    def __init__(
        self,
        root: HostRoot,
        path: Path = LOAD_PATH,
        clock: Callable[[], int] = time.monotonic_ns,
        least_ns: int = LEAST_NS,
    ) -> None:
        self._root = root
        self._least = least_ns
        self._path = path
        self._clock = clock
        self._known: dict[ThreadKey, Windows] | None = None
        self._cpus: dict[ThreadKey, CpuSet] = {}
        self._changed = False

    def update(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with the load of every thread that has been measured so far."""
        threads, known = data_plane(snapshot), self._known
        if known is None:
            # Loads that an earlier daemon measured are a beginning, but no reason to move.
            before = load(snapshot.host.boot_id, self._path).by_thread
            known = {key: Windows(load=merged(one)) for key, one in before.items()}
        known = self._known = {t.key: known.get(t.key, Windows()) for t in threads}
        if any(t.key in self._cpus and moved(self._cpus[t.key], t.affinity) for t in threads):
            # The loads were measured beside other threads.
            self._changed = True
            known = self._known = {k: Windows(load=merged(w.load)) for k, w in known.items()}
        self._cpus = {t.key: t.affinity for t in threads}
        for key in self._due(known):
            reading = read_schedstat(self._root, key, self._clock)
            if reading is not None:
                windows = known[key].update(reading, self._least)
                self._changed |= windows.load != known[key].load
                known[key] = windows
        return measured(snapshot, {key: one.load for key, one in known.items() if one.load})

    @property
    def fresh(self) -> bool:
        """Whether there are loads that were not saved yet."""
        return self._changed

    def remember(self, boot_id: str) -> None:
        """Write the file if there are new loads. Raises ObserveError."""
        if self._changed:
            self._changed = False
            threads = (ThreadLoad(k, w.load) for k, w in (self._known or {}).items() if w.load)
            save(Loads(boot_id, tuple(threads)), self._path)

    def _due(self, known: Mapping[ThreadKey, Windows]) -> list[ThreadKey]:
        now = self._clock()
        begun = {key: one.begin.at_ns if one.begin is not None else 0 for key, one in known.items()}
        due = (key for key, at in begun.items() if not at or now - at >= self._least)
        return sorted(due, key=lambda key: (begun[key], key))[:BATCH]


def read_schedstat(
    root: HostRoot, key: ThreadKey, clock: Callable[[], int] = time.monotonic_ns
) -> Reading | None:
    """How long a thread ran and waited by now; ``clock`` gives nanoseconds. None when it is gone,
    or the kernel does not report it (CONFIG_SCHED_INFO)."""
    try:
        text = root.read(f"/proc/{key.pid}/task/{key.tid}/schedstat")
        return parse_schedstat(text, clock())
    except (OSError, ValueError):
        return None
