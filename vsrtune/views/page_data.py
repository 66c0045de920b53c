"""The status page of a DaemonState, cut to sizes that stay small with any number of guests.

Guests and settings left alone that need somebody come first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from vsrtune import __version__
from vsrtune.core.text import printable
from vsrtune.model.daemon_state import DaemonState, GuestState, PlanState, Unmade
from vsrtune.model.guest import (
    REALTIME,
    Guest,
    Interface,
    Role,
    SchedClass,
    Thread,
    ThreadKey,
    thread_label,
)
from vsrtune.model.load import mean
from vsrtune.model.plan import Drift, Skipped
from vsrtune.model.root_domains import waits_for_domain
from vsrtune.model.snapshot import Snapshot
from vsrtune.plan.interrupt_cpus import device_cpus, serving
from vsrtune.views import tables
from vsrtune.views.page_model import (
    DEGRADED,
    NO_POLICY,
    PENDING,
    REFUSED,
    TUNED,
    ChangeView,
    CpuView,
    DriftView,
    GuestView,
    InterfaceView,
    OnCpu,
    PageTotals,
    PlanView,
    ProblemView,
    RefusalView,
    SkippedView,
    StatusPage,
    ThreadView,
)

T = TypeVar("T")
V = TypeVar("V")

# Maximum number of entries: of each, or in each.
CPUS, ON_CPU, GUESTS, THREADS, INTERFACES, ROWS = 512, 16, 40, 40, 12, 100
# Maximum length of a text, in characters: a plain QEMU may be called anything.
TEXT = 300

_ORDER = (DEGRADED, REFUSED, PENDING, TUNED, NO_POLICY)


def status_page(state: DaemonState) -> StatusPage:
    """The page for ``state``; a pure function of it."""
    snapshot = state.snapshot
    refused = {r.guest for r in state.plan.refusals}
    told = {s.ref: (s, _standing(s, refused)) for s in state.guests}
    counts = Counter(standing for _, standing in told.values())
    totals = PageTotals(
        guests=len(told),
        tuned=counts[TUNED],
        degraded=counts[DEGRADED],
        pending=counts[PENDING],
        refused=counts[REFUSED],
        no_policy=counts[NO_POLICY],
        drift=state.drift,
    )
    if snapshot is None:
        return StatusPage(
            vsrtune=__version__,
            kernel="",
            last_pass=state.last_pass,
            policies=state.policies,
            reload_success=state.reload_success,
            totals=totals,
            failure=_text(state.failure),
        )
    # By state, then most drift, then name.
    guests = sorted(
        (g for g in snapshot.guests if g.ref in told),
        key=lambda g: (_ORDER.index(told[g.ref][1]), -told[g.ref][0].drift, g.ref),
    )
    budgets = dict(state.budgets)
    guest_views, guests_left_out = _cut(
        guests,
        GUESTS,
        lambda g: _guest(g, snapshot, *told[g.ref], budgets),
    )
    cpus, cpus_left_out = _cpus(snapshot, state)
    drift, drift_left_out = _cut(state.drifts, ROWS, _drift)
    told_problems = [(f"CPU {s.cpu}", str(s)) for s in state.starved]
    told_problems += [(p.reader, p.what) for p in snapshot.problems]
    problems, problems_left_out = _cut(
        told_problems, ROWS, lambda p: ProblemView(_text(p[0]), _text(p[1]))
    )
    return StatusPage(
        vsrtune=__version__,
        kernel=_text(snapshot.host.kernel),
        last_pass=state.last_pass,
        policies=state.policies,
        reload_success=state.reload_success,
        totals=totals,
        cpus=cpus,
        cpus_left_out=cpus_left_out,
        guests=guest_views,
        guests_left_out=guests_left_out,
        plan=_plan(state.plan),
        drift=drift,
        drift_left_out=drift_left_out,
        problems=problems,
        problems_left_out=problems_left_out,
        failure=_text(state.failure),
    )


def _standing(guest: GuestState, refused: Collection[str]) -> str:
    if guest.tuned:
        return TUNED
    if guest.ref in refused:
        return REFUSED
    if not guest.policy:
        return NO_POLICY
    return PENDING if guest.pending and guest.pending == guest.drift else DEGRADED


# -- the host


def _cpus(snapshot: Snapshot, state: DaemonState) -> tuple[tuple[CpuView, ...], int]:
    interrupts = _interrupts(snapshot)
    reserved = {cpu for g in state.guests for cpu in g.irq}
    on: dict[int, dict[Role, list[tuple[Guest, Thread]]]] = {}
    for guest in snapshot.guests:
        for thread in guest.threads:
            if thread.role is not Role.WORKER:  # those would only flicker
                roles = on.setdefault(_where(thread), {})
                roles.setdefault(thread.role, []).append((guest, thread))
    views = []
    for cpu in snapshot.host.cpus[:CPUS]:
        here = on.get(cpu.id, {})
        ordered = [pair for role in tables.ROLES for pair in here.get(role, ())]
        threads, left_out = _cut(ordered, ON_CPU, lambda pair: _on_cpu(*pair))
        views.append(
            CpuView(
                cpu.id,
                cpu.online,
                cpu.isolated,
                cpu.node,
                tuple(interrupts.get(cpu.id, ())),
                cpu.id in reserved,
                threads,
                left_out,
            )
        )
    return tuple(views), max(0, len(snapshot.host.cpus) - CPUS)


def _interrupts(snapshot: Snapshot) -> dict[int, list[str]]:
    """The NICs below guests, by the CPU that serves them."""
    found: dict[int, list[str]] = {}
    host = snapshot.host
    chains: dict[tuple[str, ...], Interface] = {}
    for guest in snapshot.guests:
        for interface in guest.interfaces:
            chains.setdefault(interface.lower, interface)
    names = sorted({name for i in chains.values() for name in serving(host, i)})
    for name in names[:CPUS]:
        for cpu in device_cpus(host, host.nic(name))[0]:
            found.setdefault(cpu, []).append(_text(name))
    return found


def _where(thread: Thread) -> int:
    """The CPU where the thread last ran, or runs next when it was pinned elsewhere since."""
    if thread.last_cpu in thread.affinity or not thread.affinity:
        return thread.last_cpu
    return thread.affinity.first()


def _on_cpu(guest: Guest, thread: Thread) -> OnCpu:
    return OnCpu(
        _text(guest.ref),
        _text(thread_label(thread)),
        # Every real-time class that vsrtune sets has it: on a narrow card it says nothing.
        str(thread.sched).removesuffix(" reset-on-fork"),
        len(thread.affinity) == 1,
    )


# -- guests


def _guest(
    guest: Guest,
    snapshot: Snapshot,
    told: GuestState,
    standing: str,
    budgets: Mapping[ThreadKey, float],
) -> GuestView:
    threads, threads_left_out = _cut(
        tables.in_order(guest),
        THREADS,
        lambda t: _thread(t, waits_for_domain(snapshot.host, t), budgets.get(t.key)),
    )
    interfaces, interfaces_left_out = _cut(guest.interfaces, INTERFACES, _interface)
    return GuestView(
        name=_text(guest.ref),
        source=guest.source,
        state=standing,
        policy=_text(told.policy),
        drift=told.drift,
        held=told.held,
        pending=told.pending,
        threads=threads,
        threads_left_out=threads_left_out,
        interfaces=interfaces,
        interfaces_left_out=interfaces_left_out,
        problems=tuple(
            _text(p)
            for p in (*([str(told.step)] if told.step is not None else []), *guest.problems)[:ROWS]
        ),
    )


def _thread(thread: Thread, pending: bool, used: float | None) -> ThreadView:
    sched = thread.sched
    deadline = sched.cls is SchedClass.DEADLINE
    return ThreadView(
        tid=thread.key.tid,
        thread=_text(thread_label(thread)),
        sched_class=sched.cls.value,
        sched=str(sched),
        priority=sched.priority if sched.cls in REALTIME else None,
        runtime_ns=sched.runtime_ns if deadline else None,
        period_ns=sched.period_ns if deadline else None,
        used=used,
        cpus=str(thread.affinity),
        last_cpu=thread.last_cpu,
        load=mean(thread.load) if thread.load else None,
        pending=pending,
    )


def _interface(interface: Interface) -> InterfaceView:
    return InterfaceView(
        device=_text(interface.target),
        kind=interface.kind.value,
        lower=_text(" > ".join(interface.lower)),
        queues=interface.queues,
        queue_length=interface.txqueuelen,
        ring_drops=interface.ring_drops,
    )


# -- plan and drift


def _plan(plan: PlanState) -> PlanView:
    changes, changes_left_out = _cut(plan.unmade, ROWS, _change)
    refusals, refusals_left_out = _cut(
        plan.refusals,
        ROWS,
        lambda r: RefusalView(_text(r.guest), _text(r.policy), _text(r.reason), _text(r.hint)),
    )
    warnings, warnings_left_out = _cut(plan.warnings, ROWS, _text)
    skipped, skipped_left_out = _cut(
        sorted(plan.skipped, key=_urgency),
        ROWS,
        lambda s: SkippedView(_text(s.guest), _text(s.subject), _text(s.reason), s.held, s.pending),
    )
    return PlanView(
        changes,
        changes_left_out,
        refusals,
        refusals_left_out,
        warnings,
        warnings_left_out,
        skipped,
        skipped_left_out,
    )


def _urgency(skipped: Skipped) -> int:
    """The rank of a setting left alone: held or pending, the rest, already as required."""
    if skipped.held or skipped.pending:
        return 0
    return 2 if skipped.reason.startswith("already ") else 1


def _change(unmade: Unmade) -> ChangeView:
    action = unmade.action
    guest, setting = tables.split_target(action.target)
    return ChangeView(
        guest=_text(guest),
        setting=_text(setting),
        now=_text(tables.value_text(action.before)),
        then=_text(tables.value_text(action.after)),
        because=_text(action.reason),
        why=_text(unmade.why),
    )


def _drift(drift: Drift) -> DriftView:
    guest, setting = tables.split_target(drift.target)
    return DriftView(
        guest=_text(guest),
        setting=_text(setting),
        was_set_to=_text(drift.desired),
        found=_text(drift.found),
        by=_text(drift.by),
        key=drift.setting,
        rule=drift.rule.value,
        left=_text(drift.left),
    )


# -- sizes and texts


def _cut(items: Sequence[T], most: int, view: Callable[[T], V]) -> tuple[tuple[V, ...], int]:
    """Views of the first ``most`` items, and the number of the others."""
    return tuple(view(item) for item in items[:most]), max(0, len(items) - most)


def _text(text: str) -> str:
    """The text made printable, and cut after TEXT characters."""
    return printable(text[:TEXT] + "\N{HORIZONTAL ELLIPSIS}" if len(text) > TEXT else text)
