# SPDX-License-Identifier: GPL-2.0-or-later
"""Snapshots, plans and results as tables of text, for any display.

Pure: this module makes the texts, layout.py fits them to a width.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import VsrtuneError
from vsrtune.core.text import counted, time_text
from vsrtune.model.daemon_state import Starved
from vsrtune.model.deadline import bandwidth, percent
from vsrtune.model.guest import Guest, Interface, PassedDevice, Role, SchedClass, ThreadKey
from vsrtune.model.host import Host, Nic
from vsrtune.model.module_counters import TapCounters
from vsrtune.model.plan import Action, Drift, Plan, Refusal, Skipped
from vsrtune.model.root_domains import books
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import CgroupDir, CpusetFile, Partition, Pin, Target
from vsrtune.policy.matching import Assignment, no_guest
from vsrtune.views.host_view import ThreadView, Use, reported_use, thread_views

NOTHING = "-"


@dataclass(frozen=True)
class Table:
    """One table: a title, the column heads and as many texts in every row.

    ``tone`` is ``plain``, ``good``, ``warn`` or ``bad``, for displays with colours. Where there is
    not enough room for all, columns of ``spare`` go, and those of ``text``, or without a head, are
    narrower than their texts: with ``wraps`` these continue on the next line, otherwise they are
    cut. Columns of ``right`` are flush right.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    tone: str = "plain"
    spare: Sequence[str] = ()
    text: Sequence[str] = ()
    right: Sequence[str] = ()
    wraps: bool = True

    @classmethod
    def of(
        cls, title: str, rows: Sequence[Mapping[str, str]], tone: str = "plain", **fitting: Any
    ) -> Table:
        """The table of rows that give their texts by column head, all in the same order."""
        heads = tuple(rows[0]) if rows else ()
        return cls(title, heads, [tuple(row.values()) for row in rows], tone, **fitting)


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
        Table.of("Problems", problems, "warn", text=("what",)),
        Table.of("Processes named like a QEMU that are not believed", strangers, text=("why",)),
    )


def guest_tables(guest: Guest, threads: Iterable[ThreadView]) -> list[Table]:
    """The threads and the interfaces of one guest, and the counters of our kernel module for
    the interfaces that it serves."""
    served = [_frames(i, i.counters) for i in guest.interfaces if i.counters is not None]
    return [
        Table.of(
            f"Guest {guest.ref} (pid {guest.pid})",
            [_thread(view) for view in threads],
            spare=("load", "cpuset", "cgroup", "CPU s", "name"),
        ),
        *filled(
            Table.of(
                f"Interfaces of {guest.ref}",
                [_interface(i) for i in guest.interfaces],
                spare=("queues", "vhost", "model"),
            ),
            Table.of(
                f"Interfaces of {guest.ref} without a tap",
                [
                    {"kind": n.label, "model": n.model or NOTHING, "MAC": n.mac, "frames": n.why}
                    for n in guest.other_nics
                ],
                text=("frames",),
            ),
            Table.of(
                f"Devices that {guest.ref} drives itself",
                [
                    {"address": d.address, "node": str(d.node), "interrupts": _vectors(d)}
                    for d in guest.passed
                ],
                text=("interrupts",),
            ),
            Table.of(
                f"Frames of {guest.ref}, counted by the module",
                served,
                spare=("own queue, most", "rings, most", "to siblings"),
                text=("dropped",),
            ),
        ),
    ]


def _vectors(device: PassedDevice) -> str:
    return ", ".join(f"{i.number} on {i.effective}" for i in device.irqs) or "none enabled"


def _thread(view: ThreadView) -> dict[str, str]:
    thread, load = view.thread, view.use.load
    return {
        "tid": str(thread.key.tid),
        "thread": view.label,
        "mapped": thread.confidence.value if thread.confidence is not None else NOTHING,
        "class": f"{view.sched} (deadline pending)" if view.pending else view.sched,
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
                spare=("driver",),
            ),
            Table.of(
                "Neighbours that change the same settings",
                neighbours,
                "warn",
                text=("what it does",),
            ),
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
    return Table("Budgets (class deadline)", heads, rows, text=("used",))


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
    return Table.of(
        "Root domains: deadline bandwidth in percent of one CPU",
        rows,
        spare=("for ordinary threads",),
    )


def throttling(host: Host) -> str:
    """The real-time throttling limit in words."""
    if host.sched_rt_runtime_us < 0:
        return "not throttled"
    if host.sched_rt_period_us <= 0:
        return "limit not known"
    return f"limited to {100 * host.sched_rt_runtime_us / host.sched_rt_period_us:g} %"


def _nic_rows(nic: Nic) -> list[tuple[str, ...]]:
    if nic.irqs:
        return [
            (nic.name, nic.driver, str(i.number), i.name, str(i.affinity), cpu_list(i.effective))
            for i in nic.irqs
        ]
    how = "threaded NAPI" if nic.threaded_napi else "no interrupt of its own"
    return [(nic.name, nic.driver, NOTHING, how, cpu_list(nic.rps_cpus), cpu_list(nic.rx_cpus))]


def plan_tables(
    plan: Plan,
    assignment: Assignment | None = None,
    *,
    verbose: bool = False,
    switched: Collection[str] = (),
) -> list[Table]:
    """What ``vsrtune plan`` prints: a line for each guest that has a policy or changes, and what
    needs an operator. ``verbose``: every change, every setting that is left as it is, and notes.
    ``switched`` are guests whose attachment is to be switched."""
    idle = [no_guest(policy) for policy in assignment.unmatched] if assignment is not None else []
    notes = list(plan.notes) if verbose else idle
    told = [s for s in plan.skipped if verbose or _asked_in_vain(s)]
    skipped = [{**skipped_row(s), "because": ("HELD: " if s.held else "") + s.reason} for s in told]
    details = change_tables(plan.actions) if verbose else []
    return [_summary(plan, assignment, switched), *details] + filled(
        drift_table(plan.drift),
        Table.of("Refused", [refusal_row(r) for r in plan.refusals], "bad", text=_REFUSED),
        Table.of("Warnings", [{"warning": w} for w in plan.warnings], "warn", text=("warning",)),
        Table.of("Left as it is", skipped, text=("because",)),
        Table.of("Notes", [{"note": text} for text in notes], text=("note",)),
    )


# A policy without a setting.
EMPTY = "its policy asks for nothing"

_REFUSED = ("policy", "because", "instead")


def _summary(plan: Plan, assignment: Assignment | None, switched: Collection[str]) -> Table:
    """The changes of each guest in one line."""
    count = len(plan.actions)
    nothing_done = "Nothing can be changed" if plan.refusals else "Nothing to change"
    title = counted(count, "change") if count else nothing_done
    pairs = assignment.pairs if assignment is not None else []
    changes: dict[str, list[Action]] = {guest.ref: [] for guest, _ in pairs}
    for action in plan.actions:
        changes.setdefault(action.target.guest, []).append(action)
    empty = {guest.ref: EMPTY for guest, policy in pairs if not policy.asks}
    settings = (s for s in plan.skipped if not s.subject.startswith("interface "))
    left = {s.guest: "left alone, see below" for s in settings if _asked_in_vain(s)}
    refused = {r.guest: "refused, see below" for r in plan.refusals}
    nothing = {**empty, **dict.fromkeys(switched, "on another attachment"), **left, **refused}
    rows = [
        {
            "guest": ref,
            "changes": str(len(own)),
            "what": _effects(own) if own else nothing.get(ref, "as its policy says"),
        }
        for ref, own in changes.items()
    ]
    tone = "good" if plan.actions else "plain"
    return Table.of(title, rows, tone, text=("what",), right=("changes",), wraps=False)


def _differs(skipped: Skipped) -> bool:
    """Whether a setting that is left alone is not as the policy says."""
    return skipped.held or skipped.pending or skipped.stepped


def _asked_in_vain(skipped: Skipped) -> bool:
    """Whether a policy asks for something else than a setting that is left alone."""
    is_so = skipped.reason.startswith("already ") or skipped.subject == "all settings"
    return _differs(skipped) or not is_so


# First words of settings that are told together.
_ROLES = ("vcpu", "vhost", "napi", "emulator", "ksoftirqd", "irq")


def _effects(actions: Iterable[Action]) -> str:
    """What changes bring about, by the role of the threads and devices: ``vcpu: CPUs 1-2, rr:10``.
    CPUs are those of all threads of the role."""
    cpus: dict[str, CpuSet] = {}
    others: dict[str, dict[str, None]] = {}
    for action in actions:
        setting = _TID.sub("", split_target(action.target)[1])
        first = setting.split()[0].partition("/")[0]
        role = first if first in _ROLES else setting
        value = action.after.cpus if isinstance(action.after, Pin) else action.after
        others.setdefault(role, {})
        if isinstance(value, CpuSet):
            cpus[role] = cpus.get(role, CpuSet()) | value
        elif not isinstance(value, (bool, str)):  # cgroups are means, not ends
            others[role][_plain(value_text(value))] = None
    told = [
        f"{role}: " + ", ".join([*([value_text(cpus[role])] if role in cpus else ()), *texts])
        for role, texts in others.items()
        if role in cpus or texts
    ]
    return "; ".join(told) or counted(len(others), "setting")


def change_tables(actions: Sequence[Action]) -> list[Table]:
    """A table for each guest with its planned changes."""
    by_guest: dict[str, list[dict[str, str]]] = {}
    for action in actions:
        row = short_row(change_row(action))
        by_guest.setdefault(row.pop("guest"), []).append(row)
    return [
        Table.of(f"{guest}: {counted(len(rows), 'change')}", rows, "good", **SHORT)
        for guest, rows in by_guest.items()
    ]


def short_row(row: Mapping[str, str]) -> dict[str, str]:
    """A row of ``change_row`` for narrow displays: the tid has a column of its own."""
    tid = _TID.search(row["setting"])
    now, then = row["now"], row["then"]
    if _plain(now) != _plain(then):
        now, then = _plain(now), _plain(then)
    return {
        "guest": row["guest"],
        "setting": _TID.sub("", row["setting"]),
        "tid": tid[1] if tid is not None else NOTHING,
        "now": now,
        "then": then,
        "because": row["because"],
    }


# How tables of short_row() fit.
SHORT: Mapping[str, Any] = {"spare": ("tid",), "text": ("because",), "wraps": False}
_TID = re.compile(r" \(tid (\d+)\)", re.ASCII)


def _plain(value: str) -> str:
    """A value without what is always so: what a realtime thread forks is not realtime."""
    return value.removesuffix(" reset-on-fork")


def step_table(skipped: Iterable[Skipped]) -> Table:
    """Guests that the daemon has stepped down."""
    rows = [{"guest": s.guest, "why": s.reason} for s in skipped if s.stepped]
    return Table.of("Stepped down by the daemon", rows, "bad", text=("why",))


def starved_table(starved: Iterable[Starved]) -> Table:
    """The starving threads that the daemon reports."""
    rows = [
        {"CPU": str(s.cpu), "thread": s.name, "tid": str(s.tid), "held by": s.guest or NOTHING}
        for s in starved
    ]
    return Table.of("Threads that do not get to run", rows, "bad")


def drift_table(drifts: Iterable[Drift]) -> Table:
    """Settings that somebody has changed, who it was, and the policy's rule."""
    rows = [drift_row(d) for d in drifts]
    return Table.of("Changed since", rows, "warn", spare=("changed by", "policy key"))


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
        "changed by": str(drift.culprit or drift.by or "unknown"),
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
    """One failed action on one line. Errors of writers name the target themselves."""
    told, target = str(error), f"{action.target}: "
    return told if told.startswith(target) else target + told


def drift_lines(actions: Iterable[Action], skipped: Iterable[Skipped]) -> list[str]:
    """One line for every setting that differs from the policies."""
    lines = [
        f"{': '.join(split_target(a.target))}: is {value_text(a.before)}, "
        f"should be {value_text(a.after)} ({a.reason})"
        for a in actions
    ]
    told = filter(_differs, skipped)
    lines += [f"{s.guest}: {s.subject}: {s.reason}" for s in told]
    return lines


def status_line(tuned: int, drift: int, extra: Sequence[str] = ()) -> str:
    """The STATUS= line: ``2 guests tuned, 1 drift``."""
    return ", ".join([f"{counted(tuned, 'guest')} tuned", f"{drift} drift", *extra])
