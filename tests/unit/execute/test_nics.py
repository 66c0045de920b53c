"""Interrupts and queues on the imitated kernel: identity, and what is refused unwritten."""

from __future__ import annotations

import pytest
from fake_kernel import FakeKernel, make_host

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import VanishedError, WriteError
from vsrtune.model.targets import HOST_REF, IrqAffinity, QueueCpus, Target

IRQ = IrqAffinity(HOST_REF, 41, "eth0-rx-0")
RPS = QueueCpus(HOST_REF, "eth0", 2, "rx-0")
XPS = QueueCpus(HOST_REF, "eth0", 2, "tx-0")
ONE = CpuSet([1])


@pytest.fixture
def host() -> FakeKernel:
    return make_host("6.12")


def test_each_is_written_and_read_back(host: FakeKernel) -> None:
    ops = host.ops()
    for target in (IRQ, RPS, XPS):
        ops.write(target, ONE)
        assert ops.read(target) == ONE
    assert host.log == [
        "write /proc/irq/41/smp_affinity_list 1",
        "write /sys/class/net/eth0/queues/rx-0/rps_cpus 2",
        "write /sys/class/net/eth0/queues/tx-0/xps_cpus 2",
    ]


@pytest.mark.parametrize("target", [IRQ, RPS, XPS])
def test_a_cpu_that_does_not_exist_is_not_written(host: FakeKernel, target: Target) -> None:
    with pytest.raises(WriteError, match="CPU 4 does not exist"):
        host.ops().write(target, CpuSet([1, 4]))
    assert host.log == []


@pytest.mark.parametrize("cpus", [CpuSet(), CpuSet([3])])
def test_an_interrupt_gets_no_mask_without_an_online_cpu(host: FakeKernel, cpus: CpuSet) -> None:
    """An empty mask would give the interrupt the kernel's default, one that is offline is
    refused by the kernel; an original that has offline CPUs besides goes back."""
    host.state["online"] = "0-2"
    with pytest.raises(WriteError, match="is online"):
        host.ops().write(IRQ, cpus)
    assert host.log == []
    host.ops().write(IRQ, CpuSet([0, 1, 2, 3]))


def test_rps_is_switched_off_by_an_empty_mask(host: FakeKernel) -> None:
    ops = host.ops()
    ops.write(RPS, ONE)
    ops.write(RPS, CpuSet())
    assert ops.read(RPS) == CpuSet()


def test_while_the_device_is_down_its_interrupt_is_kept_for_it(host: FakeKernel) -> None:
    """Else an undo while the link is down would leave it where it was moved to."""
    host.state["irqs"]["41"]["actions"] = ""
    host.ops().write(IRQ, ONE)
    assert host.ops().read(IRQ) == ONE


def test_a_shared_interrupt_is_named_as_proc_interrupts_does(host: FakeKernel) -> None:
    host.state["irqs"]["41"]["actions"] = "eth0,usb1"
    assert host.ops().read(IrqAffinity(HOST_REF, 41, "eth0, usb1")) == CpuSet(range(4))


def test_a_queue_goes_with_its_device_or_its_number(host: FakeKernel) -> None:
    devices = host.state["devices"]
    devices["lan"] = devices.pop("eth0")
    host.ops().write(RPS, ONE)
    assert devices["lan"]["queues"]["rx-0"] == "1"
    del devices["lan"]["queues"]["rx-0"]
    with pytest.raises(VanishedError, match="no such queue"):
        host.ops().read(RPS)
    with pytest.raises(VanishedError):
        host.ops().write(RPS, ONE)
    devices["lan"]["ifindex"] = 9
    with pytest.raises(VanishedError):
        host.ops().read(XPS)
