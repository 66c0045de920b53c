"""Writes the CPUs of a NIC's work: of its interrupts, and of RPS and XPS of its queues.

An interrupt is the right one if its number is still its driver's: /sys/kernel/irq/N/actions names
who has requested it. While a device is down nobody has requested it, and the kernel keeps the
number and its affinity for the device.
"""

from __future__ import annotations

import errno

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import FixedError, VanishedError, WriteError
from vsrtune.execute.errno_table import Operation, write_error
from vsrtune.execute.syscalls import HostCalls
from vsrtune.execute.threads import CPUS
from vsrtune.host.filesystem import HostRoot
from vsrtune.host.interrupts import joined
from vsrtune.model.targets import IrqAffinity, NicTarget, QueueCpus

_NET = "/sys/class/net"
# The errnos for interrupts that the kernel manages itself.
_MANAGED = (errno.EIO, errno.EPERM)


class NicWrites:
    """Interrupts and queues of NICs. Methods raise OSError unless they state otherwise."""

    def __init__(self, root: HostRoot, calls: HostCalls) -> None:
        self._root = root
        self._calls = calls

    def read_irq(self, target: IrqAffinity) -> CpuSet:
        """The ``smp_affinity_list`` of an interrupt. Raises VanishedError."""
        return CpuSet.parse(self._root.read(self._irq(target)))

    def write_irq(self, target: IrqAffinity, cpus: CpuSet) -> None:
        """Set ``smp_affinity_list``; an empty mask would mean the kernel's default. Raises
        VanishedError, FixedError for an interrupt that the kernel manages itself, and
        WriteError."""
        path = self._irq(target)
        self._check(target, cpus, empty=False)
        try:
            self._calls.write(path, str(cpus))
        except OSError as error:
            told = write_error(Operation.IRQ, error, str(target), str(cpus))
            if error.errno in _MANAGED:
                told = FixedError(told.what, where=told.where, hint=told.hint)
            raise told from error

    def read_queue(self, target: QueueCpus, device: str) -> CpuSet:
        """The CPUs of a queue; ``device`` is the device's present name. Raises VanishedError."""
        try:
            return CpuSet.from_mask(self._root.read(_queue(target, device)))
        except FileNotFoundError:
            raise VanishedError("the device has no such queue now", where=str(target)) from None

    def write_queue(self, target: QueueCpus, device: str, cpus: CpuSet) -> None:
        """Set the CPUs of a queue; no CPUs switch it off. Raises VanishedError, WriteError."""
        self._check(target, cpus, empty=True)
        operation = Operation.RPS if target.file == "rps_cpus" else Operation.XPS
        try:
            self._calls.write(_queue(target, device), cpus.to_mask())
        except OSError as error:
            raise write_error(operation, error, str(target), str(cpus)) from error

    def _irq(self, target: IrqAffinity) -> str:
        try:
            actions = joined(self._root.read(f"/sys/kernel/irq/{target.irq}/actions"))
        except FileNotFoundError:
            raise VanishedError("the interrupt is gone", where=str(target)) from None
        if actions and actions != target.name:
            raise VanishedError(f"the number is that of {actions} now", where=str(target))
        return f"/proc/irq/{target.irq}/smp_affinity_list"

    def _check(self, target: NicTarget, cpus: CpuSet, *, empty: bool) -> None:
        possible = CpuSet.parse(self._root.read(f"{CPUS}/possible"))
        wrong = ""
        if not cpus <= possible:
            wrong = f"CPU {cpus - possible} does not exist on this host"
        elif not empty and not cpus & CpuSet.parse(self._root.read(f"{CPUS}/online")):
            wrong = f"none of CPUs {cpus or 'none'} is online"
        if wrong:
            hint = f"choose from CPUs {possible} that are online"
            raise WriteError(f"not written: {wrong}", where=str(target), hint=hint)


def _queue(target: QueueCpus, device: str) -> str:
    return f"{_NET}/{device}/queues/{target.queue}/{target.file}"
