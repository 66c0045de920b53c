"""Which CPUs are interrupt CPUs: by a policy, on the recorded e1000e host, and by the names of
interrupts."""

from __future__ import annotations

import pytest
import recorded_hosts
from planning_samples import cpus, host, macvtap, router
from planning_samples import nic as device

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.host import Irq, Nic
from vsrtune.observe.recording import replay
from vsrtune.plan.interrupt_cpus import interrupt_cpus, irqs_of, queue_irqs
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
