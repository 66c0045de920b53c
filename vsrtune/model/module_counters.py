# SPDX-License-Identifier: GPL-2.0-or-later
"""The counters of a device of our kernel module (`ethtool -S`), read from names to values.

A counter that the loaded module does not have is None, never 0. Unknown names are ignored. A module
has as many statistics whether tap queues are open or not, and says how many are; older ones have
those of open queues only. docs/kmod.md explains each counter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

_QUEUE = re.compile(r"tapq(\d+)_(\w+)", re.ASCII)

# These two names identify the counters as the module's.
_MARKS = ("rx_received", "rx_dropped_queue_full")
_ORIGINS = ("nic", "forwarded", "broadcast", "copied")


@dataclass(frozen=True, slots=True)
class QueueCounters:
    """One open tap queue. ``ring_high_water`` is the most frames that waited in its ring.
    ``worker_tid`` is the task (initial pid namespace) that transmitted last through it, 0 before
    any. ``stalled`` is 1 when frames wait in its ring and nobody takes them."""

    queue: int
    received: int | None = None
    delivered: int | None = None
    dropped_ring_full: int | None = None
    ring_high_water: int | None = None
    tx_packets: int | None = None
    worker_tid: int | None = None
    stalled: int | None = None


@dataclass(frozen=True, slots=True)
class TapCounters:
    """One napi_macvtap or napi_macvlan device, in frames (a GSO super-frame is one).

    ``rx_dropped_*`` name the place: the ring of the guest, the device's own queue (its frames or
    their memory), no open tap queue, device down, rings shrunk, anything else. ``rx_nic``,
    ``rx_forwarded``, ``rx_broadcast`` and ``rx_copied`` are the received frames by origin: the
    NIC, a sibling, broadcast and multicast, and copies for all queues but one where several guests
    share the device. ``rx_diverted`` counts frames received for a stalled queue and given to
    another. ``queue_high_water`` is the most frames that waited in the device's own queue.
    """

    rx_received: int | None = None
    rx_delivered: int | None = None
    rx_dropped_ring_full: int | None = None
    rx_dropped_queue_full: int | None = None
    rx_dropped_queue_bytes: int | None = None
    rx_dropped_no_queue: int | None = None
    rx_dropped_down: int | None = None
    rx_dropped_shrink: int | None = None
    rx_dropped_other: int | None = None
    rx_nic: int | None = None
    rx_forwarded: int | None = None
    rx_broadcast: int | None = None
    rx_copied: int | None = None
    rx_diverted: int | None = None
    queue_high_water: int | None = None
    tx_packets_lower: int | None = None
    tx_to_sibling: int | None = None
    tx_dropped: int | None = None
    queues: tuple[QueueCounters, ...] = ()

    @property
    def dropped(self) -> tuple[tuple[str, int], ...]:
        """Frames for the guest that were dropped, by place."""
        return self._family("rx_dropped_")

    @property
    def origins(self) -> tuple[tuple[str, int], ...]:
        """Received frames by origin: nic, forwarded, broadcast, copied."""
        values = self._family("rx_")
        return tuple((n, v) for n, v in values if n in _ORIGINS)

    def _family(self, prefix: str) -> tuple[tuple[str, int], ...]:
        named = ((f.name, getattr(self, f.name)) for f in fields(self))
        return tuple(
            (name.removeprefix(prefix), value)
            for name, value in named
            if name.startswith(prefix) and value is not None
        )


_DEVICE = {f.name for f in fields(TapCounters)} - {"queues"}
_PER_QUEUE = {f.name for f in fields(QueueCounters)} - {"queue"}


def parse(statistics: Mapping[str, int]) -> TapCounters | None:
    """The counters among a device's statistics; None when another driver made them."""
    if not all(mark in statistics for mark in _MARKS):
        return None
    opened = statistics.get("tap_queues")
    device: dict[str, int] = {}
    queues: dict[int, dict[str, int]] = {}
    for name, value in statistics.items():
        match = _QUEUE.fullmatch(name)
        if match is not None:
            number = int(match[1])
            if match[2] in _PER_QUEUE and (opened is None or number < opened):
                queues.setdefault(number, {})[match[2]] = value
        elif name in _DEVICE:
            device[name] = value
    each = tuple(QueueCounters(number, **found) for number, found in sorted(queues.items()))
    return TapCounters(queues=each, **device)
