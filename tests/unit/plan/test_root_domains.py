"""Root domains over time: what has to be taken back, by whom, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning_samples import (
    all_ran,
    budget,
    change,
    cpus,
    host,
    own_processes,
    released,
    router,
    snapshot,
    with_cpusets,
)

from vsrtune.model.guest import Role, Sched, WorkerKind
from vsrtune.model.journal_records import Entry
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import (
    HOST_REF,
    CgroupDir,
    CpusetFile,
    Partition,
    Pin,
    Target,
    ThreadCgroup,
    ThreadSched,
    Value,
    VcpuPin,
)
from vsrtune.plan.full_plan import full_plan
from vsrtune.plan.planner import plan
from vsrtune.plan.safety.projection import project_actions
from vsrtune.policy.model import Policy
from vsrtune.policy.parser import parse

TEXT = """\
guest: {guest}
cpus: {{vcpu: {vcpu}, vhost: {vhost}}}
scheduler:
  vcpu: {{class: deadline, runtime: 2ms, period: 10ms}}
  vhost: {{class: deadline, runtime: 1ms, period: 10ms}}
profile: none
"""


def policy(guest: str = "vr1", vcpu: str = "1", vhost: str = "2") -> Policy:
    return parse(TEXT.format(guest=guest, vcpu=vcpu, vhost=vhost), f"{guest}.yaml")


def applied(seen: Snapshot, *policies: Policy) -> tuple[Snapshot, dict[Target, Value]]:
    made = plan(seen, policies)
    assert made.refusals == ()
    return all_ran(project_actions(seen, made.actions)), {a.target: a.after for a in made.actions}


def new() -> Snapshot:
    return with_cpusets(snapshot(router(online="0-2"), on=host(3)))


def old() -> Snapshot:
    guest = own_processes(router(online="0-2", kind=WorkerKind.KTHREAD))
    return with_cpusets(snapshot(guest, on=host(3)), exclusive=False)


def entries(seen: Snapshot, ours: dict[Target, Value], asked: Policy | None = None) -> list[Entry]:
    """A journal with these writes, and what undo would restore."""
    made = plan(seen, [asked or policy()])
    return [
        Entry(a.target, a.before, ours[a.target], "done") for a in made.actions if a.target in ours
    ]


def test_nothing_is_released_on_a_host_that_is_as_asked() -> None:
    seen, ours = applied(new(), policy())
    assert released(seen, [policy()], entries(new(), ours)) == frozenset()


def test_an_invalid_partition_makes_its_guests_threads_leave_the_class_first() -> None:
    seen, ours = applied(new(), policy())
    groups = tuple(
        replace(c, partition="root invalid (x)") if c.path.endswith("/vcpu0") else c
        for c in seen.host.cpusets
    )
    broken = replace(seen, host=replace(seen.host, cpusets=groups))
    gone = released(broken, [policy()], entries(new(), ours))
    assert gone == {t for t in ours if isinstance(t, ThreadSched)}
    made = full_plan(broken, [policy()], entries(new(), ours))
    kinds = [(a.target.kind, str(a.after)) for a in made.actions]
    deadline = ["deadline:2ms/10ms reset-on-fork", *["deadline:1ms/10ms reset-on-fork"] * 2]
    assert kinds == [
        *[("thread-sched", "other")] * 3,
        ("partition", "root"),
        *[("thread-sched", text) for text in deadline],
    ]


def test_other_cpus_mean_leaving_the_root_domain_and_making_another() -> None:
    seen, ours = applied(new(), policy())
    moved = policy(vhost="1")
    made = full_plan(seen, [moved], entries(new(), ours))
    final = project_actions(seen, made.actions)
    assert {str(t.affinity) for t in final.guests[0].by_role(Role.VHOST)} == {"1"}
    assert {str(c.path.rpartition("/")[2]) for c in final.host.cpusets if c.valid} == {"vcpu0"}
    order = [a.target.kind for a in made.actions]
    # Everybody is out of the class before the first partition is touched.
    leaving = [n for n, a in enumerate(made.actions) if a.after == Sched()]
    assert max(leaving) < order.index("partition")


def test_a_pool_without_the_root_domain_of_a_thread_is_refused() -> None:
    """A thread that auto has given a budget keeps its CPUs."""
    auto = policy(vcpu="auto", vhost="auto")
    seen, ours = applied(new(), auto)
    known = entries(new(), ours, auto)
    made = full_plan(seen, [replace(auto, pool=cpus("1-2"))], known)
    assert (made.refusals, made.actions) == ((), ())
    made = full_plan(seen, [replace(auto, pool=cpus("2"))], known)
    assert made.actions == ()
    assert [(refusal.reason, refusal.hint) for refusal in made.refusals] == [
        (
            "cpus.pool: vcpu 0 is of class deadline on CPU 1, outside of 2",
            "run `vsrtune undo`: auto then chooses anew",
        )
    ]


def test_cpus_that_a_cgroup_above_does_not_list_are_refused() -> None:
    seen, ours = applied(new(), policy())
    groups = tuple(
        replace(c, cpus="0-1") if c.path == "machine.slice" else c for c in seen.host.cpusets
    )
    narrow = replace(seen, host=replace(seen.host, cpusets=groups))
    refusals = full_plan(narrow, [policy()], entries(new(), ours)).refusals
    assert [r.reason for r in refusals] == [
        f"cpus.vhost: the cgroup of vhost macvtap{n}/0 allows CPUs 0-1 only" for n in (10, 11)
    ]


def test_budgets_that_are_asked_no_more_are_taken_back_whole() -> None:
    seen, ours = applied(new(), policy())
    plainer = parse("guest: vr1\ncpus: {vcpu: 1, vhost: 2}\nprofile: none\n", "vr1.yaml")
    made = full_plan(seen, [plainer], entries(new(), ours))
    final = project_actions(seen, made.actions)
    assert {t.sched for t in final.guests[0].threads} == {Sched()}
    assert not [c.path for c in final.host.cpusets if c.valid]
    assert {c.exclusive for c in final.host.cpusets} == {""}
    workers = final.guests[0].by_role(Role.VHOST)
    assert {t.cgroup.rpartition("/")[2] for t in workers} == {"vsrtune"}


def test_a_partition_at_the_top_is_given_back_when_its_guest_is_gone() -> None:
    seen, ours = applied(old(), policy())
    groups = tuple(replace(c, populated=c.path != "vsrtune.cpus2.1000") for c in seen.host.cpusets)
    gone = replace(seen, guests=(), host=replace(seen.host, cpusets=groups))
    alive = entries(old(), ours)
    ours = {t: v for t, v in ours.items() if not isinstance(t, ThreadSched)}
    left = released(gone, [policy()], entries(old(), ours))
    named = {(t.kind, t.path) for t in left if isinstance(t, CgroupDir | CpusetFile | Partition)}
    assert named == {
        ("cgroup-dir", "vsrtune.cpus2.1000"),
        ("cpuset-file", "vsrtune.cpus2.1000"),
        ("partition", "vsrtune.cpus2.1000"),
        ("cpuset-file", "machine.slice"),
        ("partition", "machine.slice"),
    }
    # As long as somebody is in it, its guest may only have been unreadable: nothing but what the
    # guard watches goes.
    full = tuple(replace(c, populated=True) for c in seen.host.cpusets)
    unread = replace(seen, guests=(), host=replace(seen.host, cpusets=full))
    assert {t.kind for t in released(unread, [policy()], alive)} == {"thread-sched"}


def test_a_second_guest_on_the_same_cpu_makes_both_float_in_the_slice() -> None:
    both = (router("vr1", 1000, online="0-2"), router("vr2", 2000, online="0-2"))
    whole = with_cpusets(snapshot(*both, on=host(3)))
    seen, ours = applied(new(), policy(vhost="1"))
    joined = replace(
        whole,
        guests=(seen.guests[0], whole.guests[1]),
        host=replace(
            whole.host,
            cpusets=tuple(seen.host.cpuset(c.path) or c for c in whole.host.cpusets),
        ),
    )
    policies = [policy(vhost="1"), policy("vr2", vhost="1")]
    gone = released(joined, policies, entries(new(), ours, policies[0]))
    assert {t.guest for t in gone if isinstance(t, Partition)} == {"vr1"}
    assert {t for t in ours if isinstance(t, ThreadSched | ThreadCgroup)} <= gone
    made = plan(whole, policies)
    assert [t.path for a in made.actions if isinstance(t := a.target, Partition)] == [
        "machine.slice"
    ]
    assert [a.target.guest for a in made.actions if isinstance(a.target, Partition)] == [HOST_REF]


def pinned(*, exclusive: bool = True, role: Role = Role.VCPU) -> Snapshot:
    """vr1, and vr2 of which an operator pinned one thread to CPU 2, and which has no vcpu if that is
    its iothread."""
    other = change(
        router("vr2", 2000, online="0-2"), Role.VCPU if role is Role.IOTHREAD else role,
        affinity=cpus("2"), pin=cpus("2"), cpuset_cpus="2", cpuset_effective=cpus("2"),
    )  # fmt: skip
    group = "machine.slice/machine-qemu-2000-x.scope/libvirt/iothread0"
    threads = tuple(
        replace(t, role=role, cgroup=group) if role is Role.IOTHREAD and t.index == 0 else t
        for t in other.threads
    )
    other = replace(other, threads=threads)
    return with_cpusets(snapshot(router(online="0-2"), other, on=host(3)), exclusive=exclusive)


def budgets(on: str) -> Policy:
    return parse(
        f"guest: vr1\ncpus: {{vcpu: {on}}}\nprofile: none\n"
        "scheduler: {vcpu: {class: deadline, runtime: 2ms, period: 10ms}}\n",
        "vr1.yaml",
    )


def test_a_pin_that_an_operator_holds_is_not_pushed_off() -> None:
    """The policy of its guest asks for another CPU, and does not get it."""
    seen = pinned()
    policies = [budgets("2"), parse("guest: vr2\ncpus: {vcpu: 1}\nprofile: none\n", "vr2.yaml")]
    vcpu = seen.guests[1].by_role(Role.VCPU)[0]
    ours: dict[Target, Value] = {
        VcpuPin("vr2", seen.guests[1].uuid, 0, vcpu.key): Pin(cpus("1"), "1")
    }
    (refusal,) = plan(seen, policies, ours).refusals
    assert "would push vr2 vcpu 0, which no policy moves" in refusal.reason


def test_a_slice_confines_nobody_who_is_bound_elsewhere() -> None:
    """Before 6.7 the whole slice would become the partition of CPU 1."""
    queue = parse("guest: vr2\nqueue: {macvtap: 400}\nprofile: none\n", "vr2.yaml")
    (refusal,) = plan(pinned(exclusive=False), [budgets("1"), queue]).refusals
    assert "vr2 vcpu 0, which no policy moves, is bound to CPUs 2 outside it" in refusal.reason


@pytest.mark.parametrize("role", [Role.EMULATOR, Role.IOTHREAD])
@pytest.mark.parametrize(
    ("exclusive", "on", "words"),
    [(True, "2", "is bound to CPUs 2, off them"), (False, "1", "is bound to CPUs 2 outside it")],
)
def test_a_pin_without_which_libvirt_starts_no_guest(
    role: Role, exclusive: bool, on: str, words: str
) -> None:
    """Outside of the cpuset sched_setaffinity fails with EINVAL. Only libvirt's own list counts,
    unless libvirt failed to set it, and no policy rewrites that of an iothread."""
    seen = pinned(exclusive=exclusive, role=role)
    (refusal,) = plan(seen, [budgets(on)]).refusals
    assert f"vr2 {role.value}" in refusal.reason and words in refusal.reason
    away = asks("cpus: {emulator: auto, iothread: auto}", "vr2")
    assert bool(plan(seen, [budgets(on), away]).refusals) == (role is Role.IOTHREAD)
    for other in ({"cpuset_cpus": ""}, {"affinity": cpus("0-2") - cpus(on)}):
        guests = (seen.guests[0], change(seen.guests[1], role, **other))
        assert plan(replace(seen, guests=guests), [budgets(on)]).refusals == ()


@pytest.mark.parametrize("role", [Role.EMULATOR, Role.VCPU])
def test_two_partitions_together_take_nobodys_cpus(role: Role) -> None:
    bound = cpus("1-2")
    lists = {"affinity": bound, "pin": bound, "cpuset_cpus": "1-2", "cpuset_effective": bound}
    other = change(router("vr2", 2000), role, **lists)
    seen = with_cpusets(snapshot(router(), other, on=host()), exclusive=True)
    (refusal,) = plan(seen, [policy()]).refusals
    assert "which is bound to CPUs 1-2, off them" in refusal.reason


def test_a_guest_that_the_plan_moves_away_is_not_pushed_off() -> None:
    seen = pinned()
    away = parse("guest: vr2\ncpus: {vcpu: 1}\nprofile: none\n", "vr2.yaml")
    made = plan(seen, [budgets("2"), away])
    assert made.refusals == ()
    final = project_actions(seen, made.actions)
    assert [str(g.by_role(Role.VCPU)[0].affinity) for g in final.guests] == ["2", "1"]


@pytest.mark.parametrize("runtime", [-1, 0])
def test_throttling_switched_off_or_shut(runtime: int) -> None:
    seen = new()
    seen = replace(seen, host=replace(seen.host, sched_rt_runtime_us=runtime))
    made = plan(seen, [policy()])
    if runtime < 0:
        assert made.refusals == ()
    else:
        (refusal,) = made.refusals
        assert "of which 0 % remains" in refusal.reason


def test_someone_elses_budget_is_left_alone() -> None:
    seen = new()
    guest = seen.guests[0]
    threads = tuple(
        replace(t, sched=budget(1, 10), affinity=cpus("0-2")) if t.role is Role.VCPU else t
        for t in guest.threads
    )
    made = plan(replace(seen, guests=(replace(guest, threads=threads),)), [policy()])
    vcpu = guest.by_role(Role.VCPU)[0].key
    assert not [a for a in made.actions if getattr(a.target, "thread", None) == vcpu]


def test_kernel_threads_come_back_from_the_top_to_share_a_cpu_with_the_vcpu() -> None:
    seen, ours = applied(old(), policy())
    made_entries = [
        Entry(a.target, a.before, ours[a.target], "done") for a in plan(old(), [policy()]).actions
    ]
    made = full_plan(seen, [policy(vhost="1")], made_entries)
    assert made.refusals == ()
    final = project_actions(seen, made.actions)
    assert [c.path for c in final.host.cpusets if c.valid] == ["machine.slice"]
    workers = final.guests[0].by_role(Role.VHOST)
    assert {(str(t.affinity), t.sched.cls.value) for t in workers} == {("1", "deadline")}


DEADLINE = "{class: deadline, runtime: 2ms, period: 10ms}"
BOTH = f"scheduler: {{vcpu: {DEADLINE}, vhost: {DEADLINE}}}"


def asks(text: str, guest: str = "vr1") -> Policy:
    return parse(f"guest: {guest}\n{text}\nprofile: none\n", f"{guest}.yaml")


@pytest.mark.parametrize(
    ("exclusive", "cpus_", "reason", "hint"),
    [
        (
            True, "vcpu: 1, emulator: 0-1",
            "cpus.emulator: CPU 1 belongs to a partition for class deadline",
            "write emulator: auto, or CPUs outside the partition",
        ),
        (
            False, "vcpu: 1, vhost: 1, emulator: 0-1",
            ("cpus.emulator: emulator lives in machine.slice, which becomes the partition of CPUs "
            "1: CPUs 0 are outside"),
            "write emulator: auto, or CPUs within the partition",
        ),
    ],
)  # fmt: skip
def test_an_emulator_and_a_partition(exclusive: bool, cpus_: str, reason: str, hint: str) -> None:
    text = BOTH if "vhost" in cpus_ else f"scheduler: {{vcpu: {DEADLINE}}}"
    seen = with_cpusets(snapshot(router()), exclusive=exclusive)
    (refusal,) = plan(seen, [asks(f"cpus: {{{cpus_}}}\n{text}")]).refusals
    assert (refusal.reason, refusal.hint, refusal.policy) == (reason, hint, "vr1.yaml:2")


def test_an_emulator_is_confined_to_the_slice_that_is_a_partition() -> None:
    seen = with_cpusets(snapshot(router()), exclusive=False)
    made = plan(seen, [asks(f"cpus: {{vcpu: 1, vhost: 1, emulator: auto}}\n{BOTH}")])
    assert made.refusals == ()
    (pin,) = (a for a in made.actions if a.target.kind == "emulator-pin")
    assert pin.reason == "cpus.emulator: auto, confined to machine.slice (vr1.yaml:2)"
    within = asks(f"cpus: {{vcpu: 1-2, vhost: 1-2, emulator: 2}}\n{BOTH}")
    assert plan(seen, [within]).refusals == ()


def test_an_iothread_that_iothreadpin_binds_is_confined_to_what_both_allow() -> None:
    seen = pinned(exclusive=False, role=Role.IOTHREAD)
    both = {"affinity": cpus("0-1"), "cpuset_cpus": "0-1", "cpuset_effective": cpus("0-1")}
    seen = replace(seen, guests=(seen.guests[0], change(seen.guests[1], Role.IOTHREAD, **both)))
    made = plan(seen, [budgets("1-2"), asks("cpus: {iothread: auto}", "vr2")])
    assert made.refusals == ()
    (iothread,) = project_actions(seen, made.actions).guests[1].by_role(Role.IOTHREAD)
    assert iothread.affinity == cpus("1")


def test_a_slice_cannot_become_a_partition_with_the_isolated_cpu() -> None:
    seen = snapshot(router(), router("vr2", 2000), on=host(isolated="3"))
    seen = with_cpusets(seen, exclusive=False)
    one = asks(f"cpus: {{vcpu: 3}}\nscheduler: {{vcpu: {DEADLINE}}}")
    two = asks(f"cpus: {{vcpu: 1, vhost: 1}}\n{BOTH}", "vr2")
    (refusal,) = plan(seen, [one, two]).refusals
    assert (refusal.guest, refusal.reason, refusal.hint) == (
        "vr1",
        (
            "scheduler.vcpu: machine.slice has to become a partition, which cannot have the isolated "
            "CPU 3 that vcpu 0 is to run on"
        ),
        "give the guests' threads CPUs that are not isolated",
    )


def test_a_thread_that_floats_needs_all_cpus_of_its_partition() -> None:
    first = change(router(), Role.VCPU, cpuset_limit=cpus("0-1"))
    seen = with_cpusets(snapshot(first, router("vr2", 2000)), exclusive=False)
    one = asks(f"cpus: {{vcpu: 1}}\nscheduler: {{vcpu: {DEADLINE}}}")
    two = asks(f"cpus: {{vcpu: 2, vhost: 2}}\n{BOTH}", "vr2")
    (refusal,) = plan(seen, [one, two]).refusals
    assert (refusal.guest, refusal.reason, refusal.hint) == (
        "vr1",
        (
            "scheduler.vcpu: vcpu 0 would float in the partition machine.slice of CPUs 1-2, and its "
            "cgroup allows CPUs 0-1 only"
        ),
        "widen the cgroup above the guest, or give its neighbours other CPUs",
    )
