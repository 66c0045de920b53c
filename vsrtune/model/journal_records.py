# SPDX-License-Identifier: GPL-2.0-or-later
"""The meaning of journal records: the fold from records to live entries. Pure.

Records (one JSON object each, ``r`` names the kind):

========  =====================  =====================================================
header    version, boot_id       first line of every file
intent    action[, original]     about to write ``action.after``
done      target                 the intent's value is on the host, read back
revert    target                 the intent was taken back; its ``before`` is on the host
drop      target, why            no longer vsrtune's (undone, vanished, changed by others)
entry     target, original,      a live entry, from a compaction or brought by a guest; it
          written, reason        replaces all earlier records of the target. Also that of a
                                 mask which a move between cgroups has changed
lag       seconds                threads have left class deadline; their bandwidth stays
                                 booked for at most this long after the last record
step      guest, step            how far the guest is stepped down (stepdown); step null: it
                                 is tuned as its policy says
========  =====================  =====================================================

Rules of the fold

* The first ``before`` of a target is its original.
* A later ``before`` other than the value that vsrtune last wrote is somebody else's
  setting and becomes the original. The target keeps its place in the order of first writes.
* An intent that names the original overrides this: when the policy enforces a setting,
  undo restores the value before vsrtune's, not the one that somebody else set since.
* A finished entry whose written value equals its original is no longer live.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from vsrtune.core.codec import decode, encode
from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import UnknownError, VsrtuneError
from vsrtune.model.deadline import lag_seconds
from vsrtune.model.guest import Sched, SchedClass, ThreadKey, is_lowered, level
from vsrtune.model.plan import Action
from vsrtune.model.root_domains import is_partition
from vsrtune.model.stepdown import Step
from vsrtune.model.targets import (
    HOST_REF,
    CgroupDir,
    CpusetFile,
    Partition,
    PartitionState,
    Pin,
    Target,
    ThreadAffinity,
    ThreadCgroup,
    ThreadSched,
    Value,
    VcpuPin,
    decode_target,
    decode_value,
)

VERSION = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """What vsrtune did to a target.

    ``original`` is the value that undo restores, ``written`` the last value that vsrtune wrote. In
    state ``intent``, a write from ``before`` to ``written`` is unfinished, and ``committed`` is
    the entry before that write (None for the target's first write).
    """

    target: Target
    original: Value
    written: Value
    state: Literal["intent", "done"]
    before: Value | None = None
    committed: Entry | None = None
    reason: str = ""

    @property
    def before_value(self) -> Value:
        """``before`` of an unfinished write. Raises VsrtuneError in state ``done``."""
        if self.before is None:
            raise VsrtuneError("a finished entry has no value before its write")
        return self.before


def same_setting(a: Value, b: Value) -> bool:
    """Whether two values of a target are the same setting. Pins compare by their CPUs, because
    libvirt writes the same cpuset in more than one way. A partition that became invalid still
    counts as the requested one."""
    if isinstance(a, Pin) and isinstance(b, Pin):
        return a.cpus == b.cpus
    if isinstance(a, PartitionState) and isinstance(b, PartitionState):
        return a.wanted == b.wanted
    return type(a) is type(b) and a == b


def ours(written: Value, now: Value) -> bool:
    """Whether ``now`` is the setting that was written, or a realtime class that the thread's owner
    has lowered since."""
    if isinstance(written, Sched) and isinstance(now, Sched) and is_lowered(written, now):
        return True
    return same_setting(written, now)


def displaced(value: Value) -> bool:
    """Whether a thread runs outside its own cpuset: no CPU of the cpuset was online, so the kernel
    let the thread run elsewhere (cpuset_cpus_allowed_fallback). Nobody requested that mask, and
    the kernel refuses it once such a CPU is back."""
    if not isinstance(value, Pin) or not value.cpuset:
        return False
    return not CpuSet.parse(value.cpuset) & value.cpus


def applied(entries: Iterable[Entry]) -> dict[Target, Value]:
    """The values that vsrtune last wrote and read back, by target."""
    committed = (e if e.state == "done" else e.committed for e in entries)
    return {e.target: e.written for e in committed if e is not None}


def undo_action(entry: Entry) -> Action:
    """The change that restores the original."""
    return Action(entry.target, entry.written, entry.original, f"undo: {entry.reason}")


def undo_order(entries: Iterable[Entry]) -> list[Entry]:
    """The order in which undo takes entries back: the reverse of their first writes. Realtime
    classes and what concerns root domains are exceptions, because a thread may have changed its
    class or cgroup before it got its CPUs or its root domain existed:

    1. threads leave class deadline before anything happens to their root domain, and become less
       urgent before they get other CPUs back
    2. a slice that is a root domain becomes an ordinary one: it binds all threads in it
    3. everything else
    4. threads leave the cgroups of partitions
    5. these threads get their own CPUs back, and so do the vcpus whose cgroups these were:
       their list would move the threads in it
    6. threads become more urgent, on their own CPUs
    7. vsrtune's cgroups and their CPU lists, after all threads have left them
    """
    found = list(entries)
    found.reverse()
    moves = [e for e in found if isinstance(e.target, ThreadCgroup) and _in_partition(e.written)]
    moved = {e.target.thread for e in moves if isinstance(e.target, ThreadCgroup)}
    hosts = {(e.target.guest, str(e.written).rpartition("/")[2]) for e in moves}
    slices = {
        e.target.path
        for e in found
        if isinstance(e.target, Partition) and e.target.guest == HOST_REF
    }
    return sorted(found, key=lambda e: _undo_rank(e, moved, hosts, slices))


def _in_partition(cgroup: Value) -> bool:
    name = str(cgroup).rpartition("/")[2]
    return is_partition(name) or name.startswith("vcpu")


def _undo_rank(
    entry: Entry, moved: set[ThreadKey], hosts: set[tuple[str, str]], slices: set[str]
) -> int:
    written = entry.written
    match entry.target:
        case ThreadSched() if isinstance(written, Sched):
            original = level(entry.original) if isinstance(entry.original, Sched) else 0
            lowered = written.cls is SchedClass.DEADLINE or original < level(written)
            return 1 if lowered else 6 if original > level(written) else 3
        case Partition(path=path) | CpusetFile(path=path) if path in slices:
            return 2
        case ThreadCgroup(thread=thread) if thread in moved:
            return 4
        case ThreadAffinity(thread=thread) | VcpuPin(thread=thread) if thread in moved:
            return 5
        case VcpuPin(guest=guest, vcpu=vcpu) if (guest, f"vcpu{vcpu}") in hosts:
            return 5
        case CpusetFile(path=path, file="cpuset.cpus") if is_partition(path):
            return 7
        case CgroupDir():
            return 7
    return 3


class Fold:
    """Live entries by target, in the order of the first write, and by guest. ``steps`` are the
    guests that are stepped down, also those without live entries. ``lag`` is the longest time,
    in seconds, for which the kernel keeps the bandwidth of a thread booked that vsrtune took out
    of class deadline. Methods raise VsrtuneError for a record that cannot follow the ones before
    it."""

    def __init__(self) -> None:
        self.live: dict[Target, Entry] = {}
        self.by_guest: dict[str, dict[Target, Entry]] = {}
        self.steps: dict[str, Step] = {}
        self.lag = 0.0

    def put(self, entry: Entry) -> None:
        """Make ``entry`` its target's entry."""
        self.live[entry.target] = entry
        self.by_guest.setdefault(entry.target.guest, {})[entry.target] = entry

    def _take(self, target: Target) -> Entry | None:
        entry = self.live.pop(target, None)
        if entry is not None:
            mine = self.by_guest[target.guest]
            del mine[target]
            if not mine:
                del self.by_guest[target.guest]
        return entry

    def intent(self, action: Action, original: Value | None = None) -> None:
        """A write begins. ``original`` is given where it does not follow from ``before``."""
        known = self.live.get(action.target)
        if known is not None and known.state == "intent":
            raise VsrtuneError("an intent follows an unfinished intent of the same target")
        if original is None:
            original = action.before
            if known is not None and (
                ours(known.written, action.before) or displaced(action.before)
            ):
                original = known.original
        self.put(
            Entry(
                action.target,
                original,
                action.after,
                "intent",
                before=action.before,
                committed=known,
                reason=action.reason,
            )
        )
        self.lag = max(self.lag, _lag(action))

    def done(self, target: Target) -> None:
        """The unfinished write is on the host."""
        entry = self._unfinished(target)
        if entry.written == entry.original:
            self._take(target)
        else:
            self.put(replace(entry, state="done", before=None, committed=None))

    def revert(self, target: Target) -> None:
        """The unfinished write was taken back."""
        entry = self._unfinished(target)
        committed = entry.committed
        if committed is None or committed.original != entry.original:
            # Taken back to somebody else's setting: nothing of vsrtune's is left.
            self._take(target)
        else:
            self.put(committed)

    def drop(self, target: Target) -> None:
        """The target is no longer vsrtune's."""
        if self._take(target) is None:
            raise VsrtuneError("drops a target without a live entry")

    def entry(self, entry: Entry) -> None:
        """A finished entry, from a compaction or adopted."""
        self.put(entry)

    def step(self, guest: str, step: Step | None) -> None:
        """How far a guest is stepped down; None when it is not."""
        if step is None:
            self.steps.pop(guest, None)
        else:
            self.steps[guest] = step

    def _unfinished(self, target: Target) -> Entry:
        entry = self.live.get(target)
        if entry is None or entry.state != "intent":
            raise VsrtuneError("finishes a write that was not begun")
        return entry

    def record(self, data: Any) -> None:
        """Apply one decoded record. Raises VsrtuneError, LookupError or AttributeError for one that
        is malformed or out of turn."""
        kind = data.get("r") if isinstance(data, dict) else None
        if kind == "intent":
            action = Action.from_data(data["action"])
            named = data.get("original")
            original = None if named is None else decode_value(action.target, named, "$.original")
            self.intent(action, original)
        elif kind == "done":
            self.done(decode_target(data.get("target")))
        elif kind == "revert":
            self.revert(decode_target(data.get("target")))
        elif kind == "drop":
            self.drop(decode_target(data.get("target")))
        elif kind == "step":
            step = data.get("step")
            found = None if step is None else decode(Step, step, "$.step")
            self.step(decode(str, data.get("guest"), "$.guest"), found)
        elif kind == "lag":
            self.lag = max(self.lag, decode(float, data.get("seconds"), "$.seconds"))
        elif kind == "entry":
            target = decode_target(data.get("target"))
            self.entry(
                Entry(
                    target,
                    decode_value(target, data.get("original"), "$.original"),
                    decode_value(target, data.get("written"), "$.written"),
                    "done",
                    reason=decode(str, data.get("reason"), "$.reason"),
                )
            )
        elif isinstance(kind, str):
            raise UnknownError(f"unknown record {kind!r}")
        else:
            raise VsrtuneError("it is no record")

    def compacted(self) -> list[dict[str, Any]]:
        """Records that fold to exactly this. Without live entries there is no lag record, because
        it would concern nothing."""
        records = [step_record(guest, step) for guest, step in self.steps.items()]
        if self.live and self.lag:
            records.append({"r": "lag", "seconds": self.lag})
        for entry in self.live.values():
            committed = entry if entry.state == "done" else entry.committed
            if committed is not None:
                records.append(entry_record(committed))
            if entry.state == "intent":
                action = Action(entry.target, entry.before_value, entry.written, entry.reason)
                records.append(intent_record(action, entry.original))
        return records


def _lag(action: Action) -> float:
    before, after = action.before, action.after
    if not (isinstance(before, Sched) and isinstance(after, Sched)):
        return 0.0
    leaves = before.cls is SchedClass.DEADLINE and after.cls is not SchedClass.DEADLINE
    return lag_seconds(before) if leaves else 0.0


def intent_record(action: Action, original: Value | None = None) -> dict[str, Any]:
    """The record of ``Fold.intent``."""
    record = {"r": "intent", "action": action.to_data()}
    return record if original is None else {**record, "original": encode(original)}


def target_record(kind: Literal["done", "revert", "drop"], target: Target) -> dict[str, Any]:
    """The record of ``Fold.done``, ``revert`` or ``drop``."""
    return {"r": kind, "target": encode(target)}


def entry_record(entry: Entry) -> dict[str, Any]:
    """The record of ``Fold.entry``."""
    return {
        "r": "entry",
        "target": encode(entry.target),
        "original": encode(entry.original),
        "written": encode(entry.written),
        "reason": entry.reason,
    }


def step_record(guest: str, step: Step | None) -> dict[str, Any]:
    """The record of ``Fold.step``."""
    return {"r": "step", "guest": guest, "step": encode(step)}


def header_record(boot_id: str) -> dict[str, Any]:
    """The first line of a journal."""
    return {"r": "header", "version": VERSION, "boot_id": boot_id}
