"""Metrics of the devices of our kernel module: their counters as samples.

A counter that the loaded module does not have makes no sample. Counters that several guests
share are reported once, so that sums hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vsrtune.model.guest import Guest, Interface
from vsrtune.model.module_counters import QueueCounters

_DEVICE = ("domain", "target_device")
_QUEUE = (*_DEVICE, "queue")

# Name, kind, labels, help: as metric_families.Family.
FAMILIES = (
    (
        "tap_received",
        "counter",
        _DEVICE,
        "Frames for the guest that came to its napi_macvtap device.",
    ),
    (
        "tap_received_by_origin",
        "counter",
        (*_DEVICE, "origin"),
        "The same by origin: nic, forwarded (by another guest), broadcast (and multicast), copied.",
    ),
    (
        "tap_diverted",
        "counter",
        _DEVICE,
        "Frames that another member of the group got because theirs did not read.",
    ),
    ("tap_delivered", "counter", _DEVICE, "Frames put into a ring of the guest."),
    (
        "tap_dropped",
        "counter",
        (*_DEVICE, "place"),
        "Frames for the guest that were dropped, by the place where they died.",
    ),
    (
        "tap_own_queue_high_water",
        "gauge",
        _DEVICE,
        "Most frames that ever waited in the device's own queue.",
    ),
    ("tap_threaded", "gauge", _DEVICE, "1 when a NAPI thread serves the device's own queue."),
    (
        "tap_sent",
        "counter",
        (*_DEVICE, "to"),
        "Frames from the guest: to the lower device, or straight to a sibling.",
    ),
    ("tap_send_dropped", "counter", _DEVICE, "Frames from the guest that were dropped."),
    ("tap_queue_received", "counter", _QUEUE, "Frames for the guest directed to the tap queue."),
    ("tap_queue_delivered", "counter", _QUEUE, "Frames put into the ring of the tap queue."),
    (
        "tap_queue_ring_full",
        "counter",
        _QUEUE,
        "Frames dropped because the ring of the tap queue was full.",
    ),
    (
        "tap_queue_ring_high_water",
        "gauge",
        _QUEUE,
        "Most frames that ever waited in the ring of the tap queue.",
    ),
    ("tap_queue_sent", "counter", _QUEUE, "Frames the guest sent through the tap queue."),
    (
        "tap_queue_worker_tid",
        "gauge",
        _QUEUE,
        "Thread that last sent through the tap queue, 0 before any did.",
    ),
    (
        "tap_queue_stalled",
        "gauge",
        _QUEUE,
        "1 when frames wait in the ring of the tap queue and nobody takes them.",
    ),
)


class Sharing:
    """Decides which guest reports a device that several guests are plugged into, as the members
    of a group are. The guest whose thread last sent through a queue reports the queue; the first
    guest reports everything else."""

    def __init__(self, guests: Iterable[Guest]) -> None:
        self._first: dict[tuple[str, int, str], str] = {}
        self._owner: dict[int, str] = {}
        shared = set()
        sharing = tuple(g for g in guests if any(i.counters is not None for i in g.interfaces))
        for guest in sharing:
            for interface in guest.interfaces:
                if self._first.setdefault(_device(interface), guest.ref) != guest.ref:
                    shared.add(_device(interface))
        if not shared:
            return
        for guest in sharing:
            if any(_device(i) in shared for i in guest.interfaces):
                self._owner.update((thread.key.tid, guest.ref) for thread in guest.threads)

    def of_device(self, guest: Guest, interface: Interface) -> bool:
        """Whether this guest reports the device's numbers."""
        return self._first.get(_device(interface), guest.ref) == guest.ref

    def of_queue(self, guest: Guest, interface: Interface, queue: QueueCounters) -> bool:
        """Whether this guest reports the queue's numbers."""
        owner = self._owner.get(queue.worker_tid or 0)
        return self.of_device(guest, interface) if owner is None else owner == guest.ref


def _device(interface: Interface) -> tuple[str, int, str]:
    # Devices of two network namespaces may share a name, or a number.
    return (interface.target, interface.ifindex, interface.mac)


def add(
    out: dict[str, Any], labels: list[str], guest: Guest, interface: Interface, sharing: Sharing
) -> None:
    """Add the samples of one interface; ``labels`` are its domain and device."""
    for queue in interface.counters.queues if interface.counters is not None else ():
        if sharing.of_queue(guest, interface, queue):
            _add_queue(out, labels, queue)
    if not sharing.of_device(guest, interface):
        return
    if interface.threaded is not None:
        out["tap_threaded"].add_metric(labels, float(interface.threaded != 0))
    counters = interface.counters
    if counters is None:
        return

    def one(family: str, value: int | None, *more: str) -> None:
        _add_one(out, family, labels, value, *more)

    one("tap_received", counters.rx_received)
    one("tap_diverted", counters.rx_diverted)
    one("tap_delivered", counters.rx_delivered)
    one("tap_own_queue_high_water", counters.queue_high_water)
    one("tap_sent", counters.tx_packets_lower, "lower")
    one("tap_sent", counters.tx_to_sibling, "sibling")
    one("tap_send_dropped", counters.tx_dropped)
    for origin, value in counters.origins:
        one("tap_received_by_origin", value, origin)
    for place, value in counters.dropped:
        one("tap_dropped", value, place)


def _add_queue(out: dict[str, Any], labels: list[str], queue: QueueCounters) -> None:
    values = {
        "received": queue.received,
        "delivered": queue.delivered,
        "ring_full": queue.dropped_ring_full,
        "ring_high_water": queue.ring_high_water,
        "sent": queue.tx_packets,
        "worker_tid": queue.worker_tid,
        "stalled": queue.stalled,
    }
    for name, value in values.items():
        _add_one(out, f"tap_queue_{name}", labels, value, str(queue.queue))


def _add_one(
    out: dict[str, Any], family: str, labels: list[str], value: int | None, *more: str
) -> None:
    if value is not None:
        out[family].add_metric([*labels, *more], value)
