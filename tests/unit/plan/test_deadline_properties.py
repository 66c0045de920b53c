"""Random hosts, guests and policies with class deadline: what must hold for every plan."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from planning_samples import journalled, released, with_cpusets
from test_plan_properties import (
    EXAMPLES,
    Situation,
    comparable,
    guests,
    hosts,
    policies,
    rested,
    written,
)

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.deadline import limit, total
from vsrtune.model.guest import Role, Sched, SchedClass, WorkerKind
from vsrtune.model.plan import plan_text, read_plan
from vsrtune.model.root_domains import root_domain
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import HOST_REF, CgroupTarget, Partition
from vsrtune.plan.planner import plan
from vsrtune.plan.safety.projection import after, project, project_actions, undo_actions
from vsrtune.policy.model import Policy, SchedRule


def budget(percent: int) -> SchedRule:
    return SchedRule(SchedClass.DEADLINE, 0, percent * 100_000, 10_000_000, 10_000_000)


BUDGETS = (budget(5), budget(20), budget(60), None)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    machine = draw(hosts())
    found = []
    for number in range(draw(st.integers(1, 3))):
        guest = draw(guests(machine.online, number))
        threads = tuple(
            # Nobody else's DEADLINE threads: they are left alone, which others test.
            replace(t, sched=Sched() if t.sched.cls is SchedClass.DEADLINE else t.sched)
            for t in guest.threads
        )
        if draw(st.booleans()):
            threads = tuple(
                replace(t, worker=WorkerKind.KTHREAD, key=replace(t.key, pid=t.key.tid))
                if t.role is Role.VHOST
                else t
                for t in threads
            )
        found.append(replace(guest, threads=threads))
    rules: list[Policy] = []
    for guest in found:
        policy = draw(policies(guest, len(machine.cpus)))
        vcpu, vhost = draw(st.sampled_from(BUDGETS)), draw(st.sampled_from(BUDGETS))
        rules.append(
            replace(
                policy,
                irq=CpuSet([0]),
                vcpu_sched=vcpu or policy.vcpu_sched,
                vhost_sched=vhost or policy.vhost_sched,
            )
        )
    seen = with_cpusets(Snapshot(machine, tuple(found)), exclusive=draw(st.booleans()))
    return awake(seen), tuple(rules)


def plain(snapshot: Snapshot) -> Snapshot:
    groups = (replace(c, effective=CpuSet()) for c in snapshot.host.cpusets)
    return comparable(replace(snapshot, host=replace(snapshot.host, cpusets=tuple(groups))))


def awake(snapshot: Snapshot) -> Snapshot:
    """Every thread has run where it may."""
    return replace(
        snapshot,
        guests=tuple(
            replace(
                g,
                threads=tuple(
                    replace(t, last_cpu=t.affinity.first()) if t.affinity else t for t in g.threads
                ),
            )
            for g in snapshot.guests
        ),
    )


@EXAMPLES
@given(situations())
def test_budgets_fit_and_planning_again_changes_nothing(situation: Situation) -> None:
    snapshot, rules = situation
    made = plan(snapshot, rules)  # raises PlanError when an invariant breaks
    applied = rested(project(snapshot, made), made)
    booked: dict[CpuSet, list[Sched]] = {}
    for guest in applied.guests:
        for thread in guest.threads:
            if thread.sched.cls is SchedClass.DEADLINE:
                cpus = root_domain(applied.host, thread)
                assert cpus == thread.affinity
                booked.setdefault(cpus, []).append(thread.sched)
    for cpus, scheds in booked.items():
        most = limit(applied.host, cpus)
        assert most is None or total(scheds) <= most
    ours, entries = written(made), journalled(made)
    if any(s.pending for s in made.skipped):
        # Workers had to leave libvirt's cgroup first: the next plan makes the rest.
        second = plan(awake(applied), rules, ours)
        assert not any(s.pending for s in second.skipped)
        applied = rested(project(applied, second), second)
        ours |= written(second)
        entries = journalled(made, second)
    again = plan(awake(applied), rules, ours)
    assert again.actions == ()
    assert released(applied, rules, entries) == frozenset()


@EXAMPLES
@given(situations())
def test_undo_restores_and_no_thread_is_deadline_meanwhile(situation: Situation) -> None:
    snapshot, rules = situation
    made = plan(snapshot, rules)
    applied = project(snapshot, made)
    assert plain(project_actions(applied, undo_actions(made))) == plain(snapshot)
    state = applied
    for action in undo_actions(made):
        if isinstance(action.target, Partition):
            inside = [
                t
                for g in state.guests
                for t in g.threads
                if (t.cgroup + "/").startswith(f"{action.target.path}/")
            ]
            assert all(t.sched.cls is not SchedClass.DEADLINE for t in inside)
        state = after(state, action)


@EXAMPLES
@given(situations())
def test_a_reload_without_budgets_releases_the_root_domains(situation: Situation) -> None:
    snapshot, rules = situation
    made = plan(snapshot, rules)
    applied = awake(project(snapshot, made))
    ours = written(made)
    empty = tuple(Policy(path=p.path, guest=p.guest) for p in rules)
    if plan(applied, empty, ours).refusals:
        return
    assert released(applied, empty, journalled(made)) == frozenset(ours)


@EXAMPLES
@given(situations())
def test_a_refused_guest_gets_nothing(situation: Situation) -> None:
    snapshot, rules = situation
    made = plan(snapshot, rules)
    assert read_plan(plan_text(made, "boot"), "boot") == made
    refused = {r.guest for r in made.refusals}
    assert refused.isdisjoint(a.target.guest for a in made.actions)
    if refused == {g.ref for g in snapshot.guests}:
        hosts_own = [a for a in made.actions if a.target.guest == HOST_REF]
        assert not [a for a in hosts_own if isinstance(a.target, CgroupTarget)]
