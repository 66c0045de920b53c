"""Which CPUs are interrupt CPUs: by a policy, on the recorded e1000e host, and by the names of
interrupts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import recorded_hosts
from planning_samples import cpus, host, macvtap, router, snapshot
from planning_samples import nic as device

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import Guest, Irq, ThreadKey
from vsrtune.model.host import Nic, NicQueue, NicThread
from vsrtune.model.stepdown import Step, StepLevel, Steps
from vsrtune.model.targets import ThreadAffinity, VcpuPin, pinned_cpus
from vsrtune.observe.recording import replay
from vsrtune.plan.full_plan import full_plan
from vsrtune.plan.interrupt_cpus import device_cpus, interrupt_cpus, irqs_of, queue_irqs
from vsrtune.policy.parser import parse

ALL = CpuSet([0, 1, 2])


def nic(*names: str) -> Nic:
    irqs = tuple(Irq(40 + n, name, ALL, CpuSet([n])) for n, name in enumerate(names))
    return Nic("eth4", 4, "driver", -1, 1000, False, CpuSet(), irqs)


def test_an_interrupt_for_link_changes_takes_no_cpu_from_the_guests() -> None:
    """On the recorded host rx is on CPU 0, tx on CPU 1 and the rest on CPU 2."""
    snapshot = replay(recorded_hosts.file("trixie-e1000e"))
    guest = snapshot.guests[0]
    choice = interrupt_cpus(snapshot.host, guest)
    assert choice.cpus == CpuSet([0, 1])
    assert choice.notes[0] == (
        f"{guest.ref}: interrupt CPUs 0-1 from p0: "
        "where its interrupts (41, 42) are served (43 carries no frames)"
    )


@pytest.mark.parametrize(
    ("names", "queues"),
    [
        (("eth4-rx-0", "eth4-tx-0", "eth4"), ("eth4-rx-0", "eth4-tx-0")),
        (("eth4",), ("eth4",)),
        (("virtio2-config", "virtio2-input.0", "virtio2-output.0"),
         ("virtio2-input.0", "virtio2-output.0")),
        (("i40e-0000:3b:00.0:misc", "i40e-eth4-TxRx-0"), ("i40e-eth4-TxRx-0",)),
        (("virtio2-config",), ("virtio2-config",)),
        (("ena-mgmnt@pci:0000:00:05.0", "eth4-Tx-Rx-0"), ("eth4-Tx-Rx-0",)),
        (("mlx5_async0@pci:0000:01:00.0", "mlx5_comp0@pci:0000:01:00.0"),
         ("mlx5_comp0@pci:0000:01:00.0",)),
    ],
)  # fmt: skip
def test_control_interrupts_are_known_by_name(
    names: tuple[str, ...], queues: tuple[str, ...]
) -> None:
    assert tuple(irq.name for irq in queue_irqs(nic(*names))) == queues


@pytest.mark.parametrize(
    ("irq", "found"),
    [
        ("auto", {}),
        ("3", {"v5": "3", "node0": "3", "p1": "3", "p2": "3"}),
        ("{p1: 3}", {"p1": "3"}),
        ("{node1: 3}", {"node0": "3", "p1": "3"}),
        ("{node1: 2, p1: 3}", {"node0": "2", "p1": "3"}),
        ("{p1: 3, node1: 2}", {"node0": "2", "p1": "3"}),
        # The device of that name, and not p2, which is on node 0.
        ("{node0: 2, p1: 3}", {"node0": "2", "p1": "3"}),
        ("{v5: 2}", {"v5": "2"}),
        ("{node-1: 2}", {}),
    ],
)
def test_the_devices_for_which_a_policy_lists_cpus(irq: str, found: dict[str, str]) -> None:
    nodes = {"v5": -1, "node0": 1, "p1": 1, "p2": 0}
    nics = [device(name, "0", node=node) for name, node in nodes.items()]
    guest = router(interfaces=[macvtap(n, name) for n, name in enumerate(nodes)])
    policy = parse(f"guest: vr1\ncpus: {{irq: {irq}}}\nprofile: none\n", "p")
    named = irqs_of(host(nics=nics), guest, policy)
    assert {name: str(listed) for name, (_, listed) in named.items()} == found


def test_lists_and_what_the_host_shows_of_the_other_devices() -> None:
    nics = [device("p0", "0"), device("p1", "1")]
    guest = router(interfaces=[macvtap(10, "p0"), macvtap(11, "p1")])
    policy = parse("guest: vr1\ncpus:\n  irq:\n    p0: 3\nprofile: none\n", "p")
    choice = interrupt_cpus(host(nics=nics), guest, policy)
    assert choice.cpus == cpus("1,3")
    first, second = choice.notes
    assert first == "vr1: interrupt CPUs 3 of p0 from p:4"
    assert second.startswith("vr1: interrupt CPUs 1 from p1: where its interrupts")


IRQS = (Irq(40, "p0-rx-0", ALL, CpuSet([1])), Irq(41, "p0-tx-0", ALL, CpuSet([2])))
QUEUES = (NicQueue("rx-0", CpuSet()),)
NAPI = (NicThread(ThreadKey(7, 7, 7), "napi/p0-1", CpuSet([3])),)
CONFINED = {"threaded_napi": True, "queues": QUEUES, "napi": NAPI}
SERVED = "where its interrupts (40, 41) are served"
ROUTED = (
    "it has no port to a NIC, the first online CPU is taken; if the host routes frames to it, write "
    "the interrupt CPUs of the NIC where they come in (/proc/interrupts): cpus: {irq: {BRIDGE: LIST}}"
)
LATER = ", its threaded NAPI may run elsewhere"


@pytest.mark.parametrize(
    ("more", "found", "rule"),
    [
        ({"irqs": IRQS}, "1-2", SERVED),
        ({"irqs": IRQS, "rps_cpus": cpus("0")}, "0-2", f"{SERVED} and its RPS CPUs 0"),
        (
            {"irqs": IRQS, "rps_cpus": cpus("0,9"), **CONFINED}, "0-3",
            f"{SERVED} and its RPS CPUs 0 and the CPUs 3 of its NAPI threads",
        ),
        (
            {"irqs": (*IRQS, Irq(42, "p0", ALL, CpuSet([0])))}, "1-2",
            f"{SERVED} (42 carries no frames)",
        ),
        ({"rps_cpus": cpus("2")}, "2", "it has no interrupts, its RPS CPUs"),
        (
            {"rps_cpus": cpus("2"), "threaded_napi": True}, "2",
            f"it has no interrupts, its RPS CPUs{LATER}",
        ),
        (CONFINED, "3", "it has no interrupts and the CPUs 3 of its NAPI threads"),
        (
            {"rps_cpus": cpus("2"), **CONFINED}, "2-3",
            "it has no interrupts and its RPS CPUs 2 and the CPUs 3 of its NAPI threads",
        ),
        ({"rx_cpus": cpus("1,9")}, "1", "it has no interrupts, where its receive SoftIRQ was seen"),
        ({"rx_cpus": cpus("9")}, "0", "it has no interrupts, the first online CPU is taken"),
        (
            {"threaded_napi": True}, "0",
            f"it has no interrupts, the first online CPU is taken{LATER}",
        ),
        ({"driver": "bridge"}, "0", ROUTED),
        ({"driver": "", "name": "ovs-system"}, "0", ROUTED),
        ({"driver": "bridge", "rps_cpus": cpus("2")}, "2", "it has no interrupts, its RPS CPUs"),
        ({"irqs": (Irq(40, "p0", ALL, CpuSet([9])),)}, "0",
         "it has no interrupts, the first online CPU is taken"),
    ],
)  # fmt: skip
def test_the_rule_that_gave_the_cpus(more: dict[str, Any], found: str, rule: str) -> None:
    assert device_cpus(host(), replace(device("p0", None), **more)) == (cpus(found), rule)


def test_a_device_that_was_not_observed() -> None:
    rule = "the device was not observed, the first online CPU is taken"
    assert device_cpus(host(offline="0"), None) == (cpus("1"), rule)
    assert device_cpus(host(offline="0-3"), None) == (CpuSet(), rule)


NOT_PLANNED_FOR: dict[str, tuple[Guest, list[str], Steps]] = {
    "two policies name it": (router("vr2", 2000), ["", ""], {}),
    "quarrel": (router("vr2", 2000), ["irq: {set: true}\ncpus: {irq: {p0: 1, p1: 3}}"], {}),
    "wrong list": (router("vr2", 2000), ["cpus: {irq: 9}"], {}),
    "undone": (router("vr2", 2000), [""], {"vr2": Step(StepLevel.UNDONE, "x")}),
    "busy": (replace(router("vr2", 2000), busy=True), [""], {}),
    "unconfirmed": (replace(router("vr2", 2000), unconfirmed=True), [""], {}),
}


@pytest.mark.parametrize("case", NOT_PLANNED_FOR)
def test_the_interrupts_of_a_guest_that_is_not_planned_for_count_as_they_are(case: str) -> None:
    guest, texts, steps = NOT_PLANNED_FOR[case]
    policies = [parse("guest: vr1\nirq: {set: true}\ncpus: {irq: {p0: 0}}\n", "p")]
    policies += [parse(f"guest: vr2\n{text}\n", f"q{n}") for n, text in enumerate(texts)]
    seen = snapshot(
        router(interfaces=[macvtap(10), macvtap(12)]), guest, on=host(4, {"p0": "0", "p1": "3"})
    )
    made = full_plan(seen, policies, (), steps=steps)
    pinned = [
        pinned_cpus(a.after)
        for a in made.actions
        if isinstance(a.target, ThreadAffinity | VcpuPin) and a.target.guest == "vr1"
    ]
    assert {str(found) for found in pinned} == {"1", "2"}


@pytest.mark.parametrize("case", ["undone", "busy", "unconfirmed"])
@pytest.mark.parametrize(("listed", "served"), [("cpus: {irq: 0}", "3"), ("", "1-3")])
def test_a_guest_that_waits_gets_no_other_refused(case: str, listed: str, served: str) -> None:
    """Its list of interrupt CPUs counts, and its NICs do not take the last CPUs."""
    guest, _, steps = NOT_PLANNED_FOR[case]
    guest = replace(guest, interfaces=guest.interfaces[1:])
    policies = [parse("guest: vr1\ncpus: {vcpu: 3}\n", "p"), parse(f"guest: vr2\n{listed}\n", "q")]
    seen = snapshot(
        router(interfaces=[macvtap(10), macvtap(12)]), guest, on=host(4, {"p0": "0", "p1": served})
    )
    assert full_plan(seen, policies, (), steps=steps).refusals == ()
