# SPDX-License-Identifier: GPL-2.0-or-later
"""The share of a CPU that each thread demands, in windows of time.

A window runs from one reading of a thread to the first one at least ``LEAST_NS`` later (less where
an operator wants more frequent passes: ``least_ns``), so the number and regularity of readings do
not matter. The latest ``WINDOWS`` windows are kept; a reason to move a thread must hold in each.

A thread demands the time that it ran and the time that it waited for a CPU (the first two fields
of /proc/TID/schedstat). Waiting counts for at most three times the running: a thread that takes
turns with three equals waits that long. When a thread waits behind a busy real-time thread for
seconds, nobody knows what it would do with a CPU.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import DATA_PLANE, Guest, NicKind, Thread, ThreadKey
from vsrtune.model.plan import Action
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import ThreadAffinity, VcpuPin, pinned_cpus

LEAST_NS = 4_500_000_000
WINDOWS = 3
_TURNS = 3


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of a thread: when (any steady clock), how long it ran, how long it waited;
    nanoseconds."""

    at_ns: int
    run_ns: int
    wait_ns: int


@dataclass(frozen=True, slots=True)
class Windows:
    """A thread's latest windows, the newest last, and where the next one begins: None at the next
    reading."""

    begin: Reading | None = None
    load: tuple[float, ...] = ()

    def update(self, now: Reading, least_ns: int = LEAST_NS) -> Windows:
        """Add a window if enough time has passed since the last one."""
        if self.begin is None:
            return Windows(now, self.load)
        if now.at_ns - self.begin.at_ns < least_ns:
            return self
        load = demand(self.begin, now)
        return Windows(now, (*self.load, load)[-WINDOWS:])


def demand(before: Reading, now: Reading) -> float:
    """The share of a CPU demanded between two readings, 0 to 1, in thousandths."""
    elapsed = now.at_ns - before.at_ns
    ran = max(now.run_ns - before.run_ns, 0)
    waited = min(max(now.wait_ns - before.wait_ns, 0), _TURNS * ran)
    return round(min((ran + waited) / elapsed, 1.0), 3) if elapsed > 0 else 0.0


def mean(load: Sequence[float]) -> float:
    """The mean of some windows; 0 for none."""
    return round(sum(load) / len(load), 3) if load else 0.0


def merged(load: tuple[float, ...]) -> tuple[float, ...]:
    """All windows merged into one, for use after threads have moved: a load beside some threads is
    not the load beside others."""
    return (mean(load),) if load else ()


def least_ns(interval: float) -> int:
    """The least length of a window when a full pass runs every ``interval`` seconds: shorter than
    the interval, so that each full pass ends a window."""
    return min(LEAST_NS, int(interval * 0.9e9))


def parse_schedstat(text: str, at_ns: int) -> Reading:
    """/proc/TID/schedstat as a reading. Raises ValueError."""
    fields = text.split()
    if len(fields) < 2:
        raise ValueError("schedstat has less than two fields")
    return Reading(at_ns, int(fields[0]), int(fields[1]))


def measured(snapshot: Snapshot, loads: Mapping[ThreadKey, tuple[float, ...]]) -> Snapshot:
    """The snapshot with ``loads`` as the windows of its threads."""
    return replace(snapshot, guests=tuple(_measured(g, loads) for g in snapshot.guests))


def _measured(guest: Guest, loads: Mapping[ThreadKey, tuple[float, ...]]) -> Guest:
    if all(loads.get(t.key, ()) == t.load for t in guest.threads):
        return guest
    threads = (replace(t, load=loads.get(t.key, ())) for t in guest.threads)
    return replace(guest, threads=tuple(threads))


def data_plane(snapshot: Snapshot) -> list[Thread]:
    """The threads whose load vsrtune measures: vcpu, vhost and NAPI threads."""
    return [t for g in snapshot.guests for t in g.threads if t.role in DATA_PLANE]


def moved(old: CpuSet, new: CpuSet) -> bool:
    """Whether a thread that was bound to one CPU is now bound to another one."""
    return len(old) == len(new) == 1 and old != new


def moves(actions: Iterable[Action]) -> int:
    """How many actions take a thread from one CPU to another."""
    pins = (a for a in actions if isinstance(a.target, ThreadAffinity | VcpuPin))
    pairs = ((pinned_cpus(a.before), pinned_cpus(a.after)) for a in pins)
    return sum(moved(old, new) for old, new in pairs if old is not None and new is not None)


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Time of one CPU since the boot, in clock ticks (/proc/stat). ``idle`` includes iowait."""

    total: int
    idle: int
    softirq: int

    def since(self, before: CpuTimes | None) -> CpuShares | None:
        """The shares between two readings; None without an earlier one."""
        if before is None or self.total <= before.total:
            return None
        total = self.total - before.total
        # The kernel's idle time can go back by a tick.
        idle = min(max(self.idle - before.idle, 0), total)
        softirq = min(max(self.softirq - before.softirq, 0), total)
        return CpuShares(round(1 - idle / total, 4), round(softirq / total, 4))


@dataclass(frozen=True, slots=True)
class CpuShares:
    """The shares of a CPU's time that it was ``busy``, and that went to SoftIRQs, 0 to 1."""

    busy: float
    softirq: float


@dataclass(frozen=True, slots=True)
class GuestFrames:
    """Frames of a guest's devices since these were made: ``arrived`` for the guest, the
    ``dropped`` ones among them, ``sent`` by it. A router forwards the frames that it sends."""

    arrived: int = 0
    dropped: int = 0
    sent: int = 0

    def __add__(self, more: GuestFrames) -> GuestFrames:
        return GuestFrames(
            self.arrived + more.arrived, self.dropped + more.dropped, self.sent + more.sent
        )

    def since(self, before: GuestFrames | None, seconds: float) -> FrameRates | None:
        """The rates between two counts; None without an earlier one, or when a counter is lower
        than before, because its device is another one."""
        if before is None or seconds <= 0:
            return None
        sent, dropped = self.sent - before.sent, self.dropped - before.dropped
        if min(sent, dropped, self.arrived - before.arrived) < 0:
            return None
        return FrameRates(round(sent / seconds, 1), round(dropped / seconds, 1))


@dataclass(frozen=True, slots=True)
class FrameRates:
    """Frames a second that a guest ``forwarded``, and that were ``dropped`` in front of it."""

    forwarded: float
    dropped: float


def shared_devices(guests: Iterable[Guest]) -> frozenset[int]:
    """Devices of several guests, by ifindex. Their counters tell nothing of one guest alone."""
    users = Counter(i.ifindex for g in guests for i in g.interfaces)
    return frozenset(index for index, count in users.items() if count > 1)


def counted_devices(guest: Guest, shared: Collection[int]) -> tuple[tuple[str, NicKind], ...]:
    """The guest's devices, with their kinds, if their counters tell what this guest does. None of
    them if one is ``shared``, or of a kind whose counters nobody knows."""
    for interface in guest.interfaces:
        if interface.kind is NicKind.OTHER or interface.ifindex in shared:
            return ()
    return tuple((i.target, i.kind) for i in guest.interfaces)


@dataclass(frozen=True, slots=True, order=True)
class DropPlace:
    """Where frames are dropped: a device or a CPU (``CPU 0``), the place in it, and the guest that
    owns the interface ("" when it serves several). A bond with other ``ports`` (by ifindex) is
    another place: it keeps what a port counted that has left it."""

    where: str
    place: str
    guest: str = ""
    ports: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HostSample:
    """The host at one moment. ``at_ns`` is the time of any steady clock, in nanoseconds; each of
    ``threads`` has its own. ``drops`` and ``frames`` (by the guests' devices) count since the
    devices were made, ``interrupts`` (by number, over all CPUs) since the boot."""

    snapshot: Snapshot
    at_ns: int
    threads: Mapping[ThreadKey, Reading] = field(default_factory=dict)
    cpus: Mapping[int, CpuTimes] = field(default_factory=dict)
    drops: Mapping[DropPlace, int] = field(default_factory=dict)
    interrupts: Mapping[int, int] = field(default_factory=dict)
    frames: Mapping[str, GuestFrames] = field(default_factory=dict)


class PathStage(enum.StrEnum):
    """A stage of the path, in the order in which frames pass them."""

    INTERRUPTS = "interrupts"
    RING = "tap ring"
    RECEIVE = "vhost receive"
    VCPU = "vcpu"
    TRANSMIT = "vhost transmit"
    OUTSIDE = "outside"


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The ``stage`` that limits ``guest``. ``where`` is the thread, CPU or device, ``why`` what was
    measured, ``help`` what would raise the limit. ``sure`` is False when the loss is small, the
    thread has some time left, or nothing is lost yet."""

    guest: str
    stage: PathStage
    where: str
    why: str
    help: str
    sure: bool
