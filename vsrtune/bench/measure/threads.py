# SPDX-License-Identifier: GPL-2.0-or-later
"""The use of threads that move frames: CPU time, switches, migrations, by role."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psutil

from vsrtune.bench.measure.accounting import Effort
from vsrtune.host.filesystem import HostRoot
from vsrtune.host.procfs import cpu_ns, parse_stat
from vsrtune.model.guest import Guest, Role, ThreadKey
from vsrtune.model.snapshot import Snapshot

_ROLES = {
    Role.VCPU: "vcpu",
    Role.VHOST: "vhost",
    Role.NAPI: "napi",
    Role.EMULATOR: "emulator",
}
_SWITCHES = re.compile(r"^(?:non)?voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)
_MIGRATIONS = re.compile(r"^se\.nr_migrations\s*:\s*(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Used:
    """The use of one thread so far. ``cpu`` is in seconds."""

    role: str
    cpu: float
    switches: int
    migrations: int


@dataclass(frozen=True, slots=True)
class Usage:
    """The use of all threads so far. ``softirq`` and ``idle`` are those of the whole host, in
    seconds, summed over ``cpus`` CPUs."""

    threads: Mapping[ThreadKey, Used]
    softirq: float
    idle: float
    cpus: int


def roles(snapshot: Snapshot, guests: Iterable[Guest]) -> dict[ThreadKey, str]:
    """The threads that count: those of the guests, and the host's ksoftirqd."""
    found = {t.key: _ROLES.get(t.role, "other") for guest in guests for t in guest.threads}
    found.update((t.key, "ksoftirqd") for t in snapshot.host.softirq)
    return found


def read_usage(root: HostRoot, threads: Mapping[ThreadKey, str]) -> Usage:
    """The use of ``threads`` so far. Threads that are gone are left out."""
    found = {key: _used(root, key, role) for key, role in threads.items()}
    used = {key: one for key, one in found.items() if one is not None}
    times = psutil.cpu_times()
    return Usage(used, times.softirq, times.idle + times.iowait, psutil.cpu_count() or 1)


def effort(before: Usage, after: Usage, beyond: float) -> Effort:
    """The use between ``before`` and ``after``, by role. ``beyond`` is the time before and after
    the traffic, in seconds, in which the CPUs idled."""
    seconds: dict[str, float] = {}
    switches, migrations = Counter[str](), Counter[str]()
    both = before.threads.keys() & after.threads.keys()
    for key in both:
        (old, new) = (before.threads[key], after.threads[key])
        seconds[new.role] = seconds.get(new.role, 0.0) + new.cpu - old.cpu
        switches[new.role] += new.switches - old.switches
        migrations[new.role] += new.migrations - old.migrations
    seconds["softirq"] = after.softirq - before.softirq
    seconds["idle"] = max(0.0, after.idle - before.idle - max(0.0, beyond) * after.cpus)
    return Effort(
        cpu_seconds={role: round(seconds[role], 6) for role in sorted(seconds)},
        switches={role: switches[role] for role in sorted(switches)},
        migrations={role: migrations[role] for role in sorted(migrations)},
        missing=len(before.threads.keys() | after.threads.keys()) - len(both),
    )


def parse_switches(status: str) -> int:
    """Voluntary and other context switches in /proc/TID/status."""
    return sum(int(count) for count in _SWITCHES.findall(status))


def parse_migrations(sched: str) -> int:
    """``se.nr_migrations`` of /proc/TID/sched; 0 where the kernel does not tell."""
    match = _MIGRATIONS.search(sched)
    return int(match[1]) if match else 0


def _used(root: HostRoot, key: ThreadKey, role: str) -> Used | None:
    base = f"/proc/{key.pid}/task/{key.tid}"
    try:
        stat = parse_stat(root.read(f"{base}/stat"))
        if stat.start_time != key.start_time:
            return None
        status = root.read(f"{base}/status")
        seconds = cpu_ns(root, base, stat) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        return None
    try:
        migrations = parse_migrations(root.read(f"{base}/sched"))
    except OSError:  # a kernel without CONFIG_SCHED_DEBUG
        migrations = 0
    return Used(role, seconds, parse_switches(status), migrations)
