# SPDX-License-Identifier: GPL-2.0-or-later
"""The settings that a snapshot shows: their targets, their present values, and lower devices after
a change of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import Guest, Interface, Irq, Thread
from vsrtune.model.host import Host, Nic, NicQueue, NicThread, SoftirqThread, rps_cpus
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import (
    HOST_REF,
    CgroupDir,
    CgroupTarget,
    CpusetList,
    DeviceNumber,
    IrqAffinity,
    Partition,
    PartitionState,
    QueueCpus,
    RealtimeLimit,
    RrTimeslice,
    RunTime,
    Target,
    ThreadAffinity,
    ThreadCgroup,
    ThreadlessTarget,
    ThreadSched,
    TimeSlice,
    Value,
)


def irq_target(irq: Irq, ref: str = HOST_REF) -> IrqAffinity:
    """The CPUs of an interrupt: of a lower device, or of one that the guest ``ref`` drives."""
    return IrqAffinity(ref, irq.number, irq.name)


def queue_target(nic: Nic, queue: NicQueue) -> QueueCpus:
    """The RPS or XPS CPUs of a queue."""
    return QueueCpus(HOST_REF, nic.name, nic.ifindex, queue.name)


def thread_target(thread: NicThread) -> ThreadAffinity:
    """The CPUs of a NAPI thread."""
    return ThreadAffinity(HOST_REF, thread.key, thread.name)


def softirq_target(thread: SoftirqThread) -> ThreadSched:
    """The scheduling of one ksoftirqd thread."""
    return ThreadSched(HOST_REF, thread.key, f"ksoftirqd/{thread.cpu}")


def changed(nic: Nic, target: Target, cpus: CpuSet) -> Nic:
    """The device after a change of one of its settings; unchanged when it does not have the
    setting."""
    match target:
        case IrqAffinity():
            irqs = tuple(_moved(i, cpus) if irq_target(i) == target else i for i in nic.irqs)
            return replace(nic, irqs=irqs)
        case QueueCpus(ifindex=nic.ifindex, queue=name):
            queues = tuple(replace(q, cpus=cpus) if q.name == name else q for q in nic.queues)
            return replace(nic, queues=queues, rps_cpus=rps_cpus(queues))
        case ThreadAffinity(thread=key):
            napi = tuple(replace(t, affinity=cpus) if t.key == key else t for t in nic.napi)
            return replace(nic, napi=napi)
    return nic


def passed_changed(guest: Guest, target: IrqAffinity, cpus: CpuSet) -> Guest:
    """The guest after a change of an interrupt of the devices that it drives itself."""

    def after(irq: Irq) -> Irq:
        return _moved(irq, cpus) if irq_target(irq, guest.ref) == target else irq

    passed = (replace(device, irqs=tuple(map(after, device.irqs))) for device in guest.passed)
    return replace(guest, passed=tuple(passed))


def _moved(irq: Irq, cpus: CpuSet) -> Irq:
    """The kernel leaves an interrupt on its CPU when the new mask has that CPU; otherwise it takes
    one of the mask."""
    return replace(irq, affinity=cpus, effective=irq.effective & cpus or CpuSet([cpus.first()]))


def _of_host(host: Host) -> Iterator[tuple[Target, Value]]:
    """The settings of the host with their values, without cgroups and numbers of devices."""
    for nic in host.nics:
        yield from ((irq_target(i), i.affinity) for i in nic.irqs)
        yield from ((queue_target(nic, q), q.cpus) for q in nic.queues if q.cpus is not None)
        yield from ((thread_target(t), t.affinity) for t in nic.napi)
    yield from ((softirq_target(t), t.sched) for t in host.softirq)
    if host.rr_timeslice_ms is not None:
        yield RrTimeslice(HOST_REF), TimeSlice(host.rr_timeslice_ms)
    yield RealtimeLimit(HOST_REF), RunTime(host.sched_rt_runtime_us)


def _passed(guests: Iterable[Guest]) -> Iterator[tuple[Target, Value]]:
    """The interrupts of devices that guests drive themselves, with their CPUs."""
    for guest in guests:
        for device in guest.passed:
            yield from ((irq_target(i, guest.ref), i.affinity) for i in device.irqs)


class PresentValues:
    """The present values of a snapshot's settings."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._host = snapshot.host
        self._others = {**dict(_of_host(snapshot.host)), **dict(_passed(snapshot.guests))}
        self._threads = {t.key: t for g in snapshot.guests for t in g.threads}
        # Guests that share a device may have been observed at different times.
        self._own = {(g.ref, i.ifindex): i for g in snapshot.guests for i in g.interfaces}
        self._interfaces = {i.ifindex: i for g in snapshot.guests for i in g.interfaces}

    def value(self, target: Target) -> Value | None:
        """The present value; the CPUs for a pin. None: the snapshot does not tell."""
        thread = self.thread(target)
        if thread is not None:
            if isinstance(target, ThreadSched):
                return thread.sched
            return thread.cgroup if isinstance(target, ThreadCgroup) else thread.affinity
        if isinstance(target, DeviceNumber):
            device = self._device(target)
            return None if device is None else target.observed(device)
        if isinstance(target, CgroupTarget):
            return self._of_cgroup(target)
        return self._others.get(target)

    def shows(self, target: Target) -> bool:
        """Whether the snapshot has the thread, device, queue or interrupt. False for cgroups: it
        has only some."""
        if isinstance(target, DeviceNumber):
            return self._device(target) is not None
        return not isinstance(target, CgroupTarget) and self.value(target) is not None

    def thread(self, target: Target) -> Thread | None:
        """The guest's thread of which ``target`` is a setting; None when there is none."""
        return None if isinstance(target, ThreadlessTarget) else self._threads.get(target.thread)

    def _device(self, target: DeviceNumber) -> Interface | None:
        own = self._own.get((target.guest, target.ifindex))
        return own or self._interfaces.get(target.ifindex)

    def _of_cgroup(self, target: CgroupTarget) -> Value | None:
        group = self._host.cpuset(target.path)
        if group is None or isinstance(target, CgroupDir):
            return None
        if isinstance(target, Partition):
            return PartitionState(group.partition)
        own = group.cpus if target.file == "cpuset.cpus" else group.exclusive
        return None if own is None else CpusetList(own)
