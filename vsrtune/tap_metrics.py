"""Metrics of the devices of our kernel module: what they count, as samples.

A counter that the loaded module does not have makes no sample.
"""

from __future__ import annotations

from typing import Any

from vsrtune.model import Interface

_DEVICE = ("domain", "target_device")
_QUEUE = (*_DEVICE, "queue")

# Name, kind, labels, help: as metrics.Family.
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


def add(out: dict[str, Any], labels: list[str], interface: Interface) -> None:
    """Add the samples of one interface; ``labels`` are its domain and device."""
    if interface.threaded is not None:
        out["tap_threaded"].add_metric(labels, float(interface.threaded != 0))
    counters = interface.counters
    if counters is None:
        return

    def one(family: str, value: int | None, *more: str) -> None:
        if value is not None:
            out[family].add_metric([*labels, *more], value)

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
    for queue in counters.queues:
        number = str(queue.queue)
        one("tap_queue_received", queue.received, number)
        one("tap_queue_delivered", queue.delivered, number)
        one("tap_queue_ring_full", queue.dropped_ring_full, number)
        one("tap_queue_ring_high_water", queue.ring_high_water, number)
        one("tap_queue_sent", queue.tx_packets, number)
        one("tap_queue_worker_tid", queue.worker_tid, number)
        one("tap_queue_stalled", queue.stalled, number)
