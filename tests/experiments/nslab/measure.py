"""A run: build a bed for each configuration, load them in turn, write down what was counted.

All beds of a run stand at the same time and are silent but for one. In each round every
configuration meets every load, in an order drawn by the seed.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from . import beds, counters, nic, probes, spaces, traffic
from .beds import Bed, Kind
from .counters import Place
from .spaces import GENERATOR

# The generator has CPU 0.
CPU = 1
_IDLE_POLL_NS = 200_000
_DRAIN_SECONDS = 3.0
_SHORT = 0.5
# Of what both chains forward in overload, for each of them, so that both together are below.
_FAIR = 0.4
# Of what the generator can send to both, so that it keeps the rate of each.
_OF_GENERATOR = 0.8
_NO_LIMIT = 1_000_000.0
_NAPI_THREAD = re.compile(r"napi/")
_WORKERS = "/sys/devices/virtual/workqueue/cpumask"
# A load: the name by which the page knows it, and the rate of each stream.
Load = tuple[str, dict[str, float]]


def run(wanted: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Make one run of the plan: its result, as it is stored."""
    kinds = [Kind(c["name"], c["kind"], c.get("threaded", False)) for c in wanted["configurations"]]
    bed = wanted["bed"]
    spaces.remember_host()
    nic.give_back()
    spaces.clean()
    spaces.add([GENERATOR])
    standing: list[Bed] = []
    try:
        for number, kind in enumerate(kinds):
            began = time.monotonic()
            standing.append(beds.build(number, kind, bed, CPU))
            say(f"{kind.name}: built in {time.monotonic() - began:.1f} s")
        bind_threads(standing)
        if bed.get("flood"):
            # macvlan's broadcasts are handed on by a worker, which would choose its CPU.
            spaces.write(_WORKERS, f"{1 << CPU:x}")
        if bed["method"] == "latency":
            loads: list[Load] = [("probes", {})]
            facts: dict[str, Any] = {}
            for one in standing:
                probes.latencies(one, CPU, _SHORT)  # warms up
        else:
            loads, facts = _loads(bed, standing, say)
        trials = []
        began = time.monotonic()
        for turn, one, load in schedule(wanted, standing, loads):
            trials.append(_trial(turn, one, load, wanted))
        say(f"{len(trials)} trials in {time.monotonic() - began:.0f} s")
        return {
            "environment": _environment(),
            "facts": facts,
            "loads": dict(loads),
            "trials": trials,
        }
    finally:
        nic.give_back()
        spaces.clean()


def schedule(
    wanted: Mapping[str, Any], standing: Sequence[Bed], loads: Sequence[Load]
) -> Iterator[tuple[int, Bed, Load]]:
    """Every round: each load at each bed once, shuffled."""
    draw = random.Random(wanted["seed"])
    for turn in range(wanted["pairs"]):
        order = [(one, load) for load in loads for one in standing]
        draw.shuffle(order)
        for one, load in order:
            yield turn, one, load


def bind_threads(standing: Sequence[Bed]) -> None:
    """NAPI threads go to the routers' CPU, as all else that routes."""
    if not any(one.kind.threaded for one in standing):
        return
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                with open(f"/proc/{entry}/comm", encoding="utf-8") as file:
                    mine = _NAPI_THREAD.match(file.read())
                if mine:
                    os.sched_setaffinity(int(entry), {CPU})


# -- loads --------------------------------------------------------------------------------


def _loads(
    bed: Mapping[str, Any], standing: Sequence[Bed], say: Callable[[str], None]
) -> tuple[list[Load], dict[str, Any]]:
    """Rates of the streams, from what the beds carry here and now."""
    names = [s.name for s in standing[0].streams]
    if bed["method"] == "sweep":
        peaks = {one.kind.name: _peak(one, names) for one in standing}
        say(f"peaks: {_rounded(peaks)}")
        base = peaks[standing[0].kind.name]
        loads = [(f"{f:g}", dict.fromkeys(names, f * base / len(names))) for f in bed["factors"]]
        return loads, {"peaks": peaks, "base": base}
    found = {one.kind.name: _overload(one, ["a", "b"]) for one in standing}
    peaks = {name: sum(trial["forwarded_pps"].values()) for name, trial in found.items()}
    say(f"two chains forward in overload: {_rounded(peaks)}")
    fair = _FAIR * min(peaks.values())
    sends = min(sum(trial["sent_pps"].values()) for trial in found.values())
    other = "flood" if bed["method"] == "flood" else "a"
    loads = [("alone", {"b": fair})]
    if other == "a":
        loads.append(("both", {"a": fair, "b": fair}))
    loads += [
        (f"{rate / fair:.1f} times", {other: rate, "b": fair})
        for rate in overloads(bed["factors"], fair, _OF_GENERATOR * sends)
    ]
    return loads, {"peaks": peaks, "fair": fair, "generator": sends}


def overloads(factors: Sequence[float], fair: float, most: float) -> list[float]:
    """Rates beside one of ``fair``: so many times that, but with it not above ``most``,
    for a generator that falls short would take from both. Each of them once."""
    return sorted({min(factor * fair, max(most - fair, fair)) for factor in factors})


def _rounded(values: Mapping[str, float]) -> dict[str, int]:
    return {name: round(value) for name, value in values.items()}


def _overload(one: Bed, names: Sequence[str]) -> dict[str, Any]:
    """A trial with as many frames as the generator can send: of two the one that forwards
    more, after one that warms up, for an emulator translates what runs for the first time."""
    rates = dict.fromkeys(names, _NO_LIMIT)
    found = [_load(one, rates, _SHORT) for _ in range(3)]
    return max(found[1:], key=lambda trial: sum(trial["forwarded_pps"].values()))


def _peak(one: Bed, names: Sequence[str]) -> float:
    """Frames per second that leave then."""
    return sum(_overload(one, names)["forwarded_pps"].values())


# -- trials -------------------------------------------------------------------------------


def _trial(turn: int, one: Bed, load: Load, wanted: Mapping[str, Any]) -> dict[str, Any]:
    name, rates = load
    trial = {"round": turn, "configuration": one.kind.name, "load": name}
    if wanted["bed"]["method"] == "latency":
        return {**trial, "latency_us": probes.latencies(one, CPU, wanted["seconds"])}
    return {**trial, **_load(one, rates, wanted["seconds"])}


def _load(one: Bed, rates: Mapping[str, float], seconds: float) -> dict[str, Any]:
    """Load a bed, and count over all of it until nothing moves any more."""
    for device in one.nics:
        nic.poll_on(device, CPU, _IDLE_POLL_NS)
    try:
        time.sleep(0.02)
        before = _counts(one)
        numbers = [irq for device in one.nics for irq in nic.interrupts(device)]
        cpu_before = counters.cpu(CPU, numbers)
        sent = traffic.run(one.streams, rates, seconds)
        cpu_after = counters.cpu(CPU, numbers)
        after = _settled(one)
    finally:
        for device in one.nics:
            nic.poll_by_sender(device)
    time_sent = max(s.seconds for s in sent.values())
    measured = [name for name in sent if name in one.ends]
    # Streams that leave through one device are one.
    ends: dict[Place, list[str]] = {}
    for name in measured:
        ends.setdefault(one.ends[name], []).append(name)
    forwarded, through = {}, {}
    for place, names in ends.items():
        name = "+".join(names)
        forwarded[name] = after[place] - before[place]
        # In overload the streams do not end together: each by its own time.
        through[name] = forwarded[name] / max(sent[n].seconds for n in names)
    change = {str(k): v - before[k] for k, v in after.items() if isinstance(k, str)}
    return {
        "seconds": time_sent,
        "sent": {name: s.frames for name, s in sent.items()},
        "sent_pps": {name: s.frames / s.seconds for name, s in sent.items()},
        "forwarded": forwarded,
        "forwarded_pps": through,
        "counted": {k: v for k, v in change.items() if v},
        "cpu": {k: v - cpu_before[k] for k, v in cpu_after.items() if v != cpu_before[k]},
    }


def _counts(one: Bed) -> dict[Any, int]:
    """Frames that left by device, and drops by place."""
    found: dict[Any, int] = {
        place: frames.sent for place, frames in counters.devices(set(one.ends.values())).items()
    }
    wires = counters.devices(Place(GENERATOR, n.wire) for n in one.nics)
    found["nic_ring_full"] = sum(t.dropped for t in wires.values())
    found["backlog"] = counters.cpu(CPU)["backlog_dropped_anywhere"]
    if one.kind.kind == beds.OURS and len(one.virtual) <= _FEW:
        found.update(counters.own(one.virtual))
    return found


# Of more devices than these the own counters are not read.
_FEW = 24


def _settled(one: Bed) -> dict[Any, int]:
    end = time.monotonic() + _DRAIN_SECONDS
    last = counters.devices(set(one.ends.values()))
    while time.monotonic() < end:
        time.sleep(0.05)
        now = counters.devices(set(one.ends.values()))
        if now == last:
            break
        last = now
    return _counts(one)


def _environment() -> dict[str, Any]:
    text = spaces.read("/etc/os-release")
    name = re.search(r'^PRETTY_NAME="?([^"\n]*)', text, re.MULTILINE)
    return {
        "os": name[1] if name else "unknown system",
        "kernel": os.uname().release,
        "cpus": os.cpu_count(),
        "idle_poll_us": _IDLE_POLL_NS // 1000,
        "netdev_max_backlog": int(spaces.read("/proc/sys/net/core/netdev_max_backlog")),
    }
