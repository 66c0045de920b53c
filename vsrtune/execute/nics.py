# SPDX-License-Identifier: GPL-2.0-or-later
"""Reads and writes the settings of network devices: files in sysfs, and CPUs of interrupts.

An interrupt is the right one if its number is still its driver's: /sys/kernel/irq/N/actions names
who has requested it. While a device is down nobody has requested it, and the kernel keeps the
number and its affinity for the device.
"""

from __future__ import annotations

import errno

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import FixedError, VanishedError, WriteError
from vsrtune.execute.errno_table import Operation, told, write_error
from vsrtune.execute.syscalls import LiveCalls
from vsrtune.execute.threads import CPUS
from vsrtune.host.filesystem import HostRoot
from vsrtune.host.interrupts import joined
from vsrtune.model.targets import DeviceNumber, DeviceTarget, IrqAffinity

_NET = "/sys/class/net"
# The errnos for interrupts that the kernel manages itself.
_MANAGED = (errno.EIO, errno.EPERM)
# Operations by the file that they write.
_OPERATIONS = {operation.value.removeprefix("write to "): operation for operation in Operation}


class NicWrites:
    """Interrupts and files of devices. Methods raise OSError unless they state otherwise."""

    def __init__(self, root: HostRoot, calls: LiveCalls) -> None:
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
        self._check(str(target), cpus, empty=False)
        try:
            self._calls.write(path, str(cpus))
        except OSError as error:
            wrong = write_error(Operation.IRQ, error, str(target), str(cpus))
            if error.errno in _MANAGED:
                wrong = FixedError(wrong.what, where=wrong.where, hint=wrong.hint)
            raise wrong from error

    def read(self, target: DeviceTarget) -> int | CpuSet:
        """The value in a file of a device. Raises VanishedError."""
        path = self._file(target)
        if isinstance(target, DeviceNumber):
            return int(self._root.read(path))
        try:
            return CpuSet.from_mask(self._root.read(path))
        except FileNotFoundError:
            raise VanishedError("the device has no such queue now", where=str(target)) from None

    def write(self, target: DeviceTarget, value: int | CpuSet) -> None:
        """Write the value to a file of a device; no CPUs switch RPS or XPS off. Raises
        VanishedError, WriteError."""
        path = self._file(target)
        if isinstance(value, CpuSet):
            self._check(str(target), value, empty=True)
        text = value.to_mask() if isinstance(value, CpuSet) else str(value)
        operation = _OPERATIONS.get(path.rpartition("/")[2], Operation.DEVICE)
        with told(operation, str(target), str(value)):
            self._calls.write(path, text)

    def _file(self, target: DeviceTarget) -> str:
        """The path of the file; the device may have been renamed."""
        names = [target.device]
        names += [n for n in self._root.listdir(_NET) if n != target.device]
        for name in names:
            try:
                if int(self._root.read(f"{_NET}/{name}/ifindex")) == target.ifindex:
                    return f"{_NET}/{name}/{target.path}"
            except OSError:
                continue
        raise VanishedError(f"no device has ifindex {target.ifindex} now", where=str(target))

    def _irq(self, target: IrqAffinity) -> str:
        try:
            actions = joined(self._root.read(f"/sys/kernel/irq/{target.irq}/actions"))
        except FileNotFoundError:
            raise VanishedError("the interrupt is gone", where=str(target)) from None
        if actions and actions != target.name:
            raise VanishedError(f"the number is that of {actions} now", where=str(target))
        return f"/proc/irq/{target.irq}/smp_affinity_list"

    def _check(self, where: str, cpus: CpuSet, *, empty: bool) -> None:
        possible = CpuSet.parse(self._root.read(f"{CPUS}/possible"))
        wrong = ""
        if not cpus <= possible:
            wrong = f"CPU {cpus - possible} does not exist on this host"
        elif not empty and not cpus & CpuSet.parse(self._root.read(f"{CPUS}/online")):
            wrong = f"none of CPUs {cpus or 'none'} is online"
        if wrong:
            hint = f"choose from CPUs {possible} that are online"
            raise WriteError(f"not written: {wrong}", where=where, hint=hint)
