# SPDX-License-Identifier: GPL-2.0-or-later
"""The primitive calls with which host_writer changes a host, one kernel or libvirt call each.

They are separate from host_writer so that tests can run its rules against an imitated kernel, and
fail or kill it at every call.

Pins of vcpus and the emulator go through libvirt, on the running domain only. Before a pin, the
domain's metadata gets the CPUs to which libvirt pinned before us (``carried``): they travel with
the pins. The connection is opened at the first pin, and opened again once if libvirtd was restarted
meanwhile. Both calls are idempotent, so the second try is safe.

libvirtd has to answer a call within a time limit before each pin, so a silent libvirtd does not
keep the pin waiting. libvirt keeps a pin waiting for up to 30 s while it has a job on the domain
that takes no changes: a live migration, a snapshot with memory, a dump. The domain runs meanwhile,
so its state does not show the job. Each pin therefore asks libvirt for such a job first, with a
time limit of its own, because a client may hold the job, and QEMU has to tell of a backup.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import (
    BusyError,
    Lasting,
    LateError,
    SilentJobError,
    VanishedError,
    VsrtuneError,
    WriteError,
)
from vsrtune.host.libvirt import Connection, library, vanished
from vsrtune.host.scheduler import sched_setattr
from vsrtune.model import domain_xml
from vsrtune.model.guest import Sched, ThreadKey

_LATER = "the daemon tries again at its next pass"
# How long libvirt may take to tell of a job.
_JOB_SECONDS = 10.0


class LibvirtPins:
    """Sets pins; holds one connection. Raises VanishedError when the domain is gone or not
    running, BusyError when libvirt takes no pins for it now (LateError when libvirt said so after
    half a minute), otherwise WriteError."""

    def __init__(self, uri: str = "qemu:///system") -> None:
        self._kept = Connection(uri, WriteError)

    def close(self) -> None:
        """Close the connection; the next pin opens a new one."""
        self._kept.close()

    def pin(
        self,
        uuid: str,
        which: domain_xml.Which,
        cpus: CpuSet,
        was: CpuSet | None = None,
        thread: ThreadKey | None = None,
    ) -> None:
        """``virDomainPinVcpuFlags(LIVE)`` of a vcpu or ``virDomainPinEmulator(LIVE)``, like ``virsh
        vcpupin --live`` and ``emulatorpin --live``. ``was``: the pin that undo restores, which is
        noted in the domain; empty when there was none, None when only the domain knows.
        ``thread``: the vcpu's or emulator's, which is noted too."""
        libvirt, live = library(), library().VIR_DOMAIN_AFFECT_LIVE
        where = f"domain {uuid} " + ("emulator" if which is None else f"vcpu {which}")
        for attempt in (1, 2):
            domain = None
            try:
                self._check_job(uuid, where)
                connection = self._kept.open()
                domain = connection.lookupByUUIDString(uuid)
                cpumap = _cpumap(connection, cpus, where)
                xml = _cputune(domain, where)
                notes = xml.ahead(which, cpus, was, thread)
                if notes != xml.notes or xml.problem:
                    _note(domain, notes)
                if which is None:
                    domain.pinEmulator(cpumap, live)
                else:
                    domain.pinVcpuFlags(which, cpumap, live)
                left = domain_xml.behind(notes, which, cpus)
                if left != notes:
                    _note(domain, left)
                return
            except libvirt.libvirtError as error:
                if not self._kept.alive():
                    self.close()
                    if attempt == 1:
                        continue
                    raise self._kept.away(error, "libvirt went away", where) from error
                raise _translate(error, where, domain) from error

    def _check_job(self, uuid: str, where: str) -> None:
        """Raise BusyError when libvirt has a job on the domain that keeps pins waiting. While a
        backup runs, libvirt asks QEMU for it, which may never answer. Only this question may be
        left to itself then: a pin would be a write that no journal knows."""
        self._kept.open()
        try:
            self._kept.call(lambda c: _check_job(c.lookupByUUIDString(uuid), where), _JOB_SECONDS)
        except TimeoutError:
            raise SilentJobError(
                f"libvirt does not say in {_JOB_SECONDS:g} s whether it has a job on the domain",
                where=where,
                hint=f"see: virsh domjobinfo; {_LATER}",
                lasting=Lasting.TRANSIENT,
            ) from None


def _check_job(domain: Any, where: str) -> None:
    """Raise BusyError when libvirt has a job on the domain that keeps pins waiting."""
    import libvirt

    try:
        job = domain.jobStats()
    except libvirt.libvirtError as error:
        # The query waits as the pin would. The pin reports any other fault; some drivers know no
        # jobs at all.
        if error.get_error_code() == libvirt.VIR_ERR_OPERATION_TIMEOUT:
            raise
        return
    operation = job.get(libvirt.VIR_DOMAIN_JOB_OPERATION)
    # A backup goes on for hours, and takes changes meanwhile (qemuBackupBegin).
    if (
        job["type"] == libvirt.VIR_DOMAIN_JOB_NONE
        or operation == libvirt.VIR_DOMAIN_JOB_OPERATION_BACKUP
    ):
        return
    does = {
        libvirt.VIR_DOMAIN_JOB_OPERATION_MIGRATION_OUT: "migrates it away",
        libvirt.VIR_DOMAIN_JOB_OPERATION_SNAPSHOT: "takes a snapshot of it",
        libvirt.VIR_DOMAIN_JOB_OPERATION_SAVE: "saves it",
        libvirt.VIR_DOMAIN_JOB_OPERATION_DUMP: "dumps its memory",
    }.get(operation, "has a job on it")
    raise BusyError(
        f"libvirt is busy with the domain: it {does}, and takes no pins until that is done",
        where=where,
        hint=f"see: virsh domjobinfo; {_LATER}",
        lasting=Lasting.TRANSIENT,
    )


def _cputune(domain: Any, where: str) -> domain_xml.Cputune:
    try:
        return domain_xml.parse_cputune(domain.XMLDesc(0))
    except (ValueError, VsrtuneError) as error:
        raise WriteError(f"the domain's XML makes no sense: {error}", where=where) from error


def _note(domain: Any, notes: Mapping[domain_xml.Which, domain_xml.Note]) -> None:
    """``virDomainSetMetadata(LIVE)``. We do not listen to its event (daemon/events)."""
    import libvirt

    domain.setMetadata(
        libvirt.VIR_DOMAIN_METADATA_ELEMENT,
        domain_xml.notes_xml(notes) if notes else None,
        domain_xml.PREFIX,
        domain_xml.NAMESPACE,
        libvirt.VIR_DOMAIN_AFFECT_LIVE,
    )


def _cpumap(connection: Any, cpus: CpuSet, where: str) -> tuple[bool, ...]:
    """One flag for each CPU that libvirt counts on the host, offline ones included."""
    count = int(connection.getCPUMap()[0])
    beyond = [c for c in cpus if c >= count]
    if beyond:
        raise WriteError(
            f"libvirt counts {count} CPUs, CPU {beyond[0]} is not one of them",
            where=where,
            hint="name CPUs of this host in the policy",
        )
    return tuple(i in cpus for i in range(count))


def _translate(error: Any, where: str, domain: Any) -> WriteError:
    import libvirt

    code = error.get_error_code()
    if vanished(error, domain):
        return VanishedError(f"the domain is gone or not running: {error}", where=where)
    if code in (libvirt.VIR_ERR_OPERATION_TIMEOUT, libvirt.VIR_ERR_AGENT_UNRESPONSIVE):
        late = code == libvirt.VIR_ERR_OPERATION_TIMEOUT
        return (LateError if late else BusyError)(
            f"libvirt is busy with the domain: {error}",
            where=where,
            hint=_LATER,
            lasting=Lasting.TRANSIENT,
        )
    hint = "see: journalctl -u libvirtd"
    if "busy" in str(error).lower():
        hint = "a SCHED_DEADLINE thread cannot be pinned; give it another class first"
    return WriteError(f"libvirt refused: {error}", where=where, hint=hint)


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
