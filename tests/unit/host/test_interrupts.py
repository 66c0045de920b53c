"""Interrupt names and affinities."""

from __future__ import annotations

from hosttree import HostTree

from vsrtune.core.cpuset import CpuSet
from vsrtune.host.interrupts import read_irqs
from vsrtune.model.guest import Irq


def test_irqs_of_a_card() -> None:
    tree = HostTree()
    tree.file("/proc/irq/24/smp_affinity_list", "0-2\n")
    tree.file("/proc/irq/24/effective_affinity_list", "1\n")
    tree.file("/proc/irq/25/smp_affinity_list", "2\n")
    tree.file("/proc/irq/26/smp_affinity_list", "0-2\n")
    # That of a number that no driver has requested is empty.
    for number, actions in {24: "p0-rx-0", 25: "acpi,i801 smbus", 26: "", 28: "vanished"}.items():
        tree.file(f"/sys/kernel/irq/{number}/actions", f"{actions}\n")
    assert read_irqs(tree.root(), [28, 27, 26, 25, 24]) == (
        Irq(24, "p0-rx-0", CpuSet([0, 1, 2]), CpuSet([1])),
        Irq(25, "acpi, i801 smbus", CpuSet([2]), CpuSet([2])),
    )


def test_an_interrupt_that_never_started_has_no_effective_cpu() -> None:
    tree = HostTree()
    tree.file("/sys/kernel/irq/24/actions", "p0\n")
    tree.file("/proc/irq/24/smp_affinity_list", "0-2\n")
    tree.file("/proc/irq/24/effective_affinity_list", "\n")
    assert read_irqs(tree.root(), [24])[0].effective == CpuSet()
