# SPDX-License-Identifier: GPL-2.0-or-later
"""The kernel's counters on the host of the routers: lost frames; CPU time, switches and migrations
of the threads that move frames, by role. They account for the frames of a trial."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from vsrtune.bench.spec.model import Latency, Load, Router, Trial
from vsrtune.bench.traffic.pktgen import Sent
from vsrtune.cli.options import running_guest
from vsrtune.core.errors import VsrtuneError
from vsrtune.host.filesystem import HostRoot, text_of
from vsrtune.host.netdev import CLASS, NetReader, parse_softnet
from vsrtune.host.procfs import cpu_ns, parse_stat
from vsrtune.model.guest import DATA_PLANE, Guest, Role, ThreadKey
from vsrtune.model.snapshot import Snapshot

FlowKey = tuple[str, int | None]

# Lost frames so far: ``refused`` by devices that should send, ``missed`` by NICs without free
# descriptors, lost in the ``backlog`` of a CPU, and in the ``ring`` of a guest's tap.
Losses = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters at one moment, of every machine that takes part. ``counted`` is frames
    at the sink by stream ("router/forth") and flow (None where flows are not counted one by
    one). Two that are equal say that no frame is under way any more."""

    counted: Mapping[FlowKey, int]
    lost: Losses


@dataclass(frozen=True, slots=True)
class Effort:
    """The work of the host between the counters; see Trial."""

    cpu_seconds: Mapping[str, float] = field(default_factory=dict)
    switches: Mapping[str, int] = field(default_factory=dict)
    migrations: Mapping[str, int] = field(default_factory=dict)
    missing: int = 0


def account(
    configuration: str,
    load: Load,
    flows: int,
    sent: Sequence[Sent],
    before: Counts,
    after: Counts,
    effort: Effort,
    probes: Latency | None = None,
) -> Trial:
    """The trial. Probes are frames like the others: they count as sent, and as
    forwarded unless they were lost, because the drop counters include lost ones."""
    seconds = max((stream.seconds for stream in sent), default=0.0)
    sent_by, by_flow = Counter[str](), Counter[str]()
    for stream in sent:
        sent_by[router_of(stream.key)] += stream.frames
    forwarded_by = Counter(dict.fromkeys(sent_by, 0))
    for (key, flow), count in after.counted.items():
        frames = count - before.counted.get((key, flow), 0)
        forwarded_by[router_of(key)] += frames
        if flow is not None:
            # The numbers of the way back continue those of the way forth.
            number = flow + (flows if key.endswith("/back") else 0)
            by_flow[f"{router_of(key)}/{number}"] += frames
    total, forwarded = sent_by.total(), forwarded_by.total()
    notes = [f"{effort.missing} threads came or went during the trial"] if effort.missing else []
    if probes is not None:
        total += probes.sent
        forwarded += probes.sent - probes.lost
    drops = _drops(before.lost, after.lost)
    drops["elsewhere"] = total - forwarded - sum(drops.values())
    if drops["elsewhere"] < 0:
        notes.append(
            f"{-drops['elsewhere']} more frames were counted than sent: "
            "other traffic went through the same queues"
        )
    return Trial(
        configuration=configuration,
        load=load,
        seconds=seconds,
        sent=total,
        forwarded=forwarded,
        drops=drops,
        sent_by=dict(sent_by),
        forwarded_by=dict(forwarded_by),
        forwarded_by_flow=dict(by_flow),
        cpu_seconds=effort.cpu_seconds,
        switches=effort.switches,
        migrations=effort.migrations,
        latency=probes,
        notes=tuple(notes),
    )


def router_of(key: str) -> str:
    """The router of a stream's key; names may hold slashes."""
    return key.rpartition("/")[0]


def _drops(before: Losses, after: Losses) -> dict[str, int]:
    lost = {kind: count - before.get(kind, 0) for kind, count in after.items()}
    # A veth whose peer's backlog is full counts the frame as refused as well.
    refused = max(0, lost["refused"] - lost["backlog"])
    return {
        "nic": refused + lost["missed"],
        "softnet_backlog": lost["backlog"],
        "macvtap_ring": lost["ring"],
    }


# The counter files of frames that are lost, by kind of loss.
Places = Mapping[str, Collection[str]]

_ROLES = (*DATA_PLANE, Role.EMULATOR)
# Voluntary and other context switches in /proc/TID/status, migrations in /proc/TID/sched, which
# needs CONFIG_SCHED_DEBUG.
SWITCHES = re.compile(r"^(?:non)?voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)
MIGRATIONS = re.compile(r"^se\.nr_migrations\s*:\s*(\d+)", re.MULTILINE)


def guests_of(router: Router, snapshot: Snapshot) -> tuple[Guest, ...]:
    """The running guests that are the router; none for a native one. Raises
    VsrtuneError when one does not run."""
    return tuple(running_guest(snapshot, name) for name in router.guests)


def places(root: HostRoot, snapshot: Snapshot, routers: Iterable[Router]) -> Places:
    """The places where frames of these routers can be lost: the devices through which they come
    and go, and the rings of the guests' taps."""
    net = NetReader(root)
    lowers, rings = set[str](), set[str]()
    for router in routers:
        if router.native:
            macs = {leg.mac.lower() for leg in (router.forth, router.back) if leg is not None}
            for name, addresses in psutil.net_if_addrs().items():
                if any(a.family == psutil.AF_LINK and a.address in macs for a in addresses):
                    lowers.add(name)
        # Members of a group name the same devices, each of which counts once.
        for interface in (i for guest in guests_of(router, snapshot) for i in guest.interfaces):
            lowers.update(interface.lower)
            device = net.device(interface.target)
            # A macvtap receives what goes to its guest; a tun device sends it.
            counter = "tx_dropped" if device is not None and device.tun else "rx_dropped"
            rings.add(f"{CLASS}/{interface.target}/statistics/{counter}")
    # The counters of a bond contain those of its ports (bond_get_stats).
    bonds = (d for d in map(net.device, lowers) if d is not None and d.devtype == "bond")
    lowers.difference_update(*(bond.lowers for bond in bonds))
    ways = [f"{CLASS}/{name}/statistics" for name in sorted(lowers)]
    return {
        "refused": [f"{way}/tx_dropped" for way in ways],
        "missed": [f"{way}/rx_{why}_errors" for way in ways for why in ("missed", "fifo")],
        "ring": sorted(rings),
    }


def queues(router: Router, snapshot: Snapshot) -> dict[tuple[str, int], int]:
    """Frames that each queue of the router's devices received so far, by device and number,
    for devices with such counters."""
    found = {}
    for interface in (i for guest in guests_of(router, snapshot) for i in guest.interfaces):
        for queue in interface.counters.queues if interface.counters is not None else ():
            found[interface.target, queue.queue] = queue.received or 0
    return found


def all_took(
    before: Mapping[tuple[str, int], int], after: Mapping[tuple[str, int], int], ways: int
) -> bool:
    """Whether all queues received frames on as many devices as frames were sent to. True
    when no device has such counters."""
    devices = {device for device, _ in after}
    idle = {key[0] for key, count in after.items() if count <= before.get(key, 0)}
    return len(devices - idle) >= min(ways, len(devices))


def read_losses(root: HostRoot, where: Places) -> Losses:
    """The counters now. Raises VsrtuneError when a device is gone."""
    backlogs = parse_softnet(root.read("/proc/net/softnet_stat"))
    found = {kind: sum(_number(root, path) for path in paths) for kind, paths in where.items()}
    return {**found, "backlog": sum(lost for _, lost in backlogs)}


def _number(root: HostRoot, path: str) -> int:
    try:
        return int(root.read(path))
    except OSError as error:
        raise VsrtuneError(
            f"a counter cannot be read: {error.strerror}",
            where=path,
            hint="the device went away during the trial",
        ) from error


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
    threads = [t for guest in guests for t in guest.threads]
    found = {t.key: t.role.value if t.role in _ROLES else "other" for t in threads}
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


def total(counters: re.Pattern[str], text: str | None) -> int:
    """The sum of counters in a file of /proc; 0 where the kernel does not tell."""
    return sum(map(int, counters.findall(text or "")))


def _used(root: HostRoot, key: ThreadKey, role: str) -> Used | None:
    base = f"/proc/{key.pid}/task/{key.tid}"
    try:
        stat = parse_stat(root.read(f"{base}/stat"))
        if stat.start_time != key.start_time:
            return None
        switches = total(SWITCHES, root.read(f"{base}/status"))
        seconds = cpu_ns(root, base, stat) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Used(role, seconds, switches, total(MIGRATIONS, text_of(root, f"{base}/sched")))
