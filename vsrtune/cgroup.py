"""cgroup v2 cpusets, and libvirt's cgroup names."""

from __future__ import annotations

import re

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import VsrtuneError
from vsrtune.rootfs import HostRoot

MOUNT = "/sys/fs/cgroup"

# Where systemd-machined makes the scope, libvirt makes a cgroup of its own name in it. Without
# machined its own is machine/qemu-ID-NAME.libvirt-qemu (virCgroupNewDomainPartition).
_LIBVIRT = re.compile(
    r"(?:.*/)?(?:libvirt|[^/]+\.libvirt-qemu)/(vcpu|iothread|emulator)(\d*)(?:/.*)?", re.ASCII
)


def libvirt_role(path: str | None) -> tuple[str, int | None] | None:
    """What libvirt's own cgroup says of a thread: ``("vcpu", 3)``, ``("iothread", 1)``,
    ``("emulator", None)``; None for any other cgroup."""
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
        """CPUs the cpuset yields: of the cgroup, or of the nearest one above that
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
        """CPUs of the cgroup above: the most that ``cpuset.cpus`` can yield. None for
        the root, which has no cgroup above, and without the controller."""
        return self.effective(path.rpartition("/")[0]) if path else None

    def _read(self, path: str, name: str) -> str | None:
        base = f"{MOUNT}/{path}" if path else MOUNT
        try:
            return self._root.read(f"{base}/{name}").strip()
        except OSError:
            return None
