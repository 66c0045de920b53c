"""What a device of our kernel module counts, from names and values."""

from __future__ import annotations

from vsrtune.model.module_counters import QueueCounters, parse

TEXT = """
rx_received: 1000
rx_delivered: 900
rx_dropped_ring_full: 60
rx_dropped_queue_full: 20
rx_dropped_queue_bytes: 7
rx_dropped_no_queue: 10
rx_dropped_down: 5
rx_dropped_shrink: 3
rx_dropped_other: 2
rx_nic: 600
rx_forwarded: 300
rx_broadcast: 100
queue_high_water: 77
tx_packets_lower: 500
tx_to_sibling: 40
tx_dropped: 1
tapq1_received: 400
tapq1_worker_tid: 0
tapq0_received: 600
tapq0_delivered: 590
tapq0_dropped_ring_full: 10
tapq0_ring_high_water: 500
tapq0_tx_packets: 540
tapq0_worker_tid: 1234
tapq0_stalled: 1
rx_diverted: 44
"""


def statistics(text: str) -> dict[str, int]:
    pairs = (line.split(": ") for line in text.split("\n") if line)
    return {name: int(value) for name, value in pairs}


def test_every_counter() -> None:
    counters = parse(statistics(TEXT))
    assert counters is not None
    assert (counters.rx_received, counters.rx_delivered) == (1000, 900)
    assert counters.dropped == (
        ("ring_full", 60),
        ("queue_full", 20),
        ("queue_bytes", 7),
        ("no_queue", 10),
        ("down", 5),
        ("shrink", 3),
        ("other", 2),
    )
    assert counters.origins == (("nic", 600), ("forwarded", 300), ("broadcast", 100))
    assert counters.queue_high_water == 77
    assert counters.rx_diverted == 44
    sent = (counters.tx_packets_lower, counters.tx_to_sibling, counters.tx_dropped)
    assert sent == (500, 40, 1)
    assert counters.queues == (
        QueueCounters(0, 600, 590, 10, 500, 540, 1234, stalled=1),
        QueueCounters(1, received=400, worker_tid=0),
    )


def test_what_the_loaded_module_does_not_count_is_unset() -> None:
    counters = parse({"rx_received": 3, "rx_dropped_queue_full": 0})
    assert counters is not None
    assert counters.queue_high_water is None
    assert counters.dropped == (("queue_full", 0),)
    assert counters.origins == ()


def test_names_of_a_newer_module_are_passed_over() -> None:
    newer = statistics(TEXT) | {"rx_bursts": 9, "tapq0_bursts": 8, "tapq_odd": 7}
    assert parse(newer) == parse(statistics(TEXT))


def test_queues_that_are_not_open_are_left_out() -> None:
    closed = {f"tapq{number}_{name}": 0 for number in range(16) for name in ("received", "stalled")}
    one = parse(closed | statistics(TEXT) | {"tap_queues": 1})
    assert one is not None
    assert one.queues == (QueueCounters(0, 600, 590, 10, 500, 540, 1234, stalled=1),)
    none = parse(closed | statistics(TEXT) | {"tap_queues": 0})
    assert none is not None
    assert none.queues == ()


def test_statistics_of_another_driver_are_none_of_ours() -> None:
    assert parse({"peer_ifindex": 7, "rx_queue_0_drops": 0}) is None
    assert parse({}) is None
