"""Guests without a policy leave the CPUs of one whose policy says ``others: keep-off``."""

from __future__ import annotations

from dataclasses import replace

import pytest
from imitated_host import ImitatedHost
from planning_samples import change, cpus, router, snapshot, with_cpusets
from planning_samples import host as machine

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import Guest, Role
from vsrtune.model.plan import Plan
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.stepdown import Step, StepLevel
from vsrtune.model.targets import CpusetFile, CpusetList
from vsrtune.plan.full_plan import full_plan
from vsrtune.policy.model import Policy
from vsrtune.policy.parser import parse

TEXT = "guest: vr1\nprofile: none\ncpus: {vcpu: 2, vhost: 3}\n"
POLICY = parse(f"{TEXT}others: keep-off\n", "p")
WITHOUT = parse(TEXT, "p")


def scene(other: Guest | None = None, *, exclusive: bool = True) -> Snapshot:
    other = router("vm7", 2000, vcpus=2) if other is None else other
    return with_cpusets(snapshot(router(), other), exclusive=exclusive)


def masks(host: ImitatedHost, ref: str) -> set[CpuSet]:
    return {t.affinity for g in host.observed().guests if g.ref == ref for t in g.threads}


def told(plan: Plan, ref: str) -> set[str]:
    """What the plan says of all threads of a guest that it leaves alone."""
    assert {a.target.guest for a in plan.actions}.isdisjoint({ref})
    return {s.reason for s in plan.skipped if s.guest == ref and "all its threads" in s.subject}


@pytest.mark.parametrize("exclusive", [True, False], ids=["6.12", "6.1"])
def test_they_leave_once_and_come_back_when_nobody_asks_any_more(exclusive: bool) -> None:
    host = ImitatedHost(scene(exclusive=exclusive))
    before = host.visible()
    assert host.apply(host.plan((POLICY,))).failed == ()
    assert masks(host, "vm7") == {cpus("0-1")}
    assert host.plan((POLICY,)).actions == ()
    assert host.apply(host.plan((WITHOUT,))).failed == ()
    assert masks(host, "vm7") == {cpus("0-3")}
    host.undo()
    assert host.visible() == before


@pytest.mark.parametrize("case", ["6.12", "6.1", "isolated"])
def test_one_that_a_policy_names_by_now_is_tuned_at_once(case: str) -> None:
    """Its threads have all their CPUs again as soon as our list is gone."""
    usual = ImitatedHost(scene(exclusive=case == "6.12"))
    host = _isolated(exclusive=True) if case == "isolated" else usual
    host.apply(host.plan((POLICY,)))
    named = (POLICY, parse("guest: vm7\nprofile: none\ncpus: {vhost: 1}\n", "p"))
    assert host.apply(host.plan(named)).failed == ()
    assert host.plan(named).actions == ()


@pytest.mark.parametrize("more", ["", "placement: auto\n", "cpus: {cores: whole}\n"])
def test_planning_again_after_they_left_changes_nothing(more: str) -> None:
    """A thread that our list alone keeps from CPUs is bound to none, so the emulator of vr1 has no
    reason to go to the CPU of the interrupts."""
    guests = (router(online="0-7"), router("vm7", 2000, vcpus=2, online="0-7"))
    cores = {n: f"{n // 2 * 2}-{n // 2 * 2 + 1}" for n in range(8)} if "whole" in more else None
    host = ImitatedHost(with_cpusets(snapshot(*guests, on=machine(8, siblings=cores))))
    policies = (parse(f"guest: vr1\n{more}others: keep-off\n", "p"),)
    assert host.apply(host.plan(policies)).failed == ()
    assert "0" not in host.kernel.mask(1000)
    assert host.plan(policies).actions == ()


def _isolated(exclusive: bool) -> ImitatedHost:
    """A host with isolated CPUs, which libvirt does not give to a guest without pins."""
    guests = (
        replace(g, threads=tuple(replace(t, affinity=cpus("0-5")) for t in g.threads))
        for g in (router(online="0-7"), router("vm7", 2000, online="0-7"))
    )
    on = machine(8, isolated="6-7")
    return ImitatedHost(with_cpusets(snapshot(*guests, on=on), exclusive=exclusive))


def test_a_guest_without_pins_leaves_where_cpus_are_isolated() -> None:
    host = _isolated(exclusive=True)
    before = host.visible()
    policies = (parse("guest: vr1\ncpus: {vcpu: 2, vhost: 6}\nothers: keep-off\n", "p"),)
    assert host.apply(host.plan(policies)).failed == ()
    assert masks(host, "vm7") == {cpus("0-1,3-5")}
    assert host.kernel.mask(1000) == "1,3-5"
    assert host.plan(policies).actions == ()
    host.undo()
    assert host.visible() == before


def test_linux_6_1_would_forget_a_mask_without_isolated_cpus() -> None:
    why = "left alone: somebody has given emulator CPUs 0-5"
    assert told(_isolated(exclusive=False).plan((POLICY,)), "vm7") == {why}


def test_they_follow_the_cpus_of_the_guest() -> None:
    host = ImitatedHost(scene())
    host.apply(host.plan((POLICY,)))
    host.apply(host.plan((replace(POLICY, vcpu=cpus("1"), vhost=cpus("1")),)))
    assert masks(host, "vm7") == {cpus("0,2-3")}


def test_a_guest_with_a_policy_runs_where_that_says() -> None:
    plan = full_plan(scene(), [POLICY, parse("guest: vm7\nprofile: none\n", "q")], ())
    assert "vm7" not in {a.target.guest for a in plan.actions}


def test_the_lists_stay_while_the_guest_that_asks_is_refused() -> None:
    host = ImitatedHost(scene())
    host.apply(host.plan((POLICY,)))
    plan = host.plan((replace(POLICY, vcpu=cpus("9")),))
    assert [r.guest for r in plan.refusals] == ["vr1"]
    assert plan.actions == ()


def test_they_come_back_when_the_guest_that_asks_is_stepped_down_to_nothing() -> None:
    host = ImitatedHost(scene())
    before = host.visible()
    host.apply(host.plan((POLICY,)))
    steps = {"vr1": Step(StepLevel.UNDONE, "x")}
    host.apply(full_plan(host.observed(), (POLICY,), host.entries(), steps=steps))
    assert (host.visible(), host.entries()) == (before, ())


def _bound(role: Role, cpu: str, text: str | None) -> Guest:
    allowed = cpus("0-3") if text is None else cpus(text)
    return change(
        router("vm7", 2000), role, affinity=cpus(cpu), cpuset_cpus=text or "",
        cpuset_effective=allowed,
    )  # fmt: skip


def _elsewhere() -> Guest:
    """A guest whose emulator is in no cgroup of libvirt's."""
    return change(router("vm7", 2000), Role.EMULATOR, cgroup="machine.slice/x.scope/other")


def test_a_list_that_somebody_has_given_all_its_threads_is_left() -> None:
    seen = scene()
    above = "machine.slice/machine-qemu-2000-x.scope/libvirt"
    groups = tuple(replace(c, cpus="0-2") if c.path == above else c for c in seen.host.cpusets)
    seen = replace(seen, host=replace(seen.host, cpusets=groups))
    why = "left alone: somebody has given it CPUs 0-2"
    assert told(full_plan(seen, [POLICY], ()), "vm7") == {why}


def test_what_is_set_and_why() -> None:
    both = [POLICY, parse("guest: vr2\nprofile: none\ncpus: {vcpu: 1}\nothers: keep-off\n", "q")]
    seen = with_cpusets(snapshot(router(), router("vr2", 3000), router("vm7", 2000)))
    (action,) = (a for a in full_plan(seen, both, ()).actions if a.target.guest == "vm7")
    path = "machine.slice/machine-qemu-2000-x.scope/libvirt"
    assert action.target == CpusetFile("vm7", path, "cpuset.cpus")
    assert (action.before, action.after) == (CpusetList(""), CpusetList("0"))
    assert action.reason == "others: keep-off (p:4, q:4)"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (_bound(Role.VCPU, "2", "2"), "left alone: vcpu 0 is bound to CPUs 2"),
        (_bound(Role.VCPU, "1-2", None), "left alone: somebody has given vcpu 0 CPUs 1-2"),
        (router("vm7", 2000, online="0-1"), "already off CPUs 2-3"),
        (_bound(Role.EMULATOR, "0-3", "3"), "left alone: emulator is bound to CPUs 3"),
        (_elsewhere(), "it has no cgroup whose CPUs could be set"),
    ],
)
def test_what_others_chose_is_left(other: Guest, why: str) -> None:
    assert told(full_plan(scene(other), [POLICY], ()), "vm7") == {why}


def test_a_guest_to_which_no_cpu_would_remain_is_left() -> None:
    policy = replace(POLICY, vcpu=cpus("1-2"))
    narrow = with_cpusets(snapshot(router(), _in_scope(router("vm7", 2000), "1-2")))
    assert told(full_plan(narrow, [policy], ()), "vm7") == {"left alone: no other CPU would remain"}


def _in_scope(guest: Guest, allowed: str) -> Guest:
    """The guest in a scope that has these CPUs."""
    own = {name: cpus(allowed) for name in ("affinity", "cpuset_effective", "cpuset_limit")}
    return replace(guest, threads=tuple(replace(t, **own) for t in guest.threads))


def test_only_guests_of_libvirt_are_moved() -> None:
    plan = full_plan(scene(router("vm7", 2000, source="qemu")), [POLICY], ())
    assert {a.target.guest for a in plan.actions} == {"vr1"}


def test_a_key_alone_asks_for_nothing() -> None:
    assert not Policy("p", "vr1", keep_off=True).asks
