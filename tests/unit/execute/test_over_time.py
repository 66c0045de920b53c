"""Root domains, lists and masks over time: policies that change, guests that are refused, CPUs that
go, threads that come. With the real planner and executor on imitated kernels."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_kernel import BOOT, KERNELS, LIBVIRT, OURS, UUID, FakeKernel, key, make_host
from imitated_host import ImitatedHost
from plan_bases import routers
from planning_samples import cpus, router, snapshot, with_cpusets

from vsrtune.core.cpuset import CpuSet
from vsrtune.execute.executor import apply, undo
from vsrtune.execute.journal import Journal
from vsrtune.model.guest import SchedClass
from vsrtune.model.plan import Action, Plan
from vsrtune.model.targets import (
    CgroupDir,
    CpusetFile,
    EmulatorPin,
    Partition,
    Pin,
    Target,
    ThreadAffinity,
    ThreadCgroup,
    Value,
    VcpuPin,
)
from vsrtune.plan.full_plan import full_plan
from vsrtune.policy.model import Policy, SchedRule

BUDGET = SchedRule(SchedClass.DEADLINE, 0, 2_000_000, 10_000_000, 10_000_000)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal.open(tmp_path / "journal.jsonl", BOOT) as opened:
        yield opened


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> FakeKernel:
    return make_host(request.param)


def one(kernel: FakeKernel, journal: Journal, target: Target, value: Value) -> None:
    """Carry out one action."""
    ops = kernel.ops()
    made = apply(Plan((Action(target, ops.read(target), value, "p"),)), ops, journal)
    assert made.failed == ()


def emulator(kernel: FakeKernel) -> EmulatorPin:
    return EmulatorPin("vr1", UUID, key(kernel, 1000))


def test_a_worker_born_beside_a_narrow_emulator_gets_what_that_had(
    kernel: FakeKernel, journal: Journal
) -> None:
    """The emulator's CPUs are others by the end."""
    one(kernel, journal, CgroupDir("vr1", OURS), True)
    for tid in (1020, 1021):
        one(kernel, journal, ThreadCgroup("vr1", key(kernel, tid), "w"), OURS)
    one(kernel, journal, emulator(kernel), Pin(CpuSet([0]), "0"))
    threads = kernel.state["threads"]
    born = {"start": 9030, "cgroup": f"{LIBVIRT}/emulator", "mask": "0", "user": "0"}
    threads["1030"] = copy.deepcopy(threads["1020"]) | born
    one(kernel, journal, ThreadCgroup("vr1", key(kernel, 1030), "w"), OURS)
    one(kernel, journal, ThreadAffinity("vr1", key(kernel, 1030), "w"), CpuSet([1]))
    one(kernel, journal, emulator(kernel), Pin(CpuSet([0, 3]), "0,3"))
    assert undo(kernel.ops(), journal).failed == ()
    assert kernel.mask(1030) == "0-3"
    assert journal.entries() == ()


def test_an_undo_while_the_cpu_is_offline_restores(kernel: FakeKernel, journal: Journal) -> None:
    target = VcpuPin("vr1", UUID, 1, key(kernel, 1011))
    kernel.pin(UUID, 1, CpuSet([0, 1, 2]))
    one(kernel, journal, target, Pin(CpuSet([2]), "2"))
    kernel.write("/sys/devices/system/cpu/cpu2", "0")
    made = undo(kernel.ops(), journal)
    assert (made.failed, made.left, journal.entries()) == ((), (), ())
    kernel.write("/sys/devices/system/cpu/cpu2", "1")
    assert kernel.state["cgroups"][f"{LIBVIRT}/vcpu1"]["cpus"] == "0-2"
    assert CpuSet.parse(kernel.mask(1011)) <= CpuSet([0, 1, 2])


def test_the_list_of_a_disowned_pin_is_given_back(kernel: FakeKernel, journal: Journal) -> None:
    """Somebody has moved the thread alone; the list is ours, and binds others too."""
    one(kernel, journal, emulator(kernel), Pin(CpuSet([0, 3]), "0,3"))
    kernel.state["threads"]["1000"] |= {"mask": "0", "user": "0"}
    target = emulator(kernel)
    made = apply(Plan(disowned=(target,)), kernel.ops(), journal)
    assert [left.target for left in made.left] == [target]
    assert kernel.state["cgroups"][f"{LIBVIRT}/emulator"]["cpus"] == ""
    assert kernel.mask(1000) == "0"
    assert journal.entries() == ()


def test_the_list_of_a_disowned_pin_is_the_domains_own(
    kernel: FakeKernel, journal: Journal
) -> None:
    """In which the thread cannot stay where somebody has moved it."""
    kernel.pin(UUID, None, CpuSet([0]))
    one(kernel, journal, emulator(kernel), Pin(CpuSet([0, 3]), "0,3"))
    kernel.state["threads"]["1000"] |= {"mask": "3", "user": "3"}
    made = undo(kernel.ops(), journal)
    assert made.failed == ()
    assert kernel.state["cgroups"][f"{LIBVIRT}/emulator"]["cpus"] == "0"
    assert journal.entries() == ()


def test_a_list_that_cannot_be_given_back_stays_in_the_journal(
    kernel: FakeKernel, journal: Journal
) -> None:
    one(kernel, journal, emulator(kernel), Pin(CpuSet([0, 3]), "0,3"))
    kernel.state["threads"]["1000"] |= {"mask": "0", "user": "0"}

    def refuse(what: str) -> None:
        if "libvirt" in what or "cpuset" in what:
            raise PermissionError(1, "not permitted")

    kernel.ahead = refuse
    made = apply(Plan(disowned=(emulator(kernel),)), kernel.ops(), journal)
    assert [action.target for action, _ in made.failed] == [emulator(kernel)]
    kernel.ahead = lambda _what: None
    assert [e.target for e in journal.entries()] == [emulator(kernel)]
    assert undo(kernel.ops(), journal).failed == ()
    assert kernel.state["cgroups"][f"{LIBVIRT}/emulator"]["cpus"] == ""


def test_what_an_iothread_has_is_its_own(kernel: FakeKernel, journal: Journal) -> None:
    """Also if it is what the emulator has been given."""
    kernel.state["cgroups"][f"{LIBVIRT}/iothread1"] = copy.deepcopy(
        kernel.state["cgroups"][f"{LIBVIRT}/vcpu1"]
    ) | {"cpus": "2-3"}
    own = {"start": 9040, "cgroup": f"{LIBVIRT}/iothread1", "mask": "2-3", "user": "2-3"}
    kernel.state["threads"]["1040"] = copy.deepcopy(kernel.state["threads"]["1011"]) | own
    one(kernel, journal, emulator(kernel), Pin(CpuSet([2, 3]), "2-3"))
    one(kernel, journal, ThreadAffinity("vr1", key(kernel, 1040), "iothread 1"), CpuSet([3]))
    assert undo(kernel.ops(), journal).failed == ()
    assert kernel.mask(1040) == "2-3"


# -- plans over time


def budget(name: str, vcpu: str, vhost: str = "", **more: Any) -> Policy:
    workers = {"vhost": cpus(vhost), "vhost_sched": BUDGET} if vhost else {}
    return Policy(name, name, vcpu=cpus(vcpu), vcpu_sched=BUDGET, **workers, **more)


def settled(host: ImitatedHost, policies: Sequence[Policy], refused: Sequence[str] = ()) -> None:
    """Passes until nothing is left to do; none fails."""
    for _ in range(6):
        made = host.plan(policies)
        assert sorted(r.guest for r in made.refusals) == sorted(refused), made.refusals
        if not made.actions:
            return
        assert [str(error) for _, error in host.apply(made).failed] == []
    raise AssertionError([str(a.target) for a in made.actions])


def settings(host: ImitatedHost) -> list[tuple[object, ...]]:
    """Where all threads of guests may run, and how."""
    threads = (t for guest in host.observed().guests for t in guest.threads)
    return [(t.key, t.affinity, t.sched, t.cgroup, t.cpuset_cpus) for t in threads]


def eight(kernel: str, **lists: str) -> ImitatedHost:
    """Two routers on eight CPUs; slices have ``lists``."""
    base = routers(cpus=8, cpusets=kernel, softirq=True, vcpus=1)
    groups = tuple(
        replace(g, cpus=lists[name], effective=cpus(lists[name]))
        if (name := g.path.partition(".")[0]) in lists and "/" not in g.path
        else g
        for g in base.host.cpusets
    )
    return ImitatedHost(replace(base, host=replace(base.host, cpusets=groups)))


def test_the_root_domain_of_a_refused_guest_is_not_taken_by_anothers_plan() -> None:
    host = eight("6.12")
    settled(host, (budget("vr1", "1"), budget("vr2", "2")))
    made = host.plan((budget("vr1", "9"), budget("vr2", "2")))
    assert [r.guest for r in made.refusals] == ["vr1"]
    assert [a for a in made.actions if isinstance(a.target, CpusetFile | Partition)] == []


def test_workers_join_the_cpu_of_their_vcpu_with_budgets() -> None:
    host = eight("6.12")
    before = settings(host)
    apart = Policy("vr1", "vr1", vcpu=cpus("1"), vcpu_sched=BUDGET, vhost=cpus("3"))
    settled(host, (apart,))
    settled(host, (budget("vr1", "1", "1"),))
    settled(host, ())
    assert settings(host) == before


def test_a_slice_with_a_list_beside_a_partition_settles() -> None:
    host = eight("6.1", system="0-7")
    before = settings(host)
    workers = Policy("vr1", "vr1", vhost=cpus("1"), vhost_sched=BUDGET)
    settled(host, (workers,))
    settled(host, ())
    assert settings(host) == before


def test_the_cpus_of_a_partition_that_goes_come_back_to_a_slice() -> None:
    host = eight("6.1", system="0-7")
    one_, other = (
        Policy(name, name, vhost=cpus(cpu), vhost_sched=BUDGET)
        for name, cpu in (("vr1", "1"), ("vr2", "2"))
    )
    settled(host, (one_, other))
    assert host.kernel.state["cgroups"]["system.slice"]["cpus"] == "0,3-7"
    settled(host, (other,))
    assert host.kernel.state["cgroups"]["system.slice"]["cpus"] == "0-1,3-7"
    settled(host, ())
    assert host.kernel.state["cgroups"]["system.slice"]["cpus"] == "0-7"


def test_a_guest_leaves_a_slice_that_stays_a_root_domain_for_others() -> None:
    host = ImitatedHost(
        routers(("vr1", "vr2", "vr3"), (1000, 2000, 3000), cpus=8, cpusets="6.12", softirq=True)
    )
    every = tuple(budget(f"vr{n}", "2") for n in (1, 2, 3))
    settled(host, every)
    settled(host, every[1:])
    settled(host, ())


def test_a_refused_guest_that_keeps_others_off_keeps_no_partition_alive() -> None:
    host = eight("6.12")
    off = Policy("vr2", "vr2", vcpu=cpus("2"), keep_off=True)
    settled(host, (budget("vr1", "1"), off))
    settled(host, (replace(off, vcpu=cpus("9")),), refused=("vr2",))
    assert [e.target for e in host.entries() if isinstance(e.target, Partition)] == []


def test_others_are_kept_off_a_second_time() -> None:
    """An undo leaves a list of all CPUs: none can be taken away under threads."""
    policy = Policy("p", "vr1", vcpu=cpus("2"), vhost=cpus("3"), keep_off=True)
    seen = with_cpusets(snapshot(router(), router("vm7", 2000, vcpus=2)))
    path = "machine.slice/machine-qemu-2000-x.scope/libvirt"
    groups = tuple(replace(c, cpus="0-3") if c.path == path else c for c in seen.host.cpusets)
    again = replace(seen, host=replace(seen.host, cpusets=groups))
    for found in (seen, again):
        made = full_plan(found, [policy], ())
        assert [a.after for a in made.actions if a.target.guest == "vm7"] != []


def test_a_pin_that_a_partition_has_cut_is_released() -> None:
    host = eight("6.12")
    wide = Policy("vr1", "vr1", emulator=cpus("2-3,6-7"))
    settled(host, (wide,))
    settled(host, (wide, budget("vr2", "2")), refused=("vr1",))
    settled(host, (budget("vr2", "2"),))
    assert [e.target for e in host.entries() if isinstance(e.target, EmulatorPin)] == []
