# SPDX-License-Identifier: GPL-2.0-or-later
"""Measures how long a guest does not forward, by the counters of its host devices.

The guest's macvtap or napi_macvtap device counts the frames that the guest sends. The outage is
the time between the last moment before the switch and the first moment after it at which the
guest sent at least half as many frames as before. Single frames do not count, because a guest
greets a new interface with some of its own. If the guest has traffic to forward, the outage is
the time in which it did not forward. Without traffic no outage can be measured.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Self

PERIOD = 0.02
# Seconds: SETTLE to measure the rate before the switch; MOMENT is the length of a moment.
SETTLE = 0.6
MOMENT = 0.1

_NET = Path("/sys/class/net")

Counters = Callable[[], Mapping[str, int]]


class Outage:
    """The samples of one switch. ``begun`` is the time when the first interface was about to go,
    ``released`` when the guest had none of them any more (it then sends through the new ones),
    and ``plugged`` when it had all of them again, in seconds."""

    def __init__(self) -> None:
        self._known: Mapping[str, int] | None = None
        # (time, frames sent so far), the frames of devices that are gone included.
        self._seen: list[tuple[float, int]] = []
        self.begun = self.released = self.plugged = float("inf")

    def see(self, now: float, counts: Mapping[str, int]) -> None:
        """Add one sample of the frames sent, by device, at a time in seconds. If a device was not
        in the previous sample, it has sent all its frames since then. The first sample of all is
        the base."""
        known = self._known
        self._known = dict(counts)
        sent = self._seen[-1][1] if self._seen else 0
        if known is not None:
            sent += sum(max(0, n - known.get(name, 0)) for name, n in counts.items())
        self._seen.append((now, sent))

    @property
    def rate(self) -> float:
        """Frames per second before the switch; 0 when it sent none."""
        before = [sample for sample in self._seen if sample[0] <= self.begun]
        if len(before) < 2 or before[-1][0] <= before[0][0]:
            return 0.0
        return (before[-1][1] - before[0][1]) / (before[-1][0] - before[0][0])

    @property
    def seconds(self) -> float | None:
        """How long the guest sent less than half its rate before; None when the samples do not
        show that, or not its end."""
        if not self.rate:
            return None
        last = first = None
        for begin, end in self._moments():
            moment = self._seen[begin : end + 1]
            sent, elapsed = moment[-1][1] - moment[0][1], moment[-1][0] - moment[0][0]
            if sent < max(1.0, self.rate * elapsed / 2):
                continue
            if moment[-1][0] <= self.released:
                last = next(t for t, n in reversed(moment) if n < moment[-1][1])
            elif moment[0][0] >= self.released:
                first = next(t for t, n in moment if n > moment[0][1])
                break
        return first - last if first is not None and last is not None else None

    @property
    def unplugged(self) -> float:
        """From the first unplug to the last plug, which needs no traffic, in seconds."""
        return self.plugged - self.begun

    def _moments(self) -> Iterator[tuple[int, int]]:
        """Indices of samples that are a moment apart."""
        at = 0
        for number, (now, _) in enumerate(self._seen):
            while self._seen[at + 1][0] <= now - MOMENT:
                at += 1
            if self._seen[at][0] <= now - MOMENT:
                yield at, number


class OutageWatch(Outage):
    """Samples the counters every PERIOD, in a thread, while the block runs. ``counters`` gives
    the frames sent, by device, of the devices that exist."""

    def __init__(self, counters: Counters) -> None:
        super().__init__()
        self._counters = counters
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outage", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def wait(self, patience: float) -> None:
        """Wait up to ``patience`` seconds for the traffic to come back, if there was some."""
        end = time.monotonic() + patience
        while time.monotonic() < end:
            if not self.rate or self.seconds is not None:
                return
            time.sleep(3 * MOMENT)

    def lines(self) -> tuple[str, ...]:
        """The measurement, for people."""
        unplugged = f"unplugged to plugged in: {self.unplugged:.3f} s"
        if not self.rate:
            return (unplugged, "no traffic before the switch, so no outage to see")
        if self.seconds is None:
            return (unplugged, "it was sending before the switch and is not now: look at it")
        return (
            unplugged,
            f"outage (below half of {self.rate:.0f} frames/s): {self.seconds:.3f} s",
        )

    def _run(self) -> None:
        while not self._stop.wait(PERIOD):
            counts = self._counters()
            self.see(time.monotonic(), counts)


def sent_by(macs: Collection[str]) -> Counters:
    """A reader of the frames sent by each device of this host with one of these MACs."""
    known: dict[str, bool] = {}

    def read() -> dict[str, int]:
        counts = {}
        names = os.listdir(_NET)
        for vanished in set(known) - set(names):
            del known[vanished]
        for name in names:
            with contextlib.suppress(OSError):
                if name not in known:
                    known[name] = (_NET / name / "address").read_text().strip() in macs
                if known[name]:
                    counts[name] = int((_NET / name / "statistics" / "tx_packets").read_text())
        return counts

    return read
