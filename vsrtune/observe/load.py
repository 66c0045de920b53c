# SPDX-License-Identifier: GPL-2.0-or-later
"""Measures the CPU time that threads demand, a few file reads at a time.

It reads /proc/TID/schedstat itself, because the data that a pass shows of an unchanged thread may
be older than the pass.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from vsrtune.core.codec import encode
from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import ObserveError
from vsrtune.core.untrusted import kept
from vsrtune.host.filesystem import HostRoot
from vsrtune.host.state_files import read_file, replace_volatile
from vsrtune.model.guest import Thread, ThreadKey
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

_VERSION = 1


@dataclass(frozen=True, slots=True)
class ThreadLoad:
    """One thread's windows, as in model.guest.Thread."""

    key: ThreadKey
    load: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Loads:
    """The content of the file. ``moves`` counts threads that were moved from one CPU to another
    since the daemon started, ``last_moves`` those of the last pass that moved any; ``last_time``
    is the time of that pass, in seconds since the epoch."""

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


@dataclass(slots=True)
class _Known:
    """``windows`` is None until the next window begins."""

    cpus: CpuSet
    windows: Windows | None = None
    load: tuple[float, ...] = ()


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
        self._known: dict[ThreadKey, _Known] | None = None
        self._changed = False

    def update(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with the load of every thread that has been measured so far."""
        threads = data_plane(snapshot)
        if self._known is None:
            # Loads that an earlier daemon measured are a beginning, but no reason to move.
            before = load(snapshot.host.boot_id, self._path).by_thread
            self._known = {
                t.key: _Known(t.affinity, load=merged(before.get(t.key, ()))) for t in threads
            }
        known = self._known
        alive = {t.key for t in threads}
        for key in [k for k in known if k not in alive]:
            del known[key]
        if any(t.key in known and moved(known[t.key].cpus, t.affinity) for t in threads):
            self._begin_anew()
        for thread in threads:
            known.setdefault(thread.key, _Known(thread.affinity)).cpus = thread.affinity
        for thread in self._due(threads):
            self._read(thread.key, known[thread.key])
        return measured(snapshot, {key: one.load for key, one in known.items() if one.load})

    @property
    def fresh(self) -> bool:
        """Whether there are loads that were not saved yet."""
        return self._changed

    def remember(self, boot_id: str, moves: int, last_moves: int, last_time: float) -> None:
        """Write the file if there are new loads. Raises ObserveError."""
        if self._changed:
            self._changed = False
            threads = (ThreadLoad(k, w.load) for k, w in (self._known or {}).items() if w.load)
            save(Loads(boot_id, tuple(threads), moves, last_moves, last_time), self._path)

    def _begin_anew(self) -> None:
        """Merge the windows and begin new ones: threads have moved, so the loads were measured
        beside other threads."""
        self._changed = True
        for one in (self._known or {}).values():
            one.windows, one.load = None, merged(one.load)

    def _due(self, threads: Iterable[Thread]) -> list[Thread]:
        now, known = self._clock(), self._known or {}
        begun = {}
        for thread in threads:
            windows = known[thread.key].windows
            begun[thread.key] = 0 if windows is None else windows.begin.at_ns
            if windows is not None and now - windows.begin.at_ns < self._least:
                del begun[thread.key]
        due = [t for t in threads if t.key in begun]
        return sorted(due, key=lambda t: (begun[t.key], t.key))[:BATCH]

    def _read(self, key: ThreadKey, one: _Known) -> None:
        reading = read_schedstat(self._root, key, self._clock)
        if reading is None:
            return
        if one.windows is None:
            one.windows = Windows(reading, one.load)
            return
        one.windows = one.windows.update(reading, self._least)
        self._changed = self._changed or one.load != one.windows.load
        one.load = one.windows.load


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
