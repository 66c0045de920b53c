"""Makes the frame that `vsrtune top` shows of two successive samples of a host. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.deadline import used
from vsrtune.model.guest import DATA_PLANE, Guest, SchedClass, Thread, ThreadKey, thread_label
from vsrtune.model.host import Nic
from vsrtune.model.load import HostSample, Reading
from vsrtune.model.plan import Plan
from vsrtune.model.root_domains import waits_for_domain
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import HOST_REF
from vsrtune.plan.interrupt_cpus import interrupt_cpus, lower_nics, queue_irqs
from vsrtune.views.tables import NOTHING, THROTTLED, in_order, split_target, value_text
from vsrtune.views.top_model import (
    CpuRow,
    DriftRow,
    DropRow,
    Frame,
    PendingRow,
    Resident,
    ThreadRow,
)

# Other threads of a guest, and ksoftirqd, are shown from this share of a CPU on.
WORTH_TELLING = 0.01


def make_frame(
    before: HostSample,
    after: HostSample,
    plan: Plan | None = None,
    only: frozenset[str] = frozenset(),
    notes: Sequence[str] = (),
) -> Frame:
    """The host of ``after``, with loads and rates since ``before``, and without them when both
    are the same sample. ``only`` holds the guests (refs) whose threads, drops and settings are
    shown, all when it is empty. A CPU shows the threads of all guests."""
    snapshot = after.snapshot
    serving, known = _serving(snapshot)
    rows = {g.ref: _threads(before, after, g, serving) for g in snapshot.guests}
    order = sorted(rows, key=lambda ref: (-_load_of(rows[ref]), ref))
    shown = [ref for ref in order if not only or ref in only]
    return Frame(
        seconds=_seconds(before, after),
        kernel=snapshot.host.kernel,
        guests=tuple(shown),
        cpus=tuple(_cpus(before, after, rows, serving, known)),
        threads=tuple(row for ref in shown for row in rows[ref]),
        drops=tuple(_drops(before, after, only)),
        planned=plan is not None,
        pending=() if plan is None else tuple(_pending(plan, only)),
        drift=() if plan is None else tuple(_drift(plan, only)),
        notes=(*notes, *(f"{p.reader}: {p.what}" for p in snapshot.problems)),
    )


def _seconds(before: HostSample, after: HostSample) -> float:
    return max(after.at_ns - before.at_ns, 0) / 1e9


def _load_of(rows: Iterable[ThreadRow]) -> float:
    """The load that orders guests, in tenths of a CPU: equals must not swap places all the time."""
    return round(sum(r.load or 0.0 for r in rows), 1)


# -- threads


def _threads(
    before: HostSample, after: HostSample, guest: Guest, serving: CpuSet
) -> list[ThreadRow]:
    found = []
    for thread in in_order(guest):
        row = _thread(before, after, guest.ref, thread, serving)
        if thread.role in DATA_PLANE or (row.load or 0.0) >= WORTH_TELLING:
            found.append(row)
    return found


def _thread(
    before: HostSample, after: HostSample, ref: str, thread: Thread, serving: CpuSet
) -> ThreadRow:
    pair = _pair(before, after, thread.key)
    load = wait = budget = None
    if pair is not None:
        elapsed = pair[1].at_ns - pair[0].at_ns
        ran = max(pair[1].run_ns - pair[0].run_ns, 0)
        load = round(ran / elapsed, 4)
        wait = round(max(pair[1].wait_ns - pair[0].wait_ns, 0) / elapsed, 4)
        if thread.sched.cls is SchedClass.DEADLINE:
            budget = round(used(thread.sched, ran, elapsed), 4)
    return ThreadRow(
        guest=ref,
        thread=thread_label(thread),
        role=thread.role.value,
        tid=thread.key.tid,
        cpu=thread.last_cpu,
        allowed=thread.affinity,
        # Whether children inherit the class says nothing about the thread.
        sched=str(replace(thread.sched, reset_on_fork=False)),
        load=load,
        wait=wait,
        budget=budget,
        throttled=budget is not None and budget >= THROTTLED,
        pending=waits_for_domain(after.snapshot.host, thread),
        beside_interrupts=thread.role in DATA_PLANE and thread.last_cpu in serving,
    )


def _pair(before: HostSample, after: HostSample, key: ThreadKey) -> tuple[Reading, Reading] | None:
    first, last = before.threads.get(key), after.threads.get(key)
    if first is None or last is None or last.at_ns <= first.at_ns:
        return None
    return first, last


# -- CPUs


def _serving(snapshot: Snapshot) -> tuple[CpuSet, CpuSet]:
    """CPUs that serve interrupts of the NICs below guests, and those among them that interrupts,
    RPS or observed SoftIRQs confirm."""
    cpus = known = CpuSet()
    for guest in snapshot.guests:
        cpus |= interrupt_cpus(snapshot.host, guest).cpus
        for nic in lower_nics(snapshot.host, guest):
            known |= nic.rps_cpus | (nic.rx_cpus or CpuSet())
            known |= CpuSet(c for irq in queue_irqs(nic) for c in irq.effective)
    return cpus, cpus & known


def _cpus(
    before: HostSample,
    after: HostSample,
    rows: Mapping[str, Sequence[ThreadRow]],
    serving: CpuSet,
    known: CpuSet,
) -> Iterable[CpuRow]:
    residents = _residents(before, after, rows)
    for cpu in after.snapshot.host.cpus:
        if not cpu.online:
            continue
        here = residents.get(cpu.id, [])
        if cpu.id in serving:
            use = "interrupts" if cpu.id in known else "interrupts?"
        elif any(r.kind == "thread" for r in here):
            use = "guests"
        else:
            use = "isolated" if cpu.isolated else ""
        busy, softirq = _times(before, after, cpu.id)
        here.sort(key=lambda r: (r.kind == "thread", -(r.load or 0.0)))
        yield CpuRow(cpu.id, use, busy, softirq, tuple(here))


def _times(before: HostSample, after: HostSample, cpu: int) -> tuple[float | None, float | None]:
    first, last = before.cpus.get(cpu), after.cpus.get(cpu)
    if first is None or last is None or last.total <= first.total:
        return None, None
    total = last.total - first.total
    # The kernel's idle time can go back by a tick.
    idle = min(max(last.idle - first.idle, 0), total)
    softirq = min(max(last.softirq - first.softirq, 0), total)
    return round(1 - idle / total, 4), round(softirq / total, 4)


def _residents(
    before: HostSample, after: HostSample, rows: Mapping[str, Sequence[ThreadRow]]
) -> dict[int, list[Resident]]:
    found: dict[int, list[Resident]] = {}
    host = after.snapshot.host
    above = _guests_above(after.snapshot)
    for nic in host.nics:
        for cpus, resident in _of_nic(before, after, nic, above.get(nic.name, ())):
            for cpu in cpus:
                found.setdefault(cpu, []).append(resident)
    for softirq in host.softirq:
        pair = _pair(before, after, softirq.key)
        if pair is not None:
            load = round((pair[1].run_ns - pair[0].run_ns) / (pair[1].at_ns - pair[0].at_ns), 4)
            if load >= WORTH_TELLING:
                resident = Resident("ksoftirqd", f"ksoftirqd/{softirq.cpu}", load=load)
                found.setdefault(softirq.cpu, []).append(resident)
    for ref, threads in rows.items():
        for row in threads:
            resident = Resident("thread", row.thread, (ref,), row.load)
            found.setdefault(row.cpu, []).append(resident)
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
    before: HostSample, after: HostSample, nic: Nic, guests: tuple[str, ...]
) -> Iterable[tuple[CpuSet, Resident]]:
    seconds = _seconds(before, after)
    for irq in queue_irqs(nic):
        first, last = before.interrupts.get(irq.number), after.interrupts.get(irq.number)
        rate = None
        if first is not None and last is not None and seconds > 0:
            rate = round(max(last - first, 0) / seconds, 1)
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


# -- drops


def _drops(before: HostSample, after: HostSample, only: frozenset[str]) -> list[DropRow]:
    """Places that have dropped anything, the fastest first."""
    seconds = _seconds(before, after)
    found = []
    for spot, total in after.drops.items():
        if not total or (only and spot.guest and spot.guest not in only):
            continue
        first, rate = before.drops.get(spot), None
        if first is not None and seconds > 0:
            # A counter that is lower than before has been reset.
            rate = round(max(total - first, 0) / seconds, 1)
        found.append(DropRow(spot.where, spot.place, spot.guest, rate, total))
    return sorted(found, key=lambda r: (-(r.rate or 0.0), -r.total, r.where, r.place))


# -- settings


def _pending(plan: Plan, only: frozenset[str]) -> Iterable[PendingRow]:
    for action in plan.actions:
        guest, setting = split_target(action.target)
        if _wanted(guest, only):
            now, then = value_text(action.before), value_text(action.after)
            yield PendingRow(guest, setting, now, then, action.reason)
    for one in plan.skipped:
        if one.pending and _wanted(one.guest, only):
            yield PendingRow(one.guest, one.subject, NOTHING, NOTHING, one.reason)
    for refusal in plan.refusals:
        if _wanted(refusal.guest, only):
            where, why = refusal.policy, f"refused: {refusal.reason}; {refusal.hint}"
            yield PendingRow(refusal.guest, where, NOTHING, NOTHING, why)


def _drift(plan: Plan, only: frozenset[str]) -> Iterable[DriftRow]:
    for drift in plan.drift:
        guest, setting = split_target(drift.target)
        if _wanted(guest, only):
            by, rule = drift.by or "unknown", drift.rule.value
            yield DriftRow(guest, setting, drift.desired, drift.found, by, drift.setting, rule)


def _wanted(guest: str, only: frozenset[str]) -> bool:
    return not only or guest in only or guest == HOST_REF
