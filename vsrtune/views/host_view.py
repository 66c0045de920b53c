# SPDX-License-Identifier: GPL-2.0-or-later
"""What tables, `vsrtune top` and the status page show alike: the threads of guests with their
measured use of CPUs, and the NICs whose interrupts each CPU serves. Pure.

Shares are of one CPU, or of a budget, and lie between 0 and 1 (a budget can be overrun a
little). None means unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace

from vsrtune.model.deadline import used
from vsrtune.model.guest import (
    DATA_PLANE,
    Guest,
    Interface,
    Role,
    Sched,
    SchedClass,
    Thread,
    ThreadKey,
    thread_label,
)
from vsrtune.model.host import Host
from vsrtune.model.load import Reading, mean
from vsrtune.model.root_domains import waits_for_domain
from vsrtune.model.snapshot import Snapshot
from vsrtune.plan.interrupt_cpus import device_cpus, serving

# A thread that uses this much of its budget is throttled: ticks and scheduling take the rest.
THROTTLED = 0.97
# Roles of a guest's threads, in the order of display.
ROLES = (*DATA_PLANE, Role.EMULATOR, Role.IOTHREAD, Role.WORKER)


@dataclass(frozen=True, slots=True)
class Use:
    """What a thread uses. ``load`` is its share of a CPU, ``wait`` the share of the time that it
    stood in the run queue, ``budget`` the used share of its DEADLINE budget."""

    load: float | None = None
    wait: float | None = None
    budget: float | None = None

    @property
    def throttled(self) -> bool:
        """Whether the budget is used up."""
        return self.budget is not None and self.budget >= THROTTLED


@dataclass(frozen=True, slots=True)
class ThreadView:
    """A thread of ``guest``. ``pending`` is set while it waits for its root domain.
    ``beside_interrupts``: a thread that handles frames is on a CPU that serves interrupts of
    a guest's NIC."""

    guest: str
    thread: Thread
    use: Use = Use()
    pending: bool = False
    beside_interrupts: bool = False

    @property
    def label(self) -> str:
        """The thread's role, with its number or interface."""
        return thread_label(self.thread)

    @property
    def sched(self) -> str:
        """The scheduling class. Whether children inherit it says nothing about the thread."""
        return str(replace(self.thread.sched, reset_on_fork=False))


def thread_views(
    guest: Guest, host: Host, use: Callable[[Thread], Use], serving: Container[int] = ()
) -> tuple[ThreadView, ...]:
    """The guest's threads in the order of display: by ROLES, then in the order of by_role().
    ``serving`` holds the CPUs that serve interrupts."""
    return tuple(
        ThreadView(
            guest.ref,
            thread,
            use(thread),
            waits_for_domain(host, thread),
            role in DATA_PLANE and thread.last_cpu in serving,
        )
        for role in ROLES
        for thread in guest.by_role(role)
    )


def reported_use(budgets: Mapping[ThreadKey, float]) -> Callable[[Thread], Use]:
    """The use of a thread by the loads in the snapshot and measured ``budgets``."""

    def use(thread: Thread) -> Use:
        load = mean(thread.load) if thread.load else None
        return Use(load, budget=budgets.get(thread.key))

    return use


def use_between(sched: Sched, first: Reading | None, last: Reading | None) -> Use:
    """The use of a thread of this class between two readings; unknown without both."""
    if first is None or last is None or last.at_ns <= first.at_ns:
        return Use()
    elapsed = last.at_ns - first.at_ns
    ran, waited = max(last.run_ns - first.run_ns, 0), max(last.wait_ns - first.wait_ns, 0)
    deadline = sched.cls is SchedClass.DEADLINE
    budget = round(used(sched, ran, elapsed), 4) if deadline else None
    return Use(round(ran / elapsed, 4), round(waited / elapsed, 4), budget)


def interrupts(snapshot: Snapshot) -> dict[int, list[str]]:
    """The NICs below guests, in order of their names, by the CPU that serves them."""
    host = snapshot.host
    chains: dict[tuple[str, ...], Interface] = {}
    for guest in snapshot.guests:
        for interface in guest.interfaces:
            chains.setdefault(interface.lower, interface)
    found: dict[int, list[str]] = {}
    for name in sorted({name for i in chains.values() for name in serving(host, i)}):
        for cpu in device_cpus(host, host.nic(name))[0]:
            found.setdefault(cpu, []).append(name)
    return found
