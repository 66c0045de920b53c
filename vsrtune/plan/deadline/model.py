# SPDX-License-Identifier: GPL-2.0-or-later
"""Root domains as the planner makes them, and the threads in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import Role, Thread, ThreadKey
from vsrtune.model.host import Host
from vsrtune.model.plan import Refusal
from vsrtune.model.root_domains import within
from vsrtune.plan.placement.costs import Chosen
from vsrtune.plan.requirements import PinRequest, Requirements, label
from vsrtune.policy.model import sched_keys


class DomainMode(Enum):
    """How a root domain is made."""

    TIGHT = "tight"
    KTHREADS = "kernel threads"
    LOOSE = "loose"
    ISOLATED = "isolated"


@dataclass(frozen=True, slots=True)
class Member:
    """A thread that runs in a root domain, DEADLINE or beside such threads."""

    requirements: Requirements
    pin: PinRequest

    @property
    def thread(self) -> Thread:
        """The thread itself."""
        return self.pin.thread

    @property
    def booked(self) -> int:
        """Its bandwidth; 0 when the policy does not make it DEADLINE."""
        return self.requirements.booked(self.thread.role)

    @property
    def slice(self) -> str:
        """The topmost cgroup of its guest, wherever the thread itself is now."""
        found = [self.thread, *self.requirements.guest.by_role(Role.EMULATOR)]
        return next((t.cgroup for t in found if "/" in t.cgroup), "").partition("/")[0]

    @property
    def name(self) -> str:
        """The guest and the thread."""
        return f"{self.requirements.guest.ref} {label(self.thread)}"


@dataclass(frozen=True, slots=True)
class RootDomain:
    """One root domain. ``path`` is the cgroup of the partition, "" when isolated."""

    mode: DomainMode
    cpus: CpuSet
    path: str
    members: tuple[Member, ...]
    why: str

    @property
    def guests(self) -> list[str]:
        """The guests with threads in it."""
        return list(dict.fromkeys(m.requirements.guest.ref for m in self.members))

    def holds(self, host: Host, cgroup: str) -> bool:
        """Whether a thread in ``cgroup`` is in this root domain on ``host``."""
        if self.mode is DomainMode.ISOLATED:
            return True
        group = host.cpuset(self.path)
        if group is None or not group.valid:
            return False
        below = self.mode is DomainMode.LOOSE and within(cgroup, self.path)
        return below or cgroup == self.path

    @property
    def slice(self) -> str:
        """The topmost cgroup of its guests."""
        return self.members[0].slice


@dataclass(frozen=True, slots=True)
class RootDomains:
    """The root domains of a plan. ``later``: root domains that a later plan makes, once the
    threads have left cgroups that stand in the way. ``straight``: workers that go into their
    partition without a stop in the cgroup for workers. ``refusals``: of guests for which there
    is no root domain; they make the rest void."""

    domains: tuple[RootDomain, ...] = ()
    later: tuple[RootDomain, ...] = ()
    straight: frozenset[ThreadKey] = frozenset()
    refusals: tuple[Refusal, ...] = ()

    def of(self, key: ThreadKey) -> RootDomain | None:
        """The root domain of a thread."""
        for domain in self.domains:
            if any(m.thread.key == key for m in domain.members):
                return domain
        return None


@dataclass(slots=True)
class Search:
    """A search for root domains in progress. ``chosen`` are the CPUs of each thread, widened
    where threads float."""

    chosen: dict[ThreadKey, Chosen]
    domains: list[RootDomain] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)

    def refuse(self, member: Member, reason: str, hint: str) -> None:
        """Refuse the guest of ``member``, at most once."""
        if member.requirements.guest.ref not in {r.guest for r in self.refusals}:
            policy, role = member.requirements.policy, member.thread.role
            keys = sched_keys(policy, role) if member.booked else member.pin.keys
            self.refusals.append(member.requirements.refusal(keys, reason, hint))
