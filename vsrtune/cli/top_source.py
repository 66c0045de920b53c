# SPDX-License-Identifier: GPL-2.0-or-later
"""The host that `vsrtune top` shows, this one or a recorded one: its samples and plans."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from vsrtune.cli import options
from vsrtune.core.errors import VsrtuneError
from vsrtune.host.filesystem import HostRoot, LiveRoot
from vsrtune.host.recorded import load
from vsrtune.model.load import HostSample
from vsrtune.model.plan import Plan
from vsrtune.model.snapshot import Snapshot
from vsrtune.observe import samples
from vsrtune.observe.config_files import load_dirs
from vsrtune.observe.load import with_loads
from vsrtune.observe.observer import Observer, live_observer
from vsrtune.plan.full_plan import full_plan

# Planning takes at most this share of the time: hosts with very many guests keep a plan for a
# few frames.
_SHARE = 0.1


class TopHost:
    """``root`` is the file of a recorded host, None for this host."""

    def __init__(
        self,
        root: Path | None,
        uri: str,
        policy_dirs: tuple[Path, ...],
        journal: Path,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._root = root
        self._dirs = policy_dirs
        self._journal = journal
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
        self._planned: tuple[Plan | None, tuple[str, ...]] = (None, ())
        self._plan_after = 0

    def sample(self, names: frozenset[str] = frozenset()) -> HostSample:
        """The host now. With many guests, only the libvirt guests of these ``names`` are sure
        to be re-read (Observer.observe_unannounced); the counters of all are read. Raises
        ObserveError."""
        snapshot = options.readable(self._observer.observe_unannounced(names).snapshot, self._root)
        if self._root is None:
            snapshot = with_loads(snapshot)
        return samples.take(self._files, snapshot, self._clock)

    def plan(self, snapshot: Snapshot) -> tuple[Plan | None, tuple[str, ...]]:
        """``current_plan`` of this host."""
        begin = self._clock()
        if begin >= self._plan_after:
            self._planned = current_plan(snapshot, self._dirs, self._journal, self._root)
            end = self._clock()
            self._plan_after = end + int((end - begin) * (1 / _SHARE - 1))
        return self._planned


def current_plan(
    snapshot: Snapshot, policy_dirs: tuple[Path, ...], journal: Path, root: Path | None
) -> tuple[Plan | None, tuple[str, ...]]:
    """The plan that `vsrtune verify` would make, and notes. None, with a note that says why, when
    there is neither a policy nor a journal entry, or when the plan cannot be made of them."""
    try:
        policies = load_dirs(policy_dirs)
        entries, steps = options.journalled(journal, root)
        if not policies and not entries:
            return None, (options.no_policies(policy_dirs),)
        return full_plan(snapshot, policies, entries, steps=steps), ()
    except VsrtuneError as error:
        errors = getattr(error, "errors", None) or (error,)
        return None, tuple(str(one) for one in errors)
