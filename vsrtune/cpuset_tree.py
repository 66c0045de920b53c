"""The cpusets that matter to guests, from the cgroup tree: see model.CpusetGroup."""

from __future__ import annotations

from collections.abc import Iterable

from vsrtune.cgroup import MOUNT, CpusetReader
from vsrtune.model.cpuset_tree import CpusetGroup
from vsrtune.rootfs import HostRoot

# Files that controllers put beside child cgroups.
_FILES = ("cgroup.", "cpu.", "cpuset.", "hugetlb.", "io.", "irq.", "memory.", "misc.", "pids.")


def read_tree(
    root: HostRoot, reader: CpusetReader, used: Iterable[str], below: str = ""
) -> tuple[CpusetGroup, ...]:
    """Every cgroup that is above or beside one of ``used``, is a partition or has
    exclusive CPUs, sorted by path. With ``below`` only that cgroup and what is in it, as
    far as cgroups elsewhere are members without CPUs of their own. ``reader`` may have read
    some already, for the threads in them."""
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
            # Partitions are below partitions, or below cgroups with exclusive CPUs.
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
            exclusive=_exclusive(root, base),
            populated="populated 1" in root.read(f"{base}/cgroup.events"),
        )
    except OSError:
        return None


def _exclusive(root: HostRoot, base: str) -> str | None:
    try:
        return root.read(f"{base}/cpuset.cpus.exclusive").strip()
    except OSError:
        return None


def _children(root: HostRoot, path: str) -> list[str]:
    """What may be cgroups inside; anything else has no cpuset to be read."""
    base = f"{MOUNT}/{path}" if path else MOUNT
    try:
        return [n for n in root.listdir(base) if not n.startswith(_FILES)]
    except OSError:
        return []
