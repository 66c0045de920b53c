# SPDX-License-Identifier: GPL-2.0-or-later
"""cgroup v2 cpusets, and libvirt's cgroup names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import takewhile
from typing import NamedTuple

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import VsrtuneError
from vsrtune.host.filesystem import HostRoot
from vsrtune.model.cpuset_tree import CpusetGroup, upwards

MOUNT = "/sys/fs/cgroup"

# If systemd-machined makes the scope, libvirt makes a cgroup of its own name in it. Without
# machined, libvirt's own cgroup is machine/qemu-ID-NAME.libvirt-qemu
# (virCgroupNewDomainPartition).
_LIBVIRT = re.compile(
    r"(?:.*/)?(?:libvirt|[^/]+\.libvirt-qemu)/(vcpu|iothread|emulator)(\d*)(?:/.*)?", re.ASCII
)


def directory(path: str) -> str:
    """The directory of a cgroup; "" is the root."""
    return f"{MOUNT}/{path}" if path else MOUNT


def libvirt_role(path: str | None) -> tuple[str, int | None] | None:
    """The role and number that libvirt's own cgroup gives a thread: ``("vcpu", 3)``,
    ``("iothread", 1)``, ``("emulator", None)``; None for any other cgroup."""
    match = _LIBVIRT.fullmatch(path or "")
    if match is None:
        return None
    return match[1], int(match[2]) if match[2] else None


class Cpuset(NamedTuple):
    """A cgroup's cpuset. ``cpus`` is the text of ``cpuset.cpus`` ("" when unset), None without a
    cpuset controller. ``effective`` are the CPUs that it yields, or those of the nearest cgroup
    above that has the controller, which then confines the thread; None without one. ``limit`` are
    those of the cgroup above: the most that ``cpuset.cpus`` can yield; None for the root."""

    cpus: str | None = None
    effective: CpuSet | None = None
    limit: CpuSet | None = None


class CpusetReader:
    """Reads each cgroup's cpuset once."""

    def __init__(self, root: HostRoot) -> None:
        self._root = root
        self._known: dict[str, Cpuset] = {}

    def read(self, path: str) -> Cpuset:
        """The cpuset of a cgroup."""
        # Whoever has a cgroup may have thousands, one in another, so this is no recursion.
        new = list(takewhile(lambda above: above not in self._known, (*upwards(path), "")))
        for cgroup in reversed(new):
            limit = self._known[cgroup.rpartition("/")[0]].effective if cgroup else None
            text = self.text(cgroup, "cpuset.cpus.effective")
            try:
                effective = limit if text is None else CpuSet.parse(text)
            except VsrtuneError:
                effective = None
            self._known[cgroup] = Cpuset(self.text(cgroup, "cpuset.cpus"), effective, limit)
        return self._known[path]

    def text(self, path: str, name: str) -> str | None:
        """A file of a cgroup; None when it cannot be read."""
        try:
            return self._root.read(f"{directory(path)}/{name}").strip()
        except OSError:
            return None


# Files that controllers put beside child cgroups.
_FILES = ("cgroup.", "cpu.", "cpuset.", "hugetlb.", "io.", "irq.", "memory.", "misc.", "pids.")


def read_tree(
    root: HostRoot, reader: CpusetReader, used: Iterable[str], below: str = ""
) -> tuple[CpusetGroup, ...]:
    """Every cgroup that is above or beside one of ``used``, is a partition or has exclusive CPUs,
    sorted by path. With ``below``, only that cgroup and those inside it, which suffices while
    cgroups elsewhere are members without exclusive CPUs. ``reader`` may have read some cgroups
    already, for the threads in them. In a directory of somebody else than root, who may make as
    many as he likes, only those count that root made or that lead to one of ``used``."""
    leading = {path for cgroup in set(used) for path in upwards(cgroup)}
    near = {path.rpartition("/")[0] for path in leading}
    found: list[CpusetGroup] = []
    waiting = [below]
    if below:
        group = _group(reader, below)
        if group is None:
            return ()
        found.append(group)
    while waiting:
        above = waiting.pop()
        theirs = not _roots(root, above)
        for name in children(root, above):
            path = f"{above}/{name}" if above else name
            if theirs and path not in leading and not _roots(root, path):
                continue
            group = _group(reader, path)
            if group is None:
                continue
            # A partition is below another partition, or below a cgroup with exclusive CPUs.
            passed_on = group.special
            if path in near or passed_on:
                waiting.append(path)
            if above in near or passed_on:
                found.append(group)
    return tuple(sorted(found, key=lambda g: g.path))


def _group(reader: CpusetReader, path: str) -> CpusetGroup | None:
    """One cgroup's cpuset; None without the controller, or when it is gone."""
    cpus, effective, _ = reader.read(path)
    if cpus is None or effective is None:
        return None
    partition = reader.text(path, "cpuset.cpus.partition")
    events = reader.text(path, "cgroup.events")
    if partition is None or events is None:
        return None
    return CpusetGroup(
        path=path,
        cpus=cpus,
        effective=effective,
        partition=partition,
        exclusive=reader.text(path, "cpuset.cpus.exclusive"),
        populated="populated 1" in events,
    )


def _roots(root: HostRoot, path: str) -> bool:
    """Whether root made a cgroup."""
    try:
        return root.stat(directory(path), follow=False).uid == 0
    except OSError:
        return False


def children(root: HostRoot, path: str) -> list[str]:
    """The names that may be cgroups inside; anything else has no cpuset to read."""
    try:
        return [n for n in root.listdir(directory(path)) if not n.startswith(_FILES)]
    except OSError:
        return []
