"""What the kernel counted: frames by device, SoftIRQs, interrupts, the backlog, CPU time."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from vsrtune.host.ethtool import statistics

from .spaces import HOST, Failure, inside, read

_RECEIVED = ["bytes", "packets", "errors", "dropped", "fifo", "frame", "compressed", "multicast"]
_SENT = ["bytes", "packets", "errors", "dropped"]
_FIELDS = [f"rx_{name}" for name in _RECEIVED] + [f"tx_{name}" for name in _SENT]
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Place:
    """A device in a namespace."""

    space: str
    device: str


def devices(places: Iterable[Place]) -> dict[Place, dict[str, int]]:
    """Counters of those devices, by /proc/net/dev's names."""
    wanted = list(places)
    found: dict[Place, dict[str, int]] = {}
    for space in dict.fromkeys(p.space for p in wanted):
        if space == HOST:
            table = parse_devices(read("/proc/net/dev"))
        else:
            with inside(space):
                table = parse_devices(read("/proc/net/dev"))
        for place in wanted:
            if place.space == space:
                if place.device not in table:
                    raise Failure(f"no device {place.device} in {space}")
                found[place] = table[place.device]
    return found


def parse_devices(text: str) -> dict[str, dict[str, int]]:
    table = {}
    for line in text.splitlines()[2:]:
        name, _, values = line.partition(":")
        table[name.strip()] = dict(zip(_FIELDS, map(int, values.split()), strict=False))
    return table


def own(places: Iterable[Place]) -> Counter[str]:
    """Sums of `ethtool -S` over devices that count by themselves; high-water marks are no
    sums, and left out."""
    total: Counter[str] = Counter()
    for place in places:
        with inside(place.space):
            found = statistics(place.device)
        for name, value in found.items():
            if not name.startswith("tapq") and not name.endswith(("high_water", "_tid")):
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
    for name, ticks in parse_stat(read("/proc/stat"), number).items():
        found[f"{name}_ms"] = round(1000 * ticks / _TICKS)
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


def parse_stat(text: str, number: int) -> dict[str, int]:
    """Ticks of one CPU: user, system, idle, softirq."""
    for line in text.splitlines():
        if line.startswith(f"cpu{number} "):
            cells = [int(cell) for cell in line.split()[1:]]
            return {
                "user": cells[0] + cells[1],
                "system": cells[2],
                "idle": cells[3] + cells[4],
                "irq": cells[5],
                "softirq": cells[6],
            }
    raise Failure(f"/proc/stat knows no CPU {number}")
