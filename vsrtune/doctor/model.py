# SPDX-License-Identifier: GPL-2.0-or-later
"""Facts and findings of `vsrtune doctor`: values, and nothing that reads them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.exit_codes import ExitCode
from vsrtune.model.host import DeadlineCpu
from vsrtune.model.snapshot import Snapshot
from vsrtune.plan.interrupt_cpus import interrupt_cpus
from vsrtune.policy.model import Policy


class Severity(enum.StrEnum):
    """How much a finding matters, from nothing to most."""

    OK = "ok"
    INFO = "info"  # something to know; it may hinder something that is not in use yet
    WARNING = "warning"  # costs packets, time or accuracy, or soon may
    ERROR = "error"  # something that is in use does not work

    @property
    def rank(self) -> int:
        """Higher matters more."""
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check. ``hint`` is "" when there is nothing to do, ``evidence`` the value
    that tells, and where it was read. ``run`` fills in ``check``."""

    level: Severity
    what: str
    hint: str = ""
    evidence: str = ""
    check: str = ""


# A finding of each level.
ok, info, warning, error = (partial(Finding, level) for level in Severity)


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that the snapshot does not hold. None: not readable here, so not judged.

    ``rt_group_sched`` is the path of the kernel's configuration when RT_GROUP_SCHED is in
    force ("" when it is not), ``version`` what ``uname -v`` says, ``backlog`` the frames that
    each CPU's backlog dropped since boot, ``isolated`` the CPUs isolated at boot,
    ``managed_irqs`` the interrupts whose CPUs the kernel alone sets, ``devices`` the MAC of a
    guest's host device and whether it is up,
    ``openers`` the processes (device, pid, name) that have a guest's tap open and are not that
    guest's QEMU, ``books`` the kernel's bookings for class deadline, ``tuned`` the options of the
    running TuneD profile that write what vsrtune writes, or what class deadline needs.
    """

    rt_group_sched: str | None = None
    version: str | None = None
    fork_from_owner: str | None = None
    default_qdisc: str | None = None
    backlog: tuple[tuple[int, int], ...] | None = None
    isolated: CpuSet | None = None
    managed_irqs: tuple[int, ...] | None = None
    devices: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    openers: tuple[tuple[str, int, str], ...] | None = None
    books: tuple[DeadlineCpu, ...] = ()
    tuned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """A host to judge."""

    snapshot: Snapshot
    facts: Facts
    policies: tuple[Policy, ...] = ()

    @property
    def release(self) -> tuple[int, int]:
        """The kernel's release, as (6, 12); (0, 0) when it is not known."""
        return self.snapshot.host.release

    @property
    def interrupts(self) -> CpuSet:
        """The interrupt CPUs of all guests, as a policy's ``auto`` would take them."""
        host = self.snapshot.host
        found = [interrupt_cpus(host, guest).cpus for guest in self.snapshot.guests]
        return CpuSet.union(found)


Check = Callable[[Any], Iterable[Finding]]


def checks_in(module: ModuleType) -> tuple[Check, ...]:
    """The checks of a module: its public functions in their order."""
    written = (f for f in vars(module).values() if isinstance(f, FunctionType))
    return tuple(
        f for f in written if f.__module__ == module.__name__ and not f.__name__.startswith("_")
    )


def name_of(check: Check) -> str:
    """The name of a check in reports."""
    return check.__name__.replace("_", " ")


def trap_of(check: Check) -> str:
    """The trap that a check looks for, a sentence: the first paragraph of its docstring."""
    return " ".join((check.__doc__ or "").strip().partition("\n\n")[0].split())


def run(checks: Iterable[Check], facts: object) -> tuple[Finding, ...]:
    """Every check's findings, in the order of ``checks``."""
    return tuple(replace(f, check=name_of(check)) for check in checks for f in check(facts))


def worst(findings: Iterable[Finding]) -> Severity:
    """The level that matters most; OK for none."""
    return max((f.level for f in findings), key=lambda level: level.rank, default=Severity.OK)


def exit_code(findings: Iterable[Finding]) -> ExitCode:
    """DONE when nothing is wrong, DIFFERS with warnings, FAILED with errors."""
    codes = {Severity.ERROR: ExitCode.FAILED, Severity.WARNING: ExitCode.DIFFERS}
    return codes.get(worst(findings), ExitCode.DONE)
