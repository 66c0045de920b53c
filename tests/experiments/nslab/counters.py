"""What the kernel counted: frames by device, SoftIRQs, interrupts, the backlog, CPU time."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import psutil

from vsrtune.host.ethtool import statistics

from .spaces import HOST, Failure, inside, read


@dataclass(frozen=True)
class Place:
    """A device in a namespace."""

    space: str
    device: str


@dataclass(frozen=True)
class Traffic:
    """Frames that a device ``sent`` and ``dropped`` instead of sending."""

    sent: int
    dropped: int


def devices(places: Iterable[Place]) -> dict[Place, Traffic]:
    """Frames of those devices so far."""
    wanted = list(places)
    found: dict[Place, Traffic] = {}
    for space in dict.fromkeys(p.space for p in wanted):
        with contextlib.nullcontext() if space == HOST else inside(space):
            table = psutil.net_io_counters(pernic=True, nowrap=False)
        for place in wanted:
            if place.space == space:
                if place.device not in table:
                    raise Failure(f"no device {place.device} in {space}")
                seen = table[place.device]
                found[place] = Traffic(seen.packets_sent, seen.dropout)
    return found


def own(places: Iterable[Place]) -> Counter[str]:
    """Sums of `ethtool -S` over devices that count by themselves; high-water marks are no
    sums, and left out."""
    total: Counter[str] = Counter()
    for place in places:
        with inside(place.space):
            found = statistics(place.device)
        for name, value in found.items():
            if not name.startswith("tap") and not name.endswith(("high_water", "_tid")):
                total[name] += value
    return total


def cpu(number: int, irqs: Collection[str] = ()) -> Counter[str]:
    """Of one CPU: NET_RX, interrupts (all, of the timer, and those of ``irqs``), frames that
    went through its NAPI polls and backlog, those that the backlog dropped, squeezed
    rounds, busy seconds; and the frames that backlogs of all CPUs dropped."""
    found: Counter[str] = Counter()
    found["net_rx"] = parse_column(read("/proc/softirqs"), number).get("NET_RX", 0)
    rows = parse_column(read("/proc/interrupts"), number)
    found["interrupts"] = sum(v for name, v in rows.items() if name not in ("ERR", "MIS"))
    found["timer_interrupts"] = rows.get("LOC", 0)
    found["nic_interrupts"] = sum(rows.get(irq, 0) for irq in irqs)
    table = parse_softnet(read("/proc/net/softnet_stat"))
    found["softnet_processed"], found["softnet_dropped"], found["softnet_squeezed"] = table[number]
    found["backlog_dropped_anywhere"] = sum(row[1] for row in table.values())
    times = psutil.cpu_times(percpu=True)[number]
    spent = {
        "user": times.user + times.nice,
        "system": times.system,
        "idle": times.idle + times.iowait,
        "irq": times.irq,
        "softirq": times.softirq,
    }
    found.update({f"{name}_ms": round(1000 * seconds) for name, seconds in spent.items()})
    return found


def parse_column(text: str, number: int) -> dict[str, int]:
    """One CPU's column of /proc/softirqs or /proc/interrupts, by the row's first word."""
    lines = text.splitlines()
    column = lines[0].split().index(f"CPU{number}")
    found = {}
    for line in lines[1:]:
        name, _, values = line.partition(":")
        cells = values.split()
        if len(cells) > column and cells[column].isdigit():
            found[name.strip()] = int(cells[column])
    return found


def parse_softnet(text: str) -> dict[int, tuple[int, int, int]]:
    """By CPU: processed, dropped, squeezed. The 13th column is the CPU."""
    found = {}
    for row, line in enumerate(text.splitlines()):
        cells = [int(cell, 16) for cell in line.split()]
        found[cells[12] if len(cells) > 12 else row] = (cells[0], cells[1], cells[2])
    return found
