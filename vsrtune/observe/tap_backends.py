# SPDX-License-Identifier: GPL-2.0-or-later
"""The host devices behind a guest's NICs, from the open descriptors of its QEMU, its command line,
and libvirt's XML."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from vsrtune.host.filesystem import HostRoot, device_number, text_of
from vsrtune.host.netdev import Device, NetReader
from vsrtune.host.procfs import (
    RawThread,
    is_open,
    napi_device,
    parse_fdinfo_iff,
    read_links,
    read_thread,
)
from vsrtune.model.domain_xml import DomainNic
from vsrtune.model.guest import Confidence, Interface, PassedDevice
from vsrtune.model.host import NicThread
from vsrtune.observe.passed_devices import passed_devices
from vsrtune.observe.qemu_processes import QemuProcess
from vsrtune.observe.trust import Standing

MACVTAP_FD = re.compile(r"/dev/tap(\d+)", re.ASCII)
TUN_FD = "/dev/net/tun"
VHOST_NET_FD = "/dev/vhost-net"
# Descriptors whose owner gets a worker of the same name as a NIC's.
OTHER_VHOST_FDS = ("/dev/vhost-vsock", "/dev/vhost-scsi")


@dataclass(frozen=True, slots=True)
class Backend:
    """One NIC with a host device. ``cold``: it is on QEMU's command line."""

    target: str
    mac: str
    model: str
    alias: str
    vhost: bool
    queues: int
    cold: bool


@dataclass(frozen=True, slots=True)
class Descriptors:
    """The relevant open descriptors: ``taps`` maps numbers to devices, in number order; ``passed``
    are the devices of VFIO's; ``others`` are devices of this host with a name or number of one that
    it holds and that are not its own; the rest counts those of vhost."""

    taps: Mapping[int, str]
    vhost_net: int
    vhost_other: int
    passed: tuple[PassedDevice, ...] = ()
    others: tuple[str, ...] = ()

    def queues(self) -> Counter[str]:
        """How many queues of each device this process holds open."""
        return Counter(self.taps.values())


def read_descriptors(root: HostRoot, net: NetReader, process: QemuProcess) -> Descriptors:
    """The open descriptors of a process. Raises OSError when it is gone, or access is denied."""
    taps: dict[int, str] = {}
    pid = process.pid
    links = read_links(root, pid)
    # libvirt's XML names the devices of its guests. Other processes may hold devices of any network
    # namespace, which have names and numbers of this host's.
    doubted = process.standing in (Standing.PLAIN, Standing.FOREIGN) and not process.machine
    owners = _Owners(root, net, process) if doubted else None
    for number, link in links.items():
        device: str | None = None
        macvtap = MACVTAP_FD.fullmatch(link)
        if macvtap is not None:
            opened = is_open(root, pid, number)
            device = net.by_ifindex(int(macvtap[1])) if opened else None
        elif link == TUN_FD:
            try:
                device = parse_fdinfo_iff(root.read(f"/proc/{pid}/fdinfo/{number}"))
            except OSError:
                continue
        if device and (owners is None or owners.own(number, device, macvtap)):
            taps[number] = device
    kinds = list(links.values())
    return Descriptors(
        taps,
        kinds.count(VHOST_NET_FD),
        sum(kinds.count(k) for k in OTHER_VHOST_FDS),
        passed_devices(root, pid, links),
        tuple(owners.others) if owners is not None else (),
    )


class _Owners:
    """Tells the devices of a process from those of this host that only have the same name or
    number. What a recording does not hold speaks for the process. ``others`` are not its own."""

    def __init__(self, root: HostRoot, net: NetReader, process: QemuProcess) -> None:
        self._root = root
        self._net = net
        self._process = process
        self._taps: dict[str, bool] = {}
        self.others: dict[str, None] = {}

    def own(self, number: int, name: str, macvtap: re.Match[str] | None) -> bool:
        """Whether a descriptor of the process is that device of this host's."""
        device = self._net.device(name)
        if device is None:
            return True  # gone, or nowhere here
        if macvtap is not None:
            own = self._is_node(number, f"tap{macvtap[1]}", device)
        else:
            if name not in self._taps:
                self._taps[name] = self._is_tap(device)
            own = self._taps[name]
        if not own:
            self.others[name] = None
        return own

    def _is_node(self, number: int, tap: str, device: Device) -> bool:
        """devtmpfs has one /dev/tapN for all namespaces, and a mount namespace any file there."""
        if tap not in device.names:
            return False
        told = text_of(self._root, f"{device.path}/{tap}/dev")
        try:
            node = self._root.stat(f"/proc/{self._process.pid}/fd/{number}").rdev
        except OSError:
            return False  # closed meanwhile
        return told in (None, device_number(node))

    def _is_tap(self, device: Device) -> bool:
        """A user may make a tap of any name in a namespace of his own. Of a process here, its owner
        is the proof, which root sets."""
        if not device.tun or self._elsewhere():
            return False
        uid = self._process.uid
        return uid == 0 or text_of(self._root, f"{device.path}/owner") in (None, str(uid))

    def _elsewhere(self) -> bool:
        """Whether the process runs in another network namespace."""
        try:
            here = self._root.readlink("/proc/self/ns/net")
            return self._root.readlink(f"/proc/{self._process.pid}/ns/net") != here
        except OSError:
            return False


def backends(
    process: QemuProcess,
    listed: bool,
    declared: Sequence[DomainNic],
    descriptors: Descriptors,
) -> list[Backend]:
    """NICs in the order in which QEMU made them. ``declared`` are those in the domain's XML, if it
    is ``listed`` by libvirt."""
    if not listed:
        return _of_command_line(process, descriptors)
    order = {netdev.id: n for n, netdev in enumerate(process.args.netdevs)}
    opened = descriptors.queues()
    cold = []
    hot = []
    for found in declared:
        position = order.get(found.netdev)
        netdev = process.args.netdevs[position] if position is not None else None
        # libvirt gives an alias again after an unplug; then the descriptor of the command line is
        # closed, or belongs to another device.
        same = netdev is not None and (
            not netdev.fds or descriptors.taps.get(netdev.fds[0]) == found.device
        )
        backend = Backend(
            target=found.device,
            mac=found.mac,
            model=found.model,
            alias=found.alias,
            vhost=netdev.vhost if netdev is not None and same else found.vhost,
            queues=opened[found.device] or 1,
            cold=same,
        )
        if position is not None and same:
            cold.append((position, backend))
        else:
            hot.append(backend)
    return [backend for _, backend in sorted(cold, key=lambda c: c[0])] + hot


def _of_command_line(process: QemuProcess, descriptors: Descriptors) -> list[Backend]:
    found: list[Backend] = []
    # A dict, for its order.
    devices = dict.fromkeys(descriptors.taps.values())
    opened = descriptors.queues()
    named = {n.ifname for n in process.args.netdevs} | {
        descriptors.taps.get(n.fds[0]) for n in process.args.netdevs if n.fds
    }
    # QEMU opened these itself, in order; the kernel chose their names.
    unnamed = iter([d for d in devices if d not in named])
    for netdev in process.args.netdevs:
        device: str | None
        if netdev.fds:
            device = descriptors.taps.get(netdev.fds[0])
        else:
            device = netdev.ifname or next(unnamed, None)
        if device is not None and device in devices:
            del devices[device]
            queues = opened[device]
            told = (netdev.mac, netdev.model, netdev.device, netdev.vhost)
            found.append(Backend(device, *told, queues, True))
    spare = descriptors.vhost_net - sum(b.queues for b in found if b.vhost)
    for device in devices:
        queues = opened[device]
        vhost = spare >= queues
        spare -= queues if vhost else 0
        found.append(Backend(device, "", "", "", vhost, queues, False))
    return found


def read_nic_threads(root: HostRoot, tids: Iterable[int]) -> tuple[NicThread, ...]:
    """The NAPI threads of a lower device among ``tids``, which were found by its name."""
    found = []
    for tid in tids:
        thread = read_thread(root, tid, tid)
        if thread is not None and thread.kthread and napi_device(thread.name) is not None:
            found.append(NicThread(thread.key, thread.name, thread.affinity))
    return tuple(found)


def read_napi_threads(
    root: HostRoot, interfaces: Iterable[Interface], named: Mapping[str, Sequence[int]]
) -> tuple[list[tuple[RawThread, str, Confidence]], list[str]]:
    """The NAPI threads of the interfaces that are threaded, each with its device, and why some are
    not known. Confidence ORDER: by its name, which no other thread has.

    ``named`` gives the NAPI kernel threads by the device in their name. A device whose NAPI is not
    threaded has none, though on kernels before 6.17 one may sleep on.
    """
    found: list[tuple[RawThread, str, Confidence]] = []
    problems: list[str] = []
    for interface in interfaces:
        if not interface.threaded:
            continue
        tid, confidence, problem = _tid(root, interface, named.get(interface.target, ()))
        thread = read_thread(root, tid, tid) if tid else None
        if thread is not None and thread.kthread and napi_device(thread.name) is not None:
            found.append((thread, interface.target, confidence))
        else:
            vanished = f"thread {tid} is no NAPI thread now"
            problems.append(f"{interface.target}: its NAPI is threaded, but {problem or vanished}")
    return found, problems


def _tid(root: HostRoot, interface: Interface, named: Sequence[int]) -> tuple[int, Confidence, str]:
    told = None
    with suppress(OSError):
        told = root.napi_thread(interface.target)
    if told is not None:
        return told, Confidence.EXACT, "" if told else "the module says it has no thread"
    if len(named) == 1:
        return named[0], Confidence.ORDER, ""
    listed = ", ".join(map(str, named))
    return (
        0,
        Confidence.NONE,
        f"threads {listed} all have its name: which is its own is not known"
        if named
        else "no thread has its name",
    )
