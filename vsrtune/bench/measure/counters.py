# SPDX-License-Identifier: GPL-2.0-or-later
"""The kernel's counters of lost frames, on the host of the routers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import psutil

from vsrtune.bench.measure.accounting import Losses
from vsrtune.bench.spec.model import Router
from vsrtune.cli.options import running_guest
from vsrtune.core.errors import VsrtuneError
from vsrtune.host.filesystem import HostRoot
from vsrtune.host.netdev import CLASS, NetReader, parse_softnet
from vsrtune.model.guest import Guest
from vsrtune.model.snapshot import Snapshot

# The counter files of frames that are lost, by kind of loss.
Places = Mapping[str, Collection[str]]


def guests_of(router: Router, snapshot: Snapshot) -> tuple[Guest, ...]:
    """The running guests that are the router; none for a native one. Raises
    VsrtuneError when one does not run."""
    return tuple(running_guest(snapshot, name) for name in router.guests)


def places(root: HostRoot, snapshot: Snapshot, routers: Iterable[Router]) -> Places:
    """The places where frames of these routers can be lost: the devices through which they come
    and go, and the rings of the guests' taps."""
    net = NetReader(root)
    lowers: set[str] = set()
    rings: set[str] = set()
    for router in routers:
        if router.native:
            macs = {leg.mac.lower() for leg in (router.forth, router.back) if leg is not None}
            for name, addresses in psutil.net_if_addrs().items():
                if any(a.family == psutil.AF_LINK and a.address in macs for a in addresses):
                    lowers.add(name)
        # Members of a group name the same devices, each of which counts once.
        for interface in (i for guest in guests_of(router, snapshot) for i in guest.interfaces):
            lowers.update(interface.lower)
            device = net.device(interface.target)
            # A macvtap receives what goes to its guest; a tun device sends it.
            counter = "tx_dropped" if device is not None and device.tun else "rx_dropped"
            rings.add(f"{CLASS}/{interface.target}/statistics/{counter}")
    ways = [f"{CLASS}/{name}/statistics" for name in sorted(lowers)]
    return {
        "refused": [f"{way}/tx_dropped" for way in ways],
        "missed": [f"{way}/rx_{why}_errors" for way in ways for why in ("missed", "fifo")],
        "ring": sorted(rings),
    }


def queues(router: Router, snapshot: Snapshot) -> dict[tuple[str, int], int]:
    """Frames that each queue of the router's devices received so far, by device and number,
    for devices with such counters."""
    found = {}
    for interface in (i for guest in guests_of(router, snapshot) for i in guest.interfaces):
        for queue in interface.counters.queues if interface.counters is not None else ():
            found[interface.target, queue.queue] = queue.received or 0
    return found


def all_took(
    before: Mapping[tuple[str, int], int], after: Mapping[tuple[str, int], int], ways: int
) -> bool:
    """Whether all queues received frames on as many devices as frames were sent to. True
    when no device has such counters."""
    devices = {device for device, _ in after}
    idle = {key[0] for key, count in after.items() if count <= before.get(key, 0)}
    return len(devices - idle) >= min(ways, len(devices))


def read_losses(root: HostRoot, where: Places) -> Losses:
    """The counters now. Raises VsrtuneError when a device is gone."""
    backlogs = parse_softnet(root.read("/proc/net/softnet_stat"))
    found = {kind: sum(_number(root, path) for path in paths) for kind, paths in where.items()}
    return {**found, "backlog": sum(lost for _, lost in backlogs)}


def _number(root: HostRoot, path: str) -> int:
    try:
        return int(root.read(path))
    except OSError as error:
        raise VsrtuneError(
            f"a counter cannot be read: {error.strerror}",
            where=path,
            hint="the device went away during the trial",
        ) from error
