"""A budget for a whole guest: its threads' parts, in plans and when threads come and go."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning_samples import all_ran, budget, host, journalled, router, snapshot, with_cpusets

from vsrtune.model.guest import Guest, Role, Sched
from vsrtune.model.plan import Plan
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.stepdown import Step, StepLevel
from vsrtune.model.targets import RrTimeslice, ThreadSched
from vsrtune.plan.full_plan import full_plan
from vsrtune.plan.planner import plan
from vsrtune.plan.safety.projection import project_actions
from vsrtune.policy.guest_budget import divided, unfit
from vsrtune.policy.lowering import next_level
from vsrtune.policy.model import Policy, asks_of_host
from vsrtune.policy.parser import parse

ALL_ON_ONE = "cpus: {irq: 0, vcpu: 1, vhost: 1}\nprofile: none\n"


def policy(cpu: str, more: str = "", guest: str = "vr1", period: str = "10ms") -> Policy:
    text = f"guest: {guest}\nscheduler:\n  budget: {{cpu: {cpu}, period: {period}}}\n{more}"
    return parse(text, f"{guest}.yaml")


def seen(guest: Guest | None = None, count: int = 4) -> Snapshot:
    return with_cpusets(snapshot(guest or router(online=f"0-{count - 1}"), on=host(count)))


def parts(found: Snapshot) -> dict[Role, set[Sched]]:
    """The scheduling of a guest's threads, by role."""
    roles = (Role.VCPU, Role.VHOST)
    return {role: {t.sched for t in found.guests[0].by_role(role)} for role in roles}


def alike(runtime_ms: float) -> dict[Role, set[Sched]]:
    return {role: {budget(runtime_ms, 10)} for role in (Role.VCPU, Role.VHOST)}


def after(found: Snapshot, made: Plan) -> Snapshot:
    """The host after a plan, on which every thread has run since."""
    assert made.refusals == ()
    return all_ran(project_actions(found, made.actions))


@pytest.mark.parametrize(
    ("cpu", "runtime_ms"), [("120%", 4), ("100%", 3.333), ("0.1%", 0.003), ("37.5%", 1.25)]
)
def test_equal_parts_in_whole_microseconds(cpu: str, runtime_ms: float) -> None:
    found = seen()
    assert parts(after(found, plan(found, [policy(cpu)]))) == alike(runtime_ms)


def test_the_classes_of_the_profile_give_way() -> None:
    made = plan(seen(), [policy("120%")])
    assert [a.target for a in made.actions if isinstance(a.target, RrTimeslice)] == []
    told = {a.reason for a in made.actions if isinstance(a.target, ThreadSched)}
    assert told == {"scheduler.budget (vr1.yaml:3)"}


def test_a_guest_without_workers_gives_all_to_its_vcpus() -> None:
    found = seen(router(vcpus=2, interfaces=()))
    assert parts(after(found, plan(found, [policy("120%")])))[Role.VCPU] == {budget(6, 10)}


def test_each_guest_of_a_glob_has_its_own_parts() -> None:
    small = router("vr1", 1000, online="0-7")
    large = router("vr2", 2000, online="0-7", vcpus=2)
    found = with_cpusets(snapshot(small, large, on=host(8)))
    result = after(found, plan(found, [policy("60%", guest='"vr*"')]))
    told = {g.ref: {t.sched for t in g.by_role(Role.VCPU)} for g in result.guests}
    assert told == {"vr1": {budget(2, 10)}, "vr2": {budget(1.5, 10)}}


def test_a_thread_that_comes_takes_its_part_from_the_others() -> None:
    """84 % of a CPU that admits 90 %: the old parts and a new one would be too much."""
    asked = [policy("84%", ALL_ON_ONE)]
    first = full_plan(seen(), asked, ())
    tuned = after(seen(), first)
    assert parts(tuned) == alike(2.8)
    newcomer = next(t for t in router(vcpus=2).threads if t.index == 1)
    guest = tuned.guests[0]
    guest = replace(guest, threads=(*guest.threads, replace(newcomer, cpuset_cpus="0-3")))
    groups = with_cpusets(snapshot(router(vcpus=2))).host.cpusets
    own = tuple(c for c in groups if c.path == newcomer.cgroup)
    machine = replace(tuned.host, cpusets=(*tuned.host.cpusets, *own))
    plugged = replace(tuned, host=machine, guests=(guest,))
    made = full_plan(plugged, asked, journalled(first))
    result = after(plugged, made)
    assert parts(result) == alike(2.1)
    assert not any(a.release for a in made.actions), "nobody leaves the class for it"
    gone = replace(guest, threads=tuple(t for t in result.guests[0].threads if t.index != 1))
    less = replace(result, guests=(gone,))
    assert parts(after(less, full_plan(less, asked, journalled(first, made)))) == alike(2.8)


@pytest.mark.parametrize(
    ("cpu", "reason", "hint"),
    [
        (
            "400%",
            "each of its 3 threads (1 vcpu, 2 vhost) would get 133.3 % of a CPU",
            "write cpu: 270% or less",
        ),
        (
            "0.05%",
            "each of its 3 threads (1 vcpu, 2 vhost) would get 1us in 10ms, which is below 2us",
            "write cpu: 0.06% or more, or a longer period",
        ),
    ],
)
def test_parts_that_no_thread_can_have(cpu: str, reason: str, hint: str) -> None:
    (refusal,) = plan(seen(), [policy(cpu)]).refusals
    assert refusal.reason == f"scheduler.budget: {reason}"
    assert (refusal.policy, refusal.hint) == ("vr1.yaml:3", hint)
    written = hint.split()[2]
    assert plan(seen(), [policy(written)]).refusals == ()


def test_the_least_part_is_rounded_up() -> None:
    (refusal,) = plan(seen(), [policy("0.05%", period="7ms")]).refusals
    assert refusal.hint == "write cpu: 0.09% or more, or a longer period"


def test_a_part_may_be_a_whole_cpu() -> None:
    assert unfit(divided(policy("300%"), router()), router()) is None


def test_too_much_for_a_shared_cpu_is_refused() -> None:
    (refusal,) = plan(seen(), [policy("120%", ALL_ON_ONE)]).refusals
    assert refusal.reason.startswith("scheduler.budget: vhost macvtap11/0 asks 40 % of CPU 1")
    assert refusal.hint == "lower the budget, or use more CPUs"


def test_it_needs_cpus() -> None:
    refusals = plan(seen(), [policy("120%", "profile: none\n")]).refusals
    wanted = "scheduler.budget: class deadline needs CPUs that are a root domain of their own"
    assert {r.reason for r in refusals} == {wanted}


def test_before_a_guest_is_known_the_policy_asks_for_root_domains() -> None:
    asked = policy("120%", "profile: none\n")
    assert asks_of_host(asked)
    assert asked.asks


def test_a_guest_that_is_stepped_down_has_the_ordinary_class_at_once() -> None:
    assert next_level(policy("120%"), StepLevel.POLICY) is StepLevel.OTHER
    steps = {"vr1": Step(StepLevel.OTHER, "it stood still", 0.0)}
    found = seen()
    first = plan(found, [policy("120%")])
    tuned = after(found, first)
    for cpu in ("120%", "0.05%"):
        made = full_plan(tuned, [policy(cpu)], journalled(first), steps=steps)
        assert parts(after(tuned, made)) == {role: {Sched()} for role in (Role.VCPU, Role.VHOST)}
