# SPDX-License-Identifier: GPL-2.0-or-later
"""Tunes and untunes the host for a configuration: policies and libvirt's pins.

Policies and pins are plans, carried out with vsrtune's own journal, so that `vsrtune undo`
can also put back what a killed bench leaves.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Sequence
from functools import partial

from vsrtune.bench.cleanup.cleaners import failure, settle
from vsrtune.bench.spec.model import Configuration, Tuning
from vsrtune.bench.spec.parser import policies
from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import Lasting, VsrtuneError
from vsrtune.execute import executor
from vsrtune.execute.brought import adopt_brought
from vsrtune.execute.executor import Result
from vsrtune.execute.host_writer import LiveSysOps
from vsrtune.execute.journal import Journal
from vsrtune.model.guest import Role
from vsrtune.model.plan import Action, Plan
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import HOST_REF, EmulatorPin, VcpuPin
from vsrtune.observe.observer import live_observer
from vsrtune.plan.actions import pin_values
from vsrtune.plan.full_plan import full_plan
from vsrtune.plan.requirements import pin_target
from vsrtune.policy.matching import Match, QemuFilter, match, qemu_filter
from vsrtune.policy.model import WITHOUT_LIBVIRT, Policy

# A thread may end, or a worker wake up, between the observation and the write.
_TRIES = 3


def pin_cpus(configuration: Configuration, online: CpuSet) -> CpuSet:
    """The CPUs of libvirt's pins. Raises VsrtuneError when one of them is not online."""
    cpus = CpuSet.parse(configuration.cpus or "")
    if not cpus or not cpus <= online:
        raise VsrtuneError(
            f"CPUs {configuration.cpus} are not all online, {online} are",
            where=f"{configuration.name}: cpus",
            hint="name online CPUs",
        )
    return cpus


class Tuner:
    """One tuning at a time, on an open journal. Methods raise VsrtuneError."""

    def __init__(self, journal: Journal, guests: Sequence[str], uri: str) -> None:
        self._journal = journal
        self._guests = tuple(guests)
        self._uri = uri
        self._ops = LiveSysOps(uri, budgets_end=journal.budgets_end, original=journal.original)
        # Makes the present plan again while one of its settings waits for its thread to run.
        self._unsettled: Callable[[Snapshot], Plan] | None = None
        self._seen = QemuFilter()

    def check(self, configuration: Configuration) -> None:
        """Refuse a configuration that cannot be carried out, as far as this is known."""
        for program in (*configuration.apply[:1], *configuration.revert[:1]):
            if shutil.which(program) is None:
                raise VsrtuneError(
                    f"there is no program {program!r}",
                    where=configuration.name,
                    hint="install it, or name its path",
                )
        self._planning(configuration)

    def apply(self, configuration: Configuration) -> tuple[str, ...]:
        """Carry out the policy or the pins of the configuration, but not its commands, on an
        untuned host. Return notes for people."""
        make = self._planning(configuration)
        return () if make is None else self._carry_out(make)

    def _planning(self, configuration: Configuration) -> Callable[[Snapshot], Plan] | None:
        """What makes the plan of a configuration; None when nothing is planned."""
        match configuration.tuning:
            case Tuning.POLICY:
                return self._by(policies(configuration))
            case Tuning.LIBVIRT_PINS:
                cpus = pin_cpus(configuration, self._ops.online())
                return partial(libvirt_pins, names=self._guests, cpus=cpus)
        return None

    def apply_policies(self, chosen: Sequence[Policy]) -> tuple[str, ...]:
        """Carry out these policies on an untuned host, and return notes for people."""
        return self._carry_out(self._by(chosen))

    @property
    def waits(self) -> bool:
        """Whether the kernel takes a setting only once its thread has run (class deadline)."""
        return self._unsettled is not None

    def again(self) -> tuple[str, ...]:
        """Carry out settings that waited, as far as threads have run since. Return notes for
        people."""
        return () if self._unsettled is None else self._carry_out(self._unsettled)

    def undo(self) -> tuple[str, ...]:
        """Put back every setting in the journal. Return notes on settings that others changed."""
        self._unsettled = None
        return settle(executor.undo(self._ops, self._journal))

    def _by(self, chosen: Sequence[Policy]) -> Callable[[Snapshot], Plan]:
        self._seen = qemu_filter(chosen)
        return partial(self._policy_plan, chosen)

    def _policy_plan(self, chosen: Sequence[Policy], snapshot: Snapshot) -> Plan:
        under_test = [g for g in snapshot.guests if self._names(g.name, g.ref)]
        named = any(match(p, g) is not Match.NONE for p in chosen for g in under_test)
        if self._guests and not named:
            raise VsrtuneError(
                f"no policy names any of the routers that run ({', '.join(self._guests)})",
                where=chosen[0].path,
                hint="write the router's name, or a glob that matches it, as guest",
            )
        return full_plan(snapshot, chosen, self._journal.entries(), reassert=True)

    def _names(self, name: str, ref: str) -> bool:
        return name in self._guests or ref in self._guests

    def _carry_out(self, make: Callable[[Snapshot], Plan]) -> tuple[str, ...]:
        for _ in range(_TRIES):
            snapshot = live_observer(self._uri, lambda: self._seen).observe(0.0)
            adopt_brought(snapshot, snapshot.guests, self._journal)
            plan = make(snapshot)
            for refusal in plan.refusals:
                where = f"{refusal.policy}: {refusal.guest}"
                raise VsrtuneError(refusal.reason, where=where, hint=refusal.hint)
            result = executor.apply(plan, self._ops, self._journal)
            if not result.failed:
                self._unsettled = make if self._waits(plan, result) else None
                skipped = (f"{s.guest}: {s.subject}: {s.reason}" for s in plan.skipped)
                return (*plan.warnings, *skipped)
            self.undo()
            if any(error.lasting is not Lasting.TRANSIENT for _, error in result.failed):
                break
        raise failure(result)

    def _waits(self, plan: Plan, result: Result) -> bool:
        """Whether something waits in a router under test; others get no traffic."""
        refs = {action.target.guest for action, _ in result.pending}
        refs |= {skipped.guest for skipped in plan.skipped if skipped.pending}
        names = {r: r.partition(":")[2] if r.startswith(WITHOUT_LIBVIRT) else r for r in refs}
        return HOST_REF in refs or any(self._names(names[r], r) for r in refs)


def libvirt_pins(snapshot: Snapshot, names: Collection[str], cpus: CpuSet) -> Plan:
    """Pin every vcpu and the emulator (with it the vhost workers) of the guests to ``cpus``.

    Vhost workers stay where libvirt keeps them, in the emulator's cgroup, and follow its
    pin. Raises VsrtuneError for a guest that libvirt does not run.
    """
    actions: list[Action] = []
    for name in names:
        guest = next((g for g in snapshot.guests if g.name == name), None)
        if guest is None or guest.source != "libvirt":
            raise VsrtuneError(
                "is no running libvirt guest, so libvirt cannot pin it",
                where=name,
                hint="see: virsh list",
            )
        for thread in filter(None, (*guest.by_role(Role.VCPU), guest.main)):
            target = pin_target(guest, thread)
            if isinstance(target, VcpuPin | EmulatorPin):
                before, after = pin_values(thread, target, cpus)
                if before != after:
                    actions.append(Action(target, before, after, "libvirt pins only"))
    return Plan(actions=tuple(actions))
