# SPDX-License-Identifier: GPL-2.0-or-later
"""Compose the readers into one Snapshot. A reader that fails leaves a Problem and hides nothing
else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace

from vsrtune.core.errors import ObserveError
from vsrtune.host.filesystem import HostRoot, LiveRoot
from vsrtune.host.libvirt import DEFAULT_URI, DomainText, LibvirtSource, VirtSource
from vsrtune.model.guest import Guest, Role
from vsrtune.model.host import Nic
from vsrtune.model.plan import Place
from vsrtune.model.snapshot import Problem, Snapshot, SnapshotSlice
from vsrtune.observe.guests import VcpuFinder
from vsrtune.observe.incremental import ObservationCache, glance, recheck
from vsrtune.observe.one_pass import FEW, NotAlone, ObservationPass, unannounced
from vsrtune.observe.qemu_processes import Identity, ProcessTable
from vsrtune.observe.tracing import (
    RESULTS_PATH,
    Counts,
    SeenNic,
    SeenWorker,
    TraceMemory,
    Tracer,
    rx_cpus,
    sender_device,
)
from vsrtune.observe.trust import Judge
from vsrtune.policy.matching import QemuFilter

# Of so many observations for changes without events, one is of the settings of all guests and of
# the host. (On a host with few guests, each is of the guests' settings.)
ROUND = 6
# Of so many, one is of everything.
LONG_ROUND = 60
# While the kernel tells of changes by other programs, those of the guests' settings and those of
# everything come so many times as seldom.
SELDOM = 2


class Observer:
    """Observes one host repeatedly.

    ``virt`` None means a host without libvirt. Without ``memory``, the host's own trace results
    (/run/vsrtune/trace-results.json) are used and never written. Without ``tracer``, a requested
    trace becomes a Problem. ``qemu_filter`` says at each pass whose plain QEMUs may be guests.
    ``pulse`` is called within a pass, to show progress. ``told`` says whether the kernel tells of
    changes by other programs.
    """

    def __init__(
        self,
        root: HostRoot,
        virt: VirtSource | None,
        memory: TraceMemory | None = None,
        tracer: Tracer | None = None,
        qemu_filter: Callable[[], QemuFilter] = QemuFilter,
        pulse: Callable[[], None] = lambda: None,
        told: Callable[[], bool] = lambda: False,
    ) -> None:
        self._root = root
        self._virt = virt
        self._memory = memory if memory is not None else _memory_of(root)
        self._tracer = tracer
        self._qemu_filter = qemu_filter
        self._pulse = pulse
        self._told = told
        self._vcpus = VcpuFinder()
        # libvirt's last description of each domain that it confirmed.
        self._texts: dict[Identity, DomainText] = {}
        self._table = ProcessTable()
        self._known: ObservationCache | None = None
        # Calls of observe_unannounced since the last observation of everything.
        self._calls = 0

    def observe(self, trace_seconds: float = 0.0) -> Snapshot:
        """The host now. With ``trace_seconds``, the kernel first counts for that long who
        transmits and where frames are received, which makes the mapping of busy vhost workers
        EXACT."""
        snapshot = self._whole()
        if trace_seconds <= 0:
            return snapshot
        problems = self._trace(snapshot, trace_seconds)
        snapshot = self._whole()
        return replace(snapshot, problems=snapshot.problems + problems)

    def observe_some(
        self, names: frozenset[str], places: frozenset[Place] = frozenset()
    ) -> SnapshotSlice:
        """Re-read the libvirt guests of these names and the host state that depends on them, or
        where ``places`` says all that has changed of them, only that if it suffices; reuse the
        previous snapshot for the rest. Observes the whole host when that does not suffice. Returns
        the slice that was read."""
        known = self._known
        seen = glance(known, self._root, names, places) if known is not None and places else None
        if seen is None:
            return self._some(names, frozenset())
        self._known = seen
        return seen.refreshed

    def observe_unannounced(self, names: frozenset[str] = frozenset()) -> SnapshotSlice:
        """``observe_some`` for guests that came, went, or have other threads or settings without an
        event, and for those of these names; of everything if the host has changed. The counters of
        the others are read with their settings. Returns the slice that was re-read."""
        self._calls += 1
        known, due = self._known, self._calls % ROUND == 0
        seldom = SELDOM if self._told() else 1
        if known is None or self._calls >= LONG_ROUND * seldom or (due and known.delicate):
            return SnapshotSlice(self._whole())
        try:
            if due:
                # A process may have become a QEMU.
                self._table.forget()
                if self._pass(known).host_differs():
                    return SnapshotSlice(self._whole())
            found = unannounced(known, self._root, self._table, self._judge())
            if self._calls % (ROUND * seldom) == 0 or len(known.held) <= FEW:
                known, changed = recheck(known, self._root)
                unanswered = self._vcpus.unanswered & known.held.keys()
                self._known, found = known, found | changed | unanswered
        except (NotAlone, OSError):
            return SnapshotSlice(self._whole())
        if not names and not found:
            return SnapshotSlice.of(known.snapshot, names)
        return self._some(names, found)

    def remember_fixed(self, irqs: Iterable[tuple[int, str]]) -> None:
        """Mark interrupts that the kernel refused to move, until the next boot."""
        with contextlib.suppress(ObserveError):  # the next pass retries, and is refused again
            self._memory.remember_fixed(irqs)

    def _whole(self) -> Snapshot:
        self._table.forget()
        self._known = self._pass().whole()
        self._calls = 0
        return self._known.snapshot

    def _some(self, names: frozenset[str], pids: frozenset[int]) -> SnapshotSlice:
        if self._known is None:
            return SnapshotSlice(self._whole())
        try:
            self._known = self._pass(self._known).some(names, pids)
        except (NotAlone, ObserveError, OSError):
            # A full pass records what cannot be read, and goes on.
            return SnapshotSlice(self._whole())
        return self._known.refreshed

    def _pass(self, known: ObservationCache | None = None) -> ObservationPass:
        self._vcpus.update(self._qemu_filter())
        return ObservationPass(
            self._root,
            self._virt,
            self._memory,
            self._vcpus,
            self._table,
            self._judge(),
            self._texts,
            known,
            self._pulse,
        )

    def _judge(self) -> Judge:
        return Judge(self._root, self._qemu_filter().users, self._believed)

    def _believed(self, pid: int, start_time: int) -> bool:
        """Whether the last pass believed this process."""
        held = self._known.held.get(pid) if self._known is not None else None
        return held is not None and held.process.start_time == start_time

    def _trace(self, snapshot: Snapshot, seconds: float) -> tuple[Problem, ...]:
        if self._tracer is None:
            return (Problem("trace", "this host cannot be traced"),)
        interfaces = [i for guest in snapshot.guests for i in guest.interfaces]
        if not interfaces:
            return ()
        devices = (
            {i.target for i in interfaces if i.kind.rings},
            {i.target for i in interfaces if not i.kind.rings},
            {lower for i in interfaces for lower in i.lower},
        )
        try:
            sent, received = self._tracer.trace(devices, seconds)
            self._memory.remember(
                [w for guest in snapshot.guests for w in _seen_workers(guest, sent)],
                _seen_nics(snapshot.host.nics, received),
                alive=[t.key for guest in snapshot.guests for t in guest.threads],
            )
        except ObserveError as error:
            return (Problem("trace", str(error)),)
        return ()


def live_observer(
    uri: str = DEFAULT_URI,
    qemu_filter: Callable[[], QemuFilter] = QemuFilter,
    pulse: Callable[[], None] = lambda: None,
    told: Callable[[], bool] = lambda: False,
) -> Observer:
    """An observer of this host. A libvirt that is missing or does not run leaves a Problem; plain
    QEMUs are still found."""
    return Observer(
        LiveRoot(), LibvirtSource(uri), TraceMemory(), Tracer(), qemu_filter, pulse, told
    )


def _memory_of(root: HostRoot) -> TraceMemory:
    try:
        return TraceMemory(None, root.read(str(RESULTS_PATH)))
    except OSError:
        return TraceMemory(None)


def _seen_workers(guest: Guest, sent: Counts) -> list[SeenWorker]:
    ifindexes = {i.target: i.ifindex for i in guest.interfaces}
    return [
        SeenWorker(thread.key, device, ifindexes[device])
        for thread in guest.by_role(Role.VHOST)
        if (device := sender_device(sent, thread.key.tid, ifindexes)) is not None
    ]


def _seen_nics(nics: Iterable[Nic], received: Counts) -> list[SeenNic]:
    return [
        SeenNic(nic.name, nic.ifindex, cpus)
        for nic in nics
        if not nic.bridge and (cpus := rx_cpus(received, nic.name)) is not None
    ]
