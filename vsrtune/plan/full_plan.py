# SPDX-License-Identifier: GPL-2.0-or-later
"""The plan of a pass: releases of what no policy asks for any more, then what policies ask for.

A release is an action like any other: `plan` shows it, a stored plan holds it, and the journal
forgets the setting once the original is on the host. The rest is planned for the host as the
releases leave it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.deadline import is_deadline
from vsrtune.model.guest import REALTIME, Guest, Sched, SchedClass, Thread, ThreadKey
from vsrtune.model.host import Host
from vsrtune.model.journal_records import Entry, applied, ours, undo_order
from vsrtune.model.plan import Action, Plan, Refusal
from vsrtune.model.present import PresentValues
from vsrtune.model.root_domains import slices_of, within
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.stepdown import NO_STEPS, Steps
from vsrtune.model.targets import (
    HOST_REF,
    CgroupDir,
    CgroupTarget,
    CpusetFile,
    CpusetList,
    DeviceNumber,
    EmulatorPin,
    IrqAffinity,
    Partition,
    PartitionState,
    Pin,
    RealtimeLimit,
    Target,
    ThreadAffinity,
    ThreadCgroup,
    ThreadSched,
    Value,
    VcpuPin,
    pinned_cpus,
)
from vsrtune.plan import brought_pins
from vsrtune.plan.deadline.partitions import CPUS
from vsrtune.plan.drift import NO_MEMORY, Memory
from vsrtune.plan.planner import Inputs, Judged, checked, judge
from vsrtune.plan.safety.invariants import PlanError
from vsrtune.plan.safety.projection import project_actions
from vsrtune.plan.safety.starvation import unguarded, unwatched
from vsrtune.policy.matching import policies_of
from vsrtune.policy.model import Policy

_PINS = ThreadAffinity | VcpuPin | EmulatorPin

REASON = "no policy asks for it any more"
ADRIFT = "it has all CPUs of its cpuset, or one that it was given is offline or out of its cpuset"
UNSEEN = (
    "nothing guards its class: its guest no longer shows this thread, is stepped down, or has no "
    "policy and libvirt does not answer"
)


def full_plan(
    snapshot: Snapshot,
    policies: Sequence[Policy],
    entries: Sequence[Entry],
    *,
    reassert: bool = False,
    steps: Steps = NO_STEPS,
) -> Plan:
    """The plan for a host with these live entries and ``steps`` of the journal. With ``reassert``
    it overrules what was set by hand, as a reload of the daemon does. Raises PlanError."""
    overruled = {e.target.guest for e in entries} if reassert else ()
    return plan_with_releases(snapshot, policies, entries, overruled, steps=steps).plan


def plan_with_releases(
    snapshot: Snapshot,
    policies: Sequence[Policy],
    entries: Sequence[Entry],
    reassert: Collection[str] = (),
    memory: Memory = NO_MEMORY,
    steps: Steps = NO_STEPS,
) -> Judged:
    """``planner.plan`` with releases, and what later plans need of it. Pins that guests have
    brought along are released even if a policy asks for them. Raises PlanError.

    What is to be released may stand in the way of a guest, or hide why it has to be refused. The
    host is therefore judged as the releases leave it, until that judgement releases nothing more.
    A guest that is refused only then is refused from the start, and keeps all its settings. So
    does one about which the planner is wrong: it costs the others nothing.
    """
    entries = (*entries, *brought_pins.entries(snapshot.guests, snapshot.host, entries))
    written = applied(entries)
    originals = {e.target: e.original for e in entries}
    inputs = Inputs(snapshot, policies, written, reassert, memory, steps, originals=originals)
    waiting = {g.ref for g in snapshot.guests if g.waits}
    came = frozenset(
        t for t in brought_pins.brought(entries) & written.keys() if t.guest not in waiting
    )
    adrift = _adrift(snapshot, written, memory.for_verify)
    unseen = unguarded(snapshot, written, unwatched(snapshot.guests, policies, steps))
    why = {
        **dict.fromkeys(came, brought_pins.REASON),
        **dict.fromkeys(unseen, UNSEEN),
        **dict.fromkeys(adrift, ADRIFT),
    }
    unable: dict[str, tuple[Refusal, ...]] = {}
    released: frozenset[Target] = frozenset()
    # The guests that the judgement before these releases refused; None without releases.
    refused: frozenset[str] | None = None
    while True:
        after = replace(_after(inputs, entries, released, why), unable=unable)
        judged = judge(after)
        refusals = judged.plan.refusals
        late = [] if refused is None else [r for r in refusals if r.guest not in refused]
        if late:
            for refusal in late:
                unable[refusal.guest] = (*unable.get(refusal.guest, ()), refusal)
            released, refused = frozenset(), None
            continue
        refused = frozenset(r.guest for r in refusals)
        more = _released(inputs, judged, adrift) | came | unseen
        if not more <= released:
            released |= more
            continue
        try:
            return checked(after, judged)
        except PlanError as error:
            wrong = _left_out(inputs, error)
            if wrong is None or wrong.guest in unable:
                raise
            unable[wrong.guest] = (wrong,)
            released, refused = frozenset(), None


def _left_out(inputs: Inputs, error: PlanError) -> Refusal | None:
    """The refusal of the guest about which the planner is wrong, None when that is no guest with
    a policy."""
    guests = [g for g in inputs.snapshot.guests if g.ref == error.guest]
    policies = [p for guest in guests for p in policies_of(guest, inputs.policies)]
    if not policies:
        return None
    where = f" ({error.where})" if error.where else ""
    return Refusal(error.guest, policies[0].at(), f"{error.what}{where}", error.hint)


def _after(
    inputs: Inputs,
    entries: Sequence[Entry],
    released: Collection[Target],
    why: Mapping[Target, str],
) -> Inputs:
    """The inputs of the plan for the host as the releases of these targets leave it. ``why``: the
    reasons other than REASON."""
    if not released:
        return inputs
    snapshot, written = inputs.snapshot, inputs.applied
    present = PresentValues(snapshot)
    back: list[Action] = []
    disowned: list[Target] = []
    for entry in undo_order(e for e in entries if e.target in released):
        target, applied = entry.target, written[entry.target]
        reason = why.get(target, REASON)
        if reason != UNSEEN and _is_vanished(present, target):
            continue
        came = reason == brought_pins.REASON
        if came or _is_applied(snapshot.host, present, target, applied):
            back.append(Action(target, applied, entry.original, reason, release=True))
        else:
            disowned.append(target)
    projected = _masks_forgotten(snapshot, project_actions(snapshot, back), back)
    return replace(
        inputs,
        snapshot=projected,
        applied=_masks_followed(
            snapshot, projected, {t: v for t, v in written.items() if t not in released}
        ),
        releases=tuple(back),
        disowned=tuple(disowned),
    )


def _masks_forgotten(snapshot: Snapshot, projected: Snapshot, back: Collection[Action]) -> Snapshot:
    """``projected``, in which threads that a list of ours bound, or that were in a slice that was a
    root domain, have all CPUs of their cpuset, unless they had fewer or get a mask. Kernels before
    6.2 forget masks there; the executor gives them back (Cgroups.write_list)."""
    paths = {*slices_of(snapshot.host, [a.target for a in back])}
    paths |= {
        a.target.path
        for a in back
        if isinstance(a.target, CpusetFile) and a.target.file == CPUS and a.after == CpusetList("")
    }
    if not paths:
        return projected
    had = {t.key: t.cpuset_effective for g in snapshot.guests for t in g.threads}
    given = {a.target.thread for a in back if isinstance(a.target, _PINS)}

    def forgotten(thread: Thread) -> Thread:
        wide, before = thread.cpuset_effective, had[thread.key]
        below = any(within(thread.cgroup, path) for path in paths)
        if wide is None or before is None or not below or thread.key in given:
            return thread
        # libvirt gives a guest without pins no isolated CPU.
        for cut in (snapshot.host.isolated, CpuSet()):
            if thread.affinity == before - cut:
                return replace(thread, affinity=wide - cut)
        return thread

    guests = (replace(g, threads=tuple(map(forgotten, g.threads))) for g in projected.guests)
    return replace(projected, guests=tuple(guests))


def _masks_followed(
    snapshot: Snapshot, projected: Snapshot, applied: dict[Target, Value]
) -> dict[Target, Value]:
    """``applied``, in which the masks of ours that released moves cost their threads are no
    drift: the executor journals what the threads have then."""
    before, after = PresentValues(snapshot), PresentValues(projected)
    for target, written in applied.items():
        if isinstance(target, ThreadAffinity) and before.value(target) == written:
            applied[target] = after.value(target) or written
    return applied


def _released(inputs: Inputs, judged: Judged, adrift: Collection[Target]) -> frozenset[Target]:
    """Targets of the journal that no policy asks for any more: of running guests, of the host,
    and cgroups at the top that guests left behind.

    Targets of refused guests stay: a mistake in a policy must not untune its guest. So do those of
    guests that libvirt is busy with (it would not take the pins back) or has not confirmed. The
    settings of the host that such guests need stay too. The classes of threads that have lost
    their CPUs never stay.
    """
    snapshot, applied = inputs.snapshot, inputs.applied
    running = {g.ref for g in snapshot.guests}
    refused = {r.guest for r in judged.plan.refusals}
    refused |= {g.ref for g in snapshot.guests if g.waits}
    slices = slices_of(snapshot.host, applied)
    stays = inputs.host_stays(refused)
    if not stays:
        running.add(HOST_REF)
    acting = running - refused
    present = PresentValues(snapshot)

    def hidden(target: Target) -> bool:
        # Many NICs that are down show no interrupts; while a policy asks for such settings, they
        # keep theirs. What is gone for good is forgotten elsewhere.
        of_host = isinstance(target, IrqAffinity) and target.guest == HOST_REF
        return of_host and bool(judged.movers) and present.value(target) is None

    out = {
        t
        for t, value in applied.items()
        if t.guest in acting
        and t not in judged.desired
        and not hidden(t)
        and not _asked_by_another(judged, t, value)
    }
    out |= {
        t
        for t in applied
        if t.guest not in running and t.guest != HOST_REF and _left_behind(snapshot, t)
    }
    # So does a partition whose CPUs or threads change: they are settled while it is empty.
    rebuilt = _rebuilt(snapshot, applied, judged.plan) & acting
    out |= {t for t in applied if t.guest in rebuilt and isinstance(t, Partition)}
    # The list of a slice binds all threads in it, so it goes with the partition.
    out |= {
        t
        for t in applied
        if isinstance(t, CpusetFile) and t.path in slices and Partition(HOST_REF, t.path) in out
    }
    if stays and any(is_deadline(a.after) for a in judged.plan.actions):
        # The kernel admits budgets by it.
        out |= {t for t in applied if isinstance(t, RealtimeLimit)}
    # Threads in a slice that stays a root domain cannot have their own CPUs back yet.
    staying = [path for path in slices if Partition(HOST_REF, path) not in out]
    inside = {g.ref for g in snapshot.guests if _within(g, staying)}
    bound = _PINS | ThreadCgroup | CgroupDir
    out = {t for t in out if t.guest not in inside or not isinstance(t, bound)}
    changing = {t.guest for t in out if isinstance(t, Partition)}
    # Threads leave a partition that goes; the rest of the plan moves them on.
    out |= {t for t in applied if t.guest in changing and isinstance(t, ThreadCgroup)}
    # Those that get their own masks back get them in the emulator's cgroup, so its list goes too.
    passing = {t.guest for t in out if isinstance(t, ThreadAffinity)} & changing
    out |= {
        t
        for t, v in applied.items()
        if isinstance(t, EmulatorPin)
        and t.guest in passing
        and _is_applied(snapshot.host, present, t, v)
    }
    # A thread leaves a realtime class before it may run on other CPUs again, where it moves too; if
    # the policy still asks for the class, the rest of the plan gives it back. So does one that is
    # to float in a root domain, whose CPUs it gets before its budget.
    unpinned = {t.thread for t in out if isinstance(t, ThreadAffinity | VcpuPin | ThreadCgroup)}
    unpinned |= _floating(judged.plan)
    out |= {
        t
        for t, v in applied.items()
        if isinstance(t, ThreadSched) and t.thread in unpinned and _is_realtime(v)
    }
    changing |= rebuilt | _broken(snapshot, applied)
    if HOST_REF in changing:
        changing = running - refused
    # A thread leaves class deadline before its root domain is removed or built anew.
    changing -= refused
    out |= {t for t, v in applied.items() if t.guest in changing and is_deadline(v)}
    if any(isinstance(t, CpusetFile) and t.path in slices and t.file == CPUS for t in out):
        # Before 6.7 such a list gives every thread in the slice all CPUs of its cgroup.
        out |= {
            t
            for t, v in applied.items()
            if isinstance(t, ThreadSched) and t.guest in changing and _is_realtime(v)
        }
    left = {r.guest for r in judged.plan.refusals}
    return frozenset(out).union(t for t in adrift if t.guest in left)


def _adrift(
    snapshot: Snapshot, applied: Mapping[Target, Value], found_so: Mapping[Target, Value]
) -> set[Target]:
    """The realtime classes of threads that have lost a CPU which we gave them, or found them with
    (``found_so``), and may run on others. The kernel lets a thread without any CPU run on all that
    its cpuset has, and 6.1 any thread whose cpuset has changed."""
    present, online = PresentValues(snapshot), snapshot.host.online
    found: set[Target] = set()
    for target, written in {**found_so, **applied}.items():
        cpus = pinned_cpus(written)
        if cpus is None or not isinstance(target, ThreadAffinity | VcpuPin):
            continue
        thread, sched = present.thread(target), ThreadSched(target.guest, target.thread, "")
        if thread is None or thread.affinity <= cpus:
            continue
        bound = _bound(target, thread)
        kept = cpus <= online and (bound is None or cpus <= bound)
        if kept and thread.affinity != bound:
            continue
        if _is_realtime(thread.sched) and _is_realtime(applied.get(sched)):
            found.add(sched)
    return found


def _bound(target: Target, thread: Thread) -> CpuSet | None:
    """The CPUs of the cpuset around a thread. The list of a pin's own cgroup is the pin."""
    pinned = isinstance(target, VcpuPin | EmulatorPin)
    return thread.cpuset_limit if pinned else thread.cpuset_effective


def _within(guest: Guest, slices: Collection[str]) -> bool:
    """Whether a guest lives in one of these slices."""
    return any(within(t.cgroup, path) for path in slices for t in guest.threads)


def _asked_by_another(judged: Judged, target: Target, written: Value) -> bool:
    """Whether a guest that shares the device asks for the value that is there. Given back and
    written again, it would make a ring anew twice."""
    return isinstance(target, DeviceNumber) and any(
        isinstance(other, type(target)) and other.ifindex == target.ifindex and value == written
        for other, value in judged.plan.for_verify.items()
    )


def _floating(plan: Plan) -> set[ThreadKey]:
    """The threads that the plan gives class deadline and, before it, several CPUs."""
    budgets = {
        a.target.thread
        for a in plan.actions
        if isinstance(a.target, ThreadSched) and is_deadline(a.after)
    }
    wide = ((a.target, pinned_cpus(a.after)) for a in plan.actions)
    return budgets & {
        target.thread
        for target, cpus in wide
        if isinstance(target, ThreadAffinity | VcpuPin) and cpus is not None and len(cpus) > 1
    }


def _rebuilt(snapshot: Snapshot, applied: Mapping[Target, Value], plan: Plan) -> set[str]:
    """Guests in whose partitions the plan would change the CPUs, or threads that are in them. The
    host if a thread in a slice that is a root domain would get CPUs outside it."""
    paths = {t.path for t in applied if isinstance(t, Partition)}
    if not paths and not any(map(is_deadline, applied.values())):
        return set()
    present = PresentValues(snapshot)
    slices = slices_of(snapshot.host, applied)
    # A thread of ours that enters a partition has CPUs outside it; one that has just come has none.
    held = {t.thread for t in applied if isinstance(t, ThreadAffinity | VcpuPin)}

    def inside(action: Action) -> bool:
        target = action.target
        match target:
            case CpusetFile(path=path):
                return path in paths
            case ThreadSched():
                return is_deadline(action.before) and not is_deadline(action.after)
            case ThreadCgroup() | ThreadAffinity() | VcpuPin():
                thread = present.thread(target)
                return thread is not None and (
                    thread.cgroup in paths
                    or (action.after in paths and target.thread in held)
                    or thread.sched.cls is SchedClass.DEADLINE
                )
        return False

    def leaves(action: Action) -> bool:
        cpus = pinned_cpus(action.after)
        thread = present.thread(action.target)
        return (
            thread is not None
            and cpus is not None
            and any(within(thread.cgroup, path) and not cpus <= own for path, own in slices.items())
        )

    actions = [a for a in plan.actions if not a.release]
    found = {a.target.guest for a in actions if inside(a)}
    return found | {HOST_REF} if slices and any(map(leaves, actions)) else found


def _broken(snapshot: Snapshot, applied: Mapping[Target, Value]) -> set[str]:
    """Guests (or the host) of our partitions that something made invalid. The bandwidth that the
    kernel has booked is unreliable until the root domain is built anew."""
    paths = {c.path for c in snapshot.host.cpusets if not c.valid}
    return {t.guest for t in applied if isinstance(t, Partition) and t.path in paths}


def _is_realtime(written: Value | None) -> bool:
    return isinstance(written, Sched) and written.cls in REALTIME


def _left_behind(snapshot: Snapshot, target: Target) -> bool:
    """Whether a partition at the top has outlived its guest: an empty one has to give its CPUs
    back. (A guest that still runs may have been unreadable.)"""
    if not isinstance(target, CgroupTarget) or "/" in target.path:
        return False
    group = snapshot.host.cpuset(target.path)
    return group is not None and not group.populated


def _is_vanished(present: PresentValues, target: Target) -> bool:
    """Whether a guest no longer has the thread or the device. Those of the host may belong to
    lower devices that are observed only for a guest."""
    of_guest = target.guest != HOST_REF and not isinstance(target, CgroupTarget)
    return of_guest and not present.shows(target)


def _is_applied(host: Host, present: PresentValues, target: Target, written: Value) -> bool:
    """Whether the host has the value that vsrtune wrote. True where the snapshot does not tell:
    the executor reads the value again before it writes."""
    now, thread = present.value(target), present.thread(target)
    match now, written.cpus if isinstance(written, Pin) else written:
        case (CpuSet() as cpus, CpuSet() as our_cpus):
            # Partitions or its cpuset have cut it perhaps, or its CPUs have gone offline.
            lost = our_cpus.isdisjoint(host.online) and host.everywhere <= cpus
            found, left = cpus & host.online, our_cpus & host.everywhere
            bound = None if thread is None else _bound(target, thread)
            if bound is not None and not left <= bound:
                # 6.1 forgets the mask where its cpuset changes.
                lost |= found in (our_cpus & bound, bound)
            return lost or found in (our_cpus & host.online, left)
        case (PartitionState() | Sched() as value, our_value):
            return ours(our_value, value)
    return now is None or now == written
