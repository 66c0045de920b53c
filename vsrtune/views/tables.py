"""Snapshots, plans and results as tables of text, for any display.

Pure: this module makes the texts, cli/render.py draws them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import VsrtuneError
from vsrtune.core.text import time_text
from vsrtune.model.daemon_state import Starved
from vsrtune.model.deadline import bandwidth, percent
from vsrtune.model.guest import Guest, Interface, Role, SchedClass, ThreadKey
from vsrtune.model.host import Host, Nic
from vsrtune.model.module_counters import TapCounters
from vsrtune.model.plan import Action, Drift, Plan, Refusal, Skipped
from vsrtune.model.root_domains import books
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import CgroupDir, CpusetFile, Partition, Target
from vsrtune.views.host_view import ThreadView, Use, reported_use, thread_views

NOTHING = "-"


@dataclass(frozen=True)
class Table:
    """One table: a title, the column heads and as many texts in every row.

    ``tone`` is ``plain``, ``good``, ``warn`` or ``bad``, for displays with colours.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    tone: str = "plain"

    @classmethod
    def of(cls, title: str, rows: Sequence[Mapping[str, str]], tone: str = "plain") -> Table:
        """The table of rows that give their texts by column head, all in the same order."""
        heads = tuple(rows[0]) if rows else ()
        return cls(title, heads, [tuple(row.values()) for row in rows], tone)


def filled(*tables: Table) -> list[Table]:
    """The tables that have rows."""
    return [table for table in tables if table.rows]


def cpu_list(cpus: CpuSet | None) -> str:
    """A CPU list, or a dash when there is none."""
    return str(cpus) if cpus else NOTHING


def short_cgroup(path: str) -> str:
    """The cgroup below the machine's scope, where guests differ; otherwise the whole path."""
    parts = [p for p in path.split("/") if p]
    for i, part in enumerate(parts):
        if part.endswith(".scope"):
            return "/".join(parts[i + 1 :]) or part
    return path or "/"


def snapshot_tables(
    snapshot: Snapshot, budgets: Mapping[ThreadKey, float] | None = None
) -> list[Table]:
    """Everything ``vsrtune show`` prints, guests first. ``budgets`` gives the measured share
    of its budget that each DEADLINE thread uses."""
    tables: list[Table] = []
    threads: list[ThreadView] = []
    use = reported_use(budgets or {})
    for guest in snapshot.guests:
        own = thread_views(guest, snapshot.host, use)
        tables += guest_tables(guest, own)
        threads += own
    tables += filled(budget_table(threads))
    if not snapshot.guests:
        tables.append(Table("Guests", ("none is running on this host",)))
    tables += host_tables(snapshot.host)
    problems = [{"where": p.reader, "what": p.what} for p in snapshot.problems]
    problems += [{"where": g.ref, "what": text} for g in snapshot.guests for text in g.problems]
    strangers = [
        {"pid": str(s.pid), "user": str(s.uid) if s.uid >= 0 else "", "why": s.why}
        for s in snapshot.strangers
    ]
    return tables + filled(
        domain_table(snapshot),
        Table.of("Problems", problems, "warn"),
        Table.of("Processes named like a QEMU that are not believed", strangers),
    )


def guest_tables(guest: Guest, threads: Iterable[ThreadView]) -> list[Table]:
    """The threads and the interfaces of one guest, and the counters of our kernel module for
    the interfaces that it serves."""
    served = [_frames(i, i.counters) for i in guest.interfaces if i.counters is not None]
    return [
        Table.of(f"Guest {guest.ref} (pid {guest.pid})", [_thread(view) for view in threads]),
        *filled(
            Table.of(f"Interfaces of {guest.ref}", [_interface(i) for i in guest.interfaces]),
            Table.of(f"Frames of {guest.ref}, counted by the module", served),
        ),
    ]


def _thread(view: ThreadView) -> dict[str, str]:
    thread, load = view.thread, view.use.load
    return {
        "tid": str(thread.key.tid),
        "thread": view.label,
        "mapped": thread.confidence.value if thread.confidence is not None else NOTHING,
        "class": f"{thread.sched} (deadline pending)" if view.pending else str(thread.sched),
        "CPUs": str(thread.affinity),
        "last": str(thread.last_cpu),
        "cpuset": cpu_list(thread.cpuset_effective),
        "cgroup": short_cgroup(thread.cgroup),
        "CPU s": f"{thread.cpu_ns / 1e9:.2f}",
        "load": NOTHING if load is None else f"{100 * load:.0f} %",
        "name": thread.name,
    }


def _interface(interface: Interface) -> dict[str, str]:
    return {
        "device": interface.target,
        "kind": interface.kind.value,
        "model": interface.model or NOTHING,
        "vhost": "yes" if interface.vhost else "no",
        "MAC": interface.mac,
        "lower": " > ".join(interface.lower) or NOTHING,
        "txqueuelen": str(interface.txqueuelen),
        "queues": str(interface.queues),
        "ring drops": str(interface.ring_drops),
    }


def _frames(interface: Interface, counters: TapCounters) -> dict[str, str]:
    return {
        "device": interface.target,
        "threaded NAPI": "yes" if interface.threaded else "no",
        "received": _number(counters.rx_received),
        "delivered": _number(counters.rx_delivered),
        "dropped": ", ".join(f"{place} {n}" for place, n in counters.dropped if n) or "none",
        "sent": _number(counters.tx_packets_lower),
        "to siblings": _number(counters.tx_to_sibling),
        "own queue, most": _number(counters.queue_high_water),
        "rings, most": "/".join(_number(q.ring_high_water) for q in counters.queues) or NOTHING,
    }


def _number(value: int | None) -> str:
    return NOTHING if value is None else str(value)


def moves_table(moves: int, last: int, when: str) -> Table:
    """The number of threads moved for their load since the daemon started; no rows when none
    was."""
    row = {"threads moved": str(moves), "the last time": str(last), "at": when}
    return Table.of("Placement by load", [row] if moves else [])


def host_tables(host: Host) -> list[Table]:
    """CPUs, NICs with their interrupts, and neighbours."""
    softirq = {t.cpu: str(t.sched) for t in host.softirq}
    cpus = [
        {
            "CPU": str(c.id),
            "online": "yes" if c.online else "no",
            "isolated": "yes" if c.isolated else "no",
            "siblings": str(c.siblings),
            "node": str(c.node),
            "ksoftirqd": softirq.get(c.id, NOTHING),
        }
        for c in host.cpus
    ]
    neighbours = [
        {"name": n.name, "pid": _number(n.pid), "what it does": n.detail} for n in host.neighbours
    ]
    return [
        Table.of(f"CPUs (kernel {host.kernel}, real-time {throttling(host)})", cpus),
        *filled(
            Table(
                "NICs and where their packets arrive",
                ("NIC", "driver", "interrupt", "name", "CPUs allowed", "CPU used"),
                [row for nic in host.nics for row in _nic_rows(nic)],
            ),
            Table.of("Neighbours that change the same settings", neighbours, "warn"),
        ),
    ]


def budget_table(threads: Iterable[ThreadView]) -> Table:
    """Threads with a budget, and threads that wait for one."""
    rows: list[tuple[str, ...]] = []
    for view in threads:
        thread, sched = view.thread, view.thread.sched
        where = (view.guest, view.label, cpu_list(thread.affinity))
        if view.pending:
            told = f"pending: has not run there yet, last on CPU {thread.last_cpu}"
            rows.append((*where, NOTHING, NOTHING, NOTHING, NOTHING, told))
        elif sched.cls is SchedClass.DEADLINE and thread.role in (Role.VCPU, Role.VHOST):
            times = map(time_text, (sched.runtime_ns, sched.deadline_ns, sched.period_ns))
            rows.append((*where, *times, percent(bandwidth(sched)), _budget(view.use)))
    heads = ("guest", "thread", "CPUs", "runtime", "deadline", "period", "of a CPU", "used")
    return Table("Budgets (class deadline)", heads, rows)


def _budget(use: Use) -> str:
    if use.budget is None:
        return NOTHING
    return f"{100 * use.budget:.0f} %" + (": throttled" if use.throttled else "")


def domain_table(snapshot: Snapshot) -> Table:
    """DEADLINE bandwidth per root domain; no rows unless any is booked or a partition exists."""
    domains = books(snapshot)
    partitioned = any(c.partition != "member" for c in snapshot.host.cpusets)
    rows = [
        {
            "CPUs": str(d.cpus),
            "made by": d.made_by,
            "booked": percent(d.booked),
            "free": NOTHING if d.admitted is None else percent(d.admitted - d.booked),
            "admitted": NOTHING if d.admitted is None else percent(d.admitted),
            "for ordinary threads": percent(d.kernel),
        }
        for d in domains
        if partitioned or any(d.booked for d in domains)
    ]
    return Table.of("Root domains: deadline bandwidth in percent of one CPU", rows)


def throttling(host: Host) -> str:
    """The real-time throttling limit in words."""
    if host.sched_rt_runtime_us < 0:
        return "not throttled"
    return f"limited to {100 * host.sched_rt_runtime_us / host.sched_rt_period_us:g} %"


def _nic_rows(nic: Nic) -> list[tuple[str, ...]]:
    if nic.irqs:
        return [
            (nic.name, nic.driver, str(i.number), i.name, str(i.affinity), cpu_list(i.effective))
            for i in nic.irqs
        ]
    how = "threaded NAPI" if nic.threaded_napi else "no interrupt of its own"
    return [(nic.name, nic.driver, NOTHING, how, cpu_list(nic.rps_cpus), cpu_list(nic.rx_cpus))]


def plan_tables(plan: Plan) -> list[Table]:
    """Everything ``vsrtune plan`` prints."""
    changes = [change_row(action) for action in plan.actions]
    skipped = [
        {**skipped_row(s), "because": ("HELD: " if s.held else "") + s.reason} for s in plan.skipped
    ]
    tables = filled(
        Table.of(_count(len(changes), "change"), changes, "good"),
        drift_table(plan.drift),
        Table.of("Refused", [refusal_row(r) for r in plan.refusals], "bad"),
        Table.of("Warnings", [{"warning": text} for text in plan.warnings], "warn"),
        Table.of("Left as it is", skipped),
        Table.of("Notes", [{"note": text} for text in plan.notes]),
    )
    nothing = [] if changes or plan.refusals else [Table("Nothing to change", ())]
    return nothing + tables


def step_table(skipped: Iterable[Skipped]) -> Table:
    """Guests that the daemon has stepped down."""
    rows = [{"guest": s.guest, "why": s.reason} for s in skipped if s.stepped]
    return Table.of("Stepped down by the daemon", rows, "bad")


def starved_table(starved: Iterable[Starved]) -> Table:
    """The starving threads that the daemon reports."""
    rows = [
        {"CPU": str(s.cpu), "thread": s.name, "tid": str(s.tid), "held by": s.guest or NOTHING}
        for s in starved
    ]
    return Table.of("Threads that do not get to run", rows, "bad")


def drift_table(drifts: Iterable[Drift]) -> Table:
    """Settings that somebody has changed, who it was, and the policy's rule."""
    return Table.of("Changed since", [drift_row(d) for d in drifts], "warn")


# What plans say in tables, in top and on the status page, whose data has the same fields.


def change_row(action: Action) -> dict[str, str]:
    """A planned change in words."""
    guest, setting = split_target(action.target)
    return {
        "guest": guest,
        "setting": setting,
        "now": value_text(action.before),
        "then": value_text(action.after),
        "because": action.reason,
    }


def skipped_row(skipped: Skipped) -> dict[str, str]:
    """A setting that is left as it is."""
    return {"guest": skipped.guest, "setting": skipped.subject, "because": skipped.reason}


def refusal_row(refusal: Refusal) -> dict[str, str]:
    """A refused policy, and what to write instead."""
    return {
        "guest": refusal.guest,
        "policy": refusal.policy,
        "because": refusal.reason,
        "instead": refusal.hint,
    }


def drift_row(drift: Drift) -> dict[str, str]:
    """A setting that somebody has changed."""
    guest, setting = split_target(drift.target)
    return {
        "guest": guest,
        "setting": setting,
        "was set to": drift.desired,
        "found": drift.found,
        "changed by": drift.by or "unknown",
        "policy key": drift.setting,
        "rule": drift.rule.value,
    }


def split_target(target: Target) -> tuple[str, str]:
    """The guest a target belongs to and the rest of its name."""
    if isinstance(target, CgroupDir):
        return target.guest, f"cgroup {short_cgroup(target.path)}"
    if isinstance(target, CpusetFile):
        return target.guest, f"{short_cgroup(target.path)} {target.file}"
    if isinstance(target, Partition):
        return target.guest, f"partition {short_cgroup(target.path)}"
    return target.guest, str(target).removeprefix(f"{target.guest}: ")


def value_text(value: object) -> str:
    """A value of a target as an operator reads it."""
    if isinstance(value, bool):
        return "exists" if value else "absent"
    if isinstance(value, CpuSet):
        return f"CPUs {value}" if value else "off"
    return short_cgroup(value) if isinstance(value, str) else str(value)


def action_line(action: Action) -> str:
    """One action on one line, without its reason."""
    return f"{action.target}: {value_text(action.before)} -> {value_text(action.after)}"


def failure_line(action: Action, error: VsrtuneError) -> str:
    """One failed action on one line."""
    return f"{action.target}: {error}"


def drift_lines(actions: Iterable[Action], skipped: Iterable[Skipped]) -> list[str]:
    """One line for every setting that differs from the policies."""
    lines = [
        f"{a.target}: is {value_text(a.before)}, should be {value_text(a.after)} ({a.reason})"
        for a in actions
    ]
    told = (s for s in skipped if s.held or s.pending or s.stepped)
    lines += [f"{s.guest}: {s.subject}: {s.reason}" for s in told]
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def status_line(tuned: int, drift: int, extra: Sequence[str] = ()) -> str:
    """The STATUS= line: ``2 guests tuned, 1 drift``."""
    return ", ".join([f"{_count(tuned, 'guest')} tuned", f"{drift} drift", *extra])
