"""What a plan gives back: examples of mistakes that the properties (test_properties.py) found."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
from imitated_host import ImitatedHost
from plan_bases import routers
from plan_cases import PLANS, read
from planning_samples import budget, nic
from situations import settle

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import Role, Sched, SchedClass, ThreadKey
from vsrtune.model.host import NicQueue, NicThread
from vsrtune.model.journal_records import Entry, undo_order
from vsrtune.model.plan import Plan
from vsrtune.model.targets import EmulatorPin, Partition, Pin
from vsrtune.plan.brought_pins import REASON
from vsrtune.plan.full_plan import full_plan
from vsrtune.policy.model import Policy
from vsrtune.policy.parser import parse

FIFO = "class: fifo, priority: 10"
SHARE = "class: deadline, runtime: 2ms, period: 10ms"


def imitated(*, cpus: int = 8, kernel: str = "6.12", vcpus: int = 1) -> ImitatedHost:
    """vr1 and vr2, untuned, on an imitated kernel."""
    return ImitatedHost(routers(cpus=cpus, cpusets=kernel, softirq=True, vcpus=vcpus))


def ask(**texts: str) -> tuple[Policy, ...]:
    """Policies by guest."""
    return tuple(
        parse(f"guest: {name}\n{text}\nprofile: none\n", f"{name}.yaml")
        for name, text in texts.items()
    )


def kinds(plan: Plan) -> list[tuple[str, bool]]:
    return [(a.target.kind, a.release) for a in plan.actions]


def test_a_guest_that_a_release_makes_room_for_has_its_own_releases_in_the_same_plan() -> None:
    """vr2 is refused only as long as vr1's vcpu is realtime on its CPU."""
    host = imitated()
    alone = f"cpus: {{vcpu: 1}}\nscheduler: {{vcpu: {{{FIFO}}}}}"
    settle(host, ask(vr1=alone, vr2="cpus: {vcpu: 2}\nqueue: {macvtap: 50}"))
    policies = ask(vr1="queue: {macvtap: 500}", vr2="cpus: {vcpu: 1}")
    plan = host.plan(policies)
    assert plan.refusals == ()
    assert ("txqueuelen", True) in kinds(plan)
    host.apply(plan)
    assert host.plan(policies).actions == ()


def test_a_guest_is_refused_only_if_the_next_plan_refuses_it_too() -> None:
    """At first vr1's vcpu would go where vr2's, which has its old class, keeps it from running."""
    host = imitated(cpus=3)
    turns = "class: rr, priority: 10"
    fair = f"{AUTO}\nscheduler: {{vcpu: {{{turns}}}, vhost: {{{turns}}}}}"
    settle(host, ask(vr1="cpus: {vhost: auto}", vr2=fair))
    policies = ask(vr1="placement: auto", vr2="cpus: {vhost: auto}")
    plan = host.plan(policies)
    assert (plan.refusals, host.apply(plan).failed) == ((), ())
    assert host.plan(policies).actions == ()


def test_a_guest_that_is_refused_after_its_releases_keeps_all_it_has() -> None:
    """Without its pin the realtime vcpu may run on the interrupt CPU: a mistake in the policy."""
    host = imitated()
    settle(host, ask(vr1=f"cpus: {{vcpu: 1}}\nscheduler: {{vcpu: {{{FIFO}}}}}"))
    plan = host.plan(ask(vr1=f"scheduler: {{vcpu: {{{FIFO}}}}}"))
    assert [r.guest for r in plan.refusals] == ["vr1"]
    assert plan.actions == ()


def test_a_thread_leaves_its_realtime_class_before_it_may_run_everywhere() -> None:
    host = imitated()
    settle(host, ask(vr1=f"cpus: {{vcpu: 1}}\nscheduler: {{vcpu: {{{FIFO}}}}}"))
    plan = host.plan(ask(vr1="scheduler: {vcpu: {class: batch}}"))
    assert kinds(plan) == [("thread-sched", True), ("vcpu-pin", True), ("thread-sched", False)]


def test_a_class_that_its_owner_lowered_is_released() -> None:
    """Also where a reload takes the lowered one for what was there before."""
    host = imitated()
    before = host.kernel.sched_attr(1001)
    policy = f"cpus: {{vcpu: 1}}\nscheduler: {{vcpu: {{{FIFO}}}}}\ndrift: report"
    for reload in (False, True):
        settle(host, ask(vr1=policy))
        given = host.kernel.sched_attr(1001)
        host.kernel.set_sched(1001, replace(given, priority=1))
        if reload:
            host.apply(full_plan(host.observed(), ask(vr1=policy), host.entries(), reassert=True))
            assert host.kernel.sched_attr(1001) == given
        settle(host, ask(vr2="cpus: {vcpu: 1}"))
        assert host.kernel.sched_attr(1001) == before


TURNS = "class: rr, priority: 10"


def resting(rest: str = "10ms", more: str = "") -> str:
    """A policy for realtime threads that leave so much of each second."""
    rules = f"rest: {rest}, vcpu: {{{TURNS}}}, vhost: {{{TURNS}}}"
    return f"cpus: {{vcpu: 1, vhost: 1}}\nscheduler: {{{rules}}}\n{more}"


def share(runtime: str) -> str:
    rule = f"class: deadline, runtime: {runtime}, period: 10ms"
    return f"cpus: {{vcpu: 2}}\nscheduler: {{vcpu: {{{rule}}}}}"


def limited(original: int = 950_000) -> ImitatedHost:
    """A host whose kernel stops realtime threads for the rest of each second."""
    found = routers(cpus=8, cpusets="6.12", softirq=True)
    old = replace(found.host, kernel="6.8.0", sched_rt_runtime_us=original)
    return ImitatedHost(replace(found, host=old))


def test_the_limit_of_realtime_threads_is_restored_before_budgets_are_admitted_by_it() -> None:
    host = limited()
    settle(host, ask(vr1=resting()))
    assert host.kernel.state["rt_runtime"] == 990_000
    # It fits below the raised limit and not below the kernel's, with its fair_server.
    plan = host.plan(ask(vr1=resting(), vr2=share("9200us")))
    assert [(r.guest, "95 %" in r.reason) for r in plan.refusals] == [("vr2", True)]
    assert plan.actions == ()
    settle(host, ask(vr1=resting(), vr2=share("8ms")))
    assert host.kernel.state["rt_runtime"] == 950_000
    settle(host, ask(vr1=resting()))
    assert host.kernel.state["rt_runtime"] == 990_000


def test_a_guest_that_waits_does_not_keep_the_limit_raised_beside_new_budgets() -> None:
    host = limited()
    settle(host, ask(vr1=resting()))
    seen = host.observed()
    busy = tuple(replace(g, busy=g.name == "vr1") for g in seen.guests)
    policies = ask(vr1=resting(), vr2=share("9200us"))
    plan = full_plan(replace(seen, guests=busy), policies, host.entries())
    assert "vr2" in [r.guest for r in plan.refusals]
    plan = full_plan(
        replace(seen, guests=busy), ask(vr1=resting(), vr2=share("8ms")), host.entries()
    )
    assert ("realtime-limit", True) in kinds(plan)


@pytest.mark.parametrize("found", [995_000, -1])
def test_a_limit_that_somebody_changed_after_us_follows_its_drift_rule(found: int) -> None:
    for rule, then in (("enforce", 990_000), ("report", found)):
        host = limited()
        policies = ask(vr1=resting(more=f"drift: {{scheduler.rest: {rule}}}"))
        settle(host, policies)
        host.kernel.state["rt_runtime"] = found
        settle(host, policies)
        assert host.kernel.state["rt_runtime"] == then
        host.kernel.state["rt_runtime"] = 990_000
        settle(host, policies)
        host.undo()
        assert host.kernel.state["rt_runtime"] == 950_000


def test_the_limit_is_never_below_the_original() -> None:
    host = limited(970_000)
    settle(host, ask(vr1=resting()))
    assert host.kernel.state["rt_runtime"] == 990_000
    settle(host, ask(vr1=resting(rest="50ms")))
    assert host.kernel.state["rt_runtime"] == 970_000


def test_undo_lowers_a_thread_whose_class_was_written_before_its_pin() -> None:
    host = imitated()
    settle(host, ask(vr1="scheduler: {vcpu: {class: batch}}"))
    settle(host, ask(vr1=f"cpus: {{vcpu: 1}}\nscheduler: {{vcpu: {{{FIFO}}}}}"))
    back = [e.target.kind for e in undo_order(host.entries())]
    assert back == ["thread-sched", "vcpu-pin"]


def test_undo_raises_a_thread_on_its_own_cpus_only() -> None:
    host = imitated()
    urgent = Sched(SchedClass.FIFO, 30, reset_on_fork=True)
    host.kernel.set_sched(1001, urgent)
    settle(host, ask(vr1="cpus: {vcpu: 1}"))
    settle(host, ask(vr1="cpus: {vcpu: 1}\nscheduler: {vcpu: {class: batch}}"))
    back = [e.target.kind for e in undo_order(host.entries())]
    assert back == ["vcpu-pin", "thread-sched"]
    host.undo()
    assert (host.kernel.sched_attr(1001), host.kernel.mask(1001)) == (urgent, "0-7")


def budget_on(cpus: str) -> str:
    """The policy of a guest whose vcpu has a budget on this CPU."""
    return f"cpus: {{vcpu: {cpus}}}\nscheduler: {{vcpu: {{{SHARE}}}}}"


def budgeted(host: ImitatedHost, cpus: str, guest: str = "vr1") -> None:
    """The guest's vcpu has a budget on this CPU."""
    settle(host, ask(**{guest: budget_on(cpus)}))
    assert host.kernel.sched_attr(1001 if guest == "vr1" else 2001) == budget(2, 10)


def test_a_refused_guest_keeps_its_budgets_in_a_broken_partition() -> None:
    host = imitated()
    budgeted(host, "1")
    path = next(e.target.path for e in host.entries() if isinstance(e.target, Partition))
    seen = host.observed()
    groups = tuple(
        replace(g, partition="root invalid (reason)") if g.path == path else g
        for g in seen.host.cpusets
    )
    broken = replace(seen, host=replace(seen.host, cpusets=groups))
    plan = full_plan(broken, ask(vr1="cpus: {vcpu: 99}"), host.entries())
    assert [r.guest for r in plan.refusals] == ["vr1"]
    assert plan.actions == ()


def test_a_partition_moves_no_ksoftirqd() -> None:
    host = imitated()
    budgeted(host, "1")
    assert (host.kernel.mask(10), host.kernel.mask(11)) == ("0", "1")


def test_cpus_of_a_partition_that_goes_are_free_in_the_same_plan() -> None:
    host = imitated()
    budgeted(host, "1")
    policies = ask(vr1="queue: {macvtap: 50}", vr2="cpus: {vcpu: 1}")
    plan = host.plan(policies)
    assert (plan.refusals, host.apply(plan).failed) == ((), ())
    assert host.kernel.mask(2001) == "1"
    assert host.plan(policies).actions == ()


BUDGETS = "class: deadline, runtime: 8ms, period: 10ms"
AUTO = "cpus: {vcpu: auto, vhost: auto}"


def test_auto_keeps_off_the_partitions_of_other_guests() -> None:
    """One CPU beside the interrupts' is left to vr2."""
    host = imitated(cpus=5)
    budgets = f"{AUTO}\nscheduler: {{vcpu: {{{BUDGETS}}}, vhost: {{{BUDGETS}}}}}"
    assert settle(host, ask(vr1=budgets)).refusals == ()
    policies = ask(vr1=budgets, vr2=AUTO)
    plan = host.plan(policies)
    assert (plan.refusals, host.apply(plan).failed) == ((), ())
    assert {host.kernel.mask(tid) for tid in (2001, 2021, 2022)} == {"4"}
    assert host.plan(policies).actions == ()


def test_a_guest_for_which_partitions_leave_no_cpu_is_refused_alone() -> None:
    host = imitated(cpus=4)
    budgets = f"{AUTO}\nscheduler: {{vcpu: {{{BUDGETS}}}, vhost: {{{BUDGETS}}}}}"
    settle(host, ask(vr1=budgets))
    plan = host.plan(ask(vr1=f"{budgets}\nqueue: {{macvtap: 50}}", vr2=AUTO))
    assert {r.guest for r in plan.refusals} == {"vr2"}
    assert "root domains of other threads have CPUs 1-3" in plan.refusals[0].reason
    assert kinds(plan) == [("txqueuelen", False)] * 2


def test_a_guest_cannot_have_cpus_of_a_refused_guests_partition() -> None:
    host = imitated()
    budgeted(host, "1")
    plan = host.plan(ask(vr1="cpus: {vcpu: 99}", vr2="cpus: {vcpu: 1}"))
    assert [r.guest for r in plan.refusals] == ["vr1", "vr2"]
    assert plan.actions == ()


def test_a_ring_stays_when_another_guest_of_its_device_asks_for_the_same_length() -> None:
    host = imitated()
    one, two = host.scene.guests
    both = replace(two, interfaces=one.interfaces)
    host = ImitatedHost(replace(host.scene, guests=(one, both)))
    settle(host, ask(vr1="queue: {macvtap: 200}"))
    assert host.plan(ask(vr2="queue: {macvtap: 200}")).actions == ()
    settle(host, ask(vr2="queue: {macvtap: 50}"))
    settle(host, ())
    lengths = {host.kernel.state["devices"][i.target]["tx_queue_len"] for i in one.interfaces}
    assert (lengths, host.entries()) == ({500}, ())


def test_a_pin_that_a_guest_has_brought_waits_while_libvirt_is_busy() -> None:
    host = imitated()
    seen = host.observed()
    guest = seen.guests[0]
    pin = EmulatorPin(guest.ref, guest.uuid, guest.threads[0].key)
    was, now = Pin(CpuSet(range(8)), ""), Pin(CpuSet(range(8)), "0-7")
    brought = (Entry(pin, was, now, "done", reason=REASON),)
    assert kinds(full_plan(seen, (), brought)) == [("emulator-pin", True)]
    busy = replace(seen, guests=(replace(guest, busy=True), *seen.guests[1:]))
    assert full_plan(busy, (), brought).actions == ()


# -- beside the root domain of another guest


def beside(
    vr1: str, before: Callable[[ImitatedHost], None] = lambda _host: None
) -> tuple[ImitatedHost, tuple[Policy, ...]]:
    """A host on which vr1 was tuned, then vr2 got a root domain of CPU 1; vr2's policy alone."""
    host = imitated()
    before(host)
    settle(host, ask(vr1=vr1))
    settle(host, ask(vr1=vr1, vr2=budget_on("1")))
    assert host.kernel.effective("").isdisjoint(CpuSet([1]))
    return host, ask(vr2=budget_on("1"))


def test_a_mask_that_is_cut_by_another_guests_partition_counts_as_restored() -> None:
    host, vr2 = beside("cpus: {vcpu: 3, vhost: 4}")
    result = host.apply(host.plan(vr2))
    assert (result.failed, result.left) == ((), ())
    assert {e.target.guest for e in host.entries()} == {"host/", "vr2"}
    assert {host.kernel.mask(tid) for tid in (1001, 1021)} == {"0,2-7"}
    assert host.undo().failed == ()
    assert {host.kernel.mask(tid) for tid in (1001, 1021, 2001)} == {"0-7"}


def test_a_threads_own_mask_comes_back_once_the_partition_goes() -> None:
    host, vr2 = beside(
        "cpus: {vhost: 4}", before=lambda host: host.kernel.set_affinity(1021, CpuSet([1, 2, 3]))
    )
    assert host.apply(host.plan(vr2)).failed == ()
    assert host.kernel.mask(1021) == "2-3"
    assert host.undo().failed == ()
    assert host.kernel.mask(1021) == "1-3"


def test_a_mask_that_something_else_cuts_stays_owed() -> None:
    host, vr2 = beside("cpus: {vhost: 4}")
    cpus = f"/sys/fs/cgroup/{host.observed().guests[0].by_role(Role.VHOST)[0].cgroup}/cpuset.cpus"
    host.kernel.write(cpus, "0-5")
    result = host.apply(host.plan(vr2))
    assert [type(a.target).__name__ for a, _ in result.failed] == ["ThreadAffinity"] * 2
    # Its move has taken the thread out of that cgroup.
    assert host.apply(host.plan(vr2)).failed == ()
    assert host.kernel.mask(1021) == "0,2-7"


def test_undo_goes_on_where_it_was_killed_behind_a_cut_mask() -> None:
    host, vr2 = beside("cpus: {vcpu: 3, vhost: 4}")

    def kill(what: str) -> None:
        if what.startswith("affinity 1021"):
            raise KeyboardInterrupt

    host.kernel.behind = kill
    with suppress(KeyboardInterrupt):
        host.apply(host.plan(vr2))
    host.kernel.behind = lambda _what: None
    result = host.apply(host.plan(vr2))
    assert (result.failed, result.left) == ((), ())
    assert {e.target.guest for e in host.entries()} == {"host/", "vr2"}


def test_a_pass_that_fails_is_taken_back_beside_the_partition_that_it_made() -> None:
    host = imitated()
    policies = ask(
        vr1=f"cpus: {{vhost: 4}}\nscheduler: {{vhost: {{{FIFO}}}}}",
        vr2=budget_on("1"),
    )

    def fail(what: str) -> None:
        if what.startswith("sched 1022 fifo"):
            raise OSError(errno.EPERM, "operation not permitted")

    host.kernel.ahead = fail
    result = host.apply(host.plan(policies))
    assert (len(result.failed), result.rolled_back) == (1, True)
    assert {e.target.guest for e in host.entries()} == {"host/", "vr2"}
    assert host.kernel.mask(1021) == "0,2-7"


def test_an_affinity_follows_the_move_that_leaves_it_no_cpu() -> None:
    """libvirt starts vr1 with an emulatorpin, and its worker in a part of that."""

    def pinned(host: ImitatedHost) -> None:
        host.kernel.pin(host.scene.guests[0].uuid, None, CpuSet([1, 2, 3]))
        host.kernel.set_affinity(1021, CpuSet([1, 2]))

    host, vr2 = beside(f"cpus: {{vhost: 4}}\nscheduler: {{vhost: {{{SHARE}}}}}", before=pinned)
    result = host.apply(host.plan(vr2))
    assert (result.failed, result.left, host.kernel.mask(1021)) == ((), (), "2")
    assert host.undo().failed == ()
    assert host.kernel.mask(1021) == "1-2"


def test_threads_leave_a_vcpus_cgroup_before_its_list_moves_them() -> None:
    host = imitated()
    host.kernel.set_affinity(1021, CpuSet([5]))
    both = f"{{{SHARE}}}"
    settle(
        host, ask(vr1=f"cpus: {{vcpu: 1, vhost: 1}}\nscheduler: {{vcpu: {both}, vhost: {both}}}")
    )
    result = host.undo()
    assert (result.failed, result.left, host.kernel.mask(1021)) == ((), (), "5")


def test_a_mask_first_seen_beside_a_partition_comes_back_whole() -> None:
    host = imitated()
    budgeted(host, "2", guest="vr2")
    settle(host, ask(vr1="cpus: {vcpu: 3, vhost: 4}", vr2=budget_on("2")))
    settle(host, ask(vr1="cpus: {vcpu: 3, vhost: 4}"))
    assert host.undo().failed == ()
    assert {host.kernel.mask(tid) for tid in (1001, 1021, 1022)} == {"0-7"}


def test_the_list_of_a_thread_that_somebody_moved_is_given_back() -> None:
    host = imitated()
    settle(host, ask(vr1="cpus: {emulator: 0-5}"))
    host.kernel.set_affinity(1000, CpuSet([4]))
    result = host.undo()
    assert (result.failed, len(result.left), host.kernel.mask(1000)) == ((), 1, "4")
    assert host.observed().guests[0].threads[0].cpuset_cpus == ""


@pytest.mark.parametrize("kind", ["member", "root"])
@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize(
    ("kernel", "left", "own"),
    [("6.12", "0-2", "1-2"), ("6.12", "0-1", "1"), ("6.1", "0-2", "1-2"), ("6.1", "0-1", "1")],
)
def test_undo_in_a_slice_that_is_narrower_by_now_restores(
    kernel: str, left: str, own: str, release: bool, kind: str
) -> None:
    """A vcpu was on a CPU that goes, and a worker has a mask of its own. So does a release. Somebody
    may have made the slice a partition, too."""
    host = imitated(cpus=4, kernel=kernel)
    host.kernel.set_affinity(1021, CpuSet([1, 2, 3]))
    settle(host, ask(vr1="cpus: {vcpu: 3, vhost: 2-3, emulator: 0}"))
    slice_ = "/sys/fs/cgroup/machine.slice/cpuset.cpus"
    host.kernel.write(slice_, left)
    host.kernel.write(f"{slice_}.partition", kind)
    result = host.apply(host.plan(())) if release else host.undo()
    assert (result.failed, result.left, host.entries()) == ((), (), ())
    assert host.kernel.mask(1021) == own
    host.kernel.write(f"{slice_}.partition", "member")
    host.kernel.write(slice_, "0-3")
    masks = [host.kernel.mask(tid) for tid in (1000, 1001, 1021, 1022)]
    assert masks == ["0-3", "0-3", "1-3" if kernel == "6.12" else "0-3", "0-3"]


def test_a_mask_of_somebody_elses_that_is_ours_again_in_a_narrower_slice_stays_ours() -> None:
    host = imitated(cpus=4)
    settle(host, ask(vr1="cpus: {vhost: 2-3}"))
    host.kernel.set_affinity(1021, CpuSet([1]))
    plan = host.plan(())
    host.kernel.set_affinity(1021, CpuSet([2, 3]))
    host.kernel.write("/sys/fs/cgroup/machine.slice/cpuset.cpus", "0-2")
    assert (host.apply(plan).left, len(host.entries())) == ((), 1)


@pytest.mark.parametrize(("cpu", "kernel"), [(1, "6.12"), (2, "6.12"), (2, "6.1")])
def test_undo_in_a_slice_without_the_original_cpus_ends(cpu: int, kernel: str) -> None:
    """CPU 3 was a worker's and the pin of a vcpu. Ours (``cpu``) has gone too, or not."""
    host = imitated(cpus=4, kernel=kernel)
    host.kernel.set_affinity(1021, CpuSet([3]))
    host.kernel.pin(host.scene.guests[0].uuid, 0, CpuSet([3]))
    settle(host, ask(vr1=f"cpus: {{vcpu: {cpu}, vhost: {cpu}}}"))
    slice_ = "/sys/fs/cgroup/machine.slice/cpuset.cpus"
    host.kernel.write(slice_, "0-1")
    result = host.undo()
    assert (result.failed, result.left, host.entries()) == ((), (), ())
    assert [host.kernel.mask(tid) for tid in (1001, 1021)] == ["0-1", "0-1"]
    # Tuned anew, it was outside of its list, which nobody asked for.
    host.apply(host.plan(ask(vr1="cpus: {vcpu: 1}")))
    host.kernel.write(slice_, "0-3")
    assert host.undo().failed == ()
    assert [host.kernel.mask(tid) for tid in (1001, 1021)] == ["3", "0-3"]


# -- root domains that change


def settled(host: ImitatedHost, policies: tuple[Policy, ...]) -> None:
    """Carry the policies out; nothing fails, nobody is refused, and nothing is left to do."""
    for _ in range(3):
        plan = host.plan(policies)
        assert (plan.refusals, host.apply(plan).failed) == ((), ())
    assert host.plan(policies).actions == ()
    assert "miscounted" not in host.kernel.state


def test_a_vcpu_with_a_budget_gets_other_cpus() -> None:
    host = imitated()
    budgeted(host, "1")
    settled(host, ask(vr1=budget_on("2")))
    assert (host.kernel.mask(1001), host.kernel.sched_attr(1001)) == ("2", budget(2, 10))


def test_lists_by_hand_take_cpus_of_root_domains_that_auto_made() -> None:
    host = imitated(vcpus=2)
    both = f"scheduler: {{vcpu: {{{SHARE}}}, vhost: {{{SHARE}}}}}"
    settled(host, ask(vr1=f"{AUTO}\n{both}"))
    first = {tid: host.kernel.mask(tid) for tid in (1001, 1002)}
    lists = f"{{0: {first[1002]}, 1: {first[1001]}}}"
    policies = ask(vr1=f"cpus: {{vcpu: {lists}, vhost: 7}}\n{both}", vr2=f"{AUTO}\n{both}")
    settled(host, policies)
    assert host.kernel.mask(1001) == first[1002]
    assert host.undo().failed == ()
    assert {host.kernel.mask(tid) for tid in (1001, 1021, 2001)} == {"0-7"}


def test_a_thread_with_a_budget_moves_on_when_auto_gives_it_another_class() -> None:
    host = imitated()
    together = f"cpus: {{vcpu: 1, vhost: 1}}\nscheduler: {{vcpu: {{{SHARE}}}, vhost: {{{SHARE}}}}}"
    settled(host, ask(vr1=together))
    settled(
        host, ask(vr1=f"cpus: {{vcpu: 1, vhost: auto}}\nscheduler: {{vcpu: {{{SHARE}}}}}", vr2=AUTO)
    )
    assert host.kernel.sched_attr(1021) == Sched()
    assert (host.kernel.mask(1001), host.kernel.sched_attr(1001)) == ("1", budget(2, 10))


def test_a_mask_that_is_lost_on_the_way_out_of_a_root_domain_is_no_drift() -> None:
    """A worker goes back to the emulator's cgroup, whose list has not its CPU."""
    host = imitated()
    drift = "drift: {default: adopt}"
    one = f"cpus: {{vhost: 2, emulator: 0}}\nscheduler: {{vhost: {{{SHARE}}}}}\n{drift}"
    settled(host, ask(vr1=one))
    settled(host, ask(vr1=f"cpus: {{vhost: 3, emulator: 0}}\n{drift}"))
    assert {host.kernel.mask(tid) for tid in (1021, 1022)} == {"3"}
    assert (host.undo().failed, host.kernel.mask(1021), host.entries()) == ((), "0-7", ())


def test_a_thread_that_may_run_everywhere_occupies_nothing_beside_a_partition_either() -> None:
    """vr2's emulator keeps off the interrupts' CPU when vr1's vcpu gets a root domain of its CPU,
    which the masks of all other threads then lack."""
    host = imitated()
    settled(host, ask(vr1="cpus: {vcpu: 1}"))
    policies = ask(vr1=budget_on("1"), vr2="cpus: {emulator: auto}")
    plan = host.plan(policies)
    assert (plan.refusals, host.apply(plan).failed) == ((), ())
    assert host.kernel.sched_attr(1001) == budget(2, 10)
    assert (host.kernel.mask(2000), host.plan(policies).actions) == ("2-7", ())


@pytest.mark.parametrize("kernel", ["6.1", "6.12"])
def test_a_worker_gets_its_own_mask_back_through_a_narrow_emulator(kernel: str) -> None:
    """It leaves its root domain for the emulator's cgroup, from where the plan moves it on."""
    host = imitated(kernel=kernel)
    settled(host, ask(vr1=f"cpus: {{vhost: 2, emulator: 0}}\nscheduler: {{vhost: {{{SHARE}}}}}"))
    policies = ask(vr1="cpus: {emulator: 0}")
    result = host.apply(host.plan(policies))
    assert (result.failed, result.left) == ((), ())
    assert [host.kernel.mask(tid) for tid in (1000, 1021, 1022)] == ["0", "0-7", "0-7"]
    assert host.plan(policies).actions == ()
    assert (host.undo().failed, host.kernel.mask(1000), host.entries()) == ((), "0-7", ())


def test_a_worker_keeps_its_cpu_when_its_root_domain_goes() -> None:
    """The cgroup to which it moves has that CPU again."""
    host = imitated(cpus=4)
    settled(host, ask(vr1=f"{AUTO}\nscheduler: {{vhost: {{{SHARE}}}}}"))
    before = [host.kernel.mask(tid) for tid in (1001, 1021, 1022)]
    assert sorted(before) == ["1", "2", "3"]
    plan = host.plan(ask(vr1=AUTO))
    assert (plan.refusals, host.apply(plan).failed) == ((), ())
    assert [host.kernel.mask(tid) for tid in (1001, 1021, 1022)] == before
    assert host.plan(ask(vr1=AUTO)).actions == ()


def test_a_root_domain_stays_if_the_guest_for_which_it_would_go_is_refused() -> None:
    """vr2's vcpu is to have a CPU of vr1's; two budgets of 80 % on CPU 7 only fit in a slice."""
    host = imitated()
    vr1 = f"{AUTO}\nscheduler: {{vcpu: {{{SHARE}}}, vhost: {{{SHARE}}}}}"
    settled(host, ask(vr1=vr1))
    vr2 = f"cpus: {{vcpu: {host.kernel.mask(1021)}, vhost: 7}}\nscheduler: {{vhost: {{{BUDGETS}}}}}"
    plan = host.plan(ask(vr1=vr1, vr2=vr2))
    assert ([r.guest for r in plan.refusals], plan.actions) == (["vr2"], ())


def test_a_napi_thread_that_may_run_everywhere_serves_no_interrupts_beside_a_partition() -> None:
    """Nor does the plan that takes the partition away expect the mask that it leaves."""
    scene = imitated().scene
    thread = NicThread(ThreadKey(700, 700, 1), "napi/p0-1", scene.host.online)
    queues = (NicQueue("rx-0", CpuSet()),)
    threaded = nic("p0", "0", threaded_napi=True, queues=queues, napi=(thread,))
    host = ImitatedHost(replace(scene, host=replace(scene.host, nics=(threaded, nic("p1", "0")))))
    settled(host, ask(vr1=budget_on("1"), vr2="cpus: {vcpu: 2}"))
    assert host.kernel.mask(700) == "0,2-7"
    settled(host, ask(vr1="cpus: {irq: 0, vcpu: 1}\nirq: {set: true}", vr2="cpus: {vcpu: 2}"))
    assert (host.kernel.mask(700), host.kernel.sched_attr(1001)) == ("0", Sched())


def test_threads_that_take_the_name_of_a_nic_have_nothing_released() -> None:
    """Any user can make a device of that name in a network namespace of his own."""
    scene = imitated().scene
    thread = NicThread(ThreadKey(700, 700, 1), "napi/p0-8193", scene.host.online)
    p0 = nic("p0", "0", threaded_napi=True, queues=(NicQueue("rx-0", CpuSet()),), napi=(thread,))
    host = ImitatedHost(replace(scene, host=replace(scene.host, nics=(p0, nic("p1", "0")))))
    policies = ask(vr1="cpus: {irq: 0, vcpu: 1}\nirq: {set: true}")
    settle(host, policies)
    assert host.kernel.mask(700) == "0"
    both = replace(p0, napi=(thread, replace(thread, key=ThreadKey(701, 701, 2))))
    host.scene = replace(scene, host=replace(scene.host, nics=(both, nic("p1", "0"))))
    host.kernel.state["threads"]["701"] = host.kernel.state["threads"]["700"] | {"pid": 701}
    assert host.plan(policies).actions == ()


# -- a slice that is a root domain


def floating(*, kernel: str = "6.1", **texts: str) -> ImitatedHost:
    """A host whose guests float in machine.slice, which is a root domain; no pass is left."""
    host = imitated(kernel=kernel)
    assert settle(host, ask(**texts), loose=True).actions == ()
    assert host.loose
    return host


WRONG = "cpus: {vcpu: 99}"


def test_a_guest_beside_the_slice_of_a_refused_one_is_planned_for_in_it() -> None:
    host = floating(vr1=budget_on("1"), vr2="cpus: {vcpu: 2}")
    policies = ask(
        vr1=WRONG, vr2=f"cpus: {{vcpu: auto, vhost: auto}}\nscheduler: {{vhost: {{{FIFO}}}}}"
    )
    plan = host.plan(policies)
    assert ([r.guest for r in plan.refusals], host.apply(plan).failed) == (["vr1"], ())
    assert {host.kernel.mask(tid) for tid in (2001, 2021, 2022)} <= {"1", "2"}
    assert (host.kernel.mask(1001), host.kernel.sched_attr(1001)) == ("1-2", budget(2, 10))
    assert host.plan(policies).actions == ()


def test_no_guest_leaves_the_slice_of_a_refused_one() -> None:
    host = floating(vr1=budget_on("1"), vr2="cpus: {vcpu: 2}")
    for text in ("cpus: {vcpu: 3}", budget_on("3")):
        plan = host.plan(ask(vr1=WRONG, vr2=text))
        assert ([r.guest for r in plan.refusals], plan.actions) == (["vr1", "vr2"], ())
        told = plan.refusals[1].reason
        assert "machine.slice stays a root domain" in told
        assert "leaves CPUs 1-2 to vcpu 0" in told


def test_a_budget_beside_those_of_a_refused_guest_floats_with_them() -> None:
    host = floating(vr1=budget_on("1"), vr2="cpus: {vcpu: 2}")
    policies = ask(vr1=WRONG, vr2=budget_on("2"))
    plan = host.plan(policies)
    assert ([r.guest for r in plan.refusals], host.apply(plan).failed) == (["vr1"], ())
    assert (host.kernel.mask(2001), host.kernel.sched_attr(2001)) == ("1-2", budget(2, 10))
    assert host.plan(policies).actions == ()


def test_a_budget_that_those_of_a_refused_guest_leave_no_room_for_is_refused() -> None:
    most = f"scheduler: {{vcpu: {{{BUDGETS}}}}}"
    host = floating(vr1=f"cpus: {{vcpu: 1}}\n{most}")
    plan = host.plan(ask(vr1=WRONG, vr2=f"cpus: {{vcpu: 1}}\n{most}"))
    assert ([r.guest for r in plan.refusals], plan.actions) == (["vr1", "vr2"], ())
    assert "remains beside vr1 vcpu 0 (80 %)" in plan.refusals[1].reason


def test_a_thread_leaves_class_deadline_before_it_gets_another_in_the_slice() -> None:
    host = floating(vr1=budget_on("1"), vr2=budget_on("2"))
    plan = host.plan(ask(vr1=WRONG, vr2=f"cpus: {{vcpu: 2}}\nscheduler: {{vcpu: {{{FIFO}}}}}"))
    assert [r.guest for r in plan.refusals] == ["vr1"]
    assert kinds(plan) == [("thread-sched", True), ("vcpu-pin", False), ("thread-sched", False)]
    assert host.apply(plan).failed == ()


def test_pins_in_the_slice_of_a_refused_guest_wait_until_the_slice_goes() -> None:
    host = floating(vr1=budget_on("1"), vr2=budget_on("2"))
    plan = host.plan(ask(vr1=WRONG))
    assert (kinds(plan), host.apply(plan).failed) == ([("thread-sched", True)], ())
    assert host.plan(ask(vr1=WRONG)).actions == ()
    assert host.undo().failed == ()
    assert {host.kernel.mask(tid) for tid in (1001, 2001)} == {"0-7"}


@pytest.mark.parametrize("kernel", ["6.1", "6.12"])
def test_a_list_outside_the_slice_makes_it_anew(kernel: str) -> None:
    host = floating(kernel=kernel, vr1=budget_on("1"), vr2=budget_on("1"))
    settled(host, ask(vr1=budget_on("1"), vr2="cpus: {vcpu: 3}"))
    assert (host.kernel.mask(2001), host.kernel.sched_attr(2001)) == ("3", Sched())
    assert host.kernel.sched_attr(1001) == budget(2, 10)
    assert host.undo().failed == ()
    assert {host.kernel.mask(tid) for tid in (1001, 2001)} == {"0-7"}


def test_a_shared_device_keeps_its_thread_for_the_guest_that_still_asks() -> None:
    host = ImitatedHost(read(PLANS / "napi-shared-device.yaml").snapshot)
    threaded = "napi: {threaded: true}"
    settle(host, ask(vr1=threaded, vr2=threaded))
    plan = host.plan(ask(vr1="queue: {macvtap: 50}", vr2=threaded))
    assert [k for k in kinds(plan) if k[0] == "napi-threaded"] == []


AUTO = "cpus: {vcpu: auto, vhost: auto}"
FLOATS = f"{AUTO}\nscheduler: {{vcpu: {{{SHARE}}}}}"


def test_a_budget_that_floats_drives_nobody_from_its_root_domain() -> None:
    """It gives way within it, so the domain does not grow after those who would leave, in every
    pass."""
    host = imitated(cpus=12, kernel="6.1")
    policies = ask(vr1=AUTO, vr2=FLOATS)
    settle(host, ask(vr2=f"{AUTO}\nscheduler: {{vcpu: {{{FIFO}}}}}"))
    assert host.apply(host.plan(policies)).failed == ()
    assert host.plan(policies).actions == ()


def test_workers_keep_their_cpus_when_their_root_domain_is_made_anew() -> None:
    """The executor gives them the masks back that kernels before 6.2 forget."""
    host = imitated(cpus=12, kernel="6.1")
    settle(host, ask(vr1=AUTO, vr2=FLOATS))
    masks = {tid: host.kernel.mask(tid) for tid in (1021, 1022, 2021, 2022)}
    assert all(len(CpuSet.parse(mask)) == 1 for mask in masks.values())
    policies = ask(vr1="cpus: {vcpu: 11, vhost: auto}", vr2=FLOATS)
    assert host.apply(host.plan(policies)).failed == ()
    assert {tid: host.kernel.mask(tid) for tid in masks} == masks
    assert host.plan(policies).actions == ()


def test_a_thread_leaves_its_realtime_class_before_it_gets_the_cpus_to_float_on() -> None:
    host = imitated(cpus=12, kernel="6.1")
    settle(host, ask(vr2=f"{AUTO}\nscheduler: {{vcpu: {{{FIFO}}}}}"))
    at = host.kernel.mask(2001)
    seen: list[tuple[str, SchedClass]] = []
    host.kernel.behind = lambda _: seen.append(
        (host.kernel.mask(2001), host.kernel.sched_attr(2001).cls)
    )
    assert host.apply(host.plan(ask(vr1=AUTO, vr2=FLOATS))).failed == ()
    assert host.kernel.sched_attr(2001).cls is SchedClass.DEADLINE
    assert {mask for mask, cls in seen if cls is SchedClass.FIFO} <= {at}


def test_undo_gives_back_masks_that_changed_beside_a_floating_budget() -> None:
    """What a thread had when the list of the slice was written is older than what it got since."""
    host = imitated(kernel="6.1")
    one, other = (
        "cpus: {vhost: {macvtap10: 2, macvtap11: 3}}",
        "cpus: {vhost: {macvtap10: 3, macvtap11: 2}}",
    )
    settle(host, ask(vr1=one, vr2=FLOATS))
    plan = host.plan(ask(vr1=other, vr2=FLOATS))
    assert kinds(plan)[:2] == [("thread-affinity", False)] * 2
    assert host.apply(plan).failed == ()
    result = host.undo()
    assert (result.failed, result.left) == ((), ())
    assert {host.kernel.mask(tid) for tid in (1021, 1022, 2021, 2022)} == {"0-7"}


def test_a_budget_that_waits_for_its_thread_to_run_keeps_its_root_domain() -> None:
    """It floats already; a vcpu that has last run outside cannot have the class yet."""
    host = imitated(kernel="6.1")
    policies = ask(vr1=WRONG, vr2=FLOATS)
    settle(host, policies)
    assert host.kernel.sched_attr(2001) == Sched()
    assert kinds(host.plan(policies)) == [("thread-sched", False)]


@pytest.mark.parametrize("given", ["3", "2-3"])
def test_a_realtime_thread_that_loses_its_cpu_leaves_its_class_though_its_guest_is_refused(
    given: str,
) -> None:
    """The kernel lets a thread without a CPU run on all of its cpuset."""
    host = imitated(cpus=4)
    policies = ask(vr1=f"cpus: {{vcpu: {given}}}\nscheduler: {{vcpu: {{{FIFO}}}}}")
    settle(host, policies)
    on = CpuSet(range(3))
    left = CpuSet.parse(given) & on
    seen = host.observed()
    cpus = tuple(replace(c, online=c.id in on) for c in seen.host.cpus)
    threads = tuple(
        replace(t, affinity=t.affinity & on or on, cpuset_effective=on)
        for t in seen.guests[0].threads
    )
    guests = (replace(seen.guests[0], threads=threads), *seen.guests[1:])
    plan = full_plan(
        replace(seen, host=replace(seen.host, cpus=cpus), guests=guests), policies, host.entries()
    )
    (refusal,) = plan.refusals
    assert "CPU 3 is offline" in refusal.reason
    told = [(a.target.kind, str(a.after), a.reason) for a in plan.actions]
    why = "it has all CPUs of its cpuset, or one that it was given is offline or out of its cpuset"
    assert told == ([] if left else [("thread-sched", "other", why)])
    assert all(a.release for a in plan.actions)


@pytest.mark.parametrize(("kernel", "left"), [("6.12", "0-1"), ("6.1", "0-1"), ("6.1", "0-2")])
def test_realtime_threads_whose_cpus_leave_the_slice_leave_their_class(
    kernel: str, left: str
) -> None:
    """The kernel lets them run on all that the slice has, also where interrupts are served. 6.1
    does so with the workers even if it has kept their CPU."""
    host = imitated(cpus=4, kernel=kernel)
    both = f"{{vcpu: {{{FIFO}}}, vhost: {{{FIFO}}}}}"
    policies = ask(vr1=f"cpus: {{vcpu: 3, vhost: 2}}\nscheduler: {both}")
    settle(host, policies)
    host.kernel.write("/sys/fs/cgroup/machine.slice/cpuset.cpus", left)
    plan = host.plan(policies)
    assert f"allows CPUs {left} only" in plan.refusals[0].reason
    assert {(a.target.kind, str(a.after)) for a in plan.actions} == {("thread-sched", "other")}
    host.apply(plan)
    assert {host.kernel.sched_attr(tid) for tid in (1001, 1021, 1022)} == {Sched()}
    assert host.plan(policies).actions == ()


def test_a_pin_of_somebody_elses_costs_a_refused_guest_no_class() -> None:
    host = imitated(cpus=4)
    policies = ask(vr1=f"cpus: {{vcpu: 3}}\nscheduler: {{vcpu: {{{FIFO}}}}}")
    settle(host, policies)
    (vcpu,) = host.observed().guests[0].by_role(Role.VCPU)
    host.kernel.state["threads"][str(vcpu.key.tid)]["mask"] = "2"
    plan = host.plan(ask(vr1=f"cpus: {{vcpu: 7}}\nscheduler: {{vcpu: {{{FIFO}}}}}"))
    assert (len(plan.refusals), plan.actions) == (1, ())
