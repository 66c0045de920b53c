# SPDX-License-Identifier: GPL-2.0-or-later
"""The masks that threads lose to a move between cgroups, a CPU list or a partition.

A move between cgroups may cost the thread its affinity (6.1), which is no part of the cgroup's
value. The executor therefore journals the affinity around the move as an intent of its own, from
and to the present value; after a crash in between, ``recover`` writes it again. This is no change
of ours, whoever set the affinity: the intent ends as taken back, with the entry as it was.

A new cgroup may have none of the CPUs of a mask. What the kernel gives the thread then is no drift
of a mask of ours: its entry follows.

A list or partition notes the masks that its write loses, also those of threads that are not a
guest's. Each note is of the mask before all lists and partitions of ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import WriteError
from vsrtune.execute.comparison import still_applied
from vsrtune.execute.host_writer import LiveSysOps
from vsrtune.execute.journal import Journal
from vsrtune.model.journal_records import Entry, displaced
from vsrtune.model.plan import Action
from vsrtune.model.targets import (
    EmulatorPin,
    Noted,
    Noting,
    Pin,
    Target,
    ThreadAffinity,
    ThreadCgroup,
    Value,
    pinned_cpus,
)


def affinity_of(move: ThreadCgroup) -> ThreadAffinity:
    """The affinity of the thread."""
    return ThreadAffinity(move.guest, move.thread, move.label)


def kept(back: Sequence[Action], ops: LiveSysOps, journal: Journal) -> list[Target]:
    """The masks of ours, of threads that these releases move, that are not released too."""
    released = {a.target for a in back}
    found: list[Target] = []
    for move in (a.target for a in back):
        if isinstance(move, ThreadCgroup):
            target = affinity_of(move)
            entry = None if target in released else journal.finished(target)
            with suppress(WriteError):
                if entry is not None:
                    found += [target] * still_applied(entry.written, ops.read(target), ops)
    return found


def adopt(kept: Iterable[Target], ops: LiveSysOps, journal: Journal) -> None:
    """Have the entries of ``kept`` follow the moves: the rest of the plan reckons with what
    these have left of the masks."""
    for target in kept:
        entry = journal.entry(target)
        with suppress(WriteError):
            now = ops.read(target)
            if entry is not None and not still_applied(entry.written, now, ops):
                journal.adopt(replace(entry, written=now))


def follow(guard: Action, now: Value, ops: LiveSysOps, journal: Journal) -> None:
    """Have the entry of an affinity that is ours follow a move which left the thread none of its
    CPUs, if the thread may have the original again where it is ``now``. Undo would otherwise take
    the kernel's choice for somebody else's."""
    entry = journal.entry(guard.target)
    if entry is None or not isinstance(entry.original, CpuSet) or not isinstance(now, CpuSet):
        return
    ours = still_applied(entry.written, guard.before, ops)
    lost = ours and not still_applied(entry.written, now, ops)
    if lost and ops.unpartitioned(entry.original) <= now:
        journal.adopt(replace(entry, written=now))


def whole(target: Target, now: Value, ops: LiveSysOps, journal: Journal) -> Value:
    """The value ``now`` with what partitions and lists have taken: CPUs of a mask or pin, and of
    the masks that a list or partition notes, by what earlier ones have noted."""
    if not isinstance(now, Noted):
        return ops.whole(target, now)
    originals = (entry.original for entry in journal.entries())
    notes = (o.masks for o in originals if isinstance(o, Noted))
    return renewed(target, replace(now, masks=tuple(chain.from_iterable(notes))), ops)


def renewed(target: Target, value: Value, ops: LiveSysOps) -> Value:
    """The CPU list or partition ``value`` with the masks that threads are to have beside it
    (``LiveSysOps.renewed``). What the cpuset of a thread leaves it (``LiveSysOps.left``) in place
    of a mask or pin with none of its CPUs, and the CPUs of its list in place of the mask of a pin
    that was outside of it. Other values as they are. Raises WriteError."""
    if isinstance(target, Noting) and isinstance(value, Noted):
        return ops.renewed(target, value)
    if isinstance(value, Pin) and displaced(value):
        # Nobody asked for that mask. The list binds the thread again once it has a CPU.
        listed = CpuSet.parse(value.cpuset or "")
        if not ops.left(target, listed).isdisjoint(listed):
            return replace(value, cpus=listed)
    cpus = pinned_cpus(value)
    if not cpus or not (others := ops.left(target, cpus)).isdisjoint(cpus):
        return value
    return replace(value, cpus=others) if isinstance(value, Pin) else others


def left(original: Pin, written: Pin, now: Pin) -> Pin:
    """The pin ``original`` of a thread that somebody has moved: it stays where it is ``now`` as far
    as the list allows, and threads beside it that have what was ``written`` get what they had."""
    bound = CpuSet.parse(original.cpuset or "")
    known = {other.thread for other in original.others}
    beside = (
        replace(other, cpus=original.cpus)
        for other in now.others
        if other.cpus == written.cpus and other.thread not in known
    )
    cpus = (now.cpus & bound or bound) if bound else now.cpus
    return replace(original, cpus=cpus, others=(*original.others, *beside))


def noted(value: Value, before: Value) -> Value:
    """The CPU list or partition ``value`` with the masks that were noted before its unfinished
    write, which may have lost them. Other values are returned as they are."""
    if isinstance(value, Noted) and isinstance(before, Noted) and not value.masks:
        return replace(value, masks=before.masks)
    return value


def disjoint(before: Value, now: Value) -> bool:
    """Whether the new cgroup has none of the CPUs of the mask ``before``."""
    return isinstance(before, CpuSet) and isinstance(now, CpuSet) and now.isdisjoint(before)


def inherited(target: Target, now: Value, ops: LiveSysOps, journal: Journal) -> Value | None:
    """The original of a thread with the mask that vsrtune gave the main thread of its process: the
    thread was made since, and inherited it. None of all others."""
    if not isinstance(target, ThreadAffinity):
        return None
    thread, entries = target.thread, journal.entries(frozenset([target.guest]))
    for entry in entries:
        of = entry.target
        if entry.state == "intent" or pinned_cpus(entry.written) != now:
            continue
        main = isinstance(of, ThreadAffinity) and of.thread.tid == thread.pid != thread.tid
        if main or (isinstance(of, EmulatorPin) and _beside_emulator(target, ops, entries)):
            return pinned_cpus(entry.original)
    return None


def _beside_emulator(target: ThreadAffinity, ops: LiveSysOps, entries: Iterable[Entry]) -> bool:
    """Whether the thread is in libvirt's cgroup of the emulator, or was before vsrtune moved it.
    Iothreads have cgroups of their own, and what they have is theirs."""
    places = [
        entry.original
        for entry in entries
        if isinstance(entry.target, ThreadCgroup) and entry.target.thread == target.thread
    ]
    with suppress(WriteError):  # cgroup v1
        places.append(ops.read(ThreadCgroup(target.guest, target.thread, "")))
    return any(str(place).endswith("/emulator") for place in places)
