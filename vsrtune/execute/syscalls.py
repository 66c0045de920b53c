# SPDX-License-Identifier: GPL-2.0-or-later
"""The primitive calls with which host_writer changes a host, one kernel or libvirt call each.

They are separate from host_writer so that tests can run its rules against an imitated kernel, and
fail or kill it at every call.
"""

from __future__ import annotations

import os
from typing import Protocol

from vsrtune.core.cpuset import CpuSet
from vsrtune.execute.libvirt_pins import LibvirtPins
from vsrtune.host.scheduler import sched_setattr
from vsrtune.model.guest import Sched


class HostCalls(Protocol):
    """Paths are absolute as on the host. Methods raise the OSError of the system call; the pins
    raise WriteError and VanishedError, because libvirt has no errno."""

    def write(self, path: str, text: str) -> None:
        """Write a line to a file that exists."""
        ...

    def mkdir(self, path: str) -> None:
        """Make one directory."""
        ...

    def rmdir(self, path: str) -> None:
        """Remove one directory."""
        ...

    def set_affinity(self, tid: int, cpus: CpuSet) -> None:
        """``sched_setaffinity``."""
        ...

    def set_sched(self, tid: int, sched: Sched) -> None:
        """``sched_setattr``."""
        ...

    def pin_vcpu(self, uuid: str, vcpu: int, cpus: CpuSet, was: CpuSet | None = None) -> None:
        """``virDomainPinVcpuFlags(LIVE)``. ``was``: the pin that undo restores, which is
        noted in the domain; empty when there was none, None when only the domain knows."""
        ...

    def pin_emulator(self, uuid: str, cpus: CpuSet, was: CpuSet | None = None) -> None:
        """``virDomainPinEmulator(LIVE)``. ``was`` as for ``pin_vcpu``."""
        ...


class LiveCalls:
    """HostCalls on this machine."""

    def __init__(self, libvirt_uri: str = "qemu:///system") -> None:
        self._pins = LibvirtPins(libvirt_uri)

    def write(self, path: str, text: str) -> None:
        # Without O_CREAT and O_TRUNC: these files are the kernel's, and a missing one must be an
        # error. Without the newline an empty value would be no write at all.
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, f"{text}\n".encode())
        finally:
            os.close(fd)

    def mkdir(self, path: str) -> None:
        os.mkdir(path, 0o755)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def set_affinity(self, tid: int, cpus: CpuSet) -> None:
        os.sched_setaffinity(tid, cpus)

    def set_sched(self, tid: int, sched: Sched) -> None:
        sched_setattr(tid, sched)

    def pin_vcpu(self, uuid: str, vcpu: int, cpus: CpuSet, was: CpuSet | None = None) -> None:
        self._pins.pin_vcpu(uuid, vcpu, cpus, was)

    def pin_emulator(self, uuid: str, cpus: CpuSet, was: CpuSet | None = None) -> None:
        self._pins.pin_emulator(uuid, cpus, was)
