"""Samples for the tests of top: made-up hosts of shell_samples, between two moments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import shell_samples as samples

from vsrtune.model.load import CpuTimes, DropPlace, HostSample, Reading
from vsrtune.model.snapshot import Snapshot

GOLDEN = Path(__file__).parent / "golden_views"
SECOND = 10**9


def sample(
    snapshot: Snapshot,
    seconds: float,
    ran: Mapping[int, tuple[float, float]],
    drops: Mapping[DropPlace, int] | None = None,
    cpus: Mapping[int, CpuTimes] | None = None,
    interrupts: Mapping[int, int] | None = None,
) -> HostSample:
    """The host after so many seconds, in which threads (by tid) ran and waited for so many."""
    at = int(seconds * SECOND)
    keys = {t.key for g in snapshot.guests for t in g.threads}
    keys |= {t.key for t in snapshot.host.softirq}
    threads = {k: Reading(at, *(int(x * SECOND) for x in ran[k.tid])) for k in keys if k.tid in ran}
    return HostSample(snapshot, at, threads, cpus or {}, drops or {}, interrupts or {})


def crowd(number: int) -> Snapshot:
    """So many guests with one vcpu and one worker each."""
    return samples.snapshot(*(samples.guest(f"vr{n}", 100 + 10 * n) for n in range(number)))


def busy(number: int) -> tuple[HostSample, HostSample]:
    """Two samples of that crowd; the later a guest stands in it the busier it is."""
    seen = crowd(number)
    load = {
        t.key.tid: (2 * n / (number + 1), 0.0)
        for n, g in enumerate(seen.guests)
        for t in g.threads
        if t.role.value == "vcpu"
    }
    return sample(seen, 0, dict.fromkeys(load, (0.0, 0.0))), sample(seen, 2, load)


def with_nic(seen: Snapshot, **more: object) -> Snapshot:
    """The NIC below the guests changed."""
    first, *others = seen.host.nics
    nics = (replace(first, **more), *others)  # type: ignore[arg-type]
    return replace(seen, host=replace(seen.host, nics=nics))
