"""The checks on plans notice each broken invariant: good plans are spoilt by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from planning_samples import FIFO_10, change, cpus, router, snapshot

from vsrtune.actions import (
    Action,
    EmulatorPin,
    Pin,
    Plan,
    Refusal,
    ThreadAffinity,
    ThreadCgroup,
    ThreadSched,
    VcpuPin,
)
from vsrtune.cpuset import CpuSet
from vsrtune.model import Role, Sched, SchedClass, Snapshot, ThreadKey
from vsrtune.plan_checks import PlanError, check
from vsrtune.planner import plan, released
from vsrtune.policy import Policy, parse
from vsrtune.projection import project

POLICY = parse(
    """\
guest: vr1
cpus: {vcpu: auto, vhost: auto, emulator: auto}
scheduler:
  vcpu: {class: fifo, priority: 10}
  vhost: {class: fifo, priority: 10}
queue: {macvtap: 50}
""",
    "p",
)
IRQ = cpus("0")
SNAPSHOT = snapshot(router())
GOOD = plan(SNAPSHOT, [POLICY])
PINNED = {
    a.target.thread: a.after.cpus if isinstance(a.after, Pin) else a.after
    for a in GOOD.actions
    if isinstance(a.target, ThreadAffinity | VcpuPin) and isinstance(a.after, Pin | CpuSet)
}

Spoil = Callable[[tuple[Action, ...]], tuple[Action, ...]]


def verdict(actions: tuple[Action, ...], *, on: Snapshot = SNAPSHOT) -> None:
    check(on, replace(GOOD, actions=actions), IRQ, PINNED, {})


def test_the_good_plan_passes() -> None:
    verdict(GOOD.actions)


def _change(kind: type, **more: object) -> Spoil:
    def spoil(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        first = next(a for a in actions if isinstance(a.target, kind))
        changed = replace(first, **more)  # type: ignore[arg-type]
        return tuple(changed if a is first else a for a in actions)

    return spoil


def _without(kind: type) -> Spoil:
    return lambda actions: tuple(a for a in actions if not isinstance(a.target, kind))


SPOILT: dict[str, tuple[Spoil, str]] = {
    "vhost-on-interrupt-cpu": (_change(ThreadAffinity, after=cpus("0-1")), "interrupt CPU 0"),
    "vcpu-on-interrupt-cpu": (_change(VcpuPin, after=Pin(cpus("0"), "0")), "interrupt CPU 0"),
    "vcpu-on-no-cpu": (_change(VcpuPin, after=Pin(CpuSet(), "")), "has CPUs 0-3 at that point"),
    "realtime-before-pins": (_without(VcpuPin), "realtime on interrupt CPU"),
    "no-reset-on-fork": (
        _change(ThreadSched, after=Sched(SchedClass.FIFO, 10)),
        "without reset-on-fork",
    ),
    "deadline": (_change(ThreadSched, after=Sched(SchedClass.DEADLINE)), "deadline"),
    "narrowing-with-workers-inside": (_without(ThreadCgroup), "narrow vhost workers"),
    "move-to-nowhere": (lambda actions: actions[1:], "no cgroup"),
    "twice": (lambda actions: actions + actions[-1:], "second action"),
    "out-of-order": (lambda actions: (*actions[1:], actions[0]), "out of order"),
    "no-change": (_change(VcpuPin, after=Pin(cpus("0-3"), "")), "changes nothing"),
    "wrong-before": (_change(VcpuPin, before=Pin(cpus("1-2"), "")), "has CPUs 0-3"),
    "stranger": (
        _change(ThreadSched, target=ThreadSched("vr1", ThreadKey(1, 1, 1), "vcpu 0")),
        "not in the snapshot",
    ),
}


@pytest.mark.parametrize("name", SPOILT)
def test_spoilt_plans_are_not_used(name: str) -> None:
    spoil, reason = SPOILT[name]
    with pytest.raises(PlanError, match=reason):
        verdict(spoil(GOOD.actions))


def test_outside_the_cpuset() -> None:
    narrow = change(router(), Role.VHOST, cpuset_effective=cpus("0-1"), affinity=cpus("0-1"))
    stay = [a for a in GOOD.actions if isinstance(a.target, ThreadAffinity)][:1]
    with pytest.raises(PlanError, match="allows 0-1 only"):
        verdict((replace(stay[0], before=cpus("0-1")),), on=snapshot(narrow))


def test_outside_what_the_slice_allows() -> None:
    narrow = change(router(), Role.VCPU, cpuset_limit=cpus("0,2-3"))
    pin = [a for a in GOOD.actions if isinstance(a.target, VcpuPin)]
    with pytest.raises(PlanError, match="allows 0,2-3 only"):
        verdict(tuple(pin), on=snapshot(narrow))


def test_refused_guests_get_nothing() -> None:
    spoilt = replace(GOOD, refusals=(Refusal("vr1", "p:1", "x", "y"),))
    with pytest.raises(PlanError, match="refused"):
        check(SNAPSHOT, spoilt, IRQ, PINNED, {})


def test_no_housekeeping_left() -> None:
    key = next(iter(PINNED))
    with pytest.raises(PlanError, match="no housekeeping CPU"):
        check(SNAPSHOT, Plan(), CpuSet(), {key: cpus("0-3")}, {})


def test_pinned_to_an_offline_cpu() -> None:
    key = next(iter(PINNED))
    with pytest.raises(PlanError, match="would get CPUs 9"):
        check(SNAPSHOT, Plan(), IRQ, {key: cpus("9")}, {})


def test_emulator_may_widen_beside_workers() -> None:
    narrow = cpus("0")
    inside = {"affinity": narrow, "cpuset_cpus": "0", "cpuset_effective": narrow}
    guest = change(change(router(), Role.EMULATOR, **inside), Role.VHOST, **inside)
    main = guest.by_role(Role.EMULATOR)[0]
    target = EmulatorPin("vr1", guest.uuid, main.key)
    widen = Action(target, Pin(narrow, "0"), Pin(cpus("0-1"), "0-1"), "")
    check(snapshot(guest), Plan((widen,)), IRQ, {}, {})


# -- what a reload gives back


def test_released_names_what_no_policy_asks_for_any_more() -> None:
    ours = {a.target: a.after for a in GOOD.actions}
    applied = project(SNAPSHOT, GOOD)
    assert released(applied, [POLICY], ours) == frozenset()
    pins_only = replace(POLICY, vcpu_sched=None, vhost_sched=None, macvtap_queue=None)
    left = released(applied, [pins_only], ours)
    assert {t.kind for t in left} == {"thread-sched", "txqueuelen"}
    assert released(applied, [], ours) == frozenset(ours)


def test_released_spares_refused_and_unseen_guests() -> None:
    ours = {a.target: a.after for a in GOOD.actions}
    applied = project(SNAPSHOT, GOOD)
    broken = Policy("p", "vr1", vcpu=CpuSet([99]))
    assert released(applied, [broken], ours) == frozenset()
    assert released(replace(applied, guests=()), [], ours) == frozenset()


def test_released_spares_a_guest_that_libvirt_is_busy_with() -> None:
    """Paused at the end of its migration to another host: its pins could not be put back."""
    ours = {a.target: a.after for a in GOOD.actions}
    applied = project(SNAPSHOT, GOOD)
    leaving = replace(applied, guests=tuple(replace(g, busy=True) for g in applied.guests))
    assert plan(leaving, [POLICY], ours).actions == ()
    assert released(leaving, [POLICY], ours) == frozenset()


def test_journal_knows_the_cgroup_when_no_thread_shows_it() -> None:
    made = {a.target: a.after for a in GOOD.actions[:1]}
    again = plan(SNAPSHOT, [POLICY], made)
    assert [a.target.kind for a in again.actions[:1]] == ["thread-cgroup"]


def test_label_is_no_part_of_a_thread_target() -> None:
    key = ThreadKey(1, 2, 3)
    assert ThreadSched("g", key, "vhost 2") == ThreadSched("g", key, "vhost macvtap0/0")
    assert FIFO_10.reset_on_fork
