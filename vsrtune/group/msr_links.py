"""Names, MACs and devices of the links between balancers and routers of a group. Pure.

A name is that of the group, a dash, the number of the side (1 is the first under ``lower``), a
letter, and the number of the router if the device is for one:

    edge-1l    the device below those of side 1 (l: link): the dummy of a bridge, or the one
               that carries the VLANs
    edge-1l2   the hub, or the VLAN, of router 2
    edge-1b    the balancer's device on a bridge, edge-1b2 the one that leads to router 2
    edge-1r2   the device of router 2

Devices of a pvr have a letter after the dash (Group.device), so no two groups can have the same
name. MACs are locally administered and follow from the names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from vsrtune.attach.plan.steps import MadeDevice
from vsrtune.group.schema import BRIDGE, VLAN
from vsrtune.model.host import MODES

LINK, BALANCER, ROUTER = "l", "b", "r"
DUMMY_KIND, VLAN_KIND = "dummy", "vlan"
# The VLAN of router 1 is 101.
FIRST_VLAN = 100
# Nothing waits in a link: its devices have no queueing discipline.
_QUEUE = 1000
_TAP_QUEUE = 500


def name(group: str, side: int, letter: str, router: int = 0) -> str:
    """A device's name; ``side`` and ``router`` count from 1, 0 means all routers."""
    return f"{group}-{side}{letter}{router or ''}"


def mac(words: str, taken: Collection[str]) -> str:
    """A locally administered MAC that follows from the words and is none of ``taken``."""
    for salt in range(1000):
        digest = hashlib.sha256(f"{words}/{salt}".encode()).digest()
        found = (b"\x02" + digest[:5]).hex(":")
        if found not in taken:
            return found
    raise ValueError(f"no MAC is left for {words}")  # of 2^40


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a multistage router. ``mac`` is the balancer's on the device ``lower``.
    ``inner`` has the MAC and the lower device of each of its internal interfaces: one for all
    routers, or, with ``each``, one for every router. ``routers`` are the routers' MACs there."""

    name: str
    lower: str
    balancer: str
    mac: str
    inner: tuple[tuple[str, str], ...]
    each: bool
    routers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SideLinks:
    """Our devices of one side. ``links`` are those on which others stand, each after the one below
    it. ``balancer`` are the balancer's, in the order of the routers. ``of_router`` names the
    lower devices of the routers' own, in the same order."""

    links: tuple[MadeDevice, ...]
    balancer: tuple[MadeDevice, ...]
    of_router: tuple[str, ...]


def side_links(
    group: str, side: int, kind: str, routers: int, mtu: int, taken: Collection[str]
) -> SideLinks:
    """The devices to make for a side with that many routers. ``kind`` is one of schema.LINKS,
    ``taken`` are the MACs that others have."""
    have = set(taken)

    def mac_of(device: str) -> str:
        found = mac(device, have)
        have.add(found)
        return found

    def link(number: int, kind: str, lower: str = "", vlan: int = 0) -> MadeDevice:
        own = name(group, side, LINK, number)
        return MadeDevice(own, lower, mac_of(own), 0, mtu, _QUEUE, kind, vlan=vlan)

    numbers = range(1, routers + 1)
    if kind == BRIDGE:
        links = [link(0, DUMMY_KIND)]
        below = [links[0].name] * routers
        ends: Iterator[tuple[int, str]] = iter([(0, links[0].name)])
    else:
        if kind == VLAN:
            trunk = link(0, DUMMY_KIND)
            links = [link(n, VLAN_KIND, trunk.name, FIRST_VLAN + n) for n in numbers]
            below = [one.name for one in links]
            links = [trunk, *links]
        else:
            links = [link(n, DUMMY_KIND) for n in numbers]
            below = [one.name for one in links]
        ends = zip(numbers, below, strict=True)
    balancer = []
    for number, lower in ends:
        own = name(group, side, BALANCER, number)
        mode = MODES["bridge"]
        balancer.append(MadeDevice(own, lower, mac_of(own), mode, mtu, _TAP_QUEUE, uplink=True))
    return SideLinks(tuple(links), tuple(balancer), tuple(below))
