"""Keeps adaptive queues between the passes of the daemon: samples, asks the rule, sets.

A pass leaves an adaptive queue as it stands, or makes it long; the rule is queue_control's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from vsrtune import queue_control, queue_status
from vsrtune.actions import Action, Target, TxQueueLen
from vsrtune.log import LOGGER
from vsrtune.model import Guest, Snapshot
from vsrtune.policy import Policy
from vsrtune.policy_match import assign
from vsrtune.queue_control import Bounds
from vsrtune.queue_samples import Sampler, Watched, watched
from vsrtune.queue_windows import Sample, between
from vsrtune.reconcile import Reconciler
from vsrtune.rootfs import LiveRoot
from vsrtune.state import QueueState

# Seconds between samples, and between the cheap looks while nothing is dropped anywhere.
TICK = 0.5
GLANCE = 1.0


@dataclass(slots=True)
class _Kept:
    """One guest. ``before`` is the sample at the begin of the next window, ``drops`` what
    the last cheap look found; None when there was none."""

    guest: Guest
    policy: Policy
    bounds: Bounds
    where: Watched
    state: queue_control.State
    before: Sample | None = None
    drops: int | None = None

    @property
    def told(self) -> QueueState:
        s = self.state
        return QueueState(self.guest.ref, s.length, s.phase.value, s.why, s.changes)


class QueueKeeper:
    """``look`` is to be called between passes."""

    def __init__(
        self,
        reconciler: Reconciler,
        sampler: Sampler | None = None,
        clock: Callable[[], float] = time.monotonic,
        publish: Callable[[tuple[QueueState, ...]], None] = queue_status.write,
    ) -> None:
        self._reconciler = reconciler
        self._sampler = sampler or Sampler(LiveRoot())
        self._clock = clock
        self._publish = publish
        self._kept: dict[str, _Kept] = {}
        self._snapshot: Snapshot | None = None
        self._policies: tuple[Policy, ...] = ()
        self._due = 0.0
        # After a failure the next pass has to look at the host first.
        self._stuck = False

    def look(self) -> float | None:
        """Do what is due; seconds until something is due again, None without adaptive
        queues."""
        state = self._reconciler.state
        if state.snapshot is not self._snapshot or self._reconciler.policies != self._policies:
            self._choose(state.snapshot)
        now = self._clock()
        if now >= self._due:
            self._work(now)
        if not self._kept:
            return None
        return max(self._due - now, 0.0)

    def close(self) -> None:
        """Nothing is kept any more; what was set is the journal's to put back."""
        self._kept = {}
        self._tell(())

    def _work(self, now: float) -> None:
        actions: list[Action] = []
        # Changed by somebody, and not to be put back by the policy's rule, or not yet.
        left = {d.target for d in self._reconciler.state.drifts if d.left}
        quiet = True
        for kept in self._kept.values():
            quiet &= self._sample(kept, now)
            if not self._stuck:
                actions += _changes(kept, left)
        self._due = now + (GLANCE if quiet else TICK)
        told = tuple(kept.told for kept in self._kept.values())
        if not actions and told == self._reconciler.state.queues:
            return
        self._stuck = not self._reconciler.adjust(actions, told)
        # Its own changes are no reason to choose anew.
        self._snapshot = self._reconciler.state.snapshot
        self._refresh()
        self._tell(told)

    def _tell(self, told: tuple[QueueState, ...]) -> None:
        try:
            self._publish(told)
        except OSError as error:
            LOGGER.debug("cannot tell of adaptive queues: %s", error)

    def _sample(self, kept: _Kept, now: float) -> bool:
        """One look at a guest; whether nothing happens there."""
        try:
            if kept.state.idle(kept.bounds):
                drops = self._sampler.drops(kept.where)
                before, kept.drops = kept.drops, drops
                if before in (None, drops) and kept.before is None:
                    return True
            after = self._sampler.sample(kept.where, now)
        except (OSError, ValueError):
            kept.before = None
            return True
        before_, kept.before = kept.before, after
        if before_ is None:
            return False
        window = between(before_, after, kept.where.crews)
        if window is None:
            return False
        kept.state = queue_control.step(kept.state, kept.bounds, window)
        if kept.state.idle(kept.bounds):
            kept.before = None
        return False

    def _choose(self, snapshot: Snapshot | None) -> None:
        """Whose queues to keep, after a pass: guests that are as their policies say, with
        devices of their own."""
        self._snapshot, self._policies = snapshot, self._reconciler.policies
        self._stuck = False
        known, self._kept = self._kept, {}
        if snapshot is None:
            return
        tuned = {g.ref for g in self._reconciler.state.guests if g.tuned}
        devices = [i.ifindex for g in snapshot.guests for i in g.interfaces]
        for guest, policy in assign(snapshot.guests, self._policies).pairs:
            bounds = policy.macvtap_queue
            own = [i.ifindex for i in guest.interfaces if i.kind.rings]
            shared = any(devices.count(index) > 1 for index in own)
            if not isinstance(bounds, Bounds) or guest.ref not in tuned or not own or shared:
                continue
            where = watched(guest)
            old = known.get(guest.ref)
            same = (
                old is not None
                and old.bounds == bounds
                and _identity(old.guest) == _identity(guest)
            )
            if old is not None and same:
                if old.where != where:
                    old.before = old.drops = None
                old.guest, old.policy, old.where = guest, policy, where
                self._kept[guest.ref] = old
            else:
                state = queue_control.begin(bounds)
                self._kept[guest.ref] = _Kept(guest, policy, bounds, where, state)

    def _refresh(self) -> None:
        """The guests as they are after our own changes."""
        guests = self._snapshot.guests if self._snapshot is not None else ()
        for guest in guests:
            if guest.ref in self._kept:
                self._kept[guest.ref].guest = guest


def _identity(guest: Guest) -> tuple[object, ...]:
    return guest.pid, guest.start_time, tuple(sorted(i.ifindex for i in guest.interfaces))


def _changes(kept: _Kept, left: Collection[Target]) -> list[Action]:
    reason = f"queue.macvtap: adaptive: {kept.state.why} ({kept.policy.at('queue', 'macvtap')})"
    length = kept.state.length
    found = []
    for interface in kept.guest.interfaces:
        target = TxQueueLen(kept.guest.ref, interface.target, interface.ifindex)
        if interface.kind.rings and interface.txqueuelen != length and target not in left:
            found.append(Action(target, interface.txqueuelen, length, reason))
    return found
