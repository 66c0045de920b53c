# SPDX-License-Identifier: GPL-2.0-or-later
"""Files that the daemon reads by polling, as reasons for a pass: settings for which the kernel has
no events, and policy files.

The threads here never change anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from vsrtune.core.errors import VsrtuneError
from vsrtune.daemon.events.libvirt import Dirty
from vsrtune.daemon.events.thread import Background
from vsrtune.host.filesystem import HostRoot
from vsrtune.model.host import Nic
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import DEVICE_SETTINGS
from vsrtune.observe.config_files import files_in


def settings(snapshot: Snapshot | None) -> tuple[str, ...]:
    """Files of settings for which the kernel has no events: of the CPUs, the scheduler, the
    guests' devices and their lower devices."""
    if snapshot is None or not snapshot.guests:
        return ()
    interfaces = [i for guest in snapshot.guests for i in guest.interfaces]
    below = {name for i in interfaces for name in i.lower}
    kernel = ("sched_rt_runtime_us", "sched_rr_timeslice_ms")
    files = ["/sys/devices/system/cpu/online"]
    files += [f"/proc/sys/kernel/{name}" for name in kernel] if below else []
    for nic in snapshot.host.nics:
        if nic.name in below:
            files.append(f"/sys/class/net/{nic.name}/threaded")
            for irq in nic.irqs:
                # The first is the requested affinity; the second follows when it fires.
                files.append(f"/proc/irq/{irq.number}/smp_affinity_list")
                files.append(f"/proc/irq/{irq.number}/effective_affinity_list")
    for row in DEVICE_SETTINGS:
        if not row.announced:
            own = {i.target for i in interfaces if i.kind in row.kinds}
            names = below if row.of is Nic else own
            files += [f"/sys/class/net/{name}/{row.path}" for name in sorted(names)]
    return tuple(files)


EVERY = 2.0


class Patrol(Background):
    """Reads the files of ``settings`` every ``every`` seconds, from ``start`` to ``stop``.
    ``snapshot`` returns the latest snapshot; ``dirty`` is called from this thread."""

    def __init__(
        self,
        root: HostRoot,
        snapshot: Callable[[], Snapshot | None],
        dirty: Dirty,
        every: float = EVERY,
    ) -> None:
        super().__init__("patrol")
        self._root = root
        self._snapshot = snapshot
        self._dirty = dirty
        self._every = every
        self._seen: dict[str, str | None] = {}

    def run(self) -> None:
        """One round after the other."""
        while not self._stopping.wait(self._every):
            self.round()

    def round(self) -> None:
        """Read every file once. A file read for the first time is only remembered, because
        the pass that added it has read it too."""
        files = settings(self._snapshot())
        now = {file: self._read(file) for file in files}
        changed = [f for f in files if f in self._seen and self._seen[f] != now[f]]
        self._seen = now
        if changed:
            self._dirty(f"{', '.join(changed)} changed")

    def _read(self, path: str) -> str | None:
        try:
            return self._root.read(path)
        except OSError:
            return None


# Policy files are looked at more often: an operator who has written one waits for it.
POLICY_EVERY = 1.0

# The policy files, each with what tells one version of it from another: device, inode, and when
# content, owner or mode changed.
PolicyStamps = dict[Path, tuple[int, int, int]]


class PolicyWatch(Background):
    """Looks at the policy files of ``dirs`` every ``every`` seconds, from ``start`` to ``stop``.
    ``changed`` is called from this thread, once two looks in a row find the same: files that
    somebody still writes are not read yet."""

    def __init__(
        self, dirs: Sequence[Path], changed: Callable[[str], None], every: float = POLICY_EVERY
    ) -> None:
        super().__init__("policy-watch")
        self._dirs = dirs
        self._changed = changed
        self._every = every
        self._seen = self._told = self._stamps()

    def run(self) -> None:
        """One look after the other."""
        while not self._stopping.wait(self._every):
            self.look()

    def look(self) -> None:
        """Look at every file once."""
        before, self._seen = self._seen, self._stamps()
        if before == self._seen != self._told:
            paths = self._seen.keys() | self._told.keys()
            names = [str(p) for p in sorted(paths) if self._seen.get(p) != self._told.get(p)]
            self._told = self._seen
            self._changed(f"{', '.join(names)} changed")

    def _stamps(self) -> PolicyStamps:
        """The files as they are. One that cannot be read has no stamp, and a directory that
        cannot be listed no files: the daemon says why when it reads them."""
        found: PolicyStamps = {}
        with contextlib.suppress(VsrtuneError):
            for path in files_in(self._dirs):
                with contextlib.suppress(OSError):
                    status = path.stat()
                    found[path] = status.st_dev, status.st_ino, status.st_ctime_ns
        return found
