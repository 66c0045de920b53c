"""The kernel's counters of lost frames, on the host of the routers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vsrtune.bench.measure.accounting import Losses
from vsrtune.bench.spec.model import Router
from vsrtune.core.errors import Lasting, VsrtuneError
from vsrtune.host.filesystem import HostRoot
from vsrtune.host.netdev import CLASS
from vsrtune.model.guest import Guest
from vsrtune.model.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Places:
    """Where frames of the routers under test can be lost. ``lowers`` are the devices
    through which they come and go, ``rings`` the counter files of the guests' taps."""

    lowers: tuple[str, ...]
    rings: tuple[str, ...]


def guests_of(router: Router, snapshot: Snapshot) -> tuple[Guest, ...]:
    """The running guests that are the router; none for a native one. Raises
    VsrtuneError when one does not run."""
    return tuple(_guest(name, snapshot) for name in router.guests)


def _guest(name: str, snapshot: Snapshot) -> Guest:
    found = [g for g in snapshot.guests if name in (g.ref, g.name)]
    exact = [g for g in found if g.ref == name] or found
    if len(exact) != 1:
        names = ", ".join(g.ref for g in snapshot.guests) or "none"
        raise VsrtuneError(
            "this router does not run" if not exact else "several guests have this name",
            where=name,
            hint=f"guests that run: {names}",
            lasting=Lasting.TRANSIENT,
        )
    return exact[0]


def places(root: HostRoot, snapshot: Snapshot, routers: Iterable[Router]) -> Places:
    """The places where frames of these routers can be lost."""
    lowers: set[str] = set()
    rings: set[str] = set()
    for router in routers:
        if router.native:
            macs = {leg.mac.lower() for leg in (router.forth, router.back) if leg is not None}
            lowers |= {name for name in _names(root) if _text(root, name, "address") in macs}
            continue
        guests = guests_of(router, snapshot)
        # Members of a group name the same devices, each of which counts once.
        for interface in (i for guest in guests for i in guest.interfaces):
            lowers.update(interface.lower)
            # A macvtap receives what goes to its guest; a tun device sends it.
            tun = root.exists(f"{CLASS}/{interface.target}/tun_flags")
            counter = "tx_dropped" if tun else "rx_dropped"
            rings.add(f"{CLASS}/{interface.target}/statistics/{counter}")
    return Places(tuple(sorted(lowers)), tuple(sorted(rings)))


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
    refused = missed = 0
    for name in where.lowers:
        statistics = f"{CLASS}/{name}/statistics"
        refused += _number(root, f"{statistics}/tx_dropped")
        missed += _number(root, f"{statistics}/rx_missed_errors")
        missed += _number(root, f"{statistics}/rx_fifo_errors")
    return Losses(
        refused=refused,
        missed=missed,
        backlog=parse_softnet_drops(root.read("/proc/net/softnet_stat")),
        ring=sum(_number(root, path) for path in where.rings),
    )


def parse_softnet_drops(text: str) -> int:
    """Frames that found a CPU's backlog full: column 2 of /proc/net/softnet_stat."""
    return sum(int(line.split()[1], 16) for line in text.splitlines())


def _names(root: HostRoot) -> list[str]:
    return [name for name in root.listdir(CLASS) if name != "bonding_masters"]


def _text(root: HostRoot, name: str, file: str) -> str:
    with contextlib.suppress(OSError):
        return root.read(f"{CLASS}/{name}/{file}").strip()
    return ""


def _number(root: HostRoot, path: str) -> int:
    try:
        return int(root.read(path))
    except OSError as error:
        raise VsrtuneError(
            f"a counter cannot be read: {error.strerror}",
            where=path,
            hint="the device went away during the trial",
            lasting=Lasting.TRANSIENT,
        ) from error
