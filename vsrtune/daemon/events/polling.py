"""Settings that change without an event: interrupt affinity, threaded NAPI.

Every few seconds the few files that matter are read, and nothing else. irqbalance and
others write them, and the kernel tells nobody.
"""

from __future__ import annotations

from collections.abc import Callable

from vsrtune.daemon.events.libvirt import Dirty
from vsrtune.daemon.events.links import settings
from vsrtune.daemon.events.thread import Background
from vsrtune.host.filesystem import HostRoot
from vsrtune.model.snapshot import Snapshot

EVERY = 2.0


class Patrol(Background):
    """Looks from ``start`` to ``stop``, every ``every`` seconds; ``snapshot`` gives the
    latest one, ``dirty`` is called from this thread."""

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
        """Read every file once. One that is met for the first time is only remembered:
        the pass that made it known has read it too."""
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
