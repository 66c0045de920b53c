# SPDX-License-Identifier: GPL-2.0-or-later
"""Counts the frames that came through, and drops them.

An nftables table at the ingress of the device takes a frame before IP does, at the least
cost for the CPU that delivers the frame. One lookup in a set finds the element of a frame,
however many routers and flows there are; the element counts it. The netlink socket of this
process owns the table: the kernel removes the table when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vsrtune.bench.spec.streams import Counted
from vsrtune.bench.traffic.probe import ProbeSocket
from vsrtune.core.errors import VsrtuneError

TABLE = "vsrtune_bench"
# Before every other hook at this place.
_PRIORITY = -400

# linux/if_ether.h: a packet socket of it gets frames before the sink drops them.
ETH_P_ALL = 3
# net/core/pktgen.c: 42 bytes of headers, the magic number, the number of the frame in its stream,
# and when it was made, in seconds and microseconds.
_MAGIC = bytes.fromhex("be9be955")
_HEAD = 58


class Sink:
    """The counters of one namespace, by device. Raises VsrtuneError without nftables."""

    def __init__(self, devices: Mapping[str, Sequence[Counted]]) -> None:
        try:
            import nftables
        except ImportError as error:
            raise VsrtuneError(
                "the Python binding of nftables is missing",
                hint="install python3-nftables",
            ) from error
        self._nft = nftables.Nftables()
        self.devices = {name: tuple(counted) for name, counted in devices.items() if counted}
        self._run(ruleset(self.devices))

    def read(self) -> list[tuple[str, int | None, int]]:
        """Streams, flows, and their frames so far. Raises VsrtuneError."""
        self._nft.set_json_output(True)
        found: list[tuple[str, int | None, int]] = []
        for number, counted in enumerate(self.devices.values()):
            listing = json.loads(self._run(f"list set netdev {TABLE} {_set(number)}"))
            frames = dict(parse_elements(listing))
            found += [(one.key, one.flow, frames[element(one)]) for one in counted]
        return found

    def _run(self, command: str) -> str:
        (status, output, error) = self._nft.cmd(command)
        if status != 0:
            raise VsrtuneError(
                f"nftables refuses: {error.strip()}",
                where=f"table netdev {TABLE}",
                hint="a table of that name belongs to a bench that still runs"
                if "permitted" in error or "busy" in error
                else "",
            )
        return str(output)


def ruleset(devices: Mapping[str, Sequence[Counted]]) -> str:
    """The table in the syntax of nft(8)."""
    parts = [f"create table netdev {TABLE} {{ flags owner; }}"]
    for number, (device, counted) in enumerate(devices.items()):
        by_flow = counted[0].source_port is not None
        kinds = "ipv4_addr . inet_service" + (" . inet_service" if by_flow else "")
        fields = "ip saddr . udp dport" + (" . udp sport" if by_flow else "")
        elements = ", ".join(" . ".join(map(str, element(one))) + " counter" for one in counted)
        hook = f'type filter hook ingress device "{device}" priority {_PRIORITY};'
        parts += [
            f"add set netdev {TABLE} {_set(number)} {{ type {kinds}; counter; }}",
            f"add element netdev {TABLE} {_set(number)} {{ {elements} }}",
            f"add chain netdev {TABLE} in_{number} {{ {hook} }}",
            f"add rule netdev {TABLE} in_{number} {fields} @{_set(number)} drop",
        ]
    return "\n".join(parts)


def element(counted: Counted) -> tuple[str | int, ...]:
    """The set element that counts ``counted``."""
    if counted.source_port is None:
        return counted.source, counted.destination_port
    return counted.source, counted.destination_port, counted.source_port


def parse_elements(listing: Any) -> Iterator[tuple[tuple[str | int, ...], int]]:
    """Elements of the set in nft's JSON, and their frames."""
    for item in listing["nftables"]:
        for entry in item.get("set", {}).get("elem", []):
            yield tuple(entry["elem"]["val"]["concat"]), int(entry["elem"]["counter"]["packets"])


def _set(number: int) -> str:
    return f"frames_{number}"


def order(socket: ProbeSocket) -> tuple[int, int]:
    """How many of the generator's frames a socket of ETH_P_ALL got, and how many of them came
    after a frame of their flow that was sent later: the reordered singletons of RFC 4737."""
    highest: dict[bytes, bytes] = {}
    count = late = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            head = socket.socket.recv(_HEAD)
            # From the source address to the destination port.
            flow, sent = head[26:38], head[50:] + head[46:50]
            if head[42:46] == _MAGIC:
                # Numbers begin anew with every run, and frames of the warm-up may still come.
                last = highest.get(flow, b"")
                highest[flow] = max(sent, last)
                count += 1
                late += sent < last
    return count, late
