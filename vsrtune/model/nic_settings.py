"""The settings of lower devices that vsrtune can change, as targets of the host."""

from __future__ import annotations

from dataclasses import replace

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.host import Host, Irq, Nic, NicQueue, NicThread, rps_cpus
from vsrtune.model.targets import HOST_REF, IrqAffinity, QueueCpus, Target, ThreadAffinity


def irq_target(irq: Irq) -> IrqAffinity:
    """The CPUs of an interrupt."""
    return IrqAffinity(HOST_REF, irq.number, irq.name)


def queue_target(nic: Nic, queue: NicQueue) -> QueueCpus:
    """The RPS or XPS CPUs of a queue."""
    return QueueCpus(HOST_REF, nic.name, nic.ifindex, queue.name)


def thread_target(thread: NicThread) -> ThreadAffinity:
    """The CPUs of a NAPI thread."""
    return ThreadAffinity(HOST_REF, thread.key, thread.name)


def nic_settings(host: Host) -> dict[Target, CpuSet]:
    """Every such setting of the observed lower devices, with its value."""
    found: dict[Target, CpuSet] = {}
    for nic in host.nics:
        found |= {irq_target(i): i.affinity for i in nic.irqs}
        found |= {queue_target(nic, q): q.cpus for q in nic.queues if q.cpus is not None}
        found |= {thread_target(t): t.affinity for t in nic.napi}
    return found


def changed(nic: Nic, target: Target, cpus: CpuSet) -> Nic:
    """The device after a change of one of its settings; unchanged when it does not have the
    setting."""
    match target:
        case IrqAffinity():
            irqs = tuple(_moved(i, cpus) if irq_target(i) == target else i for i in nic.irqs)
            return replace(nic, irqs=irqs)
        case QueueCpus(ifindex=nic.ifindex):
            queues = tuple(
                replace(q, cpus=cpus) if q.name == target.queue else q for q in nic.queues
            )
            return replace(nic, queues=queues, rps_cpus=rps_cpus(queues))
        case ThreadAffinity(thread=key):
            napi = tuple(replace(t, affinity=cpus) if t.key == key else t for t in nic.napi)
            return replace(nic, napi=napi)
    return nic


def _moved(irq: Irq, cpus: CpuSet) -> Irq:
    """The kernel leaves an interrupt on its CPU when the new mask has that CPU; otherwise it takes
    one of the mask."""
    return replace(irq, affinity=cpus, effective=irq.effective & cpus or CpuSet([cpus.first()]))
