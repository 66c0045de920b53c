# SPDX-License-Identifier: GPL-2.0-or-later
"""Reads samples beside the snapshot, for `vsrtune top` and `vsrtune try`: the times of threads and
CPUs, the frames of guests, and where frames are dropped. It only reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from vsrtune.host.cpus import parse_cpu_times
from vsrtune.host.filesystem import HostRoot, text_of
from vsrtune.host.interrupts import parse_counts
from vsrtune.host.netdev import (
    Device,
    NetReader,
    guest_frames,
    parse_net_dev,
    parse_softnet,
)
from vsrtune.model.load import DropPlace, GuestFrames, HostSample
from vsrtune.model.snapshot import Snapshot
from vsrtune.observe.load import read_schedstat

K = TypeVar("K")
T = TypeVar("T")

# Counters of a lower device that say that a frame was lost, by their names in sysfs.
_LOWER = ("rx_dropped", "rx_missed_errors", "rx_fifo_errors", "tx_dropped")


def take(
    root: HostRoot, snapshot: Snapshot, clock: Callable[[], int] = time.monotonic_ns
) -> HostSample:
    """Sample the host of ``snapshot`` now, by a ``clock`` in nanoseconds. Values that cannot be
    read, or are gone since, are left out."""
    threads = {t.key for g in snapshot.guests for t in g.threads}
    threads |= {t.key for t in snapshot.host.softirq}
    net = NetReader(root)
    readings = {key: read_schedstat(root, key, clock) for key in sorted(threads)}
    return HostSample(
        snapshot=snapshot,
        at_ns=clock(),
        threads={key: one for key, one in readings.items() if one is not None},
        cpus=parsed(root, "/proc/stat", parse_cpu_times),
        drops={spot: count for spot, count in _drops(root, net, snapshot) if count is not None},
        interrupts=parsed(root, "/proc/interrupts", parse_counts),
        frames=dict(_frames(root, net, snapshot)),
    )


def parsed(root: HostRoot, path: str, parse: Callable[[str], dict[K, T]]) -> dict[K, T]:
    """What a file says; empty when it cannot be read or understood."""
    try:
        return parse(root.read(path))
    except (OSError, ValueError, IndexError):
        return {}


def _drops(
    root: HostRoot, net: NetReader, snapshot: Snapshot
) -> Iterator[tuple[DropPlace, int | None]]:
    """The frames dropped at each place; None where that cannot be read."""
    backlogs = parsed(root, "/proc/net/softnet_stat", lambda text: dict(parse_softnet(text)))
    for cpu, dropped in backlogs.items():
        yield DropPlace(f"CPU {cpu}", "backlog"), dropped
    for name in sorted({name for g in snapshot.guests for i in g.interfaces for name in i.lower}):
        device = net.device(name)
        if device is not None:
            # The kernel adds what the ports of a bond have dropped since they joined it to what the
            # bond drops itself (bond_get_stats). Read before the ports, it never seems too much.
            bond = device.devtype == "bond"
            ports = [port for n in device.lowers if bond and (port := net.device(n)) is not None]
            for counter in _LOWER:
                count = _counter(root, device, counter)
                if count is not None:
                    below = sum(_counter(root, port, counter) or 0 for port in ports)
                    spot = DropPlace(name, counter, ports=tuple(p.ifindex for p in ports))
                    yield spot, max(count - below, 0)
    for guest in snapshot.guests:
        for interface in guest.interfaces:
            device = net.device(interface.target)
            for place, count in _of_tap(root, net, device) if device is not None else ():
                yield DropPlace(interface.target, place, guest.ref), count


def _frames(
    root: HostRoot, net: NetReader, snapshot: Snapshot
) -> Iterator[tuple[str, GuestFrames]]:
    """The frames of each of the guests' devices, without those that are gone."""
    counted = parsed(root, "/proc/net/dev", parse_net_dev)
    for name in {i.target for g in snapshot.guests for i in g.interfaces}:
        device = net.device(name)
        if device is not None:
            found = guest_frames(((name, device.kind),), counted)
            if found is not None:
                yield name, found


def _of_tap(root: HostRoot, net: NetReader, device: Device) -> tuple[tuple[str, int | None], ...]:
    counters = net.counters(device)
    if counters is not None:
        return (*counters.dropped, ("tx_dropped", counters.tx_dropped))
    # A macvtap receives the frames for its guest; a tun device sends them.
    ring, other = ("tx_dropped", "rx_dropped") if device.tun else ("rx_dropped", "tx_dropped")
    return ("ring", _counter(root, device, ring)), (other, _counter(root, device, other))


def _counter(root: HostRoot, device: Device, counter: str) -> int | None:
    text = text_of(root, f"{device.path}/statistics/{counter}")
    return int(text) if text is not None and text.isdecimal() else None
