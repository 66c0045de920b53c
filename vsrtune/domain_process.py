"""Which QEMU is that of a libvirt domain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace

from vsrtune.cgroup import libvirt_role
from vsrtune.proc import QemuProcess, parse_cgroup
from vsrtune.rootfs import HostRoot

# Where the system's libvirt writes the pid of a domain's QEMU (virPidFileConstructPath).
_PIDS = "/run/libvirt/qemu"


def process_of(root: HostRoot, found: Sequence[QemuProcess], name: str) -> QemuProcess | None:
    """Of the QEMUs that have the UUID of the domain ``name``, the one that libvirt started;
    None when it started none of them.

    A command line can be copied, with the UUID and with what libvirt leaves in it; a guest that
    migrates between two libvirts of one host is there twice. libvirt writes down which one is
    its. Else, nobody but libvirt starts a QEMU in the cgroups that it makes; where it makes
    none, its traces in the command line are all there is to go by.
    """
    if len(found) == 1 and found[0].args.libvirt:
        return found[0]
    told = _pid_file(root, name) if found else None
    for process in found:
        if process.pid == told:
            return process
    at_home = {p.pid for p in found if _in_libvirts_cgroup(root, p.pid)}
    ours = [p for p in found if p.args.libvirt or p.pid in at_home]
    return min(ours, key=lambda p: (p.pid not in at_home, not p.args.libvirt, p.pid), default=None)


def without_copies(
    root: HostRoot, qemus: Iterable[QemuProcess], owned: Container[int]
) -> Iterator[QemuProcess]:
    """The QEMUs, of which those of the pids ``owned`` are libvirt's domains. One outside
    libvirt's cgroups that has the UUID of one inside is a plain QEMU, whatever traces of libvirt
    are in its command line."""
    qemus = tuple(qemus)
    uuids = Counter(p.args.uuid for p in qemus)
    domains = {p.args.uuid: p for p in qemus if p.pid in owned and uuids[p.args.uuid] > 1}
    for process in qemus:
        domain = domains.get(process.args.uuid)
        if domain is not None and process is not domain and process.args.libvirt:
            inside = _in_libvirts_cgroup(root, process.pid)
            if not inside and _in_libvirts_cgroup(root, domain.pid):
                # Its monitor may be that of the guest that it is a copy of.
                process = replace(process, args=replace(process.args, libvirt=False, qmp=()))
        yield process


def _in_libvirts_cgroup(root: HostRoot, pid: int) -> bool:
    try:
        return libvirt_role(parse_cgroup(root.read(f"/proc/{pid}/task/{pid}/cgroup"))) is not None
    except OSError:
        return False


def _pid_file(root: HostRoot, name: str) -> int | None:
    """The pid that libvirt wrote down for a domain; None when it did not."""
    try:
        text = root.read(f"{_PIDS}/{name}.pid").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
