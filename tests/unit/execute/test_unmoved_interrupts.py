"""Interrupts that could not be moved away keep guest threads from becoming realtime there."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest
from imitated_host import ImitatedHost
from planning_samples import cpus, host, macvtap, nic, router, snapshot

from vsrtune.core.cpuset import CpuSet
from vsrtune.execute import executor
from vsrtune.model.guest import REALTIME, Guest, Irq, Sched, SchedClass
from vsrtune.model.targets import HOST_REF
from vsrtune.policy.model import Policy
from vsrtune.policy.parser import parse

RR = "{class: rr, priority: 10}"
MOVING = f"cpus: {{irq: 0, vcpu: auto, vhost: auto}}\nscheduler: {{vcpu: {RR}, vhost: {RR}}}"


def policies(vr1: str = MOVING, vr2: str = "cpus: {vcpu: auto}") -> tuple[Policy, ...]:
    ends = "irq: {set: true}\nprofile: none\n"
    return (
        parse(f"guest: vr1\n{vr1}\n{ends}", "p1"),
        parse(f"guest: vr2\n{vr2}\nprofile: none\n", "p2"),
    )


@pytest.fixture
def scene() -> ImitatedHost:
    """The interrupts of p0 are served on CPUs 1 and 2, and may be on all; p1's is on CPU 0."""
    every = cpus("0-3")
    p0 = nic(
        "p0", None, irqs=(Irq(41, "p0-0", every, cpus("1")), Irq(42, "p0-1", every, cpus("2")))
    )
    guests = (
        router("vr1", 1000, interfaces=[macvtap(10, "p0")]),
        router("vr2", 2000, interfaces=[macvtap(20, "p1")]),
    )
    return ImitatedHost(snapshot(*guests, on=host(4, [p0, nic("p1", "0")])))


def full(scene: ImitatedHost, number: str = "42") -> None:
    """CPU 0 has no vector left for this interrupt."""

    def refuse(what: str) -> None:
        if f"/proc/irq/{number}/smp_affinity_list 0" in what:
            raise OSError(errno.ENOSPC, "no space left on device")

    scene.kernel.ahead = refuse


def served(scene: ImitatedHost) -> CpuSet:
    return CpuSet.union(i.effective for n in scene.observed().host.nics for i in n.irqs)


def urgent(scene: ImitatedHost) -> dict[str, CpuSet]:
    """The CPUs of each realtime thread of a guest."""
    return {
        f"{g.ref} {t.key.tid}": t.affinity
        for g in scene.observed().guests
        for t in g.threads
        if t.sched.cls in (*REALTIME, SchedClass.DEADLINE)
    }


def guest(scene: ImitatedHost, ref: str) -> Guest:
    return next(g for g in scene.observed().guests if g.ref == ref)


def test_no_thread_becomes_realtime_where_interrupts_stay(scene: ImitatedHost) -> None:
    before = guest(scene, "vr1")
    full(scene)
    result = scene.apply(scene.plan(policies()))
    assert served(scene) == cpus("0,2")
    assert urgent(scene) == {}
    assert guest(scene, "vr1") == before
    assert {a.target.guest for a, _ in result.failed} == {HOST_REF, "vr1"}
    (told,) = [str(e) for a, e in result.failed if a.target.guest == "vr1"]
    assert "waits for host/: irq 42 (p0-1) affinity, which failed" in told
    assert {a.target.guest for a in result.done} == {"vr2"}, "it has no realtime threads"
    scene.kernel.ahead = lambda _what: None
    assert scene.apply(scene.plan(policies())).failed == ()
    assert urgent(scene)
    assert all(on.isdisjoint(served(scene)) for on in urgent(scene).values())


def test_moves_that_wait_after_a_failure_count_too(scene: ImitatedHost) -> None:
    plan = scene.plan(policies())
    move = next(a.target for a in plan.actions if a.target.guest == HOST_REF)
    due = replace(plan, actions=tuple(a for a in plan.actions if a.target.guest != HOST_REF))
    journal = scene.journal()
    result = executor.apply(due, scene.kernel.ops(), journal, move)
    assert {a.target.guest for a, _ in result.failed} == {"vr1"}
    assert urgent(scene) == {}


def test_a_realtime_thread_does_not_follow_an_interrupt_that_stays(scene: ImitatedHost) -> None:
    """By the new lists they change places."""
    rr = f"scheduler: {{vcpu: {RR}}}"
    assert scene.apply(scene.plan(policies(f"cpus: {{irq: 1, vcpu: 3}}\n{rr}"))).failed == ()
    assert set(urgent(scene).values()) == {cpus("3")}
    full(scene)
    result = scene.apply(scene.plan(policies(f"cpus: {{irq: 0, vcpu: 1}}\n{rr}")))
    assert {a.target.guest for a, _ in result.failed} == {HOST_REF, "vr1"}
    assert set(urgent(scene).values()) == {cpus("3")}


def test_a_move_back_that_fails_counts_too(scene: ImitatedHost) -> None:
    """The interrupts go back to CPUs 1 and 2, and a vcpu is to come where they were."""
    assert scene.apply(scene.plan(policies("cpus: {irq: 3}"))).failed == ()
    assert served(scene) == cpus("0,3")

    def refuse(what: str) -> None:
        if "/proc/irq/" in what:
            raise OSError(errno.EBUSY, "busy")

    scene.kernel.ahead = refuse
    without = (parse(f"guest: vr1\ncpus: {{irq: 0-2, vcpu: 3}}\nscheduler: {{vcpu: {RR}}}\n"
                     "profile: none\n", "p1"),)  # fmt: skip
    result = scene.apply(scene.plan(without))
    assert "vr1" in {a.target.guest for a, _ in result.failed}
    assert urgent(scene) == {}


@pytest.mark.parametrize("number", [errno.EIO, errno.EPERM, errno.EINVAL])
def test_interrupts_that_never_move_stay_and_stop_nobody(scene: ImitatedHost, number: int) -> None:
    def refuse(what: str) -> None:
        if "/proc/irq/42/smp_affinity_list" in what:
            raise OSError(number, "refused")

    scene.kernel.ahead = refuse
    result = scene.apply(scene.plan(policies()))
    assert [a.target.irq for a, _ in result.fixed if hasattr(a.target, "irq")] == [42]
    assert result.failed == ()
    assert urgent(scene)


@pytest.mark.parametrize(("cls", "priority"), [("fifo", 10), ("rr", 20)])
def test_a_lower_class_waits_for_nothing(scene: ImitatedHost, cls: str, priority: int) -> None:
    """A guest is stepped down while the interrupts of its host fail."""
    high, low = (
        f"scheduler: {{vcpu: {{class: {c}, priority: {n}}}}}"
        for c, n in (("fifo", 20), (cls, priority))
    )
    assert scene.apply(scene.plan(policies(f"cpus: {{irq: 1, vcpu: 3}}\n{high}"))).failed == ()
    full(scene)
    result = scene.apply(scene.plan(policies(f"cpus: {{irq: 0, vcpu: 3}}\n{low}")))
    assert {a.target.guest for a, _ in result.failed} == {HOST_REF}
    (vcpu,) = [t for t in guest(scene, "vr1").threads if t.sched != Sched()]
    assert (vcpu.sched.cls.value, vcpu.sched.priority) == (cls, priority)
