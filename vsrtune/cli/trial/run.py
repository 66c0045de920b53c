# SPDX-License-Identifier: GPL-2.0-or-later
"""Runs a trial: switches between tuned and untuned, waits, and counts (``rule`` judges)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from vsrtune.bench.methods.methods import trial_rounds
from vsrtune.bench.setup.tuning import Tuner
from vsrtune.cli.trial import rule
from vsrtune.cli.trial.rule import TrialCounts, TrialTurn
from vsrtune.host.filesystem import LiveRoot
from vsrtune.model.snapshot import Snapshot
from vsrtune.observe import samples
from vsrtune.observe.observer import live_observer
from vsrtune.policy.matching import qemu_filter
from vsrtune.policy.model import Policy

# The beginning of a turn does not count: threads move, queues fill or drain, and the losses that a
# NIC shows until its driver reads them again (every 2 s: ixgbe, e1000e) are of the turn before.
SETTLE_SECONDS = 2.05
# Frames are counted within this time, in which the driver reads the losses at least once.
COUNT_SECONDS = 2.05
PAIR_SECONDS = 2 * (SETTLE_SECONDS + COUNT_SECONDS)


class HostGround:
    """Where a trial takes place: this host. ``refs`` are the guests that the policies name.
    ``notes`` tell what somebody else has changed and undo left alone."""

    def __init__(
        self, tuner: Tuner, policies: Sequence[Policy], refs: frozenset[str], uri: str
    ) -> None:
        self._tuner = tuner
        self._policies = policies
        self._refs = refs
        self._root = LiveRoot()
        self._observer = live_observer(uri, lambda: qemu_filter(policies))
        self.notes: list[str] = []

    def switch(self, tuned: bool) -> None:
        """Apply the policy, or undo it. Raises VsrtuneError."""
        if tuned:
            self._tuner.apply_policies(self._policies)
        else:
            self.notes += self._tuner.undo()

    def settle(self) -> bool:
        """Retry settings that waited for their thread to run. True when none waits any more."""
        if self._tuner.waits:
            self._tuner.again()
        return not self._tuner.waits

    def update(self) -> Snapshot:
        """The guests and their settings now."""
        snapshot = self._observer.observe()
        return replace(snapshot, guests=tuple(g for g in snapshot.guests if g.ref in self._refs))

    def count(self, snapshot: Snapshot) -> TrialCounts:
        """The counters of these guests now."""
        return rule.counts(samples.take(self._root, snapshot))


def run(
    ground: HostGround, pairs: int, seed: int, wait: Callable[[float], None]
) -> Iterator[TrialTurn]:
    """Yield the turns of ``pairs`` pairs as they are made. ``ground`` is untuned before; after, it
    is as the last turn left it. ``wait`` takes seconds. The order within a pair is drawn so that
    each side comes first equally often: changes over time favour neither. Raises VsrtuneError."""
    present = False
    for number, pair in enumerate(trial_rounds([0, 1], 1, pairs, seed), 1):
        for index in pair.configurations:
            tuned = index == 1
            if tuned is not present:
                ground.switch(tuned)
                present = tuned
            wait(SETTLE_SECONDS)
            left_out = "" if ground.settle() else "a setting still waits for its thread to run"
            snapshot = ground.update()
            before = ground.count(snapshot)
            wait(COUNT_SECONDS)
            after = ground.count(snapshot)
            if rule.settings(ground.update()) != rule.settings(snapshot):
                left_out = "a setting changed"
            yield rule.turn(before, after, number, tuned, left_out)
