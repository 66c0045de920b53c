# SPDX-License-Identifier: GPL-2.0-or-later
"""The primitive calls with which host_writer changes a host, one kernel or libvirt call each.

They are separate from host_writer so that tests can run its rules against an imitated kernel, and
fail or kill it at every call.
"""

from __future__ import annotations

import os

from vsrtune.core.cpuset import CpuSet
from vsrtune.execute.libvirt_pins import LibvirtPins
from vsrtune.host.scheduler import sched_setattr
from vsrtune.model.guest import Sched


class LiveCalls(LibvirtPins):
    """The calls on this machine, those of ``LibvirtPins`` included. Paths are absolute. Methods
    raise the OSError of the system call; the pins raise WriteError and VanishedError, because
    libvirt has no errno."""

    def write(self, path: str, text: str) -> None:
        """Write a line to a file that exists."""
        # Without O_CREAT and O_TRUNC: these files are the kernel's, and a missing one must be an
        # error. Without the newline an empty value would be no write at all.
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, f"{text}\n".encode())
        finally:
            os.close(fd)

    def mkdir(self, path: str) -> None:
        """Make one directory."""
        os.mkdir(path, 0o755)

    def rmdir(self, path: str) -> None:
        """Remove one directory."""
        os.rmdir(path)

    def set_affinity(self, tid: int, cpus: CpuSet) -> None:
        """``sched_setaffinity``."""
        os.sched_setaffinity(tid, cpus)

    def set_sched(self, tid: int, sched: Sched) -> None:
        """``sched_setattr``."""
        sched_setattr(tid, sched)
