# SPDX-License-Identifier: GPL-2.0-or-later
"""The frame that `vsrtune top` shows of two successive samples of a host. Pure.

Shares and None have the meaning of host_view. A value that takes two samples is None while there
is one.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import DATA_PLANE, Guest, Sched, ThreadKey
from vsrtune.model.host import Nic
from vsrtune.model.load import Bottleneck, FrameRates, GuestFrames, HostSample, shared_devices
from vsrtune.model.snapshot import Snapshot
from vsrtune.plan.interrupt_cpus import lower_nics, queue_irqs
from vsrtune.views.bottleneck import CpuLoad, Flow, bottleneck, is_ring
from vsrtune.views.host_view import ThreadView, Use, interrupts, thread_views, use_between

# Other threads of a guest, and ksoftirqd, are shown from this share of a CPU on.
WORTH_TELLING = 0.01


@dataclass(frozen=True, slots=True)
class Resident:
    """A resident of a CPU: a ``thread`` of a guest, an ``irq``, a NIC's ``softirq`` where it was
    observed, ``rps``, a NIC's ``napi`` thread, or ``ksoftirqd``. ``guests`` are those it works
    for, ``rate`` is in interrupts a second."""

    kind: str
    label: str
    guests: tuple[str, ...] = ()
    load: float | None = None
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class CpuRow:
    """One online CPU. ``use`` is ``interrupts``, ``interrupts?`` (assumed, because nothing
    tells where the NIC's interrupts are served), ``guests``, ``isolated`` or "". ``busy`` and
    ``softirq`` are shares of its time. ``residents`` lists guests' threads last, the busiest of
    them first."""

    cpu: int
    use: str
    busy: float | None
    softirq: float | None
    residents: tuple[Resident, ...]


@dataclass(frozen=True, slots=True)
class DropRow:
    """Frames dropped at one place: ``rate`` is per second over the interval, ``total`` counts
    since the counter began."""

    where: str
    place: str
    guest: str
    rate: float | None
    total: int


@dataclass(frozen=True, slots=True)
class Frame:
    """One picture of the host. ``seconds`` is the time between the two samples, 0 while
    there is only one. ``guests`` are the refs of the guests shown, the busiest first; their
    ``threads`` have the same order. ``rates`` are by guest, where counters tell them. ``drops``
    begins with the fastest. ``notes`` say what could not be read. ``bottlenecks`` are of the guests
    whose devices count what they get."""

    seconds: float
    kernel: str
    guests: tuple[str, ...]
    cpus: tuple[CpuRow, ...]
    threads: tuple[ThreadView, ...]
    drops: tuple[DropRow, ...]
    notes: tuple[str, ...] = ()
    rates: Mapping[str, FrameRates] = field(default_factory=dict)
    bottlenecks: tuple[Bottleneck, ...] = ()

    @property
    def budgets(self) -> dict[ThreadKey, float]:
        """The used share of its budget, by thread that has one."""
        shares = ((view.thread.key, view.use.budget) for view in self.threads)
        return {key: share for key, share in shares if share is not None}


def make_frame(
    before: HostSample,
    after: HostSample,
    only: frozenset[str] = frozenset(),
) -> Frame:
    """The host of ``after``, with loads and rates since ``before``, and without them when both
    are the same sample. ``only`` holds the guests (refs) whose threads and drops are
    shown, all when it is empty. A CPU shows the threads of all guests."""
    interval, snapshot = _Interval(before, after), after.snapshot
    serving = interrupts(snapshot)
    rows = {g.ref: _threads(interval, g, serving) for g in snapshot.guests}
    order = sorted(rows, key=lambda ref: (-_load_of(rows[ref]), ref))
    shown = [ref for ref in order if not only or ref in only]
    cpus = tuple(_cpus(interval, rows, serving))
    drops = _drops(interval)
    return Frame(
        seconds=interval.seconds,
        kernel=snapshot.host.kernel,
        guests=tuple(shown),
        cpus=cpus,
        threads=tuple(row for ref in shown for row in rows[ref]),
        drops=tuple(d for d in drops if not (only and d.guest and d.guest not in only)),
        notes=tuple(f"{p.reader}: {p.what}" for p in snapshot.problems),
        rates=dict(_rates(interval, shown)),
        bottlenecks=tuple(_bottlenecks(interval, rows, cpus, drops, serving, shown)),
    )


@dataclass(frozen=True, slots=True)
class _Interval:
    """The time between two samples."""

    before: HostSample
    after: HostSample

    @property
    def seconds(self) -> float:
        return max(self.after.at_ns - self.before.at_ns, 0) / 1e9

    def use(self, key: ThreadKey, sched: Sched) -> Use:
        return use_between(sched, self.before.threads.get(key), self.after.threads.get(key))

    def rate(self, first: int | None, last: int | None) -> float | None:
        """The rate of a counter, a second. A counter that is lower than before has been reset."""
        if first is None or last is None or not self.seconds:
            return None
        return round(max(last - first, 0) / self.seconds, 1)

    def busy(self, cpu: int) -> tuple[float | None, float | None]:
        """The shares of a CPU's time that it was busy, and that went to SoftIRQs."""
        last = self.after.cpus.get(cpu)
        shares = last.since(self.before.cpus.get(cpu)) if last is not None else None
        return (shares.busy, shares.softirq) if shares is not None else (None, None)


# -- threads


def _load_of(views: Iterable[ThreadView]) -> float:
    """The load that orders guests, in tenths of a CPU: equals must not swap places all the time."""
    return round(sum(v.use.load or 0.0 for v in views), 1)


def _threads(interval: _Interval, guest: Guest, serving: Container[int]) -> list[ThreadView]:
    host = interval.after.snapshot.host
    return [
        view
        for view in thread_views(guest, host, lambda t: interval.use(t.key, t.sched), serving)
        if view.thread.role in DATA_PLANE or (view.use.load or 0.0) >= WORTH_TELLING
    ]


# -- CPUs


def _observed(snapshot: Snapshot) -> CpuSet:
    """CPUs on which interrupts, RPS or an observed SoftIRQ of a NIC below guests show."""
    found = CpuSet()
    for nic in {n.name: n for g in snapshot.guests for n in lower_nics(snapshot.host, g)}.values():
        found |= nic.rps_cpus | (nic.rx_cpus or CpuSet())
        found |= CpuSet.union(irq.effective for irq in queue_irqs(nic))
    return found


def _cpus(
    interval: _Interval, rows: Mapping[str, Sequence[ThreadView]], serving: Container[int]
) -> Iterable[CpuRow]:
    snapshot = interval.after.snapshot
    residents, observed = _residents(interval, rows), _observed(snapshot)
    for cpu in snapshot.host.cpus:
        if not cpu.online:
            continue
        here = residents.get(cpu.id, [])
        if cpu.id in serving:
            use = "interrupts" if cpu.id in observed else "interrupts?"
        elif any(r.kind == "thread" for r in here):
            use = "guests"
        else:
            use = "isolated" if cpu.isolated else ""
        busy, softirq = interval.busy(cpu.id)
        here.sort(key=lambda r: (r.kind == "thread", -(r.load or 0.0)))
        yield CpuRow(cpu.id, use, busy, softirq, tuple(here))


def _residents(
    interval: _Interval, rows: Mapping[str, Sequence[ThreadView]]
) -> dict[int, list[Resident]]:
    found: dict[int, list[Resident]] = {}
    host = interval.after.snapshot.host
    above = _guests_above(interval.after.snapshot)
    for nic in host.nics:
        for cpus, resident in _of_nic(interval, nic, above.get(nic.name, ())):
            for cpu in cpus:
                found.setdefault(cpu, []).append(resident)
    for softirq in host.softirq:
        load = interval.use(softirq.key, softirq.sched).load
        if (load or 0.0) >= WORTH_TELLING:
            resident = Resident("ksoftirqd", f"ksoftirqd/{softirq.cpu}", load=load)
            found.setdefault(softirq.cpu, []).append(resident)
    for ref, views in rows.items():
        for view in views:
            resident = Resident("thread", view.label, (ref,), view.use.load)
            found.setdefault(view.thread.last_cpu, []).append(resident)
    return found


def _guests_above(snapshot: Snapshot) -> dict[str, tuple[str, ...]]:
    """The guests that send and receive through each lower device."""
    found: dict[str, dict[str, None]] = {}
    for guest in snapshot.guests:
        for interface in guest.interfaces:
            for name in interface.lower:
                found.setdefault(name, {})[guest.ref] = None
    return {name: tuple(refs) for name, refs in found.items()}


def _of_nic(
    interval: _Interval, nic: Nic, guests: tuple[str, ...]
) -> Iterable[tuple[CpuSet, Resident]]:
    before, after = interval.before.interrupts, interval.after.interrupts
    for irq in queue_irqs(nic):
        rate = interval.rate(before.get(irq.number), after.get(irq.number))
        label = f"irq {irq.number} {irq.name}"
        yield irq.effective, Resident("irq", label, guests, rate=rate)
    if nic.rps_cpus:
        yield nic.rps_cpus, Resident("rps", f"rps {nic.name}", guests)
    if not nic.irqs and nic.rx_cpus:
        yield nic.rx_cpus, Resident("softirq", f"softirq {nic.name}", guests)
    for thread in nic.napi:
        # Nothing tells where a thread that may run on several CPUs does run.
        if len(thread.affinity) == 1:
            yield thread.affinity, Resident("napi", thread.name, guests)


# -- frames


def _counted(interval: _Interval, refs: Collection[str]) -> Iterable[tuple[Guest, Collection[str]]]:
    """The guests whose devices count what each guest alone gets, with these devices."""
    guests = interval.after.snapshot.guests
    shared = shared_devices(guests)
    for guest in guests:
        devices = {i.target for i in guest.interfaces if i.ifindex not in shared}
        known = devices & interval.before.frames.keys() & interval.after.frames.keys()
        if guest.ref in refs and len(known) == len(guest.interfaces) > 0:
            yield guest, known


def _rates(interval: _Interval, refs: Collection[str]) -> Iterable[tuple[str, FrameRates]]:
    for guest, devices in _counted(interval, refs):
        before, after = (
            sum((s.frames[name] for name in devices), GuestFrames())
            for s in (interval.before, interval.after)
        )
        rates = after.since(before, interval.seconds)
        if rates is not None:
            yield guest.ref, rates


def _bottlenecks(
    interval: _Interval,
    rows: Mapping[str, Sequence[ThreadView]],
    cpus: Iterable[CpuRow],
    drops: Iterable[DropRow],
    serving: Mapping[int, Collection[str]],
    refs: Collection[str],
) -> Iterable[Bottleneck]:
    if not interval.seconds:
        return
    loads = {row.cpu: _cpu_load(row) for row in cpus}
    drops = [d for d in drops if d.rate]
    for guest, devices in _counted(interval, refs):
        rates = {name: _flowed(interval, name) for name in devices}
        below = {name for i in guest.interfaces for name in i.lower}
        missed: dict[int, float] = {}
        at = {(f"CPU {c}", "backlog"): [c] for c, names in serving.items() if below & {*names}}
        for place in ("rx_missed_errors", "rx_fifo_errors"):
            at |= {(n, place): [c for c in serving if n in serving[c]] for n in below}
        for drop in drops:
            if served := at.get((drop.where, drop.place)):
                # A NIC counts for all its queues: most likely it misses on the fullest CPU.
                cpu = max(served, key=lambda c: loads[c].softirq)
                missed[cpu] = missed.get(cpu, 0.0) + (drop.rate or 0.0)
        full = [d for d in drops if d.guest == guest.ref and is_ring(d.place)]
        unsent = [d for d in drops if d.where in below and d.place == "tx_dropped"]
        yield bottleneck(
            guest,
            Flow(
                threads=rows[guest.ref],
                arrived={name: rate[0] for name, rate in rates.items()},
                sent={name: rate[1] for name, rate in rates.items()},
                lost=_by_device(full),
                missed=missed,
                unsent=_by_device(unsent),
                cpus=loads,
            ),
        )


def _flowed(interval: _Interval, device: str) -> tuple[float, float]:
    """Frames a second that arrived for a guest and were sent by it, by one device."""
    before, after = interval.before.frames[device], interval.after.frames[device]
    rates = interval.rate(before.arrived, after.arrived), interval.rate(before.sent, after.sent)
    return rates[0] or 0.0, rates[1] or 0.0


def _by_device(drops: Iterable[DropRow]) -> dict[str, float]:
    found: dict[str, float] = {}
    for drop in drops:
        found[drop.where] = found.get(drop.where, 0.0) + (drop.rate or 0.0)
    return found


def _cpu_load(row: CpuRow) -> CpuLoad:
    """What else than guests and SoftIRQs keeps the CPU busy shows as ``other processes``. The time
    of ksoftirqd is that of SoftIRQs."""
    busy, softirq = row.busy or 0.0, row.softirq or 0.0
    named = [
        (f"{r.guests[0]} {r.label}" if r.kind == "thread" else r.label, r.load)
        for r in row.residents
        if r.load and r.kind != "ksoftirqd"
    ]
    rest = busy - softirq - sum(load for _, load in named)
    if rest >= WORTH_TELLING:
        named.append(("other processes", round(rest, 4)))
    return CpuLoad(busy, softirq, tuple(sorted(named, key=lambda one: -one[1])))


def _drops(interval: _Interval) -> list[DropRow]:
    """Places that have dropped anything, the fastest first."""
    found = []
    for spot, total in interval.after.drops.items():
        if total:
            rate = interval.rate(interval.before.drops.get(spot), total)
            found.append(DropRow(spot.where, spot.place, spot.guest, rate, total))
    return sorted(found, key=lambda r: (-(r.rate or 0.0), -r.total, r.where, r.place))
