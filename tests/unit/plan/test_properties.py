"""What holds of every plan, whatever the situation (situations.py).

Each property is judged by the snapshot, the plan, and what an imitated kernel does with it; the
planner's own projection of a plan is not asked.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from fake_kernel import Killed
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from imitated_host import ImitatedHost, Visible
from situations import Row, Situation, settle, situations

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import DATA_PLANE, REALTIME, Guest, Role, SchedClass
from vsrtune.model.plan import Action, Plan, plan_text, read_plan
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import (
    HOST_REF,
    CgroupTarget,
    DeviceNumber,
    QueueCpus,
    Target,
    Value,
)
from vsrtune.plan.full_plan import full_plan
from vsrtune.plan.interrupt_cpus import irqs_of
from vsrtune.policy.matching import policies_of
from vsrtune.policy.model import Policy

REALTIME_NAMES = {cls.value for cls in REALTIME}


# -- what an operator would see


def same(before: Visible, now: Visible, touched: frozenset[Row] = frozenset()) -> None:
    """Raise AssertionError unless both show the same, except rows that somebody has changed."""
    for part in before:
        if not isinstance(before[part], dict):
            assert now[part] == before[part], part
            continue
        names = {n for n in {*before[part], *now[part]} if (part, n) not in touched}
        for name in sorted(names):
            assert now[part].get(name) == before[part].get(name), f"{part} {name}"
    assert "miscounted" not in now


def realtime(host: ImitatedHost) -> set[tuple[str, int]]:
    """The threads that are realtime, with each CPU on which they are."""
    return {
        (tid, cpu)
        for tid, row in host.kernel.state["threads"].items()
        if row["sched"]["cls"] in REALTIME_NAMES
        for cpu in CpuSet.parse(row["mask"])
    }


def admitted(host: ImitatedHost) -> None:
    """Raise AssertionError when a root domain has more DEADLINE bandwidth than it may."""
    for domain, booked in host.kernel.booked().items():
        most = host.kernel.admitted(domain)
        assert most is None or booked <= most, f"CPUs {domain} have booked {booked} of {most}"


def busy_cpus(seen: Snapshot, guest: Guest) -> CpuSet:
    """The CPUs on which interrupts for frames of the devices below a guest are served."""
    names = {name for i in guest.interfaces for name in i.lower}
    irqs = (i for nic in seen.host.nics if nic.name in names for i in nic.irqs)
    return CpuSet(c for i in irqs if "rx" in i.name.lower() for c in i.effective)


def policies_by_ref(seen: Snapshot, policies: Iterable[Policy]) -> dict[str, Policy]:
    """The policy of each guest that has one."""
    found = ((g.ref, policies_of(g, tuple(policies))) for g in seen.guests)
    return {ref: matching[0] for ref, matching in found if matching}


# -- plans are made


CERTAIN = settings(
    max_examples=200,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def test_most_situations_make_the_planner_plan() -> None:
    """Otherwise the properties below say nothing."""
    found: Counter[str] = Counter()

    @CERTAIN
    @given(situations())
    def count(situation: Situation) -> None:
        plan = situation.plan()
        guests = {a.target.guest for a in plan.actions} - {HOST_REF}
        found["all"] += 1
        found["with actions"] += bool(plan.actions)
        found["for two guests"] += len(guests) >= 2
        found["with releases"] += any(a.release for a in plan.actions)
        found["with budgets"] += any(_deadline(a.after) for a in plan.actions)
        found["with refusals"] += bool(plan.refusals)

    count()
    assert found["all"] >= 150
    assert found["with actions"] >= 0.7 * found["all"], found
    assert found["for two guests"] >= 0.5 * found["all"], found
    for kind in ("with releases", "with budgets", "with refusals"):
        assert found[kind] >= 0.05 * found["all"], found


def _deadline(value: Value) -> bool:
    return getattr(value, "cls", None) is SchedClass.DEADLINE


# -- plans on paper


@given(situations(loose=True))
def test_a_guest_is_refused_or_planned_for(situation: Situation) -> None:
    plan = situation.plan()
    refused = {r.guest for r in plan.refusals}
    acted = {a.target.guest for a in plan.actions}
    assert refused.isdisjoint(acted), refused & acted
    told = refused | acted | {s.guest for s in plan.skipped}
    assert {g.ref for g in situation.host.scene.guests} <= told
    assert all(r.reason and r.hint and r.policy for r in plan.refusals)
    assert all(s.reason for s in plan.skipped)
    assert read_plan(plan_text(plan, "boot"), "boot") == plan


@given(situations(loose=True))
def test_the_order_of_policies_and_threads_does_not_change_the_plan(situation: Situation) -> None:
    plan, seen = situation.plan(), situation.host.observed()
    turned = replace(
        seen, guests=tuple(replace(g, threads=tuple(reversed(g.threads))) for g in seen.guests)
    )
    again = full_plan(turned, situation.policies[::-1], situation.host.entries())
    assert {r.guest for r in again.refusals} == {r.guest for r in plan.refusals}
    assert _written(again) == _written(plan)


def _written(plan: Plan) -> set[tuple[Target, str, bool]]:
    return {(a.target, str(a.after), a.release) for a in plan.actions}


@given(situations(past=True, loose=True))
def test_a_release_touches_nothing_that_another_guest_asks_for(situation: Situation) -> None:
    plan, seen = situation.plan(), situation.host.observed()
    refused = {r.guest for r in plan.refusals}
    policies = {
        r: p for r, p in policies_by_ref(seen, situation.policies).items() if r not in refused
    }
    for action in plan.actions:
        if not action.release:
            continue
        target = action.target
        for guest in seen.guests:
            policy = policies.get(guest.ref)
            if policy is not None and guest.ref != target.guest:
                assert not _asks(seen, guest, policy, action), f"{target} of {guest.ref}"
        # Nothing of the host goes and comes back.
        if target.guest == HOST_REF and not isinstance(target, CgroupTarget):
            again = [a for a in plan.actions if a.target == target and not a.release]
            assert [a for a in again if a.after == action.before] == [], target


def _asks(seen: Snapshot, guest: Guest, policy: Policy, release: Action) -> bool:
    """Whether a policy asks for the very value that a release takes away."""
    target, now = release.target, release.before
    if isinstance(target, DeviceNumber):
        mine = any(i.ifindex == target.ifindex for i in guest.interfaces)
        return mine and policy.desired(type(target)) == now
    if target.guest == HOST_REF and target.kind in ("irq-affinity", "queue-cpus"):
        named = irqs_of(seen.host, guest, policy) if policy.moves_irqs else {}
        names = {name for name, (_, cpus) in named.items() if cpus == now}
        if isinstance(target, QueueCpus):
            return target.device in names
        numbers = {i.number for n in seen.host.nics if n.name in names for i in n.irqs}
        return getattr(target, "irq", None) in numbers
    return False


# -- plans carried out


def watched(host: ImitatedHost) -> list[set[tuple[str, int]]]:
    """A list to which each write adds what is realtime after it."""
    states: list[set[tuple[str, int]]] = []

    def behind(_what: str) -> None:
        admitted(host)
        states.append(realtime(host))

    host.kernel.behind = behind
    return states


def carry_out(host: ImitatedHost, plan: Plan, touched: frozenset[Row]) -> bool:
    """Apply the plan, and judge the host after each write. Whether a part of it has to wait for a
    thread that sleeps, or for another part. Classes that somebody gave to threads after vsrtune
    (``touched``) are theirs."""
    start, states = realtime(host), watched(host)
    result = host.apply(plan)
    host.kernel.behind = lambda _what: None
    for action, error in result.failed:
        raise AssertionError(f"{error}; {action.before} -> {action.after}")
    assert result.vanished == ()
    assert {left.target for left in result.left} <= set(plan.disowned)
    assert "miscounted" not in host.kernel.state
    end = realtime(host)
    for state in states:
        new = {(tid, cpu) for tid, cpu in state - start - end if ("threads", tid) not in touched}
        assert new == set()
    return bool(result.pending) or any(s.pending for s in plan.skipped)


@given(situations())
def test_planning_again_changes_nothing(situation: Situation) -> None:
    host, policies = situation.clone(), situation.policies
    for _ in range(4):
        plan = host.plan(policies)
        waits = carry_out(host, plan, situation.touched)
        if host.loose:
            return
        again = host.plan(policies)
        if not again.actions:
            break
        # Only what has waited may be left.
        assert waits, list(map(str, again.actions))
    assert again.actions == ()


@given(situations(), st.data())
def test_a_guest_that_leaves_moves_nobody_else(situation: Situation, data: st.DataObject) -> None:
    """Threads that are placed without loads and have a CPU of their own keep it."""
    host, policies = situation.clone(), situation.policies
    last = settle(host, policies)
    if last.actions or host.loose or len(host.scene.guests) < 2:
        return
    alone = _alone(host)
    gone = data.draw(st.sampled_from([g.ref for g in host.scene.guests]))
    host.leave(gone)
    plan = host.plan(policies)
    # Interrupts that go back, and a guest that is no longer refused, may need the CPUs.
    refused = {r.guest for r in last.refusals}
    host_moves = any(a.release and a.target.guest == HOST_REF for a in plan.actions)
    if host_moves or refused - {gone} != {r.guest for r in plan.refusals}:
        return
    managed = policies_by_ref(host.observed(), policies)
    by_load = {ref for ref, policy in managed.items() if policy.placement is not None}
    host.apply(plan)
    for (ref, tid), cpus in alone.items():
        if ref in managed.keys() - by_load:
            assert CpuSet.parse(host.kernel.mask(tid)) == cpus, (ref, tid)


def _alone(host: ImitatedHost) -> dict[tuple[str, int], CpuSet]:
    """The threads of the data plane that have one CPU which none of the others may use."""
    threads = [
        (g.ref, t) for g in host.observed().guests for t in g.threads if t.role in DATA_PLANE
    ]
    users = Counter(cpu for _, t in threads for cpu in t.affinity)
    return {
        (ref, t.key.tid): t.affinity
        for ref, t in threads
        if len(t.affinity) == 1 and users[t.affinity.first()] == 1
    }


@given(situations())
def test_no_two_vcpus_of_a_guest_share_a_cpu_under_fifo(situation: Situation) -> None:
    host = situation.clone()
    plan = host.plan(situation.policies)
    host.apply(plan)
    seen = host.observed()
    tuned = {a.target.guest for a in plan.actions if not a.release}
    for guest in seen.guests:
        fifo = [t for t in guest.by_role(Role.VCPU) if t.sched.cls is SchedClass.FIFO]
        for one, two in itertools.combinations(fifo, 2):
            crowded = len(one.affinity | two.affinity) < 2
            assert not crowded or guest.ref not in tuned, (one, two)


@given(situations())
def test_no_realtime_thread_gets_an_interrupt_cpu(situation: Situation) -> None:
    host = situation.clone()
    before = realtime(host)
    host.apply(host.plan(situation.policies))
    seen, new = host.observed(), realtime(host) - before
    for guest in seen.guests:
        irq = busy_cpus(seen, guest)
        for thread in guest.threads:
            if thread.role in DATA_PLANE:
                found = {cpu for tid, cpu in new if tid == str(thread.key.tid)}
                assert irq.isdisjoint(CpuSet(found)), (thread, irq)


@given(situations())
def test_nothing_is_written_to_a_strangers_thread(situation: Situation) -> None:
    host = situation.clone()
    seen = host.observed()
    managed = policies_by_ref(seen, situation.policies)
    ours = {e.target.guest for e in host.entries()}
    host.kernel.log.clear()
    host.apply(host.plan(situation.policies))
    own = {str(t.key.tid) for g in seen.guests if g.ref in {*managed, *ours} for t in g.threads}
    own |= {str(t.key.tid) for t in seen.host.softirq}
    own |= {str(t.key.tid) for n in seen.host.nics for t in n.napi}
    for what in host.kernel.log:
        words = what.split()
        moves = words[0] == "write" and words[1].endswith(("cgroup.threads", "cgroup.procs"))
        if words[0] in ("affinity", "sched"):
            assert words[1] in own, what
        elif moves or words[:2] == ["libvirt", "affinity"]:
            assert words[2] in own, what


# -- and taken back


@given(situations())
def test_undo_gives_every_value_back(situation: Situation) -> None:
    host = situation.clone()
    settle(host, situation.policies)
    start, states = realtime(host), watched(host)
    result = host.undo()
    assert [f"{action.target}: {error}" for action, error in result.failed] == []
    assert host.entries() == ()
    same(situation.before, host.visible(), situation.touched)
    for state in states:
        new = state - start - realtime(host)
        assert {n for n in new if ("threads", n[0]) not in situation.touched} == set()


@given(situations(strangers=False), st.integers(0, 10**6), st.booleans())
def test_killed_after_any_write_undo_gives_every_value_back(
    situation: Situation, number: int, before_it: bool
) -> None:
    count = situation.clone()
    count.kernel.log.clear()
    plan = count.plan(situation.policies)
    count.apply(plan)
    writes = len(count.kernel.log)
    if not writes:
        return
    host = situation.clone()
    left = 1 + number % writes

    def kill(what: str) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise Killed

    setattr(host.kernel, "ahead" if before_it else "behind", kill)
    with suppress(Killed):
        host.apply(plan)
    host.kernel.ahead = host.kernel.behind = lambda _what: None
    result = host.undo()
    assert [f"{action.target}: {error}" for action, error in result.failed] == []
    assert list(map(str, result.left)) == []
    same(situation.before, host.visible())
