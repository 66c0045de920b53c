"""Snapshots, plans and results as tables of text, for any display.

Pure: this module makes the texts, cli/render.py draws them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import VsrtuneError
from vsrtune.core.text import time_text
from vsrtune.model.deadline import bandwidth, percent
from vsrtune.model.guest import Guest, Interface, Role, SchedClass, ThreadKey
from vsrtune.model.host import Host, Nic
from vsrtune.model.plan import Action, Drift, Plan, Skipped
from vsrtune.model.root_domains import books
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import CgroupDir, CpusetFile, Partition, Target
from vsrtune.views.host_view import ThreadView, Use, reported_use, thread_views

NOTHING = "-"
CHANGE_HEADS = ("guest", "setting", "now", "then", "because")
DRIFT_HEADS = ("guest", "setting", "was set to", "found", "changed by", "policy key", "rule")


@dataclass(frozen=True)
class Table:
    """One table: a title, the column heads and as many texts in every row.

    ``tone`` is ``plain``, ``good``, ``warn`` or ``bad``, for displays with colours.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    tone: str = "plain"


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


def seconds(nanoseconds: int) -> str:
    """CPU time in seconds with two decimals."""
    return f"{nanoseconds / 1e9:.2f}"


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
    tables += budget_tables(threads)
    if not snapshot.guests:
        tables.append(Table("Guests", ("none is running on this host",)))
    tables += host_tables(snapshot.host)
    tables += domain_tables(snapshot)
    problems: list[tuple[str, ...]] = [(p.reader, p.what) for p in snapshot.problems]
    problems += [(g.ref, text) for g in snapshot.guests for text in g.problems]
    if problems:
        tables.append(Table("Problems", ("where", "what"), problems, "warn"))
    if snapshot.strangers:
        rows: list[tuple[str, ...]] = [
            (str(s.pid), str(s.uid) if s.uid >= 0 else "", s.why) for s in snapshot.strangers
        ]
        heads = ("pid", "user", "why")
        tables.append(Table("Processes named like a QEMU that are not believed", heads, rows))
    return tables


def guest_tables(guest: Guest, threads: Iterable[ThreadView]) -> list[Table]:
    """The threads and the interfaces of one guest."""
    table = Table(
        f"Guest {guest.ref} (pid {guest.pid})",
        (
            "tid",
            "thread",
            "mapped",
            "class",
            "CPUs",
            "last",
            "cpuset",
            "cgroup",
            "CPU s",
            "load",
            "name",
        ),
    )
    table.rows.extend(map(_thread_row, threads))
    tables = [table]
    if guest.interfaces:
        tables.append(
            Table(
                f"Interfaces of {guest.ref}",
                (
                    "device",
                    "kind",
                    "model",
                    "vhost",
                    "MAC",
                    "lower",
                    "txqueuelen",
                    "queues",
                    "ring drops",
                ),
                [_interface_row(i) for i in guest.interfaces],
            )
        )
        tables += _counter_tables(guest)
    return tables


def _thread_row(view: ThreadView) -> tuple[str, ...]:
    thread, load = view.thread, view.use.load
    return (
        str(thread.key.tid),
        view.label,
        thread.confidence.value if thread.confidence is not None else NOTHING,
        f"{thread.sched} (deadline pending)" if view.pending else str(thread.sched),
        str(thread.affinity),
        str(thread.last_cpu),
        cpu_list(thread.cpuset_effective),
        short_cgroup(thread.cgroup),
        seconds(thread.cpu_ns),
        NOTHING if load is None else f"{100 * load:.0f} %",
        thread.name,
    )


def _interface_row(interface: Interface) -> tuple[str, ...]:
    return (
        interface.target,
        interface.kind.value,
        interface.model or NOTHING,
        "yes" if interface.vhost else "no",
        interface.mac,
        " > ".join(interface.lower) or NOTHING,
        str(interface.txqueuelen),
        str(interface.queues),
        str(interface.ring_drops),
    )


def _counter_tables(guest: Guest) -> list[Table]:
    """Counters of our kernel module, for the interfaces of the guest that it serves."""
    rows = []
    for interface in guest.interfaces:
        counters = interface.counters
        if counters is None:
            continue
        drops = ", ".join(f"{place} {n}" for place, n in counters.dropped if n)
        waited = (counters.queue_high_water, *(q.ring_high_water for q in counters.queues))
        rows.append(
            (
                interface.target,
                "yes" if interface.threaded else "no",
                *(map(_number, (counters.rx_received, counters.rx_delivered))),
                drops or "none",
                *(map(_number, (counters.tx_packets_lower, counters.tx_to_sibling))),
                _number(waited[0]),
                "/".join(map(_number, waited[1:])) or NOTHING,
            )
        )
    heads = (
        "device",
        "threaded NAPI",
        "received",
        "delivered",
        "dropped",
        "sent",
        "to siblings",
        "own queue, most",
        "rings, most",
    )
    return [Table(f"Frames of {guest.ref}, counted by the module", heads, rows)] if rows else []


def _number(value: int | None) -> str:
    return NOTHING if value is None else str(value)


def moves_table(moves: int, last: int, when: str) -> Table:
    """The number of threads moved for their load since the daemon started."""
    heads = ("threads moved", "the last time", "at")
    return Table("Placement by load", heads, [(str(moves), str(last), when)])


def host_tables(host: Host) -> list[Table]:
    """CPUs, NICs with their interrupts, and neighbours."""
    softirq = {t.cpu: str(t.sched) for t in host.softirq}
    cpus = Table(
        f"CPUs (kernel {host.kernel}, real-time {throttling(host)})",
        ("CPU", "online", "isolated", "siblings", "node", "ksoftirqd"),
        [
            (
                str(c.id),
                "yes" if c.online else "no",
                "yes" if c.isolated else "no",
                str(c.siblings),
                str(c.node),
                softirq.get(c.id, NOTHING),
            )
            for c in host.cpus
        ],
    )
    tables = [cpus]
    if host.nics:
        nics = Table(
            "NICs and where their packets arrive",
            ("NIC", "driver", "interrupt", "name", "CPUs allowed", "CPU used"),
        )
        for nic in host.nics:
            nics.rows.extend(_nic_rows(nic))
        tables.append(nics)
    if host.neighbours:
        tables.append(
            Table(
                "Neighbours that change the same settings",
                ("name", "pid", "what it does"),
                [
                    (n.name, NOTHING if n.pid is None else str(n.pid), n.detail)
                    for n in host.neighbours
                ],
                "warn",
            )
        )
    return tables


def budget_tables(threads: Iterable[ThreadView]) -> list[Table]:
    """Threads with a budget, and threads that wait for one."""
    rows: list[tuple[str, ...]] = []
    for view in threads:
        thread, sched = view.thread, view.thread.sched
        where = (view.guest, view.label, cpu_list(thread.affinity))
        if view.pending:
            told = f"pending: has not run there yet, last on CPU {thread.last_cpu}"
            rows.append((*where, NOTHING, NOTHING, NOTHING, NOTHING, told))
        elif sched.cls is SchedClass.DEADLINE and thread.role in (Role.VCPU, Role.VHOST):
            times = (sched.runtime_ns, sched.deadline_ns, sched.period_ns)
            rows.append(
                (*where, *map(time_text, times), percent(bandwidth(sched)), _budget(view.use))
            )
    heads = ("guest", "thread", "CPUs", "runtime", "deadline", "period", "of a CPU", "used")
    return [Table("Budgets (class deadline)", heads, rows)] if rows else []


def _budget(use: Use) -> str:
    if use.budget is None:
        return NOTHING
    return f"{100 * use.budget:.0f} %" + (": throttled" if use.throttled else "")


def domain_tables(snapshot: Snapshot) -> list[Table]:
    """DEADLINE bandwidth per root domain, when any is booked or a partition exists."""
    rows: list[tuple[str, ...]] = []
    for domain in books(snapshot):
        free = NOTHING if domain.admitted is None else percent(domain.admitted - domain.booked)
        most = NOTHING if domain.admitted is None else percent(domain.admitted)
        kernel = percent(domain.kernel)
        rows.append((str(domain.cpus), domain.made_by, percent(domain.booked), free, most, kernel))
    partitioned = any(c.partition != "member" for c in snapshot.host.cpusets)
    if not partitioned and not any(d.booked for d in books(snapshot)):
        return []
    heads = ("CPUs", "made by", "booked", "free", "admitted", "for ordinary threads")
    return [Table("Root domains: deadline bandwidth in percent of one CPU", heads, rows)]


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
    tables: list[Table] = []
    if plan.actions:
        rows = [change_row(a) for a in plan.actions]
        tables.append(Table(_count(len(rows), "change"), CHANGE_HEADS, rows, "good"))
    tables += drift_tables(plan.drift, "Changed since")
    if plan.refusals:
        rows = [(r.guest, r.policy, r.reason, r.hint) for r in plan.refusals]
        tables.append(Table("Refused", ("guest", "policy", "because", "instead"), rows, "bad"))
    if plan.warnings:
        tables.append(Table("Warnings", ("warning",), [(w,) for w in plan.warnings], "warn"))
    if plan.skipped:
        skipped = [_skipped_row(s) for s in plan.skipped]
        tables.append(Table("Left as it is", ("guest", "setting", "because"), skipped))
    if plan.notes:
        tables.append(Table("Notes", ("note",), [(n,) for n in plan.notes]))
    if not plan.actions and not plan.refusals:
        tables.insert(0, Table("Nothing to change", ()))
    return tables


def step_tables(skipped: Iterable[Skipped]) -> list[Table]:
    """Guests that the daemon has stepped down."""
    rows: list[tuple[str, ...]] = [(s.guest, s.reason) for s in skipped if s.stepped]
    return [Table("Stepped down by the daemon", ("guest", "why"), rows, "bad")] if rows else []


def drift_tables(drifts: Iterable[Drift], title: str) -> list[Table]:
    """Settings that somebody has changed, who it was, and the policy's rule."""
    rows = [drift_row(drift) for drift in drifts]
    return [Table(title, DRIFT_HEADS, rows, "warn")] if rows else []


def drift_row(drift: Drift) -> tuple[str, ...]:
    """The texts of a changed setting, under DRIFT_HEADS."""
    by, rule = drift.by or "unknown", drift.rule.value
    return (*split_target(drift.target), drift.desired, drift.found, by, drift.setting, rule)


def change_row(action: Action) -> tuple[str, ...]:
    """The texts of a planned change, under CHANGE_HEADS."""
    guest, setting = split_target(action.target)
    before, after = value_text(action.before), value_text(action.after)
    return (guest, setting, before, after, action.reason)


def _skipped_row(skipped: Skipped) -> tuple[str, ...]:
    return (skipped.guest, skipped.subject, ("HELD: " if skipped.held else "") + skipped.reason)


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
