"""Random hosts, guests and policies: what must hold for every plan."""

from __future__ import annotations

import os
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planning_samples import UUID, host, journalled, macvtap, nic, released, thread

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import (
    DATA_PLANE,
    REALTIME,
    Confidence,
    Guest,
    Interface,
    NicKind,
    Role,
    Sched,
    SchedClass,
    Thread,
    ThreadKey,
    WorkerKind,
)
from vsrtune.model.host import Host, Irq, Nic, NicQueue, NicThread, rps_cpus
from vsrtune.model.load import WINDOWS, data_plane, measured, merged, moves
from vsrtune.model.plan import Plan, plan_text, read_plan
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import HOST_REF, Target, ThreadSched, Value
from vsrtune.plan.planner import plan
from vsrtune.plan.safety.projection import after, project, project_actions, undo_actions
from vsrtune.policy.model import AUTO, Policy, SchedRule

LOWERS = ("p0", "p1", "br0")
INDEXES = {name: number for number, name in enumerate(LOWERS, 36)}


def cpu_sets(within: CpuSet) -> st.SearchStrategy[CpuSet]:
    return st.sets(st.sampled_from(sorted(within)), min_size=1).map(CpuSet)


@st.composite
def queues(draw: st.DrawFn, some: st.SearchStrategy[CpuSet]) -> tuple[NicQueue, ...]:
    cpus = st.one_of(st.none(), st.just(CpuSet()), some)
    names = ("rx-0", "rx-1", "tx-0")[draw(st.integers(0, 2)) :]
    return tuple(NicQueue(name, draw(cpus)) for name in names)


@st.composite
def odd_nics(draw: st.DrawFn, plain: Nic, some: st.SearchStrategy[CpuSet]) -> Nic:
    """With interrupts that cannot be moved, and NAPI threads."""
    number = plain.ifindex * 10
    more = draw(st.sampled_from(("", "tx-0", "tx-0, other")))
    irqs = tuple(replace(i, managed=draw(st.booleans())) for i in plain.irqs)
    if more and irqs:
        irqs += (Irq(number, f"{plain.name}-{more}", draw(some), draw(some)),)
    napi = tuple(
        NicThread(ThreadKey(number + n, number + n, 1), f"napi/{plain.name}-{n}", draw(some))
        for n in range(draw(st.integers(0, 2)) if plain.threaded_napi else 0)
    )
    return replace(plain, irqs=irqs, napi=napi, rps_cpus=rps_cpus(plain.queues))


@st.composite
def hosts(draw: st.DrawFn) -> Host:
    count = draw(st.integers(1, 6))
    everything = CpuSet(range(count))
    offline = draw(st.sets(st.integers(1, 5), max_size=2))
    isolated = draw(st.sets(st.integers(1, 5), max_size=3))
    some = cpu_sets(everything)
    nics = [
        nic(
            name,
            draw(st.one_of(st.none(), some.map(str))),
            node=draw(st.sampled_from((-1, 0, 1))),
            threaded_napi=draw(st.booleans()),
            rx_cpus=draw(st.one_of(st.none(), some)),
            queues=draw(queues(some)),
            driver=draw(st.sampled_from(("", "e1000e"))),
        )
        for name in draw(st.sets(st.sampled_from(LOWERS)).map(sorted))
    ]
    nics = [draw(odd_nics(replace(n, ifindex=INDEXES[n.name]), some)) for n in nics]
    return host(
        count,
        nics,
        offline=str(CpuSet(offline)),
        isolated=str(CpuSet(isolated)),
        nodes={n: draw(st.integers(0, 1)) for n in range(count)},
        siblings={n: f"{n // 2 * 2}-{n // 2 * 2 + 1}" for n in range(count)},
        rt_runtime=draw(st.sampled_from((950_000, -1))),
        softirq={n: draw(SCHEDS) for n in range(count) if draw(st.booleans())},
    )


SCHEDS = st.sampled_from(
    (
        Sched(),
        Sched(nice=5),
        Sched(SchedClass.FIFO, 10, reset_on_fork=True),
        Sched(SchedClass.RR, 3),
        Sched(SchedClass.BATCH),
        Sched(SchedClass.DEADLINE, runtime_ns=10**6, deadline_ns=10**7, period_ns=10**7),
    )
)


LOADS = st.sampled_from(((), (0.4,), *((n / 10,) * WINDOWS for n in (0, 1, 5, 9))))


@st.composite
def guests(draw: st.DrawFn, online: CpuSet, number: int) -> Guest:
    pid = 1000 * (number + 1)
    libvirt = draw(st.booleans())
    controller = draw(st.booleans())
    limit = draw(st.one_of(st.just(online), cpu_sets(online)))
    scope = f"machine.slice/machine-qemu-{pid}.scope/libvirt" if libvirt else "user.slice/x"

    def member(tid: int, role: Role, group: str, narrow: CpuSet | None, **more: object) -> Thread:
        effective = limit if narrow is None else narrow
        if not controller:
            effective = limit
        affinity = draw(st.one_of(st.just(effective), cpu_sets(effective)))
        managed = libvirt and role is not Role.VHOST
        return thread(
            pid,
            tid,
            role,
            online,
            f"{scope}/{group}" if libvirt else scope,
            affinity=affinity,
            cpuset_cpus=("" if narrow is None else str(narrow)) if controller else None,
            # Without a controller of its own the cgroup is confined by those above.
            cpuset_effective=effective if controller else limit,
            cpuset_limit=limit,
            pin=draw(st.sampled_from((affinity, online))) if managed else None,
            load=draw(LOADS),
            **more,
        )

    def napi(tid: int, device: str) -> Thread:
        return thread(
            tid,
            tid,
            Role.NAPI,
            online,
            "",
            affinity=draw(st.one_of(st.just(online), cpu_sets(online))),
            cpuset_cpus=None,
            cpuset_limit=None,
            interface=device,
            confidence=draw(st.sampled_from((Confidence.EXACT, Confidence.ORDER))),
            sched=draw(SCHEDS),
        )

    # Every member of a cgroup has its cpuset; a plain guest has one cgroup.
    unset = st.none()
    emulator = draw(st.one_of(unset, cpu_sets(limit))) if libvirt else None
    threads = [member(pid, Role.EMULATOR, "emulator", emulator)]
    for index in range(draw(st.integers(0, 3))):
        own = draw(st.one_of(unset, cpu_sets(limit))) if libvirt else None
        sched = draw(SCHEDS)
        threads.append(
            member(pid + 1 + index, Role.VCPU, f"vcpu{index}", own, index=index, sched=sched)
        )
    interfaces: list[Interface] = []
    for nth in range(draw(st.integers(0, 3))):
        device = 10 * (number + 1) + nth if draw(st.integers(0, 9)) else 99
        if any(i.ifindex == 100 + device for i in interfaces):
            continue
        tap = macvtap(device, draw(st.sampled_from(LOWERS)))
        tap = replace(
            tap,
            kind=draw(st.sampled_from(NicKind)),
            vhost=draw(st.booleans()),
            txqueuelen=500 if device == 99 else draw(st.sampled_from((50, 500, 1000))),
            lower=draw(st.sampled_from(((), tap.lower, ("br0", *tap.lower)))),
        )
        if device == 99:
            tap = replace(tap, kind=NicKind.MACVTAP)
        if tap.kind is NicKind.NAPI_MACVTAP:
            tap = replace(tap, threaded=draw(st.sampled_from((0, 1, None))))
        if tap.threaded:
            threads.append(napi(pid + 30 + nth, tap.target))
        interfaces.append(tap)
        if tap.vhost:
            sure = draw(st.sampled_from(Confidence))
            threads.append(
                member(
                    pid + 20 + nth,
                    Role.VHOST,
                    "emulator",
                    emulator,
                    worker=WorkerKind.TASK,
                    interface=None if sure is Confidence.NONE else tap.target,
                    queue=None if sure is Confidence.NONE else 0,
                    confidence=sure,
                    sched=draw(SCHEDS),
                )
            )
    return Guest(
        f"vr{number}",
        UUID.format(pid),
        "libvirt" if libvirt else "qemu",
        pid,
        pid,
        tuple(threads),
        tuple(interfaces),
    )


@st.composite
def policies(draw: st.DrawFn, guest: Guest, count: int, by_load: bool = True) -> Policy:
    some = cpu_sets(CpuSet(range(count)))
    choice = st.one_of(st.none(), st.just(AUTO), st.just(AUTO), some)
    vcpus = [t.index for t in guest.by_role(Role.VCPU) if t.index is not None]
    names = [i.target for i in guest.interfaces]
    vcpu_map = st.dictionaries(st.sampled_from(vcpus), some, min_size=1) if vcpus else st.none()
    vhost_map = st.dictionaries(st.sampled_from(names), some, min_size=1) if names else st.none()
    as_tuple = [
        m.map(lambda found: tuple(found.items()) if found is not None else None)
        for m in (vcpu_map, vhost_map)
    ]
    rules = st.sampled_from(
        (
            None,
            SchedRule(SchedClass.OTHER),
            SchedRule(SchedClass.FIFO, 10),
            SchedRule(SchedClass.RR, 20),
        )
    )
    irq = draw(st.one_of(st.none(), st.just(AUTO), some))
    return Policy(
        path=f"{guest.name}.yaml",
        guest=draw(st.sampled_from((guest.ref, guest.ref, f"{guest.ref}*"))),
        irq=irq,
        irq_set=draw(st.sampled_from((None, True))) if isinstance(irq, CpuSet) else None,
        vcpu=draw(st.one_of(choice, choice, as_tuple[0])),
        vhost=draw(st.one_of(choice, choice, as_tuple[1])),
        emulator=draw(choice),
        vcpu_sched=draw(rules),
        vhost_sched=draw(rules),
        softirq_sched=draw(rules),
        napi=draw(st.one_of(choice, choice, as_tuple[1])),
        napi_sched=draw(rules),
        devices=tuple(
            (key, value)
            for key, value in (
                ("queue.macvtap", draw(st.sampled_from((None, 50, 500)))),
                ("napi.threaded", draw(st.sampled_from((None, None, True, False)))),
            )
            if value is not None
        ),
        placement=draw(st.sampled_from((None, AUTO))) if by_load else None,
    )


Situation = tuple[Snapshot, tuple[Policy, ...]]


@st.composite
def situations(draw: st.DrawFn, by_load: bool = True) -> Situation:
    machine = draw(hosts())
    found = [draw(guests(machine.online, n)) for n in range(draw(st.integers(1, 3)))]
    rules = [
        draw(policies(g, len(machine.cpus), by_load)) for g in found if draw(st.integers(0, 4))
    ]
    # Two guests share device 99 and therefore its length.
    return Snapshot(machine, tuple(found)), tuple(rules)


def written(made: Plan) -> dict[Target, Value]:
    return {a.target: a.after for a in made.actions}


def comparable(snapshot: Snapshot) -> Snapshot:
    """Without what follows from the rest: libvirt's view, effective cpusets, and which CPU
    of its mask serves an interrupt."""
    nics = (
        replace(n, irqs=tuple(replace(i, effective=CpuSet()) for i in n.irqs))
        for n in snapshot.host.nics
    )
    return replace(
        snapshot,
        host=replace(snapshot.host, nics=tuple(nics)),
        guests=tuple(
            replace(
                g,
                threads=tuple(replace(t, pin=None, cpuset_effective=None) for t in g.threads),
            )
            for g in snapshot.guests
        ),
    )


def rested(snapshot: Snapshot, made: Plan) -> Snapshot:
    """With the loads that are measured next: windows end anew after moves."""
    if not moves(made.actions):
        return snapshot
    return measured(snapshot, {t.key: merged(t.load) for t in data_plane(snapshot)})


def realtime_on(snapshot: Snapshot, irq: CpuSet) -> set[object]:
    return {
        t.key
        for g in snapshot.guests
        for t in g.threads
        if t.role in DATA_PLANE and t.sched.cls in REALTIME and t.affinity & irq
    }


EXAMPLES = settings(
    max_examples=int(os.environ.get("VSRTUNE_EXAMPLES", "150")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@EXAMPLES
@given(situations())
def test_invariants_hold_and_planning_again_changes_nothing(situation: Situation) -> None:
    snapshot, rules = situation
    made = plan(snapshot, rules)  # raises PlanError when an invariant breaks
    applied = rested(project(snapshot, made), made)
    ours = written(made)
    assert plan(applied, rules, ours).actions == ()
    assert plan(applied, rules).actions == ()
    assert released(applied, rules, journalled(made)) == frozenset()


@EXAMPLES
@given(situations())
def test_undo_restores_and_never_passes_through_worse(situation: Situation) -> None:
    snapshot, rules = situation
    made = plan(snapshot, rules)
    applied = project(snapshot, made)
    assert comparable(project_actions(applied, undo_actions(made))) == comparable(snapshot)
    # On no way there or back is a thread realtime on a CPU that it is not
    # realtime on at either end.
    for start, end, actions in (
        (snapshot, applied, made.actions),
        (applied, snapshot, undo_actions(made)),
    ):
        state = start
        for action in actions:
            state = after(state, action)
            for cpu in snapshot.host.online:
                one = CpuSet([cpu])
                allowed = realtime_on(start, one) | realtime_on(end, one)
                assert realtime_on(state, one) <= allowed


@EXAMPLES
@given(situations())
def test_every_guest_is_accounted_for(situation: Situation) -> None:
    snapshot, rules = situation
    made = plan(snapshot, rules)
    told = {s.guest for s in made.skipped} | {r.guest for r in made.refusals}
    told |= {a.target.guest for a in made.actions}
    assert {g.ref for g in snapshot.guests} <= told
    refused = {r.guest for r in made.refusals}
    assert refused.isdisjoint(a.target.guest for a in made.actions)
    assert all(r.reason and r.hint and r.policy for r in made.refusals)
    assert all(s.reason for s in made.skipped)
    assert read_plan(plan_text(made, "boot"), "boot") == made


@EXAMPLES
@given(situations(), st.randoms(use_true_random=False))
def test_order_of_policies_and_threads_does_not_matter(
    situation: Situation, random: object
) -> None:
    snapshot, rules = situation
    made = plan(snapshot, rules)
    turned = tuple(replace(g, threads=tuple(reversed(g.threads))) for g in snapshot.guests)
    again = plan(replace(snapshot, guests=turned), tuple(reversed(rules)))
    assert written(again) == written(made)


@EXAMPLES
@given(situations(by_load=False))
def test_a_guest_that_leaves_moves_nobody(situation: Situation) -> None:
    """Threads placed without loads that had a CPU of their own keep it when another guest goes."""
    snapshot, rules = situation
    if len(snapshot.guests) < 2:
        return
    made = plan(snapshot, rules)
    applied = project(snapshot, made)
    rest = replace(applied, guests=applied.guests[1:])
    again = plan(rest, rules, written(made))
    before = {t.key: t.affinity for g in rest.guests for t in g.threads}
    alone = [
        key
        for key, cpus in before.items()
        if len(cpus) == 1
        and sum(1 for g in applied.guests for t in g.threads if t.affinity & cpus) == 1
    ]
    refused_before = {r.guest for r in made.refusals}
    if refused_before or again.refusals:
        return
    after_all = project(rest, again)
    for guest in after_all.guests:
        for one in guest.threads:
            if one.key in alone and one.role in DATA_PLANE:
                assert one.affinity == before[one.key]


@EXAMPLES
@given(situations())
def test_reload_that_asks_nothing_releases_everything(situation: Situation) -> None:
    snapshot, rules = situation
    made = plan(snapshot, rules)
    applied = project(snapshot, made)
    empty = tuple(Policy(path=p.path, guest=p.guest) for p in rules)
    again = plan(applied, empty, written(made))
    refused = {r.guest for r in again.refusals}
    assert again.actions == ()
    # The host's own settings stay as long as a refused guest may need them.
    kept = refused | {HOST_REF} if refused else refused
    expected = {t for t in written(made) if t.guest not in kept}
    assert released(applied, empty, journalled(made)) == expected


def test_realtime_is_only_planned_with_reset_on_fork() -> None:
    assert SchedRule(SchedClass.FIFO, 1).sched.reset_on_fork
    assert not SchedRule(SchedClass.OTHER).sched.reset_on_fork
    assert ThreadSched.kind == "thread-sched"
