# SPDX-License-Identifier: GPL-2.0-or-later
"""Link notifications of the kernel (RTNLGRP_LINK), and settings read by polling, as reasons
for a pass.

The threads here never change anything. LinkEvents never reads guests; it drops notifications
that say nothing new and those about devices of no guest.
"""

from __future__ import annotations

import errno
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from vsrtune.daemon.events.libvirt import Dirty
from vsrtune.daemon.events.thread import Background
from vsrtune.daemon.scope import FULL, NOTHING, Scope
from vsrtune.daemon.systemd import LOGGER
from vsrtune.host import netlink
from vsrtune.host.filesystem import HostRoot
from vsrtune.host.netlink import LinkMonitor
from vsrtune.model.guest import Guest
from vsrtune.model.host import Link
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import DEVICE_SETTINGS

# Seconds within which a snapshot should show a new device as a guest's.
GRACE = 3.0
RETRY = 5.0
_BUFFER = 1 << 20
_TURN = 1.0


class LinkEvents(Background):
    """Listens in this network namespace from ``start`` to ``stop``.

    ``snapshot`` returns the latest snapshot. ``dirty`` is called from this thread. ``buffer``
    is the size of the socket's buffer in bytes, as far as net.core.rmem_max lets it.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot | None],
        dirty: Dirty,
        *,
        grace: float = GRACE,
        buffer: int = _BUFFER,
    ) -> None:
        super().__init__("link-events")
        self._snapshot = snapshot
        self._dirty = dirty
        self._grace = grace
        self._buffer = buffer
        self._links: dict[int, Link] = {}
        self._known: tuple[Snapshot | None, LinkInterest] | None = None
        # When a snapshot should show a new device, by its index, monotonic seconds.
        self._new: dict[int, float] = {}
        self.listening = threading.Event()

    def run(self) -> None:
        """Listen. Log a failure once while it lasts, and try again."""
        said = first = False
        while not self._stopping.is_set():
            try:
                with LinkMonitor(self._buffer) as monitor:
                    self._reread()
                    if first:
                        self._dirty("news of network devices were lost")
                    first = True
                    self.listening.set()
                    said = False
                    self._listen(monitor)
            except OSError as error:
                if not said:
                    LOGGER.warning(
                        "no news of network devices: %s; changes are found by the rescan", error
                    )
                said = True
                self._stopping.wait(RETRY)

    def _listen(self, monitor: LinkMonitor) -> None:
        while not self._stopping.is_set():
            ready, _, _ = select.select([monitor], [], [], _TURN)
            if ready:
                try:
                    news = monitor.read()
                except OSError as error:
                    if error.errno != errno.ENOBUFS:
                        raise
                    # The buffer overflowed: the lost notifications are unknown.
                    self._dirty("news of network devices were lost")
                    self._reread()
                    continue
                for link, exists in news:
                    self._hear(link, exists)
            self._claim()

    def _reread(self) -> None:
        self._links = {link.index: link for link in netlink.links()}

    def _hear(self, link: Link, exists: bool) -> None:
        old = self._links.get(link.index)
        new = link if exists else None
        if new is None:
            self._links.pop(link.index, None)
            self._new.pop(link.index, None)
        else:
            self._links[link.index] = new
            if old is None:
                self._new[link.index] = time.monotonic() + self._grace
        what = "gone" if new is None else "new" if old is None else "changed"
        if old != new:
            self._tell(f"{link.name} is {what}", concerned(self._devices(), old, new))

    def _claim(self) -> None:
        """Mark everything dirty for a device that no snapshot shows in time."""
        now = time.monotonic()
        due = [index for index, when in self._new.items() if when <= now]
        for index in due:
            del self._new[index]
            link = self._links.get(index)
            if link is not None and unclaimed(self._devices(), link):
                self._dirty(f"{link.name} may be a guest's")

    def _devices(self) -> LinkInterest:
        """The link interest of the latest snapshot, found once for each."""
        snapshot = self._snapshot()
        if self._known is None or self._known[0] is not snapshot:
            self._known = snapshot, devices(snapshot)
        return self._known[1]

    def _tell(self, reason: str, scope: Scope) -> None:
        if scope.host:
            self._dirty(reason)
        else:
            for guest in scope.guests:
                self._dirty(reason, guest)


# Kinds of links that QEMU opens.
GUEST_KINDS = ("macvtap", "napi_macvtap", "tun")


@dataclass(frozen=True, slots=True)
class LinkInterest:
    """``owners`` maps the index of a guest's device to the scope of its guests. ``lowers``
    names the lower devices of guests, and the host's NICs."""

    owners: dict[int, Scope]
    lowers: frozenset[str]


def devices(snapshot: Snapshot | None) -> LinkInterest:
    """The link interest of a snapshot; empty before the first."""
    if snapshot is None:
        return LinkInterest({}, frozenset())
    owners: dict[int, Scope] = {}
    lowers = {nic.name for nic in snapshot.host.nics}
    for guest in snapshot.guests:
        for interface in guest.interfaces:
            owners[interface.ifindex] = owners.get(interface.ifindex, NOTHING).merge(whose(guest))
            lowers.update(interface.lower)
    return LinkInterest(owners, frozenset(lowers))


def whose(guest: Guest) -> Scope:
    """The scope that re-reads a guest; plain QEMU needs a pass over everything."""
    return Scope.of(guest.name) if guest.source == "libvirt" else FULL


def concerned(known: LinkInterest, old: Link | None, new: Link | None) -> Scope:
    """The scope of a device's change from ``old`` to ``new``; None is a device that does not
    exist. A new device belongs to no guest yet (see ``unclaimed``)."""
    scope = NOTHING
    for link in (old, new):
        if link is not None:
            if link.name in known.lowers:
                return FULL
            scope = scope.merge(known.owners.get(link.index, NOTHING))
    return scope if old != new else NOTHING


def unclaimed(known: LinkInterest, link: Link) -> bool:
    """Whether a device may belong to a guest that no snapshot shows. (libvirt makes a
    guest's devices before it announces the guest.)"""
    return link.kind in GUEST_KINDS and link.index not in known.owners


def settings(snapshot: Snapshot | None) -> tuple[str, ...]:
    """Files of settings for which the kernel has no events: of the CPUs, the scheduler, the
    guests' devices and their lower devices."""
    if snapshot is None or not snapshot.guests:
        return ()
    interfaces = [i for guest in snapshot.guests for i in guest.interfaces]
    below = {name for i in interfaces for name in i.lower}
    kernel = ("sched_rt_runtime_us", "sched_rr_timeslice_ms")
    files = ["/sys/devices/system/cpu/online"]
    files += [f"/proc/sys/kernel/{name}" for name in kernel] if below else []
    nics = [nic for nic in snapshot.host.nics if nic.name in below]
    files += [f"/sys/class/net/{nic.name}/threaded" for nic in nics]
    irqs = [irq for nic in nics for irq in nic.irqs]
    for irq in irqs + [irq for g in snapshot.guests for device in g.passed for irq in device.irqs]:
        # The first is the requested affinity; the second follows when it fires.
        files.append(f"/proc/irq/{irq.number}/smp_affinity_list")
        files.append(f"/proc/irq/{irq.number}/effective_affinity_list")
    for row in DEVICE_SETTINGS:
        if not row.announced:
            names = {i.target for i in interfaces if i.kind in row.kinds}
            files += [f"/sys/class/net/{name}/{row.path}" for name in sorted(names)]
    return tuple(files)


EVERY = 2.0
# While the kernel tells of changes, only each of so many rounds reads all files, and the others
# those of which it does not tell.
SELDOM = 30
UNTOLD = ("/sys/devices/system/cpu/online",)


class Patrol(Background):
    """Reads the files of ``settings`` every ``every`` seconds, from ``start`` to ``stop``.
    ``snapshot`` returns the latest snapshot; ``dirty`` is called from this thread; ``told`` says
    whether the kernel tells of changes."""

    def __init__(
        self,
        root: HostRoot,
        snapshot: Callable[[], Snapshot | None],
        dirty: Dirty,
        every: float = EVERY,
        told: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__("patrol")
        self._told = told
        self._rounds = 0
        self._root = root
        self._snapshot = snapshot
        self._dirty = dirty
        self._every = every
        self._seen: dict[str, str | None] = {}

    def run(self) -> None:
        """One round after the other."""
        while not self._stopping.wait(self._every):
            self.round()

    def round(self) -> None:
        """Read every file that is due. A file read for the first time is only remembered, because
        the pass that added it has read it too."""
        files = settings(self._snapshot())
        seldom = self._told() and self._rounds % SELDOM != 0
        self._rounds += 1
        now = {file: self._read(file) for file in files if not seldom or file in UNTOLD}
        changed = [f for f, text in now.items() if f in self._seen and self._seen[f] != text]
        self._seen = {
            f: now.get(f, self._seen.get(f)) for f in files if f in now or f in self._seen
        }
        if changed:
            self._dirty(f"{', '.join(changed)} changed")

    def _read(self, path: str) -> str | None:
        try:
            return self._root.read(path)
        except OSError:
            return None
