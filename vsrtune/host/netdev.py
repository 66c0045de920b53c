# SPDX-License-Identifier: GPL-2.0-or-later
"""Network devices from sysfs: the devices below a guest's interface."""

from __future__ import annotations

import contextlib
import errno
import posixpath
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from vsrtune.core.cpuset import CpuSet
from vsrtune.host.filesystem import HostRoot
from vsrtune.host.interrupts import read_irqs
from vsrtune.model.guest import NicKind
from vsrtune.model.host import Nic, NicQueue, rps_cpus
from vsrtune.model.load import GuestFrames
from vsrtune.model.module_counters import TapCounters
from vsrtune.model.module_counters import parse as parse_counters
from vsrtune.model.targets import DEVICE_SETTINGS, queue_file

CLASS = "/sys/class/net"
# What sysfs answers of a device that is being removed (netdev_show and netstat_show: EINVAL).
GOING = (errno.ENOENT, errno.ENODEV, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class Device:
    """One network device.

    ``path`` is its directory in /sys/devices, ``names`` are the entries of that directory,
    ``lowers`` the devices directly below, in this network namespace.
    """

    name: str
    ifindex: int
    devtype: str
    path: str
    names: frozenset[str]
    # Computed once: a device below a thousand others has as many upper_ names to scan.
    lowers: tuple[str, ...]

    @property
    def kind(self) -> NicKind:
        """How a guest's host device is attached. The directory of a macvtap holds the class device
        of its /dev/tapN, that of our module's devices likewise; uevent has no DEVTYPE (seen on
        6.1)."""
        if "macvtap" in self.names:
            return NicKind.MACVTAP
        if "napi_macvtap" in self.names:
            return NicKind.NAPI_MACVTAP
        return NicKind.TAP if self.tun else NicKind.OTHER

    @property
    def tun(self) -> bool:
        """Whether it is a tun or tap device (drivers/net/tun.c adds tun_flags)."""
        return "tun_flags" in self.names

    @property
    def hardware(self) -> str | None:
        """Directory of the device behind it; None for virtual devices."""
        if "device" not in self.names:
            return None
        return posixpath.dirname(posixpath.dirname(self.path))


def parse_uevent(text: str) -> dict[str, str]:
    """Read a uevent file: KEY=VALUE lines."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {key: value for key, equals, value in pairs if equals}


class NetReader:
    """Reads each device once, except those that are ``known``. Devices that vanish meanwhile count
    as absent."""

    def __init__(self, root: HostRoot, known: Mapping[str, Device] | None = None) -> None:
        self._root = root
        self._devices: dict[str, Device | None] = dict(known or {})
        self._by_ifindex: dict[int, str] = {}
        self._all_read = False
        self._paths: dict[str, str] = {}
        self._leads_in: dict[str, bool] = {}

    def names(self) -> list[str]:
        """All devices of this network namespace. Raises OSError."""
        # bonding_masters is a file of the class, not a device.
        return [n for n in self._root.listdir(CLASS) if n != "bonding_masters"]

    def hardware_names(self) -> list[str]:
        """Devices that are not virtual. Raises OSError."""
        found = []
        for name in self.names():
            with contextlib.suppress(FileNotFoundError):
                if "/virtual/" not in self._path(name):
                    found.append(name)
        return found

    def device(self, name: str) -> Device | None:
        """The device of that name; None when there is none."""
        if name not in self._devices:
            self._devices[name] = self._read(name)
        return self._devices[name]

    def known(self, names: Iterable[str]) -> dict[str, Device]:
        """The devices of these names that have been read."""
        return {n: d for n in names if (d := self._devices.get(n)) is not None}

    def by_ifindex(self, ifindex: int) -> str | None:
        """The name of the device with that index; None when there is none, or sysfs
        is not readable."""
        if ifindex not in self._by_ifindex and not self._all_read:
            self._all_read = True
            names: list[str] = []
            with contextlib.suppress(OSError):
                names = self.names()
            for name in names:
                number = self._number(f"{CLASS}/{name}/ifindex")
                if number is not None:
                    self._by_ifindex[number] = name
        return self._by_ifindex.get(ifindex)

    def expect(self, name: str) -> None:
        """Prepare for a likely ``by_ifindex`` of that device."""
        device = self.device(name)
        if device is not None:
            self._by_ifindex[device.ifindex] = name

    def numbers(self, device: Device) -> dict[str, Any]:
        """The fields of Interface that DEVICE_SETTINGS names, without those that devices of this
        kind do not have. Raises OSError."""
        rows = (row for row in DEVICE_SETTINGS if row.universal or device.kind in row.kinds)
        paths = ((row, f"{device.path}/{row.path}") for row in rows)
        return {
            row.field: int(self._root.read(path)) if row.universal else self._number(path)
            for row, path in paths
        }

    def ring_drops(self, device: Device) -> int:
        """Frames to the guest that found the ring full.

        macvtap counts them as rx_dropped (``tap_handle_frame``), tun as tx_dropped
        (``tun_net_xmit``). For devices with ``counters``, those are exact. Raises OSError.
        """
        counter = "tx_dropped" if device.tun else "rx_dropped"
        return int(self._root.read(f"{device.path}/statistics/{counter}"))

    def counters(self, device: Device) -> TapCounters | None:
        """The counters of our module on the device; None for devices of other drivers, and when
        the device is gone or changes at every attempt."""
        if device.kind is not NicKind.NAPI_MACVTAP:
            return None
        try:
            return parse_counters(self._root.ethtool_statistics(device.name))
        except OSError:
            return None

    def lower_chain(self, name: str) -> tuple[str, ...]:
        """Devices below a guest's host device, nearest first, down to the physical
        ones; several stand side by side below a bridge or bond.

        A chain that leaves this network namespace ends there.
        """
        chain: list[str] = []
        visited = {name}
        self._descend(name, True, visited, chain)
        return tuple(chain)

    def _descend(self, name: str, end: bool, visited: set[str], chain: list[str]) -> None:
        device = self.device(name)
        if device is None:
            return
        below, ends = self._below(device, end)
        for lower in below:
            if lower not in visited:
                visited.add(lower)
                chain.append(lower)
                self._descend(lower, ends, visited, chain)

    def _below(self, device: Device, end: bool) -> tuple[tuple[str, ...], bool]:
        """Devices directly below. ``end`` says that the device is an end of a link (a guest's tap,
        the far end of a veth), so that a bridge that it is in lies below it and not above. The
        second result says the same of the returned devices."""
        if end:
            master = self._master(device)
            if master is not None:
                return (master,), False
        ports = self._ports(device)
        if ports:
            return ports, False
        if device.tun or "device" in device.names:
            return (), False
        peer = self._veth_peer(device)
        return ((peer,) if peer is not None else ()), True

    def _master(self, device: Device) -> str | None:
        """The bridge, or the Open vSwitch, that the device is a port of."""
        try:
            master = self._root.readlink(f"{device.path}/master").rpartition("/")[2]
        except OSError:
            return None
        return master if "brport" in device.names or master == "ovs-system" else None

    def _ports(self, device: Device) -> tuple[str, ...]:
        """Devices directly below. Of a bridge, ports that lead out of the host: not the guests'
        taps, nor links to bridges with only taps beside them (one for each tap behind Proxmox VE's
        firewall)."""
        if "bridge" not in device.names and device.name != "ovs-system":
            return device.lowers
        return tuple(n for n in self._untapped(device) if not self._leads_inwards(n))

    def _untapped(self, bridge: Device) -> list[str]:
        """Ports that are no taps."""
        ports = map(self.device, bridge.lowers)
        return [port.name for port in ports if port is not None and not port.tun]

    def _leads_inwards(self, name: str) -> bool:
        """Whether a port is a veth whose other end leads to taps only."""
        if name not in self._leads_in:
            self._leads_in[name] = self._only_taps_behind(name)
        return self._leads_in[name]

    def _only_taps_behind(self, name: str) -> bool:
        port = self.device(name)
        if port is None or port.lowers or "device" in port.names:
            return False
        far = self._veth_peer(port)
        end = self.device(far) if far is not None else None
        above = self._master(end) if end is not None else None
        bridge = self.device(above) if above is not None else None
        return bridge is not None and self._untapped(bridge) == [far] != [*bridge.lowers]

    def _veth_peer(self, device: Device) -> str | None:
        """The other end of a veth when it is in this namespace.

        ``iflink`` of a veth is its peer's index in the *peer's* namespace, so the device of that
        index here is the peer only if its own ``iflink`` points back.
        """
        link = self._number(f"{device.path}/iflink")
        if link is None or link == device.ifindex or device.devtype:
            return None
        name = self.by_ifindex(link)
        peer = self.device(name) if name is not None else None
        if peer is None or "device" in peer.names or peer.devtype:
            return None
        back = self._number(f"{peer.path}/iflink")
        return name if back == device.ifindex else None

    def nic(self, name: str, rx_cpus: Callable[[str, int], CpuSet | None]) -> Nic | None:
        """A lower device with its interrupts; None when it is gone. ``rx_cpus(name, ifindex)``
        gives the trace result for its receive SoftIRQ, which that of a bridge is not."""
        device = self.device(name)
        if device is None:
            return None
        hardware = device.hardware
        numbers = self._irq_numbers(hardware) if hardware is not None else ()
        queues = self._queues(device)
        # What the host receives from a bridge, it receives where the sender runs: in a guest's own
        # vhost worker.
        traced = "bridge" not in device.names
        try:
            return Nic(
                name=name,
                ifindex=device.ifindex,
                driver=self._driver(device, hardware),
                node=self._node(hardware),
                txqueuelen=int(self._root.read(f"{device.path}/tx_queue_len")),
                threaded_napi=self._number(f"{device.path}/threaded") not in (None, 0),
                rps_cpus=rps_cpus(queues),
                irqs=read_irqs(self._root, numbers),
                rx_cpus=rx_cpus(name, device.ifindex) if traced else None,
                queues=queues,
                inner=self._inner(device),
            )
        except OSError as error:
            if error.errno not in GOING:
                raise
            return None

    def _inner(self, device: Device) -> bool:
        """Whether it is a dummy or the like, whose kind sysfs does not show: it is virtual and,
        unlike a veth with its peer, linked to no other device."""
        if device.hardware is not None or device.devtype or device.lowers or device.tun:
            return False
        return self._number(f"{device.path}/iflink") == device.ifindex

    def _driver(self, device: Device, hardware: str | None) -> str:
        """The hardware's driver; otherwise the kind of virtual device ("" for veth, whose kind
        sysfs does not show)."""
        if hardware is None:
            return device.devtype
        try:
            return self._root.readlink(f"{hardware}/driver").rpartition("/")[2]
        except OSError:
            return device.devtype

    def _node(self, hardware: str | None) -> int:
        """NUMA node, -1 when the device belongs to none."""
        if hardware is None:
            return -1
        for path in (hardware, posixpath.dirname(hardware)):
            node = self._number(f"{path}/numa_node")
            if node is not None:
                return node
        return -1

    def _irq_numbers(self, hardware: str) -> tuple[int, ...]:
        """The MSI vectors; otherwise the one pin interrupt. Those of a virtio device are its PCI
        parent's (drivers/virtio/virtio_pci_common.c)."""
        virtio = posixpath.basename(hardware).startswith("virtio")
        path = posixpath.dirname(hardware) if virtio else hardware
        try:
            listed = self._root.listdir(f"{path}/msi_irqs")
        except OSError:
            number = self._number(f"{path}/irq")
            return (number,) if number else ()
        return tuple(int(n) for n in listed if n.isdecimal())

    def _queues(self, device: Device) -> tuple[NicQueue, ...]:
        """Its queues with the CPUs of RPS and XPS, receive queues first, by number."""
        found: list[NicQueue] = []
        try:
            names = self._root.listdir(f"{device.path}/queues")
        except OSError:
            return ()
        for name in sorted(names, key=lambda n: (n[:2], len(n), n)):
            path = f"{device.path}/queues/{name}/{queue_file(name)}"
            try:
                found.append(NicQueue(name, CpuSet.from_mask(self._root.read(path))))
            except OSError:
                # A device with one transmit queue has no XPS (xps_cpus_show, ENOENT).
                found.append(NicQueue(name, None))
        return tuple(found)

    def _number(self, path: str) -> int | None:
        try:
            return int(self._root.read(path))
        except (OSError, ValueError):
            return None

    def _path(self, name: str) -> str:
        if name not in self._paths:
            link = self._root.readlink(f"{CLASS}/{name}")
            self._paths[name] = posixpath.normpath(posixpath.join(CLASS, link))
        return self._paths[name]

    def _read(self, name: str) -> Device | None:
        try:
            path = self._path(name)
            uevent = parse_uevent(self._root.read(f"{path}/uevent"))
            names = self._root.listdir(path)
        except OSError:
            return None
        return Device(
            name=name,
            ifindex=int(uevent.get("IFINDEX", "0")),
            devtype=uevent.get("DEVTYPE", ""),
            path=path,
            names=frozenset(names),
            lowers=tuple([n[6:] for n in names if n[:6] == "lower_"]),
        )


def parse_softnet(text: str) -> tuple[tuple[int, int], ...]:
    """Each CPU and the frames that its backlog dropped, from /proc/net/softnet_stat. Columns are
    hexadecimal: the second is drops, the thirteenth the CPU."""
    columns = (line.split() for line in text.splitlines())
    return tuple((int(c[12], 16), int(c[1], 16)) for c in columns if len(c) > 12)


class DeviceFrames(NamedTuple):
    """Frames of one device since it was made, as the kernel counts them."""

    received: int
    rx_dropped: int
    sent: int
    tx_dropped: int


def parse_net_dev(text: str) -> dict[str, DeviceFrames]:
    """/proc/net/dev: the frames of every device of this network namespace. Raises ValueError or
    IndexError for anything else."""
    found = {}
    for line in text.splitlines()[2:]:
        name, _, rest = line.rpartition(":")
        columns = rest.split()
        found[name.strip()] = DeviceFrames(*(int(columns[n]) for n in (1, 3, 9, 11)))
    return found


def guest_frames(
    devices: Collection[tuple[str, NicKind]], frames: Mapping[str, DeviceFrames]
) -> GuestFrames | None:
    """The frames of the guest that has ``devices``; None when there are none, or one is gone."""
    if not devices or any(name not in frames for name, _ in devices):
        return None
    arrived = dropped = sent = 0
    for name, kind in devices:
        rx, rx_dropped, tx, tx_dropped = frames[name]
        if kind is NicKind.TAP:
            # The host sends to the guest through a tap. tun_net_xmit counts frames that find the
            # ring full as dropped.
            arrived, dropped, sent = arrived + tx + tx_dropped, dropped + tx_dropped, sent + rx
        else:
            # macvtap counts a frame that it drops as received too (macvlan_count_rx).
            both = rx + rx_dropped if kind is NicKind.NAPI_MACVTAP else rx
            arrived, dropped, sent = arrived + both, dropped + rx_dropped, sent + tx
    return GuestFrames(arrived, dropped, sent)
