"""Controls adaptive queues between the daemon's passes: samples, applies the rule, sets lengths.

A pass leaves an adaptive queue as it stands, or makes it long. The rule is in adaptive_queue.py.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from vsrtune.core.codec import decode, encode
from vsrtune.core.errors import VsrtuneError
from vsrtune.core.untrusted import json_value
from vsrtune.daemon.journald import LOGGER
from vsrtune.daemon.reconciler import Reconciler
from vsrtune.host.filesystem import HostRoot, LiveRoot
from vsrtune.host.procfs import parse_stat
from vsrtune.host.state_files import read_file, replace_volatile
from vsrtune.model.daemon_state import QueueState, Starved
from vsrtune.model.guest import Guest
from vsrtune.model.load import QueueSample, window_between
from vsrtune.model.plan import Action
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import Target, TxQueueLen
from vsrtune.observe.samples import SampledGuests, Sampler, sampled_guest
from vsrtune.plan import adaptive_queue
from vsrtune.policy.matching import assign, policies_of
from vsrtune.policy.model import Policy, QueueBounds

DEFAULT_PATH = Path("/run/vsrtune/queues.json")
STARVED_PATH = Path("/run/vsrtune/starved.json")

T = TypeVar("T")


def write_status(
    states: tuple[QueueState, ...] | tuple[Starved, ...],
    path: Path = DEFAULT_PATH,
    root: HostRoot | None = None,
) -> None:
    """Replace the file, or remove it when ``states`` is empty. Raises OSError."""
    if not states:
        path.unlink(missing_ok=True)
        return
    pid = os.getpid()
    data = {
        "pid": pid,
        "start_time": _start_time(root or LiveRoot(), pid),
        "told": encode(states),
    }
    replace_volatile(path, json.dumps(data, ensure_ascii=False).encode(), 0o644)


def read_status(path: Path = DEFAULT_PATH, root: HostRoot | None = None) -> tuple[QueueState, ...]:
    """The queue states of the running daemon; empty when none runs, or the file is damaged or
    not for this user."""
    return _read(tuple[QueueState, ...], path, root)


def read_starved(path: Path = STARVED_PATH, root: HostRoot | None = None) -> tuple[Starved, ...]:
    """As ``read_status``, for starving threads."""
    return _read(tuple[Starved, ...], path, root)


def _read(kind: type[tuple[T, ...]], path: Path, root: HostRoot | None) -> tuple[T, ...]:
    try:
        data = json_value(read_file(path).decode("utf-8", "replace"))
        if data["start_time"] != _start_time(root or LiveRoot(), int(data["pid"])):
            return ()
        return decode(kind, data["told"])
    except (OSError, ValueError, LookupError, TypeError, VsrtuneError):
        return ()


def _start_time(root: HostRoot, pid: int) -> int:
    return parse_stat(root.read(f"/proc/{pid}/stat")).start_time


# Seconds between samples, and between reads of drop counters while nothing is dropped anywhere.
TICK = 0.5
GLANCE = 1.0


@dataclass(slots=True)
class _Kept:
    """One guest. ``before`` is the sample at the start of the next window, ``drops`` the drop
    counter as last read; None before the first."""

    guest: Guest
    policy: Policy
    bounds: QueueBounds
    where: SampledGuests
    state: adaptive_queue.QueueRuleState
    before: QueueSample | None = None
    drops: int | None = None

    @property
    def told(self) -> QueueState:
        s = self.state
        return QueueState(self.guest.ref, s.length, s.phase.value, s.why, s.changes)


class QueueKeeper:
    """Call ``update`` between passes."""

    def __init__(
        self,
        reconciler: Reconciler,
        sampler: Sampler | None = None,
        clock: Callable[[], float] = time.monotonic,
        publish: Callable[[tuple[QueueState, ...]], None] = write_status,
    ) -> None:
        self._reconciler = reconciler
        self._sampler = sampler or Sampler(LiveRoot())
        self._clock = clock
        self._publish = publish
        self._kept: dict[str, _Kept] = {}
        # Guests whose queues are no longer controlled and may still be short.
        self._parting: dict[str, _Kept] = {}
        self._snapshot: Snapshot | None = None
        self._policies: tuple[Policy, ...] = ()
        self._due = 0.0
        # After a failure the next pass has to observe the host first.
        self._stuck = False

    def update(self) -> float | None:
        """Do what is due. Return the seconds until something is due again; None without
        adaptive queues."""
        state = self._reconciler.state
        if state.snapshot is not self._snapshot or self._reconciler.policies != self._policies:
            self._choose(state.snapshot)
            self._part()
        now = self._clock()
        if now >= self._due:
            self._work(now)
        if not self._kept:
            return None
        return max(self._due - now, 0.0)

    def leave(self) -> None:
        """Stop controlling queues, and leave them long."""
        self._parting, self._kept = {**self._parting, **self._kept}, {}
        self._part()

    def close(self) -> None:
        """Stop controlling queues; undo restores them from the journal."""
        self._kept, self._parting = {}, {}
        self._tell(())

    def _work(self, now: float) -> None:
        actions: list[Action] = []
        left = self._left()
        quiet = True
        for kept in self._kept.values():
            quiet &= self._sample(kept, now)
            if not self._stuck:
                actions += _changes(kept, kept.state, left)
        self._due = now + (GLANCE if quiet else TICK)
        self._set(actions)

    def _part(self) -> None:
        """Make queues long that are no longer controlled, because nobody would when overload
        ends. Leave alone a queue that somebody changed, and wait while libvirt is busy with
        the guest."""
        actions: list[Action] = []
        left = self._left()
        for kept in self._parting.values():
            why = "it is kept no more"
            long = replace(kept.state, length=kept.bounds.high, why=why)
            changes = () if kept.guest.waits else _changes(kept, long, left)
            actions += [a for a in changes if a.before == kept.state.length]
        if actions:
            self._set(actions)
        failed = bool(actions) and self._stuck
        self._parting = {r: k for r, k in self._parting.items() if k.guest.waits or failed}

    def _left(self) -> frozenset[Target]:
        """Targets that somebody changed and that the policy's rule does not put back, or not
        yet."""
        return frozenset(d.target for d in self._reconciler.state.drifts if d.left)

    def _set(self, actions: list[Action]) -> None:
        told = tuple(kept.told for kept in self._kept.values())
        if not actions and told == self._reconciler.state.queues:
            return
        self._stuck = not self._reconciler.adjust(actions, told)
        # Own changes are no reason to select guests again.
        self._snapshot = self._reconciler.state.snapshot
        self._refresh()
        self._tell(told)

    def _tell(self, told: tuple[QueueState, ...]) -> None:
        try:
            self._publish(told)
        except OSError as error:
            LOGGER.debug("cannot tell of adaptive queues: %s", error)

    def _sample(self, kept: _Kept, now: float) -> bool:
        """Sample a guest and apply the rule. True when nothing happens there, or it cannot be
        read."""
        try:
            if kept.state.idle(kept.bounds):
                drops = self._sampler.drops(kept.where)
                before, kept.drops = kept.drops, drops
                if before in (None, drops) and kept.before is None:
                    return True
            after = self._sampler.sample(kept.where, now)
        except (OSError, ValueError, IndexError):
            kept.before = None
            return True
        before_, kept.before = kept.before, after
        if before_ is None:
            return False
        window = window_between(before_, after, kept.where.crews)
        if window is None:
            return False
        kept.state = adaptive_queue.step(kept.state, kept.bounds, window)
        if kept.state.idle(kept.bounds):
            kept.before = None
        return False

    def _choose(self, snapshot: Snapshot | None) -> None:
        """Select the guests to control after a pass: those that match their policies and have
        devices of their own."""
        self._snapshot, self._policies = snapshot, self._reconciler.policies
        self._stuck = False
        known = {**self._parting, **self._kept}
        self._kept, self._parting = {}, {}
        if snapshot is None:
            return
        tuned = {g.ref for g in self._reconciler.state.guests if g.tuned}
        devices = [i.ifindex for g in snapshot.guests for i in g.interfaces]
        for guest, policy in assign(snapshot.guests, self._policies).pairs:
            bounds = policy.macvtap_queue
            own = [i.ifindex for i in guest.interfaces if i.kind.rings]
            shared = any(devices.count(index) > 1 for index in own)
            if not isinstance(bounds, QueueBounds) or guest.ref not in tuned or not own or shared:
                continue
            where = sampled_guest(guest)
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
                state = adaptive_queue.begin(bounds)
                self._kept[guest.ref] = _Kept(guest, policy, bounds, where, state)
        for guest in snapshot.guests:
            old = known.get(guest.ref)
            if old is None or guest.ref in self._kept or _process(old.guest) != _process(guest):
                continue
            asking = policies_of(guest, self._policies)
            if guest.ref in tuned:
                # Under a policy with a fixed length or none, the pass has set the queue.
                asking = [p for p in asking if isinstance(p.macvtap_queue, QueueBounds)]
            if asking:
                old.guest, old.before, old.drops = guest, None, None
                self._parting[guest.ref] = old

    def _refresh(self) -> None:
        """Update the guests after our own changes."""
        guests = self._snapshot.guests if self._snapshot is not None else ()
        for guest in guests:
            if guest.ref in self._kept:
                self._kept[guest.ref].guest = guest


def _identity(guest: Guest) -> tuple[object, ...]:
    return *_process(guest), tuple(sorted(i.ifindex for i in guest.interfaces))


def _process(guest: Guest) -> tuple[int, int]:
    return guest.pid, guest.start_time


def _changes(
    kept: _Kept, state: adaptive_queue.QueueRuleState, left: Collection[Target]
) -> list[Action]:
    reason = f"queue.macvtap: adaptive: {state.why} ({kept.policy.at('queue', 'macvtap')})"
    length = state.length
    found = []
    for interface in kept.guest.interfaces:
        target = TxQueueLen(kept.guest.ref, interface.target, interface.ifindex)
        if interface.kind.rings and interface.txqueuelen != length and target not in left:
            found.append(Action(target, interface.txqueuelen, length, reason))
    return found
