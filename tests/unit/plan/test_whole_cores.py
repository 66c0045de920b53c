"""``cores: whole``: threads on physical cores of their own, and nobody else on the siblings."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning_samples import change, cpus, host, journalled, macvtap, router, snapshot, with_cpusets

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import Guest, Role
from vsrtune.model.plan import Plan
from vsrtune.model.snapshot import Snapshot
from vsrtune.plan.full_plan import full_plan
from vsrtune.plan.planner import plan
from vsrtune.plan.safety.projection import project_actions
from vsrtune.policy.model import Policy
from vsrtune.policy.parser import parse

WHOLE = "cpus: {cores: whole}\n"


def policy(guest: str = "vr1", text: str = WHOLE) -> Policy:
    return parse(f"guest: {guest}\n{text}", f"{guest}.yaml")


def seen(*guests: Guest, cores: int = 4, smt: bool = True) -> Snapshot:
    """A host whose CPUs n and n + cores are one core; its interrupts are served on CPU 0."""
    count = 2 * cores if smt else cores
    siblings = {n: f"{n % cores},{n % cores + cores}" for n in range(count)}
    return snapshot(*guests, on=host(count, siblings=siblings if smt else None))


def small(name: str, pid: int, count: int = 8, vcpus: int = 1) -> Guest:
    taps = [macvtap(pid // 100)]
    return router(name, pid, online=f"0-{count - 1}", vcpus=vcpus, interfaces=taps)


def where(found: Snapshot, made: Plan) -> dict[str, list[str]]:
    """The CPUs of each guest's vcpus and workers, and last those of its emulator."""
    roles = (Role.VCPU, Role.VHOST, Role.EMULATOR)
    return {
        g.ref: [str(t.affinity) for role in roles for t in g.by_role(role)]
        for g in project_actions(found, made.actions).guests
    }


def test_nobody_else_is_on_the_siblings() -> None:
    found = seen(small("vr1", 1000), small("vr2", 2000))
    without = plan(found, [policy(text=""), policy("vr2", "")])
    assert where(found, without) == {"vr1": ["1", "3", "5-7"], "vr2": ["2", "4", "5-7"]}
    made = plan(found, [policy(), policy("vr2", "")])
    assert where(found, made) == {"vr1": ["1", "2", "7"], "vr2": ["3", "4", "7"]}
    assert {a.reason.partition(" (")[0] for a in made.actions if "of its own" in a.reason} >= {
        "cpus.vcpu: auto, a core of its own", "cpus.vhost: auto, a core of its own",
    }  # fmt: skip


def test_without_smt_nothing_changes() -> None:
    found = seen(router(vcpus=2), cores=4, smt=False)
    one, other = plan(found, [policy()]), plan(found, [policy(text="cpus: {irq: auto}\n")])
    assert where(found, one) == where(found, other)
    assert one.refusals == ()


def test_threads_that_shared_a_core_part_and_stay_then() -> None:
    guest = change(small("vr1", 1000), Role.VCPU, affinity=cpus("5"), pin=cpus("5"))
    found = seen(change(guest, Role.VHOST, affinity=cpus("1")))
    made = plan(found, [policy()])
    assert where(found, made)["vr1"][:2] in (["5", "2"], ["2", "1"])
    again = plan(
        project_actions(found, made.actions), [policy()], {a.target: a.after for a in made.actions}
    )
    assert again.actions == ()


def test_guests_that_come_move_nobody_off_its_core() -> None:
    """One core is left for two threads, so the guest that comes is refused."""
    found = seen(small("vr2", 2000))
    made = plan(found, [policy('"vr*"')])
    tuned = project_actions(found, made.actions)
    later = replace(tuned, guests=(small("vr1", 1000), *tuned.guests))
    again = plan(later, [policy('"vr*"')], {a.target: a.after for a in made.actions})
    assert [r.guest for r in again.refusals] == ["vr1"]
    assert again.actions == ()


def test_one_guest_too_many_takes_no_core_from_the_others() -> None:
    """Its name is the first, and so is each of some more."""
    found = seen(small("vr2", 2000, 10), small("vr3", 3000, 10), cores=5)
    made = plan(found, [policy('"vr*"')])
    tuned = project_actions(found, made.actions)
    more = [small(f"vr1{n}", 1000 + 100 * n, 10) for n in range(3)]
    later = replace(tuned, guests=(*more, *tuned.guests))
    again = plan(later, [policy('"vr*"')], {a.target: a.after for a in made.actions})
    wanted = "cpus.cores: 2 of its threads need a core each; free cores: 0"
    assert [(r.guest, r.reason) for r in again.refusals] == [(g.ref, wanted) for g in more]
    assert again.actions == ()


def test_a_guest_that_fits_is_not_refused_for_a_large_one() -> None:
    guests = (small("vr1", 1000, 10), small("vr2", 2000, 10, vcpus=7), small("vr3", 3000, 10))
    made = plan(seen(*guests, cores=5), [policy('"vr*"')])
    assert [r.guest for r in made.refusals] == ["vr2"]


@pytest.mark.parametrize(
    ("more", "vcpus", "free"),
    [
        ("", 3, 3),
        (", irq: 0-1", 3, 2),
        (", pool: 1-2", 2, 2),
        (", pool: 4-5", 1, 1),
        (", pool: 4", 1, 0),
    ],
)
def test_too_few_cores(more: str, vcpus: int, free: int) -> None:
    """CPU 0 serves interrupts, so its core is none."""
    found = seen(small("vr1", 1000, vcpus=vcpus))
    (refusal,) = plan(found, [policy(text=f"cpus: {{cores: whole{more}}}\n")]).refusals
    wanted = f"cpus.cores: {vcpus + 1} of its threads need a core each; free cores: {free}"
    assert (refusal.policy, refusal.reason) == ("vr1.yaml:2", wanted)


def test_the_last_guest_is_refused_where_cores_do_not_suffice_for_all() -> None:
    found = seen(*(small(f"vr{n}", 1000 * n, 12) for n in (1, 2, 3)), cores=6)
    made = plan(found, [policy('"vr*"')])
    (refusal,) = made.refusals
    assert refusal.guest == "vr3"
    assert refusal.reason == "cpus.cores: 2 of its threads need a core each; free cores: 1"
    placed = where(found, made)
    assert sorted(placed["vr1"][:2] + placed["vr2"][:2]) == ["1", "2", "3", "4"]


def test_lists_by_hand_stay_and_take_the_core() -> None:
    text = "cpus: {cores: whole, vcpu: 5}\n"
    found = seen(small("vr1", 1000), small("vr2", 2000))
    made = plan(found, [policy(text=text), policy("vr2", "cpus: {vcpu: 1, vhost: 6}\n")])
    assert where(found, made)["vr1"][:2] == ["5", "3"]
    assert where(found, made)["vr2"][:2] == ["1", "6"]


def test_a_guest_that_has_no_cpu_beside_them_is_refused() -> None:
    found = seen(small("vr1", 1000), small("vr2", 2000))
    pool = "cpus: {pool: 5-6}\n"
    made = plan(found, [policy(text="cpus: {cores: whole, pool: 1-2}\n"), policy("vr2", pool)])
    assert [(r.guest, r.reason) for r in made.refusals] == [
        ("vr2", "cpus: guests with cores: whole leave it no CPU")
    ]
    assert where(found, made)["vr1"][:2] == ["1", "2"]


def test_measured_threads_do_not_come_to_the_siblings() -> None:
    busy = change(small("vr2", 2000), Role.VCPU, load=(0.9, 0.9, 0.9))
    idle = change(small("vr1", 1000), Role.VCPU, load=(0.1, 0.1, 0.1))
    found = seen(change(idle, Role.VHOST, load=(0.1, 0.1, 0.1)), busy)
    text = "placement: auto\n"
    made = plan(found, [policy(text=text + WHOLE), policy("vr2", text)])
    placed = where(found, made)
    assert placed["vr1"][:2] == ["1", "2"]
    assert CpuSet.union(map(cpus, placed["vr2"])).isdisjoint(cpus("1-2,5-6"))


def test_budgets_keep_their_cores() -> None:
    """Threads that have class deadline stay where they are, and their siblings stay empty."""
    text = WHOLE + "scheduler: {budget: {cpu: 100%, period: 10ms}}\n"
    found = with_cpusets(seen(small("vr1", 1000), small("vr2", 2000)))
    policies = [policy(text=text), policy("vr2", "")]
    made = full_plan(found, policies, ())
    tuned = project_actions(found, made.actions)
    assert where(found, made) == {"vr1": ["1", "2", "7"], "vr2": ["3", "4", "7"]}
    again = full_plan(tuned, policies, journalled(made))
    assert again.actions == ()
