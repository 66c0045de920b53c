"""The checks on plans notice each broken invariant: good plans are spoilt by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from planning_samples import (
    FIFO_10,
    budget,
    change,
    cpus,
    host,
    journalled,
    macvtap,
    nic,
    released,
    router,
    snapshot,
    with_cpusets,
)

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.cpuset_tree import CpusetGroup
from vsrtune.model.guest import Guest, Irq, Role, Sched, SchedClass, ThreadKey
from vsrtune.model.host import Nic, NicQueue, NicThread
from vsrtune.model.plan import Action, Plan, Refusal
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import (
    HOST_REF,
    CpusetFile,
    CpusetList,
    EmulatorPin,
    IrqAffinity,
    Partition,
    PartitionState,
    Pin,
    ThreadAffinity,
    ThreadCgroup,
    ThreadSched,
    VcpuPin,
)
from vsrtune.plan.deadline import partitions
from vsrtune.plan.deadline.model import RootDomains
from vsrtune.plan.full_plan import UNSEEN, full_plan
from vsrtune.plan.interrupt_cpus import interrupt_cpus
from vsrtune.plan.phases import Draft, Phase
from vsrtune.plan.planner import plan
from vsrtune.plan.requirements import Context
from vsrtune.plan.safety.invariants import PlanError, check, interrupts
from vsrtune.plan.safety.projection import project_actions
from vsrtune.policy.model import Policy
from vsrtune.policy.parser import parse

POLICY = parse(
    """\
guest: vr1
cpus: {vcpu: auto, vhost: auto, emulator: auto}
scheduler:
  vcpu: {class: fifo, priority: 10}
  vhost: {class: fifo, priority: 10}
queue: {macvtap: 50}
profile: none
""",
    "p",
)
SNAPSHOT = snapshot(router())
GOOD = plan(SNAPSHOT, [POLICY])

ALL = cpus("0-3")

Spoil = Callable[[tuple[Action, ...]], tuple[Action, ...]]


def verdict(actions: tuple[Action, ...], *, on: Snapshot = SNAPSHOT) -> None:
    check(on, replace(GOOD, actions=actions), {})


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
    "vcpu-on-no-cpu": (_change(VcpuPin, after=Pin(CpuSet(), "")), "would get CPUs none"),
    "realtime-before-pins": (_without(VcpuPin), "realtime on interrupt CPU"),
    "no-reset-on-fork": (
        _change(ThreadSched, after=Sched(SchedClass.FIFO, 10)),
        "without reset-on-fork",
    ),
    "deadline": (_change(ThreadSched, after=Sched(SchedClass.DEADLINE)), "deadline"),
    "narrowing-with-workers-inside": (_without(ThreadCgroup), "narrow vhost workers"),
    "move-to-nowhere": (lambda actions: actions[1:], "no cgroup"),
    "twice": (lambda actions: actions + actions[-1:], "second action"),
    "no-change": (_change(ThreadSched, after=Sched()), "changes nothing"),
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


BUDGETS = parse(
    "guest: vr1\ncpus: {vcpu: 1, vhost: 2}\nprofile: none\nscheduler: {vcpu: {class: deadline, "
    "runtime: 2ms, period: 10ms}, vhost: {class: deadline, runtime: 4ms, period: 10ms}}\n",
    "p",
)
WITH_LISTS = with_cpusets(SNAPSHOT)
MAKES = plan(WITH_LISTS, [BUDGETS])
UNDER = project_actions(WITH_LISTS, MAKES.actions)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (
            _change(ThreadSched, after=replace(budget(2, 10), reset_on_fork=False)),
            "deadline without reset-on-fork",
        ),
        (
            _change(ThreadSched, after=budget(9.5, 10)),
            "CPUs 1 have too little bandwidth left at that point",
        ),
        (_without(Partition), "CPUs [12] are no root domain at that point"),
        (_without(CpusetFile), "it would get CPUs none"),
    ],
)
def test_spoilt_plans_of_root_domains_are_not_used(spoil: Spoil, reason: str) -> None:
    check(WITH_LISTS, MAKES, {})
    with pytest.raises(PlanError, match=reason):
        check(WITH_LISTS, replace(MAKES, actions=spoil(MAKES.actions)), {})


def test_a_thread_stays_deadline_as_long_as_its_root_domain() -> None:
    vcpu = UNDER.guests[0].by_role(Role.VCPU)[0]
    target = ThreadSched("vr1", vcpu.key, "vcpu 0")
    for after in (Sched(), FIFO_10):
        with pytest.raises(PlanError, match="leaves class deadline within its root domain"):
            check(UNDER, Plan((Action(target, vcpu.sched, after, ""),)), {})
    again = Action(target, vcpu.sched, budget(3, 10), "")
    check(UNDER, Plan((again,)), {})


@pytest.mark.parametrize("text", ["0", "0-3", "1-3,9"])
def test_a_partition_leaves_interrupt_cpus_and_others(text: str) -> None:
    """Without interrupts on CPU 0 it may have that, but never all."""
    path = "machine.slice/machine-qemu-1000-x.scope/libvirt/vcpu0"
    actions = (
        Action(
            CpusetFile("vr1", path, "cpuset.cpus.exclusive"), CpusetList(""), CpusetList(text), ""
        ),
        Action(Partition("vr1", path), PartitionState("member"), PartitionState("root"), ""),
    )
    heeded = {"vr1": (cpus("0"), frozenset(["p0", "p1"]))}
    good = text == "1-3,9"
    if good:
        check(WITH_LISTS, Plan(actions, heeded=heeded), {})
        return
    with pytest.raises(PlanError, match=f"it would get CPUs {text}"):
        check(WITH_LISTS, Plan(actions, heeded=heeded if text != "0-3" else {}), {})


def test_a_partition_leaves_a_cpu_that_is_not_isolated() -> None:
    path = "machine.slice/machine-qemu-1000-x.scope/libvirt/vcpu0"
    listed = CpusetFile("vr1", path, "cpuset.cpus.exclusive")
    partition = Partition("vr1", path)
    actions = (
        Action(listed, CpusetList(""), CpusetList("0-1"), ""),
        Action(partition, PartitionState("member"), PartitionState("root"), ""),
    )
    check(WITH_LISTS, Plan(actions), {})
    rest = tuple(replace(c, isolated=c.id > 1) for c in WITH_LISTS.host.cpus)
    with pytest.raises(PlanError, match="it would get CPUs 0-1"):
        check(replace(WITH_LISTS, host=replace(WITH_LISTS.host, cpus=rest)), Plan(actions), {})


@pytest.mark.parametrize(
    ("after", "good"), [("", False), ("9", False), ("0,9", False), ("1", True)]
)
def test_a_lower_device_is_served_on_online_cpus(after: str, good: bool) -> None:
    irq = SNAPSHOT.host.nics[0].irqs[0]
    target = IrqAffinity(HOST_REF, irq.number, irq.name)
    made = Plan((Action(target, irq.affinity, cpus(after), ""),))
    if good:
        check(SNAPSHOT, made, {})
        return
    text = f"a lower device would be served on CPUs {after or 'none'}"
    with pytest.raises(PlanError, match=text) as caught:
        check(SNAPSHOT, made, {})
    assert str(caught.value) == (
        f"{target}: internal error, the plan is not used: {text}; please report it with the output "
        "of `vsrtune record`"
    )
    assert caught.value.guest == HOST_REF


SOFTIRQ = snapshot(router(), on=host(softirq=dict.fromkeys(range(4), Sched())))


@pytest.mark.parametrize(
    "spoilt",
    [
        {"target": ThreadSched(HOST_REF, ThreadKey(9, 9, 1), "ksoftirqd/9")},  # of no CPU
        {"target": ThreadSched(HOST_REF, ThreadKey(10, 10, 1), "ksoftirqd/0")},  # of interrupts
        {"before": Sched(SchedClass.FIFO, 3)},
    ],
)
def test_a_softirq_thread_that_is_not_as_the_plan_says(spoilt: dict[str, Any]) -> None:
    policy = parse("guest: vr1\ncpus: {vcpu: 1}\nscheduler: {vcpu: {class: fifo, priority: 10}, "
                   "softirq: {class: fifo, priority: 11}}\nprofile: none\n", "p")  # fmt: skip
    good = plan(SOFTIRQ, [policy])
    check(SOFTIRQ, good, {})
    actions = tuple(replace(a, **spoilt) if a.target.guest == HOST_REF else a for a in good.actions)
    assert actions != good.actions
    with pytest.raises(PlanError, match="no such ksoftirqd thread"):
        check(SOFTIRQ, replace(good, actions=actions), {})


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


def test_a_mistake_about_one_guest_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The planner plans the queues of vr1 twice, by hand."""
    right = partitions.build

    def wrong(context: Context, seen: Snapshot, found: RootDomains, draft: Draft) -> None:
        right(context, seen, found, draft)
        for action in draft.of(Phase.DEVICES):
            if action.target.guest == "vr1":
                draft.add(Phase.DEVICES, action)

    monkeypatch.setattr(partitions, "build", wrong)
    seen = snapshot(router(), router("vr2", 2000))
    made = full_plan(seen, [parse("guest: 'vr*'\nqueue: {macvtap: 50}\n", "p")], ())
    (refusal,) = made.refusals
    assert refusal.guest == "vr1"
    assert "internal error, the plan is not used: the plan has a second action" in refusal.reason
    assert {a.target.guest for a in made.actions} == {"vr2"}


def test_refused_guests_get_nothing() -> None:
    spoilt = replace(GOOD, refusals=(Refusal("vr1", "p:1", "x", "y"),))
    with pytest.raises(PlanError, match="refused"):
        check(SNAPSHOT, spoilt, {})


def test_no_housekeeping_left() -> None:
    pin = next(a.target for a in GOOD.actions if isinstance(a.target, VcpuPin))
    with pytest.raises(PlanError, match="no housekeeping CPU"):
        check(SNAPSHOT, Plan(for_verify={pin: cpus("0-3")}), {})


def test_an_isolated_cpu_is_no_housekeeping_cpu() -> None:
    pin = next(a.target for a in GOOD.actions if isinstance(a.target, VcpuPin))
    closed = replace(SNAPSHOT, host=host(isolated="0,3"))
    with pytest.raises(PlanError, match="no housekeeping CPU"):
        check(closed, Plan(for_verify={pin: cpus("1-2")}), {})


def test_the_cpu_of_a_partition_of_others_is_no_housekeeping_cpu() -> None:
    pin = next(a.target for a in GOOD.actions if isinstance(a.target, VcpuPin))
    theirs = CpusetGroup("database.slice", "0,3", cpus("0,3"), "root", "0,3", True)
    closed = replace(SNAPSHOT, host=replace(SNAPSHOT.host, cpusets=(theirs,)))
    with pytest.raises(PlanError, match="no housekeeping CPU"):
        check(closed, Plan(for_verify={pin: cpus("1-2")}), {})


def test_pinned_to_an_offline_cpu() -> None:
    pin = next(a.target for a in GOOD.actions if isinstance(a.target, VcpuPin))
    with pytest.raises(PlanError, match="would get CPUs 9"):
        check(SNAPSHOT, Plan(for_verify={pin: cpus("9")}), {})


def test_emulator_may_widen_beside_workers() -> None:
    narrow = cpus("0")
    inside = {"affinity": narrow, "cpuset_cpus": "0", "cpuset_effective": narrow}
    guest = change(change(router(), Role.EMULATOR, **inside), Role.VHOST, **inside)
    main = guest.by_role(Role.EMULATOR)[0]
    target = EmulatorPin("vr1", guest.uuid, main.key)
    widen = Action(target, Pin(narrow, "0"), Pin(cpus("0-1"), "0-1"), "")
    check(snapshot(guest), Plan((widen,)), {})


# -- where interrupts are served: from the snapshot and the plan


AUTO = parse("guest: '*'\ncpus: {vcpu: auto, vhost: auto}\nprofile: none\n", "p")
ON_P0 = router(interfaces=[macvtap(10, "p0")])


def _served(lower: Nic, *more: Nic, guest: Guest = ON_P0, named: Iterable[str] = ()) -> CpuSet:
    return interrupts(host(nics=[lower, *more]), [guest], {guest.ref: (CpuSet(), frozenset(named))})


def test_interrupts_are_read_from_the_devices() -> None:
    two = (Irq(5, "p0-rx-0", ALL, cpus("2")), Irq(6, "p0-rx-1", ALL, cpus("3")))
    assert _served(nic("p0", None, irqs=two)) == cpus("2-3")
    config = Irq(7, "virtio0-config", ALL, cpus("1"))
    assert _served(nic("p0", None, irqs=(*two, config))) == cpus("2-3")
    assert _served(nic("p0", "2", rps_cpus=cpus("1"))) == cpus("1-2")
    assert _served(nic("p0", "2", rx_cpus=cpus("1"))) == cpus("2"), "what was seen may be old"
    assert _served(nic("p0", None, rx_cpus=cpus("1"))) == cpus("1")
    assert _served(nic("p0", None)) == CpuSet(), "nothing is known, nothing is demanded"
    assert _served(nic("p1", "2")) == CpuSet()


def test_interrupts_of_threaded_napi_are_where_its_threads_are_confined_to() -> None:
    queues = (NicQueue("rx-0", CpuSet()),)
    thread = NicThread(ThreadKey(7, 7, 7), "napi/p0-1", cpus("3"))
    threaded = nic("p0", "2", threaded_napi=True, queues=queues, napi=(thread,))
    assert _served(threaded) == cpus("2-3")
    assert _served(replace(threaded, napi=(replace(thread, affinity=ALL),))) == cpus("2")
    assert _served(replace(threaded, napi=(thread, thread))) == cpus("2"), "not known whose"
    on = host(nics=[threaded])
    assert interrupt_cpus(on, ON_P0).cpus == cpus("2-3")


def test_interrupts_of_every_port_of_a_bond() -> None:
    guest = router(interfaces=[replace(macvtap(10), lower=("bond0", "p0", "p1"))])
    ports = nic("bond0", None), nic("p0", "2"), nic("p1", "3")
    assert _served(*ports, guest=guest) == cpus("2-3")
    assert interrupt_cpus(host(nics=ports), guest).cpus == cpus("2-3")


def test_a_device_for_which_the_policy_lists_cpus_is_not_read() -> None:
    guest = router(interfaces=[replace(macvtap(10), lower=("bond0", "p0", "p1"))])
    ports = nic("bond0", None, rps_cpus=cpus("1")), nic("p0", "2"), nic("p1", "3")
    assert _served(*ports, guest=guest, named=["p0"]) == cpus("1,3")
    assert _served(*ports, guest=guest, named=["p0", "bond0"]) == cpus("3")
    # A port that is down may have been seen to receive, but the other one tells more.
    down = nic("bond0", None), nic("p0", "2"), nic("p1", None, rx_cpus=cpus("3"))
    policy = parse("guest: vr1\ncpus: {irq: {p0: 0}}\nprofile: none\n", "p")
    assert _served(*down, guest=guest, named=["p0"]) == CpuSet()
    assert interrupt_cpus(host(nics=down), guest, policy).cpus == cpus("0")


def test_interrupts_below_a_vlan_that_has_rps() -> None:
    guest = router(interfaces=[replace(macvtap(10), lower=("p0.5", "p0"))])
    vlan = nic("p0.5", None, rps_cpus=cpus("3"))
    assert _served(vlan, nic("p0", "2"), guest=guest) == cpus("2-3")
    assert interrupt_cpus(host(nics=[vlan, nic("p0", "2")]), guest).cpus == cpus("2-3")
    # Of a veth without interrupts a measurement tells.
    veth = nic("p0", None, rx_cpus=cpus("1"))
    assert interrupt_cpus(host(nics=[vlan, veth]), guest).cpus == cpus("1,3")
    thread = NicThread(ThreadKey(7, 7, 7), "napi/p0.5-1", cpus("1"))
    queues = (NicQueue("rx-0", CpuSet()),)
    own = nic("p0.5", None, threaded_napi=True, queues=queues, napi=(thread,))
    assert _served(own, nic("p0", "2"), guest=guest) == cpus("1-2")
    assert interrupt_cpus(host(nics=[own, nic("p0", "2")]), guest).cpus == cpus("1-2")


def test_a_list_by_hand_is_not_doubted() -> None:
    on = host(nics=[nic("p0", "2")])
    assert interrupts(on, [ON_P0], {"vr1": (cpus("0"), frozenset(["p0"]))}) == cpus("0")
    assert interrupts(on, [ON_P0], {}) == CpuSet()


def test_a_planner_that_is_wrong_about_interrupts_is_found_out() -> None:
    """The planner may believe what it likes: the same plan is good on the host that it was
    made for, and is not used on one where the device is served elsewhere."""
    on = snapshot(ON_P0, on=host(nics=[nic("p0", "0")]))
    made = plan(on, [AUTO])
    check(on, made, {})
    moved = snapshot(ON_P0, on=host(nics=[nic("p0", "1-3")]))
    with pytest.raises(PlanError, match="interrupt CPU"):
        check(moved, made, {})


def test_interrupts_count_where_the_plan_itself_moves_them() -> None:
    on = snapshot(ON_P0, on=host(nics=[nic("p0", "2")]))
    made = replace(plan(on, [AUTO]), heeded={"vr1": (CpuSet(), frozenset())})
    irq = on.host.nics[0].irqs[0]
    (taken,) = {a.after.cpus for a in made.actions if isinstance(a.after, Pin)}
    target = IrqAffinity(HOST_REF, irq.number, irq.name)
    onto = replace(made, actions=(Action(target, irq.affinity, taken, ""), *made.actions))
    with pytest.raises(PlanError, match=f"interrupt CPU {taken}"):
        check(on, onto, {})


def test_a_vcpu_that_keeps_another_thread_of_a_router_from_running() -> None:
    """Unless the policy accepts that."""
    actions = _change(VcpuPin, after=Pin(cpus("2"), "2"))(GOOD.actions)
    with pytest.raises(PlanError, match=r"vcpu 0 of vr1 would keep vhost .* of vr1 from CPU 2"):
        verdict(actions)
    check(SNAPSHOT, replace(GOOD, actions=actions, accepted=frozenset(["vr1"])), {})


# -- what a reload gives back


def test_released_names_what_no_policy_asks_for_any_more() -> None:
    ours = journalled(GOOD)
    applied = project_actions(SNAPSHOT, GOOD.actions)
    assert released(applied, [POLICY], ours) == frozenset()
    pins_only = replace(POLICY, vcpu_sched=None, vhost_sched=None, devices={})
    left = released(applied, [pins_only], ours)
    assert {t.kind for t in left} == {"thread-sched", "txqueuelen"}
    assert released(applied, [], ours) == {e.target for e in ours}


def test_released_spares_refused_guests() -> None:
    ours = journalled(GOOD)
    applied = project_actions(SNAPSHOT, GOOD.actions)
    broken = Policy("p", "vr1", vcpu=CpuSet([99]))
    assert released(applied, [broken], ours) == frozenset()


@pytest.mark.parametrize("seen_as", ["nothing", "another guest", "fewer threads"])
def test_what_its_guest_does_not_show_loses_its_realtime_class_alone(seen_as: str) -> None:
    """A process chooses its command line and how many threads it has; the guard sees guests."""
    ours = journalled(GOOD)
    applied = project_actions(SNAPSHOT, GOOD.actions)
    (guest,) = applied.guests
    hidden = {
        "nothing": (),
        "another guest": (replace(guest, name="else"),),
        "fewer threads": (replace(guest, threads=()),),
    }[seen_as]
    policies = [POLICY] if seen_as == "fewer threads" else []
    made = full_plan(replace(applied, guests=hidden), policies, ours)
    back = {a.target: a.after for a in made.actions if a.release}
    classes = {e.target: e.original for e in ours if isinstance(e.target, ThreadSched)}
    assert len(classes) == 3
    assert back == classes
    assert {a.reason for a in made.actions if a.release} == {UNSEEN}


def test_released_spares_a_guest_that_libvirt_is_busy_with() -> None:
    """Paused at the end of its migration to another host: its pins could not be put back."""
    ours = journalled(GOOD)
    applied = project_actions(SNAPSHOT, GOOD.actions)
    leaving = replace(applied, guests=tuple(replace(g, busy=True) for g in applied.guests))
    assert full_plan(leaving, [POLICY], ours).actions == ()
    assert released(leaving, [POLICY], ours) == frozenset()


def test_journal_knows_the_cgroup_when_no_thread_shows_it() -> None:
    made = {a.target: a.after for a in GOOD.actions[:1]}
    again = plan(SNAPSHOT, [POLICY], made)
    assert [a.target.kind for a in again.actions[:1]] == ["thread-cgroup"]


def test_label_is_no_part_of_a_thread_target() -> None:
    key = ThreadKey(1, 2, 3)
    assert ThreadSched("g", key, "vhost 2") == ThreadSched("g", key, "vhost macvtap0/0")
    assert FIFO_10.reset_on_fork


def test_a_realtime_thread_is_lowered_before_it_leaves_the_interrupt_cpu() -> None:
    """Somebody else has made it realtime there, more urgent than the policy wants it."""
    urgent = Sched(SchedClass.FIFO, 30, reset_on_fork=True)
    guest = change(router(), Role.VCPU, sched=urgent)
    made = plan(snapshot(guest), [POLICY])
    mine = {t.key for t in guest.by_role(Role.VCPU)}
    kinds = [a.target.kind for a in made.actions if getattr(a.target, "thread", None) in mine]
    assert kinds == ["thread-sched", "vcpu-pin"]
