"""How long a guest did not forward, from looks at its counters."""

from __future__ import annotations

import pytest

from vsrtune.attach.outage import Outage


def seen(outage: Outage, begin: float, end: float, pps: float, device: str, base: int = 0) -> int:
    """Looks every 5 ms from ``begin`` to ``end``; the count at the end."""
    count = base
    steps = round((end - begin) / 0.005)
    for step in range(1, steps + 1):
        count = base + round(pps * step * 0.005)
        outage.see(begin + step * 0.005, {device: count})
    return count


def test_from_the_last_moment_of_traffic_to_the_first() -> None:
    outage = Outage()
    count = seen(outage, 0, 2, 1000, "macvtap0", 5000)
    outage.begun = 2.0
    seen(outage, 2, 2.5, 1000, "macvtap0", count)
    seen(outage, 2.5, 3, 0, "macvtap0", count + 500)
    outage.released = 3.0
    outage.see(3.0, {})
    # The guest greets its new interface with some frames of its own.
    for step, frames in ((0.1, 1), (0.2, 2), (0.3, 4)):
        outage.see(3 + step, {"nvt1": frames})
    outage.plugged = 3.4
    seen(outage, 3.5, 5, 1000, "nvt1", 4)
    assert outage.rate == pytest.approx(1000, rel=0.02)
    assert outage.seconds == pytest.approx(1.0, abs=0.02)
    assert outage.unplugged == pytest.approx(1.4)


def test_a_device_of_the_same_name_begins_anew() -> None:
    outage = Outage()
    count = seen(outage, 0, 1, 1000, "x")
    outage.begun = 1.0
    outage.released = 1.1
    outage.see(1.1, {})
    outage.plugged = 1.5
    seen(outage, 1.5, 2.5, 1000, "x")
    assert count == 1000
    assert outage.seconds == pytest.approx(0.5, abs=0.02)


def test_traffic_that_is_not_there_or_does_not_come_back() -> None:
    outage = Outage()
    seen(outage, 0, 1, 0, "x", 7)
    outage.begun = 1.0
    outage.released = 1.1
    outage.plugged = 1.5
    seen(outage, 1.5, 2, 100, "y")
    assert outage.rate == 0
    assert outage.seconds is None
    outage = Outage()
    seen(outage, 0, 1, 1000, "x")
    outage.begun = 1.0
    outage.released = 1.1
    seen(outage, 1.5, 3, 2, "y")
    assert outage.rate > 900
    assert outage.seconds is None
