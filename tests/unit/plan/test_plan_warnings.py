"""Warnings about a host as a plan would leave it, and what is none. tests/plans has their texts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning_samples import budget, change, change_one, cpus, host, router, snapshot

from vsrtune.model.guest import Guest, Role, Sched, SchedClass
from vsrtune.plan import kernel_threads
from vsrtune.plan.safety.standstill import standstills
from vsrtune.plan.warnings import warnings

OTHER, RR_9, RR_10 = Sched(), Sched(SchedClass.RR, 9), Sched(SchedClass.RR, 10)
DEADLINE = budget(2, 10)


def test_a_fifo_vcpu_that_shares_its_cpu_is_warned_of() -> None:
    both = {"affinity": cpus("1"), "sched": Sched(SchedClass.FIFO, priority=10)}
    guest = change(router(vcpus=2), Role.VCPU, **both)
    left = snapshot(guest)
    found = warnings(left, {"vr1"}, cpus("0"), standstills(left, {"vr1"}))
    assert any("keeps vcpu 1 of vr1 from running" in text for text in found)


def placed(
    vcpu: tuple[str, Sched],
    vhost: tuple[str, Sched] = ("3", OTHER),
    emulator: str = "0-3",
    guest: str = "vr1",
) -> Guest:
    """A guest whose vcpu (tid 1001), workers (1021, 1022) and emulator have these CPUs and
    classes."""
    made = router(guest, 1000 if guest == "vr1" else 2000)
    made = change(made, Role.EMULATOR, affinity=cpus(emulator))
    made = change(made, Role.VCPU, affinity=cpus(vcpu[0]), sched=vcpu[1])
    return change(made, Role.VHOST, affinity=cpus(vhost[0]), sched=vhost[1])


def apart(vcpu: tuple[str, Sched], sched: Sched) -> Guest:
    """A guest whose workers are on CPUs 1 and 2."""
    return change_one(placed(vcpu, ("1", sched)), 1022, affinity=cpus("2"))


ONE_VCPU = placed(("1", RR_10))
CASES: dict[str, tuple[list[Guest], list[str]]] = {
    "equals": ([placed(("1", RR_10), ("1", RR_10))], []),
    "vhost above": (
        [placed(("1", RR_9), ("1", RR_10))], ["vr1: vhost stands above vcpu on CPU 1"],
    ),
    "vcpu above": ([placed(("1", RR_10), ("1", RR_9))], ["vr1: vcpu stands above vhost on CPU 1"]),
    "above elsewhere": ([placed(("1", RR_9), ("2", RR_10))], []),
    "above on one of two CPUs": ([placed(("1-2", RR_9), ("1", RR_10))], []),
    "above on both": ([apart(("1-2", RR_9), RR_10)], ["vr1: vhost stands above vcpu on CPU 1-2"]),
    "a budget below": ([placed(("1", DEADLINE), ("1", RR_10))], []),
    "budgets": ([placed(("1", DEADLINE), ("1", DEADLINE))], []),
    "an emulator beside": (
        [placed(("1", RR_10), emulator="1")], ["vr1: the emulator runs on CPU 1 only"],
    ),
    "an emulator with a CPU more": ([placed(("1", RR_10), emulator="1-2")], []),
    "an emulator beside two": (
        [apart(("0", OTHER), RR_10)],
        [],
    ),
    "an emulator on the CPUs of two": (
        [change(apart(("3", OTHER), RR_10), Role.EMULATOR, affinity=cpus("1-2"))],
        ["vr1: the emulator runs on CPU 1-2 only"],
    ),
    "an emulator beside one that roams": ([placed(("1-2", RR_10), emulator="1")], []),
    "an emulator beside the ordinary class": ([placed(("1", OTHER), emulator="1")], []),
    "on an interrupt CPU": (
        [placed(("0-1", RR_10))], ["vr1: vcpu 0 is rr:10 and may run on interrupt CPU 0,"],
    ),
    "on an interrupt CPU in the ordinary class": ([placed(("0-1", OTHER))], []),
    "guests at unequal priorities": (
        [ONE_VCPU, placed(("1", RR_9), guest="vr2")],
        ["CPU 1 is shared by vr1, vr2 at unequal priorities"],
    ),
    "guests at equal priorities": ([ONE_VCPU, placed(("1", RR_10), guest="vr2")], []),
    "guests of which one roams": ([ONE_VCPU, placed(("1-2", RR_9), guest="vr2")], []),
    "guests of which one has a budget": ([ONE_VCPU, placed(("1", DEADLINE), guest="vr2")], []),
    "guests on CPUs of their own": (
        [ONE_VCPU, placed(("2", RR_9), guest="vr2")],
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_warned_of(case: str) -> None:
    guests, expected = CASES[case]
    found = warnings(snapshot(*guests), {g.ref for g in guests}, cpus("0"), ())
    assert len(found) == len(expected), found
    assert [t for t, start in zip(found, expected, strict=True) if not t.startswith(start)] == []


def test_guests_without_a_policy_are_not_warned_of() -> None:
    guests = [placed(("0-1", RR_9), ("0-1", RR_10)), placed(("1", RR_9), ("1", RR_10), guest="vr2")]
    assert warnings(snapshot(*guests), set(), cpus("0"), ()) == ()
    assert (
        kernel_threads.warnings(snapshot(*guests, on=host(softirq={1: OTHER})), frozenset()) == []
    )


@pytest.mark.parametrize(
    ("runtime", "sched", "count"), [(-1, RR_9, 1), (-1, DEADLINE, 1), (-1, OTHER, 0), (1, RR_9, 0)]
)
def test_throttling_that_is_off(runtime: int, sched: Sched, count: int) -> None:
    left = snapshot(placed(("1", sched)), on=host(rt_runtime=runtime))
    found = warnings(left, {"vr1"}, cpus("0"), ())
    assert [text.startswith("realtime throttling is off") for text in found] == [True] * count


@pytest.mark.parametrize(
    ("vcpu", "vhost", "where", "warned"),
    [
        ((0.7, 0.7, 0.7), (0.5, 0.5, 0.5), "1", False),  # a fifth more than there is
        ((0.7, 0.7, 0.7), (0.6, 0.6, 0.6), "1", True),
        ((0.0, 0.7, 0.7, 0.7), (0.0, 0.6, 0.6, 0.6), "1", True),
        ((0.7, 0.7, 0.7), (0.6, 0.6, 0.5), "1", False),
        ((0.7, 0.7, 0.7), (0.5, 0.6, 0.6), "1", False),
        ((0.7, 0.7), (0.6, 0.6), "1", False),
        ((0.7, 0.7, 0.7), (0.6, 0.6, 0.6), "1-2", False),
        ((0.7, 0.7, 0.7), (0.6, 0.6, 0.6), "2", False),
    ],
)
def test_a_cpu_that_is_overcommitted(
    vcpu: tuple[float, ...], vhost: tuple[float, ...], where: str, warned: bool
) -> None:
    guest = change_one(placed(("1", OTHER), ("3", OTHER)), 1001, load=vcpu)
    left = snapshot(change_one(guest, 1021, load=vhost, affinity=cpus(where)))
    text = "CPU 1 is overcommitted: vr1 vcpu 0, vr1 vhost macvtap10/0 together ask"
    found = warnings(left, {"vr1"}, cpus("0"), ())
    assert [t.startswith(text) for t in found] == [True] * warned
    assert warnings(left, {"vr2"}, cpus("0"), ()) == ()


@pytest.mark.parametrize(
    ("vcpu", "softirq", "cpu"),
    [
        (("1", RR_10), OTHER, 1),
        (("1", RR_10), RR_9, 1),
        (("1", RR_10), RR_10, None),
        (("1", OTHER), OTHER, None),
        (("1-2", RR_10), OTHER, None),
        (("3", RR_10), OTHER, None),  # of which no ksoftirqd is known
    ],
)
def test_ksoftirqd_below_a_realtime_thread(
    vcpu: tuple[str, Sched], softirq: Sched, cpu: int | None
) -> None:
    left = snapshot(placed(vcpu, ("2", OTHER)), on=host(softirq={1: softirq, 2: softirq}))
    found = kernel_threads.warnings(left, {"vr1"})
    assert [text.partition(":")[0] for text in found] == ([] if cpu is None else [f"CPUs {cpu}"])
    assert kernel_threads.warnings(replace(left, guests=()), {"vr1"}) == []
