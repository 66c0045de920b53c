# SPDX-License-Identifier: GPL-2.0-or-later
"""The order in which a plan writes; no other place defines it.

Undo reverses the order. During a plan and its undo

- no thread is realtime on a CPU where it is not realtime at either end,
- no worker is above its vcpu unless it is at either end,
- no thread asks for CPUs outside its cpuset,
- no thread is DEADLINE while its root domain is made or removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto

from vsrtune.model.deadline import bandwidth
from vsrtune.model.guest import Sched, SchedClass, level
from vsrtune.model.plan import Action, Drift, DriftRule, Skipped
from vsrtune.model.targets import (
    HOST_REF,
    IrqAffinity,
    QueueCpus,
    Target,
    ThreadAffinity,
    Value,
)

# The cgroup for vhost workers, beside libvirt's for the emulator.
OWN_CGROUP = "vsrtune"


class Phase(IntEnum):
    """A group of writes. Actions of one phase keep the order in which they were added."""

    # Settings that no policy asks for any more make room for the rest: CPUs, bandwidth, root
    # domains. They are in the order of undo.
    RELEASES = auto()
    # Interrupts, RPS, XPS and NAPI threads of lower devices leave the guests' CPUs first.
    INTERRUPTS = auto()
    # A partition's cgroup gets its CPUs while it is empty.
    PARTITION_CGROUPS = auto()
    WORKER_CGROUPS = auto()
    # Workers leave the emulator's cgroup before the emulator is narrowed.
    WORKER_MOVES = auto()
    # The vcpus of a stepped-down guest keep its workers from running, so they go first.
    STEP_DOWN = auto()
    # A worker is lowered before and raised after its vcpus, NAPI threads with the workers.
    LOWER_WORKERS = auto()
    LOWER_VCPUS = auto()
    LOWER_SOFTIRQ = auto()
    PIN_WORKERS = auto()
    PIN_VCPUS = auto()
    # Threads have a partition's CPUs before they are moved to it, so no move changes a mask.
    PARTITION_MOVES = auto()
    PIN_EMULATORS = auto()
    # Lists of the cgroups above partitions, then those beside them and of guests that keep off,
    # then their own.
    LISTS_ABOVE = auto()
    LISTS_BESIDE = auto()
    PARTITION_LISTS = auto()
    PARTITIONS = auto()
    # The host's values for realtime threads hold before the first thread has such a class.
    TIME_SLICE = auto()
    RAISE_SOFTIRQ = auto()
    RAISE_VCPUS = auto()
    RAISE_WORKERS = auto()
    # The next pass tunes the threads that threaded NAPI makes.
    DEVICES = auto()


@dataclass(slots=True)
class Draft:
    """A plan in progress. ``desired``: the targets for which policies have a value;
    ``for_verify``: those that have it already; ``left``: those left alone because somebody
    changed them."""

    skipped: list[Skipped] = field(default_factory=list)
    desired: set[Target] = field(default_factory=set)
    for_verify: dict[Target, Value] = field(default_factory=dict)
    left: set[Target] = field(default_factory=set)
    _added: list[tuple[Phase, Action]] = field(default_factory=list)

    def want(self, phase: Phase, action: Action, drift: Drift | None, subject: str) -> None:
        """Plan a setting, unless it has that value already or somebody has changed it and the
        policy leaves that alone (``drift``). ``subject`` names it in reports."""
        target, ref = action.target, action.target.guest
        self.desired.add(target)
        if action.before == action.after:
            self.for_verify[target] = action.after
            self.skip(ref, subject, f"already set: {action.after}")
        elif drift is not None:
            self.leave(ref, subject, drift)
        else:
            self.add(phase, action)

    def add(self, phase: Phase, action: Action) -> None:
        """Add a write to its phase."""
        self._added.append((phase, action))

    def of(self, *phases: Phase) -> Sequence[Action]:
        """The actions of these phases so far."""
        return [action for phase, action in self._added if phase in phases]

    def actions(self) -> tuple[Action, ...]:
        """All actions in the order of the phases."""
        return tuple(action for _, action in sorted(self._added, key=lambda added: added[0]))

    def skip(
        self, guest: str, subject: str, reason: str, *, pending: bool = False, vain: bool = False
    ) -> None:
        """Record a setting that is left as it is."""
        self.skipped.append(Skipped(guest, subject, reason, pending=pending, vain=vain))

    def leave(self, guest: str, subject: str, drift: Drift) -> None:
        """Record a setting that somebody has changed and that is not put back."""
        self.left.add(drift.target)
        held = drift.rule is DriftRule.REPORT
        self.skipped.append(Skipped(guest, subject, drift.left, held))


def on_lower_device(target: Target) -> bool:
    """Whether it is an interrupt, or a queue or a NAPI thread of a lower device."""
    of_host = isinstance(target, ThreadAffinity) and target.guest == HOST_REF
    return of_host or isinstance(target, IrqAffinity | QueueCpus)


def moves_work(target: Target) -> bool:
    """Whether it says where the work of a lower device is done, on which other guests rely: not
    an interrupt of a device that a guest drives itself."""
    return target.guest == HOST_REF and on_lower_device(target)


def lowers(before: Sched, after: Sched) -> bool:
    """Whether a thread becomes less urgent, or its budget smaller, which makes room for the budgets
    beside it. A thread that becomes DEADLINE is raised."""
    if after.cls is SchedClass.DEADLINE:
        return bandwidth(after) < bandwidth(before)
    return level(after) < level(before)
