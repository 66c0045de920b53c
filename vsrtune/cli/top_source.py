# SPDX-License-Identifier: GPL-2.0-or-later
"""The host that `vsrtune top` shows, this one or a recorded one: its samples."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from vsrtune.cli import options
from vsrtune.host.filesystem import HostRoot, LiveRoot
from vsrtune.host.recorded import load
from vsrtune.model.load import HostSample
from vsrtune.observe import samples
from vsrtune.observe.load import with_loads
from vsrtune.observe.observer import Observer, live_observer


class TopHost:
    """``root`` is the file of a recorded host, None for this host."""

    def __init__(
        self,
        root: Path | None,
        uri: str,
        policy_dirs: tuple[Path, ...],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._root = root
        self._clock = clock
        self._files: HostRoot
        qemu_filter = options.curious_filter(options.readable_policies(policy_dirs))
        if root is None:
            self._files, self._observer = LiveRoot(), live_observer(uri, lambda: qemu_filter)
        else:
            recording = load(root)
            self._files = recording.root()
            self._observer = Observer(
                self._files, recording.virt(), qemu_filter=lambda: qemu_filter
            )

    def sample(self, names: frozenset[str] = frozenset()) -> HostSample:
        """The host now. With many guests, only the libvirt guests of these ``names`` are sure
        to be re-read (Observer.observe_unannounced); the counters of all are read. Raises
        ObserveError."""
        snapshot = options.readable(self._observer.observe_unannounced(names).snapshot, self._root)
        if self._root is None:
            snapshot = with_loads(snapshot)
        return samples.take(self._files, snapshot, self._clock)
