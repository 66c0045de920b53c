# SPDX-License-Identifier: GPL-2.0-or-later
"""The streams of a load: one for each leg, distinguished by UDP ports.

Every stream owns a block of destination ports, so the sink knows the router and the
direction of a frame by its source address and destination port. Flows are source ports.
pktgen advances both ports (and the destination address) by one with every frame, each in
its own circle: the number of different frames is the least common multiple of the
circles. More flows than there are source ports therefore need a second circle, of
destination ports, whose length has no factor in common with the first.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, gcd, prod
from typing import Literal

from vsrtune.bench.spec.model import Leg, Load, Router, Spec
from vsrtune.core.errors import VsrtuneError

FIRST_SOURCE_PORT = 1024
SOURCE_PORTS = 65535 - FIRST_SOURCE_PORT
# Above the ports that connection tracking has helpers for.
FIRST_DESTINATION_PORT = 20000
PORT_BLOCK = 64
MAX_STREAMS = (65535 - FIRST_DESTINATION_PORT) // PORT_BLOCK
# Up to this number, flows are counted one by one.
COUNTED_FLOWS = 16

Direction = Literal["forth", "back"]


@dataclass(frozen=True, slots=True)
class Stream:
    """The frames for one leg: ``frames`` at ``pps``. ``key`` is "router/forth" or
    "router/back"; ``device`` sends, by the pktgen thread of ``cpu``. ``size`` 0 means IMIX.
    ``source_ports`` count from FIRST_SOURCE_PORT, ``destination_ports`` from
    ``destination_port``."""

    key: str
    device: str
    cpu: int
    leg: Leg
    destinations: int
    size: int
    source_ports: int
    destination_port: int
    destination_ports: int
    pps: float
    frames: int

    @property
    def last_destination(self) -> str:
        return str(ipaddress.IPv4Address(self.leg.destination) + (self.destinations - 1))


@dataclass(frozen=True, slots=True)
class Counted:
    """Frames that the sink counts by themselves: from ``source`` to ``destination_port``, of
    one ``source_port`` unless that is None. ``key`` is the stream's. ``flow`` is the flow's
    number, None where flows are not counted one by one."""

    key: str
    flow: int | None
    source: str
    destination_port: int
    source_port: int | None


def circles(flows: int) -> tuple[int, int]:
    """Lengths of the circles of source and destination ports for ``flows``.

    Up to SOURCE_PORTS the first circle is enough. Beyond, where no two fitting factors give
    the exact number, they give the nearest greater one.
    """
    found = []
    for second in range(1, PORT_BLOCK + 1):
        first = ceil(flows / second)
        while gcd(first, second) != 1:
            first += 1
        if first <= SOURCE_PORTS:
            found.append((first, second))
    return min(found, key=prod)


def legs(spec: Spec) -> tuple[tuple[Router, Direction, Leg], ...]:
    """Every leg that frames are sent on, in a fixed order."""
    found: list[tuple[Router, Direction, Leg]] = []
    for router in spec.routers:
        found.append((router, "forth", router.forth))
        if router.back is not None and spec.traffic.bidirectional:
            found.append((router, "back", router.back))
    if len(found) > MAX_STREAMS:
        raise VsrtuneError(f"{len(found)} streams, but at most {MAX_STREAMS} can be told apart")
    return tuple(found)


def streams(spec: Spec, load: Load) -> tuple[Stream, ...]:
    """The streams of a load. The legs of a router share its rate equally."""
    every = legs(spec)
    size = spec.traffic.size if load.size is None else load.size
    shares = Counter(router.name for router, _, _ in every)
    rates = [load.pps.get(router.name, 0.0) / shares[router.name] for router, _, _ in every]
    counts = _counts(rates, load)
    source_ports, destination_ports = circles(spec.traffic.flows)
    found = []
    for number, (router, direction, leg) in enumerate(every):
        if counts[number] == 0:
            continue
        end = spec.left if direction == "forth" else spec.right
        found.append(
            Stream(
                key=f"{router.name}/{direction}",
                device=end.device,
                cpu=end.cpu,
                leg=leg,
                destinations=spec.traffic.destinations,
                size=0 if size == "imix" else size,
                source_ports=source_ports,
                destination_port=FIRST_DESTINATION_PORT + PORT_BLOCK * number,
                destination_ports=destination_ports,
                pps=rates[number],
                frames=counts[number],
            )
        )
    return tuple(found)


def counted(spec: Spec) -> dict[Direction, list[Counted]]:
    """What the sink counts, by direction; forth is counted at the right end."""
    flows = spec.traffic.flows
    _, destination_ports = circles(flows)
    found: dict[Direction, list[Counted]] = {"forth": [], "back": []}
    for number, (router, direction, leg) in enumerate(legs(spec)):
        key = f"{router.name}/{direction}"
        first = FIRST_DESTINATION_PORT + PORT_BLOCK * number
        if 1 < flows <= COUNTED_FLOWS:
            found[direction] += [
                Counted(key, flow, leg.source, first, FIRST_SOURCE_PORT + flow)
                for flow in range(flows)
            ]
        else:
            found[direction] += [
                Counted(key, None if flows > 1 else 0, leg.source, first + port, None)
                for port in range(destination_ports)
            ]
    return found


def _counts(rates: Sequence[float], load: Load) -> list[int]:
    """Frames of each stream, rounded so that they add up: the next streams get what rounding
    took from one."""
    found = []
    due = given = 0.0
    for rate in rates:
        due += rate * load.seconds
        found.append(round(due - given))
        given += found[-1]
    return found
