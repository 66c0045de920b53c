"""Settings that a plan leaves as they are, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning_samples import (
    change,
    change_one,
    cpus,
    host,
    journalled,
    macvtap,
    router,
    snapshot,
    with_cpusets,
)

from vsrtune.model.guest import Confidence, Guest, Role, Sched, SchedClass
from vsrtune.model.plan import Skipped
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.stepdown import Step, StepLevel
from vsrtune.plan.full_plan import full_plan
from vsrtune.plan.planner import plan
from vsrtune.plan.safety.projection import project_actions
from vsrtune.policy.model import Policy
from vsrtune.policy.parser import parse

DEADLINE = "{class: deadline, runtime: 2ms, period: 10ms}"
FIFO = "{class: fifo, priority: 10}"


def policy(text: str) -> Policy:
    return parse(f"guest: vr1\n{text}\nprofile: none\n", "p")


def without(guest: Guest, role: Role) -> Guest:
    return replace(guest, threads=tuple(t for t in guest.threads if t.role is not role))


def beside_worker(guest: Guest) -> Guest:
    """A guest whose worker somebody made DEADLINE, so that it does not leave the emulator."""
    budget = Sched(SchedClass.DEADLINE, runtime_ns=1, deadline_ns=2, period_ns=2)
    return change_one(guest, 1021, sched=budget)


UNMAPPED = router(confidence=Confidence.NONE)
LEFT: dict[str, tuple[Snapshot, str, Skipped]] = {
    "a device without a queue length": (
        snapshot(router(interfaces=[macvtap(10, txqueuelen=None)])), "queue: {macvtap: 300}",
        Skipped("vr1", "macvtap10 queue", "the device has no such attribute", vain=True),
    ),
    "no main thread": (
        snapshot(without(router(), Role.EMULATOR)), "cpus: {emulator: 1}",
        Skipped("vr1", "emulator CPUs", "QEMU's main thread was not found", vain=True),
    ),
    "an emulator without a housekeeping CPU": (
        snapshot(change(router(), Role.EMULATOR, cpuset_limit=cpus("1"))),
        "cpus: {vcpu: 1, emulator: auto}",
        Skipped("vr1", "emulator CPUs", "its cgroup allows no housekeeping CPU", vain=True),
    ),
    "an emulator beside a worker that stays": (
        snapshot(beside_worker(router())), "cpus: {vcpu: 1, emulator: 0}",
        Skipped(
            "vr1", "emulator CPUs",
            "vhost macvtap10/0 cannot be moved out of its cgroup and would be narrowed too", vain=True,
        ),
    ),
    "a budget without CPUs": (
        with_cpusets(snapshot(router())),
        f"cpus: {{vhost: {{macvtap10: 2}}}}\nscheduler: {{vhost: {DEADLINE}}}",
        Skipped(
            "vr1", "vhost macvtap11/0 scheduling",
            "no CPUs are given to it, and class deadline needs a root domain of them", vain=True,
        ),
    ),
    "a worker of which the interface is not known": (
        snapshot(UNMAPPED), "cpus: {vhost: {macvtap10: 2}}",
        Skipped(
            "vr1", "vhost 1021 CPUs", "which interface it serves is not known (confidence none)", vain=True
        ),
    ),
    "a thread that may run on interrupt CPUs": (
        snapshot(router()), f"cpus: {{vhost: {{macvtap10: 2}}}}\nscheduler: {{vhost: {FIFO}}}",
        Skipped(
            "vr1", "vhost macvtap11/0 scheduling",
            "it may run on interrupt CPU 0, where it would starve packet reception", vain=True,
        ),
    ),
    "a budget by somebody else": (
        snapshot(beside_worker(router())), "cpus: {vhost: 2}",
        Skipped(
            "vr1", "vhost macvtap10/0 CPUs",
            "someone else gave the thread class deadline; it is left alone", vain=True,
        ),
    ),
    "an interface without a worker": (
        snapshot(router(interfaces=[macvtap(10, vhost=False)])), "cpus: {vhost: {macvtap10: 2}}",
        Skipped(
            "vr1", "interface macvtap10",
            "no vhost-net: a thread of QEMU moves its frames, on the emulator's CPUs",
        ),
    ),
    "a NAPI thread of a macvtap": (
        snapshot(router()), "cpus: {napi: {macvtap10: 2}}",
        Skipped(
            "vr1", "napi macvtap10 CPUs",
            "the interface is macvtap, only napi_macvtap has a thread", vain=True,
        ),
    ),
    "no threads to serve": (
        snapshot(router()), "napi: {threaded: true}\nscheduler: {napi: {class: batch}}",
        Skipped(
            "vr1", "scheduler.napi, napi.threaded", "the guest has no napi_macvtap interface", vain=True),
    ),
    "a CPU without its ksoftirqd": (
        snapshot(router()),
        f"cpus: {{vcpu: 1}}\nscheduler: {{vcpu: {FIFO}, softirq: {FIFO}}}",
        Skipped("vr1", "ksoftirqd/1 scheduling", "the thread was not found", vain=True),
    ),
    "ksoftirqd with a budget": (
        snapshot(
            router(),
            on=host(softirq={1: Sched(SchedClass.DEADLINE, runtime_ns=1, deadline_ns=2, period_ns=2)}),
        ),
        f"cpus: {{vcpu: 1}}\nscheduler: {{vcpu: {FIFO}, softirq: {FIFO}}}",
        Skipped(
            "host/", "ksoftirqd/1 scheduling",
            "someone else gave the thread class deadline; it is left alone",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left(case: str) -> None:
    seen, text, skipped = LEFT[case]
    made = plan(seen, [policy(text)])
    assert made.refusals == ()
    assert skipped in made.skipped
    subject = skipped.subject.rpartition(" ")[0]
    assert [
        a for a in made.actions if subject in str(a.target) and "cgroup" not in str(a.target)
    ] == []


def test_a_guest_that_is_stepped_down_has_its_vcpus_lowered_first() -> None:
    wanted = policy(f"cpus: {{vcpu: 1, vhost: 2}}\nscheduler: {{vcpu: {FIFO}, vhost: {FIFO}}}")
    first = plan(snapshot(router()), [wanted])
    tuned = project_actions(snapshot(router()), first.actions)
    steps = {"vr1": Step(StepLevel.RR, "it stood still")}
    made = full_plan(tuned, [wanted], journalled(first), steps=steps)
    rr = Sched(SchedClass.RR, 10, reset_on_fork=True)
    assert {a.after for a in made.actions} == {rr}
    # fifo and rr of one priority are equals: nothing is lowered, and vcpus come first.
    assert [(a.target.kind, a.reason) for a in made.actions] == [
        ("thread-sched", "scheduler.vcpu, stepped down (p:3)"),
        ("thread-sched", "scheduler.vhost, stepped down (p:3)"),
        ("thread-sched", "scheduler.vhost, stepped down (p:3)"),
    ]
    steps = {"vr1": Step(StepLevel.OTHER, "it stood still")}
    made = full_plan(tuned, [wanted], journalled(first), steps=steps)
    assert [a.target.thread.tid for a in made.actions] == [1001, 1021, 1022]  # type: ignore[union-attr]
    assert {a.after for a in made.actions} == {Sched()}
