"""Which interrupts count for ``cpus.irq: auto``, on the recorded e1000e host and by name."""

from __future__ import annotations

import pytest
import recorded_hosts

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.host import Irq, Nic
from vsrtune.observe.recording import replay
from vsrtune.plan.interrupt_cpus import interrupt_cpus, queue_irqs

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
