# SPDX-License-Identifier: GPL-2.0-or-later
"""Lays out a multistage router (MSR): balancers in front of routers. Pure.

Invariants:
- On every link there is one device of a balancer, which has the flag uplink: it gets the frames
  that routers send to their neighbours outside.
- A balancer's interfaces outside are left alone; their MACs are those of the whole router.
- Routers keep their MACs, so their configuration by MAC stays right.

A device's name is that of the group, a dash, the number of the side (1 is the first under
``lower``), a letter, and the number of the router if the device is for one:

    edge-1l    the device below those of side 1 (l: link): the dummy of a bridge, or the one
               that carries the VLANs
    edge-1l2   the hub, or the VLAN, of router 2
    edge-1b    the balancer's device on a bridge, edge-1b2 the one that leads to router 2
    edge-1r2   the device of router 2

Devices of a pvr have a letter after the dash (Group.device), so no two groups can have the same
name. MACs are locally administered and follow from the names.
"""

from __future__ import annotations

from dataclasses import replace

from vsrtune.attach.plan.model import AttachHostState, GuestNics, Move
from vsrtune.attach.plan.planner import device_like
from vsrtune.attach.plan.steps import MadeDevice, MsrRole, Stage
from vsrtune.core.errors import VsrtuneError
from vsrtune.group.members import Layout, free_mac, macs, on_lower, running
from vsrtune.group.parser import Group
from vsrtune.group.schema import BRIDGE, VLAN
from vsrtune.model import domain_xml
from vsrtune.model.domain_xml import DomainNic
from vsrtune.model.host import MODES

_LINK, _BALANCER, _ROUTER = "l", "b", "r"
# The VLAN of router 1 is 101.
FIRST_VLAN = 100
# Nothing waits in a link: its devices have no queueing discipline.
_QUEUE = 1000
_TAP_QUEUE = 500


# The devices of one side: those on which others stand, each after the one below it; the balancer's
# with the router to which each leads, 0 for all; and the lower device of each router's own.
SideLinks = tuple[tuple[MadeDevice, ...], tuple[tuple[int, MadeDevice], ...], tuple[str, ...]]


def layout(group: Group, host: AttachHostState) -> Layout:
    """The links between running balancers and running routers. Raises VsrtuneError with the
    obstacle."""
    routers = [running(m, group.at_member(n), host) for n, m in enumerate(group.members)]
    balancers = {
        name: running(name, group.at("group", "balancers", name), host)
        for name, _ in group.balancers
    }
    made, taken = Layout(group, host), macs(host)
    ends: list[list[tuple[DomainNic, MadeDevice, Stage]]] = [[] for _ in routers]
    for number, (side, lower) in enumerate(group.lowers, 1):
        below = host.links.get(lower)
        if below is None:
            raise VsrtuneError(
                "there is no such device", where=group.at("group", "lower", side),
                hint="see: ip link",
            )  # fmt: skip
        balancer = balancers[group.balancer(side)]
        outer = on_lower(group.name, balancer, lower, host, one_queue=False)
        nics = [on_lower(group.name, r, lower, host, one_queue=False) for r in routers]
        _differ(routers, nics)
        links, to_routers, lowers = side_links(
            group.name, number, group.links, len(routers), below.mtu, taken
        )
        for device in links:
            made.add(device, stage=Stage(MsrRole.LINK, side, lower))
        for to, device in to_routers:
            router = group.members[to - 1] if to else ""
            made.add(device, balancer, Stage(MsrRole.BALANCER, side, lower, router))
            xml = domain_xml.another(outer, device.mac, device.name)
            config = ("", xml if balancer.config is not None else "")
            pair = ("", xml)
            made.moves.append(Move(balancer.name, balancer.uuid, device.mac, device, pair, config))
        stage = Stage(MsrRole.ROUTER, side, lower)
        for n, (nic, on) in enumerate(zip(nics, lowers, strict=True), 1):
            own = name(group.name, number, _ROUTER, n)
            device = device_like(host, own, nic, below, host.links.get(nic.device))
            device = replace(device, lower=on, mode=MODES["bridge"])
            ends[n - 1].append((nic, device, stage))
    for guest, sides in zip(routers, ends, strict=True):
        for nic, device, stage in sides:
            made.adopt(guest, nic, device, stage)
    made.notes += [f"{one} forwards when it has loaded what this prints: vsrtune group rules "
                   f"{group.name} {one}" for one in balancers]  # fmt: skip
    return made


def name(group: str, side: int, letter: str, router: int = 0) -> str:
    """A device's name; ``side`` and ``router`` count from 1, 0 means all routers."""
    return f"{group}-{side}{letter}{router or ''}"


def side_links(
    group: str, side: int, kind: str, routers: int, mtu: int, taken: set[str]
) -> SideLinks:
    """The devices to make for a side with that many routers. ``kind`` is one of schema.LINKS.
    ``taken`` are the MACs that others have; those of the new devices are added."""

    def device(letter: str, number: int, lower: str = "", vlan: int = 0) -> MadeDevice:
        own = name(group, side, letter, number)
        address = free_mac(own, taken)
        taken.add(address)
        if letter == _BALANCER:
            return MadeDevice(own, lower, address, MODES["bridge"], mtu, _TAP_QUEUE, uplink=True)
        kind = "vlan" if vlan else "dummy"
        return MadeDevice(own, lower, address, 0, mtu, _QUEUE, kind, vlan=vlan)

    numbers = range(1, routers + 1)
    if kind == BRIDGE:
        whole = device(_LINK, 0)
        balancer = device(_BALANCER, 0, whole.name)
        return (whole,), ((0, balancer),), (whole.name,) * routers
    if kind == VLAN:
        trunk = [device(_LINK, 0)]
        own = [device(_LINK, n, trunk[0].name, FIRST_VLAN + n) for n in numbers]
    else:
        trunk = []
        own = [device(_LINK, n) for n in numbers]
    below = tuple(link.name for link in own)
    ends = tuple((n, device(_BALANCER, n, lower)) for n, lower in enumerate(below, 1))
    return (*trunk, *own), ends, below


def _differ(routers: list[GuestNics], nics: list[DomainNic]) -> None:
    """Refuse routers that a balancer cannot tell apart."""
    first: dict[str, str] = {}
    for router, nic in zip(routers, nics, strict=True):
        if nic.mac in first:
            raise VsrtuneError(
                f"its MAC {nic.mac} is that of {first[nic.mac]} too", where=router.name,
                hint="each router has MACs of its own (virsh edit)",
            )  # fmt: skip
        first[nic.mac] = router.name
