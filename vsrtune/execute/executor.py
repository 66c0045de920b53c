# SPDX-License-Identifier: GPL-2.0-or-later
"""Executes plans, undoes them, and resolves unfinished writes of a crash, with the journal.

Each guest is a transaction. Actions run in the plan's order, guests interleaved as planned. When
an action fails, the executor takes back what this pass did to its guest, in reverse order, and
skips the rest of the guest's actions. Other guests go on. The host's interrupts, queues and root
domains are one transaction too. Each ksoftirqd thread and the slice of class rr is one of its own,
because nothing else of the host depends on it.

A plan is made for interrupts where it moves them. A guest to whose threads it gives a realtime
class or a budget therefore fails with the host's transaction if that was to move the work of lower
devices: otherwise these threads would starve the SoftIRQ on the CPUs where it still runs.

Releases come first, and each stands for itself, as in ``undo``: what no policy asks for any more is
not set again because something else of its guest fails. A release that fails does stop the other
actions of its guest.

For each other action

1. The executor reads the value again. A value that is no longer ``before`` is a StaleError, which
   fails the guest. A value that is already ``after`` counts as done, and is not recorded, in two
   cases: this pass has written to the guest, which may have changed the value too (a cpuset cuts
   the masks of all its threads); or the target is a cgroup that exists, which no snapshot shows
   while it is empty.
2. The executor journals the intent (fsync), writes the value, reads it back and journals the
   result. If it cannot write the journal, it does not write the host: it raises JournalError, and
   the journal has everything done until then. Before the first write it reserves disk space for
   the pass and for the undo of this and all earlier passes, so that a full disk shows then and
   not half-way. What relieves the host is carried out even so (``relieving``).
3. A vanished thread, device or guest is no failure: the executor drops its entry and goes on.
   Each action finds out for itself whether its object is gone. A thread that runs another program
   has another number; it loses the class that was ours (``drop_vanished``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import (
    FixedError,
    JournalError,
    Lasting,
    PendingError,
    StaleError,
    VanishedError,
    VsrtuneError,
    WriteError,
)
from vsrtune.execute import moved_masks, waits
from vsrtune.execute.comparison import (
    between,
    cut,
    exactly,
    lost_its_cpus,
    restored,
    still_applied,
    unchanged,
)
from vsrtune.execute.host_writer import LiveSysOps
from vsrtune.execute.journal import Journal
from vsrtune.execute.vanished import drop_vanished
from vsrtune.model.journal_records import Entry, displaced, same_setting, undo_action, undo_order
from vsrtune.model.plan import Action, Plan
from vsrtune.model.targets import (
    HOST_REF,
    CgroupDir,
    DeviceNumber,
    IrqAffinity,
    Noted,
    Pin,
    QueueCpus,
    SchedLimit,
    Target,
    ThreadAffinity,
    ThreadCgroup,
    ThreadSched,
    Value,
)
from vsrtune.plan.phases import moves_work


@dataclass(frozen=True, slots=True)
class Left:
    """A value that is no longer the one that we wrote, and was left alone."""

    target: Target
    current: Value
    written: Value
    original: Value

    def __str__(self) -> str:
        return (
            f"{self.target}: is {self.current} now, vsrtune had written {self.written} "
            f"in place of {self.original}; left alone"
        )


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a pass. ``done`` holds of a transaction that failed nothing but releases.
    ``failed`` holds the action that failed first in its transaction, releases that failed, and any
    action that could not be taken back (as its inverse). ``skipped`` were not tried because of an
    earlier failure. ``left`` are settings of somebody else that were to be restored. ``pending``
    are settings that the kernel will accept later, ``fixed`` those that it never will; neither is
    a failure. ``rolled_back``: something failed, and what failed is as it was before the pass."""

    done: tuple[Action, ...] = ()
    failed: tuple[tuple[Action, VsrtuneError], ...] = ()
    vanished: tuple[Target, ...] = ()
    left: tuple[Left, ...] = ()
    rolled_back: bool = False
    skipped: tuple[Action, ...] = ()
    pending: tuple[tuple[Action, VsrtuneError], ...] = ()
    fixed: tuple[tuple[Action, VsrtuneError], ...] = ()


# Written in one step: the host has the old value or the new one.
_SINGLE = ThreadSched | ThreadAffinity | IrqAffinity | QueueCpus | DeviceNumber | SchedLimit


@dataclass(slots=True)
class _Tally:
    """A Result in progress."""

    done: list[Action] = field(default_factory=list)
    failed: list[tuple[Action, VsrtuneError]] = field(default_factory=list)
    vanished: dict[Target, None] = field(default_factory=dict)
    left: list[Left] = field(default_factory=list)
    skipped: list[Action] = field(default_factory=list)
    pending: list[tuple[Action, VsrtuneError]] = field(default_factory=list)
    fixed: list[tuple[Action, VsrtuneError]] = field(default_factory=list)

    def result(self, rolled_back: bool = False) -> Result:
        found = {f.name: tuple(getattr(self, f.name)) for f in fields(self)}
        return Result(**found, rolled_back=rolled_back)


def apply(plan: Plan, ops: LiveSysOps, journal: Journal, unmoved: Target | None = None) -> Result:
    """Execute ``plan.actions``. ``unmoved``: a setting of a lower device that the plan was made
    with and that is not tried, after a failure. On a disk without room for the plan, the part
    that relieves the host is carried out, and the rest has failed (``relieving``). Raises
    JournalError only; see the module's docstring."""
    with journal.one_pass():
        return _apply(plan, ops, journal, unmoved)


def _apply(plan: Plan, ops: LiveSysOps, journal: Journal, unmoved: Target | None) -> Result:
    tally, beyond = _Tally(), _Tally()
    try:
        journal.reserve(plan.actions)
    except JournalError as error:
        plan, beyond = _relief(plan, error)
    _release(plan, ops, journal, tally)
    released = {_transaction(a.target) for a in tally.done}
    # What this pass did, by transaction, in order; None when the transaction has failed.
    passes: dict[str | Target, list[Action] | None] = {
        _transaction(a.target): None for a, _ in tally.failed
    }
    stuck = bool(tally.failed)
    # Targets for which the records alone would not tell what undo restores.
    named: set[Target] = set()
    raised = {a.target.guest for a in plan.actions if waits.raises(a)} - {HOST_REF}
    served = [a for a in plan.actions if moves_work(a.target)]
    if HOST_REF in passes:
        unmoved = _unmoved(served, tally)
    for action in plan.actions:
        if action.release:
            continue
        target = action.target
        own = _transaction(target)
        done = passes.setdefault(own, [])
        if done is None:
            tally.skipped.append(action)
            continue
        try:
            waits.check_busy(target, tally.failed)
            if unmoved and (own in raised or waits.pins_urgent(target, ops)):
                raise waits.starving(target, unmoved)
            tally.left += _finish_interrupted(target, ops, journal)
            now = ops.read(target)
            changed = bool(done) or own in released or isinstance(target, CgroupDir)
            if changed and exactly(action.after, now, ops):
                tally.done.append(action)
                continue
            if not same_setting(action.before, now) and not cut(action.before, now, ops):
                raise StaleError(
                    f"is {now} now, but was {action.before} when the plan was made",
                    where=str(target),
                    hint="plan again",
                    lasting=Lasting.TRANSIENT,
                )
            # The value just read has more than the plan's: threads beside a pin, and CPUs that
            # partitions have taken.
            entry = journal.entry(target)
            ours = entry is not None and cut(entry.written, now, ops)
            before = (
                entry.written if entry and ours else moved_masks.whole(target, now, ops, journal)
            )
            action = replace(action, before=before)
            original = moved_masks.inherited(target, now, ops, journal) if entry is None else None
            if action.enforced:
                original = action.after if entry is None else entry.original
                named.add(target)
            journal.ensure(action)
            _change(action, ops, journal, original)
        except VanishedError:
            _vanished(target, ops, journal, tally)
        except PendingError as error:
            tally.pending.append((action, error))
        except FixedError as error:
            tally.fixed.append((action, error))
        except WriteError as error:
            tally.failed.append((action, error))
            passes[own] = None
            stays = () if own == HOST_REF else passes.get(HOST_REF) or ()
            stuck |= not _roll_back(done, named, stays, ops, journal, tally) or own in released
            tally.done = [a for a in tally.done if a.release or _transaction(a.target) != own]
            tally.pending = [p for p in tally.pending if _transaction(p[0].target) != own]
            if own == HOST_REF:
                unmoved = _unmoved(served, tally)
        else:
            done.append(action)
            tally.done.append(action)
    tally.failed += beyond.failed
    tally.skipped += beyond.skipped
    return tally.result(rolled_back=bool(tally.failed) and not stuck)


def _relief(plan: Plan, error: JournalError) -> tuple[Plan, _Tally]:
    """What of a plan the disk has room for (``relieving``), and what is beyond that. Raises
    ``error`` when there is no room for anything."""
    some = waits.relieving(plan.actions)
    if not some:
        raise error
    within, failed, beyond = set(some), set[str | Target](), _Tally()
    for action in plan.actions:
        own = _transaction(action.target)
        if action in within:
            continue
        if own in failed:
            beyond.skipped.append(action)
        else:
            failed.add(own)
            beyond.failed.append((action, error))
    return replace(plan, actions=some), beyond


def _transaction(target: Target) -> str | Target:
    """A guest, the host, or a setting of the host that is a transaction of its own."""
    alone = isinstance(target, ThreadSched | SchedLimit) and target.guest == HOST_REF
    return target if alone else target.guest


def _unmoved(served: Iterable[Action], tally: _Tally) -> Target | None:
    """What failed of the host's transaction, if any of ``served`` is not as planned because of
    that. Where the kernel never moves an interrupt is known, and warned of."""
    known = {*tally.vanished, *(a.target for a, _ in tally.fixed)}
    if all(a in tally.done or a.target in known for a in served):
        return None
    return next(a.target for a, _ in tally.failed if _transaction(a.target) == HOST_REF)


def undo(ops: LiveSysOps, journal: Journal) -> Result:
    """Restore the originals of the live entries in reverse order of their first write
    (``undo_order``). ``done`` holds the inverse actions. No guest is stepped down any more
    afterwards.

    Unfinished writes are resolved first, as in ``recover``. A value that is no longer the one
    that we wrote is left alone, reported and forgotten. An entry whose write fails is kept for
    the next try, and what depends on it is not tried (``waits.check``). Raises JournalError only.
    """
    tally = _Tally()
    _resolve_all(reversed(journal.entries()), ops, journal, tally)
    tally.done.clear()
    order = undo_order(journal.entries())
    _restore_all([undo_action(entry) for entry in order], ops, journal, tally)
    for guest in journal.steps:
        journal.step(guest, None)
    return tally.result()


def _release(plan: Plan, ops: LiveSysOps, journal: Journal, tally: _Tally) -> None:
    """Carry out the releases of a plan, and forget what it disowns."""
    for target in plan.disowned:
        entry = journal.finished(target)
        if entry is None:
            continue
        try:
            waits.check_busy(target, tally.failed)
            _disown(entry, ops, journal, tally)
        except VanishedError:
            _vanished(target, ops, journal, tally)
        except WriteError as error:
            tally.failed.append((undo_action(entry), error))
    back = [a for a in plan.actions if a.release]
    entries = (journal.entry(a.target) for a in reversed(back))
    resolved = _Tally(failed=tally.failed, vanished=tally.vanished, left=tally.left)
    _resolve_all([e for e in entries if e is not None], ops, journal, resolved)
    kept = moved_masks.kept(back, ops, journal)
    _restore_all(back, ops, journal, tally)
    moved_masks.adopt(kept, ops, journal)


def _restore_all(back: Sequence[Action], ops: LiveSysOps, journal: Journal, tally: _Tally) -> None:
    """Carry out inverse actions of live entries, in this order, and once more what was put off."""
    _restore_round(back, ops, journal, tally)
    late = waits.put_off(tally.failed)
    # An unfinished write was not tried here: its failure stays.
    again = [a for a in back if a.target in late and journal.finished(a.target)]
    late = {a.target for a in again}
    tally.failed = [f for f in tally.failed if f[0].target not in late]
    _restore_round(again, ops, journal, tally)


def _restore_round(
    back: Sequence[Action], ops: LiveSysOps, journal: Journal, tally: _Tally
) -> None:
    unrecorded: JournalError | None = None
    for action in back:
        target = action.target
        entry = journal.finished(target)
        if entry is None:
            continue
        try:
            try:
                waits.check(action, tally.failed, ops)
                _restore(entry, action, ops, journal, tally)
            except VanishedError:
                _vanished(target, ops, journal, tally)
            except WriteError as error:
                tally.failed.append((action, error))
        except JournalError as error:
            tally.failed.append((action, error))
            unrecorded = error
    if unrecorded is not None:
        raise unrecorded


def recover(ops: LiveSysOps, journal: Journal) -> Result:
    """Resolve writes that a crash left unfinished, latest first; finished entries stay.

    With the target's identity intact, an unfinished write from ``before`` to ``after`` is

    * adopted when the host has ``after``: written once more, which completes hidden steps
      (``done``);
    * forgotten when the host has ``before``, unless it is a pin, a CPU list or a partition, which
      other threads may have lost their masks to;
    * half-written when the host has a mixture of both, or such a ``before``: ``before`` is written
      again, or ``after`` if that is the original (the crash was in an undo) (``done``);
    * otherwise somebody else's value: left alone and dropped (``left``).

    Raises JournalError only. An entry whose write fails stays unfinished (``failed``).
    """
    tally = _Tally()
    _resolve_all(reversed(journal.entries()), ops, journal, tally)
    return tally.result()


# -- one change


def _change(
    action: Action,
    ops: LiveSysOps,
    journal: Journal,
    original: Value | None = None,
    *,
    back: bool = False,
    others: bool = False,
) -> None:
    """Journal, write, read back, journal (``original`` as in ``Journal.intent``). ``back``: the
    value was there before, so the thread may lack CPUs of it by now (``restored``). ``others``:
    the value is somebody else's again, so it is not journalled as written. Raises WriteError after
    writing ``before`` back; if that fails too, the entry stays unfinished. Raises
    VanishedError. A journal that cannot be written keeps no ``_SINGLE`` value from its original:
    the entry stays, and the next undo finds the original on the host."""
    guard = _guard(action, ops, journal)
    if guard is not None:
        kept = journal.entry(guard.target)
        journal.intent(guard, None if kept is None else kept.original)
    try:
        journal.intent(action, original)
    except JournalError:
        entry = journal.entry(action.target)
        own = entry is not None and same_setting(entry.original, action.after)
        if not own or not isinstance(action.target, _SINGLE):
            raise
        ops.write(action.target, action.after)
        _read_back(action.target, action.after, ops, back=True)
        return
    try:
        ops.write(action.target, action.after)
        _read_back(action.target, action.after, ops, back=back)
    except VanishedError:
        if guard is not None:
            journal.drop(guard.target, "vanished")
        raise
    except WriteError as error:
        _take_back(action, guard, ops, journal, error)
        raise
    if others:
        journal.revert(action.target)
    else:
        journal.done(action.target)
    if guard is not None:
        journal.revert(guard.target)
        moved_masks.follow(guard, ops.read(guard.target), ops, journal)


def _take_back(
    action: Action, guard: Action | None, ops: LiveSysOps, journal: Journal, error: WriteError
) -> None:
    """Write ``before`` back after a failed write: some of its steps may be on the host."""
    try:
        if not unchanged(action.before, ops.read(action.target), ops):
            ops.write(action.target, action.before)
            _read_back(action.target, action.before, ops, back=True)
        journal.revert(action.target)
        if guard is not None:
            if not exactly(guard.before, ops.read(guard.target), ops):
                ops.write(guard.target, guard.before)
            journal.revert(guard.target)
    except VanishedError:
        if guard is not None:
            journal.drop(guard.target, "vanished")
        raise
    except WriteError as second:
        raise _StuckError(
            f"{error}; and could not be taken back: {second}",
            where=str(action.target),
            hint="run `vsrtune undo`",
            lasting=second.lasting,
        ) from error


class _StuckError(WriteError):
    """A failed write that could not be taken back either."""


def _guard(action: Action, ops: LiveSysOps, journal: Journal) -> Action | None:
    """The affinity to keep across a move between cgroups."""
    target = action.target
    if not isinstance(target, ThreadCgroup):
        return None
    affinity = moved_masks.affinity_of(target)
    _finish_interrupted(affinity, ops, journal)
    now = ops.read(affinity)
    return Action(affinity, now, now, "kept across the move between cgroups")


def _read_back(target: Target, wanted: Value, ops: LiveSysOps, *, back: bool = False) -> None:
    now = ops.read(target)
    if not (restored(target, wanted, now, ops) if back else exactly(wanted, now, ops)):
        raise WriteError(
            f"wrote {wanted}, but the host has {now}",
            where=str(target),
            hint="something else sets this value too, or the kernel does not allow it here",
            lasting=Lasting.TRANSIENT,
        )


def _vanished(target: Target, ops: LiveSysOps, journal: Journal, tally: _Tally) -> None:
    entry = journal.entry(target)
    try:
        drop_vanished(target, ops, journal)
    except WriteError as error:
        if entry is not None:
            tally.failed.append((undo_action(entry), error))
        return
    tally.vanished[target] = None


# -- back


def _roll_back(
    done: Sequence[Action],
    named: Collection[Target],
    stays: Sequence[Action],
    ops: LiveSysOps,
    journal: Journal,
    tally: _Tally,
) -> bool:
    """Take back a guest's actions of the pass, those of ``named`` to the values that others had
    set. Those of the host that it was made with are another transaction: they stay, and what would
    be wrong within them waits. Returns whether all, and the action that failed, are back."""
    clean = not isinstance(tally.failed[-1][1], _StuckError)
    # Unless it is stuck, the failed action is taken back and obstructs nothing.
    first = len(tally.failed) - (0 if clean else 1)
    for action in reversed(done):
        # A mask may have followed a move.
        entry = journal.finished(action.target)
        now = action.after if entry is None else entry.written
        back = Action(action.target, now, action.before, f"rolled back: {action.reason}")
        try:
            waits.check_busy(action.target, tally.failed)
            waits.check(back, tally.failed[first:], ops, stays)
            _change(back, ops, journal, back=True, others=action.target in named)
        except VanishedError:
            _vanished(action.target, ops, journal, tally)
        except WriteError as error:
            tally.failed.append((back, error))
            clean = False
    return clean


def _restore(entry: Entry, back: Action, ops: LiveSysOps, journal: Journal, tally: _Tally) -> None:
    """Undo one finished entry. ``done`` gets a release that finds the original there already."""
    now = ops.read(entry.target)
    if not same_setting(entry.original, back.after):
        raise StaleError(
            f"was {back.after} before vsrtune when the plan was made, and is {entry.original} now",
            where=str(entry.target),
            hint="plan again",
            lasting=Lasting.TRANSIENT,
        )
    if unchanged(entry.original, now, ops):
        journal.drop(entry.target, "the original is on the host")
        if back.release:
            tally.done.append(back)
    elif (applied := still_applied(entry.written, now, ops)) or (
        isinstance(now, CpuSet | Pin)
        and (exactly(entry.original, now, ops) or lost_its_cpus(entry, now, ops))
    ):
        # The kernel gave it others when its own were gone. The original may name others too.
        after = moved_masks.renewed(entry.target, back.after, ops)
        before = entry.written if applied else now
        change = replace(back, before=before, after=after, release=False)
        _change(change, ops, journal, entry.original, back=True)
        if not same_setting(after, back.after):
            journal.drop(entry.target, "the original has what its cpuset leaves")
        tally.done.append(back)
    else:
        _leave(entry, now, ops, journal, tally)


def _disown(entry: Entry, ops: LiveSysOps, journal: Journal, tally: _Tally) -> None:
    """Forget an entry whose value somebody else has changed, if that still holds."""
    now = ops.read(entry.target)
    if not still_applied(entry.written, now, ops) and not lost_its_cpus(entry, now, ops):
        _leave(entry, now, ops, journal, tally)


def _leave(entry: Entry, now: Value, ops: LiveSysOps, journal: Journal, tally: _Tally) -> None:
    original = entry.original
    match now, entry.written:
        case (Pin() as moved, Pin() as ours) if moved.cpuset == ours.cpuset is not None:
            # Somebody has moved the thread alone: the list is still ours, and binds others too.
            if isinstance(original, Pin) and not displaced(now):
                original = moved_masks.left(original, ours, moved)
            back = replace(undo_action(entry), before=now, after=original)
            _change(back, ops, journal, entry.original, back=True)
    tally.left.append(Left(entry.target, now, entry.written, entry.original))
    journal.drop(entry.target, "changed by somebody else")


# -- unfinished writes


def _finish_interrupted(target: Target, ops: LiveSysOps, journal: Journal) -> list[Left]:
    """Resolve an unfinished write of ``target`` before another one. Raises WriteError when that
    fails."""
    tally = _Tally()
    for entry in journal.entries(frozenset([target.guest])):
        if entry.target == target and entry.state == "intent":
            with suppress(JournalError):  # what follows writes an original, or says so
                _resolve(entry, _unfinished(entry), ops, journal, tally)
    return tally.left


def _resolve_all(
    entries: Iterable[Entry], ops: LiveSysOps, journal: Journal, tally: _Tally
) -> None:
    """Resolve those of ``entries`` that are unfinished, in this order."""
    for entry in entries:
        if entry.state != "intent":
            continue
        action = _unfinished(entry)
        try:
            waits.check_busy(entry.target, tally.failed)
            _resolve(entry, action, ops, journal, tally)
        except VanishedError:
            _vanished(entry.target, ops, journal, tally)
        except (WriteError, JournalError) as error:
            tally.failed.append((action, error))
            if isinstance(error, JournalError) and isinstance(entry.target, _SINGLE):
                with suppress(VsrtuneError):
                    ops.write(entry.target, entry.original)


def _unfinished(entry: Entry) -> Action:
    return Action(entry.target, entry.before_value, entry.written, entry.reason)


def _resolve(
    entry: Entry, action: Action, ops: LiveSysOps, journal: Journal, tally: _Tally
) -> None:
    """Resolve one unfinished write, as in ``recover``."""
    target = entry.target
    before, after = action.before, action.after
    now = ops.read(target)
    back = after == entry.original
    if restored(target, after, now, ops) if back else exactly(after, now, ops):
        ops.write(target, moved_masks.noted(after, before))
        _read_back(target, after, ops, back=back)
        if before == after:
            journal.revert(target)  # an affinity that was kept across a move
        else:
            journal.done(target)
        tally.done.append(action)
    elif not isinstance(before, Pin | Noted) and (
        exactly(before, now, ops) or cut(before, now, ops)
    ):
        # The write never happened. A pin, list or partition may have reached other threads, whose
        # masks are written last.
        journal.revert(target)
    elif before == after:
        # Kept across a move: the new cgroup may have some of these CPUs, or none.
        if not moved_masks.disjoint(before, now):
            ops.write(target, before)
        journal.revert(target)
        moved_masks.follow(action, ops.read(target), ops, journal)
    elif exactly(before, now, ops) or between(before, after, now, ops):
        if back:
            ops.write(target, after)
            _read_back(target, after, ops, back=True)
            journal.done(target)
            tally.done.append(action)
        else:
            ops.write(target, before)
            _read_back(target, before, ops, back=True)
            journal.revert(target)
            tally.done.append(Action(target, now, before, f"taken back: {action.reason}"))
    else:
        tally.left.append(Left(target, now, after, entry.original))
        journal.drop(target, "changed by somebody else")
