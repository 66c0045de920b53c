# SPDX-License-Identifier: GPL-2.0-or-later
"""cgroup v2 cpusets, and libvirt's cgroup names."""

from __future__ import annotations

import re
from collections.abc import Iterable

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import VsrtuneError
from vsrtune.host.filesystem import HostRoot, text_of
from vsrtune.model.cpuset_tree import CpusetGroup

MOUNT = "/sys/fs/cgroup"

# If systemd-machined makes the scope, libvirt makes a cgroup of its own name in it. Without
# machined, libvirt's own cgroup is machine/qemu-ID-NAME.libvirt-qemu
# (virCgroupNewDomainPartition).
_LIBVIRT = re.compile(
    r"(?:.*/)?(?:libvirt|[^/]+\.libvirt-qemu)/(vcpu|iothread|emulator)(\d*)(?:/.*)?", re.ASCII
)


def libvirt_role(path: str | None) -> tuple[str, int | None] | None:
    """The role and number that libvirt's own cgroup gives a thread: ``("vcpu", 3)``,
    ``("iothread", 1)``, ``("emulator", None)``; None for any other cgroup."""
    match = _LIBVIRT.fullmatch(path or "")
    if match is None:
        return None
    return match[1], int(match[2]) if match[2] else None


class CpusetReader:
    """Reads each cgroup's cpuset once."""

    def __init__(self, root: HostRoot) -> None:
        self._root = root
        self._raw: dict[str, str | None] = {}
        self._effective: dict[str, CpuSet | None] = {}

    def raw(self, path: str) -> str | None:
        """Text of ``cpuset.cpus`` ("" when unset); None when the cgroup has no
        cpuset controller."""
        if path not in self._raw:
            self._raw[path] = self._read(path, "cpuset.cpus")
        return self._raw[path]

    def effective(self, path: str) -> CpuSet | None:
        """The CPUs that the cpuset yields: that of the cgroup, or of the nearest one above that
        has the controller, which then confines the thread. None without one."""
        if path not in self._effective:
            text = self._read(path, "cpuset.cpus.effective")
            if text is not None:
                try:
                    self._effective[path] = CpuSet.parse(text)
                except VsrtuneError:
                    self._effective[path] = None
            elif path:
                self._effective[path] = self.effective(path.rpartition("/")[0])
            else:
                self._effective[path] = None
        return self._effective[path]

    def limit(self, path: str) -> CpuSet | None:
        """The CPUs of the cgroup above: the most that ``cpuset.cpus`` can yield. None for the
        root, which has no cgroup above, and without the controller."""
        return self.effective(path.rpartition("/")[0]) if path else None

    def _read(self, path: str, name: str) -> str | None:
        return text_of(self._root, f"{MOUNT}/{path}/{name}" if path else f"{MOUNT}/{name}")


# Files that controllers put beside child cgroups.
_FILES = ("cgroup.", "cpu.", "cpuset.", "hugetlb.", "io.", "irq.", "memory.", "misc.", "pids.")


def read_tree(
    root: HostRoot, reader: CpusetReader, used: Iterable[str], below: str = ""
) -> tuple[CpusetGroup, ...]:
    """Every cgroup that is above or beside one of ``used``, is a partition or has exclusive CPUs,
    sorted by path. With ``below``, only that cgroup and those inside it, which suffices while
    cgroups elsewhere are members without exclusive CPUs. ``reader`` may have read some cgroups
    already, for the threads in them."""
    near = {above for path in set(used) for above in _above(path)}
    found: list[CpusetGroup] = []
    waiting = [below]
    if below:
        group = _group(root, reader, below)
        if group is None:
            return ()
        found.append(group)
    while waiting:
        above = waiting.pop()
        for name in _children(root, above):
            path = f"{above}/{name}" if above else name
            group = _group(root, reader, path)
            if group is None:
                continue
            # A partition is below another partition, or below a cgroup with exclusive CPUs.
            passed_on = group.special
            if path in near or passed_on:
                waiting.append(path)
            if above in near or passed_on:
                found.append(group)
    return tuple(sorted(found, key=lambda g: g.path))


def _above(path: str) -> list[str]:
    found = []
    while path:
        path = path.rpartition("/")[0]
        found.append(path)
    return found


def _group(root: HostRoot, reader: CpusetReader, path: str) -> CpusetGroup | None:
    """One cgroup's cpuset; None without the controller, or when it is gone."""
    base = f"{MOUNT}/{path}"
    cpus, effective = reader.raw(path), reader.effective(path)
    if cpus is None or effective is None:
        return None
    try:
        return CpusetGroup(
            path=path,
            cpus=cpus,
            effective=effective,
            partition=root.read(f"{base}/cpuset.cpus.partition").strip(),
            exclusive=text_of(root, f"{base}/cpuset.cpus.exclusive"),
            populated="populated 1" in root.read(f"{base}/cgroup.events"),
        )
    except OSError:
        return None


def _children(root: HostRoot, path: str) -> list[str]:
    """The names that may be cgroups inside; anything else has no cpuset to read."""
    base = f"{MOUNT}/{path}" if path else MOUNT
    try:
        return [n for n in root.listdir(base) if not n.startswith(_FILES)]
    except OSError:
        return []
