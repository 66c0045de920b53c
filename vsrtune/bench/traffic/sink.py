# SPDX-License-Identifier: GPL-2.0-or-later
"""Counts the frames that came through, and drops them.

An nftables table at the ingress of the device takes a frame before IP does, at the least
cost for the CPU that delivers the frame. One lookup in a set finds the element of a frame,
however many routers and flows there are; the element counts it. The netlink socket of this
process owns the table: the kernel removes the table when the process ends, however it ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vsrtune.bench.spec.streams import Counted
from vsrtune.core.errors import VsrtuneError

TABLE = "vsrtune_bench"
# Before every other hook at this place.
_PRIORITY = -400


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
        self._devices = {name: tuple(counted) for name, counted in devices.items() if counted}
        self._run(ruleset(self._devices))

    def read(self) -> list[tuple[str, int | None, int]]:
        """Streams, flows, and their frames so far. Raises VsrtuneError."""
        self._nft.set_json_output(True)
        found: list[tuple[str, int | None, int]] = []
        for number, counted in enumerate(self._devices.values()):
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
