# SPDX-License-Identifier: GPL-2.0-or-later
"""The daemon's state after a pass, frozen, for metrics and the STATUS line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import ThreadKey
from vsrtune.model.load import Bottleneck, CpuShares, FrameRates
from vsrtune.model.plan import Action, Drift, Plan, Refusal, Skipped
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.stepdown import Step


@dataclass(frozen=True, slots=True)
class Unmade:
    """A planned change that was not made, and ``why`` in words. ``fixed``: the kernel will never
    accept it."""

    action: Action
    why: str
    fixed: bool = False


@dataclass(slots=True)
class _Left:
    """The entries of one guest, or of the host itself. They do not change once a PlanState has
    them."""

    unmade: list[Unmade] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PlanState:
    """Planned changes that were not made, skipped settings, refusals, and warnings about the host
    as a whole. Entries are kept by guest, so that a pass over one guest replaces its own without
    scanning all others."""

    warnings: tuple[str, ...] = ()
    _by_guest: Mapping[str, _Left] = field(default_factory=dict)

    @classmethod
    def after(cls, plan: Plan, unmade: tuple[Unmade, ...]) -> PlanState:
        """The state after a pass over all guests or over some."""
        found: dict[str, _Left] = {}
        for change in unmade:
            found.setdefault(change.action.target.guest, _Left()).unmade.append(change)
        for skipped in plan.skipped:
            found.setdefault(skipped.guest, _Left()).skipped.append(skipped)
        for refusal in plan.refusals:
            found.setdefault(refusal.guest, _Left()).refusals.append(refusal)
        return cls(plan.warnings, found)

    def updated(self, observed: PlanState, guests: frozenset[str]) -> PlanState:
        """Replace the entries of ``guests`` by ``observed``, the state after a pass over them
        alone. Other guests and the warnings stay as they were."""
        found = dict(self._by_guest)
        for guest in guests:
            found.pop(guest, None)
        found.update(observed._by_guest)
        return PlanState(self.warnings, found)

    @property
    def unmade(self) -> tuple[Unmade, ...]:
        """Planned changes that were not made, guest by guest in the plan's order."""
        return tuple(u for left in self._by_guest.values() for u in left.unmade)

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Skipped settings, guest by guest."""
        return tuple(s for left in self._by_guest.values() for s in left.skipped)

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """Refusals, guest by guest."""
        return tuple(r for left in self._by_guest.values() for r in left.refusals)


# Upper bounds of the pass duration histogram, seconds.
BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class GuestState:
    """One guest after a pass. ``drift`` counts settings that differ from the policy, ``held``
    those of them that an operator changed and vsrtune leaves alone, ``pending`` those that wait
    for their thread to run or for libvirt. ``overrides`` counts settings that somebody changed and
    that ``drift`` leaves so, whether they count as drift or not. ``policy`` is the file that names
    the guest ("" for none, the first of two that name it equally well), ``refused`` says that the
    plan refuses it, ``irq`` are the interrupt CPUs in that file. ``step`` says how far the guest is
    stepped down, None when it is not."""

    ref: str
    source: str
    tuned: bool
    drift: int = 0
    held: int = 0
    pending: int = 0
    overrides: int = 0
    policy: str = ""
    irq: CpuSet = field(default_factory=CpuSet)
    step: Step | None = None
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts since the daemon started. ``durations`` has one count for each bound in
    BUCKETS, and one for longer passes."""

    passes: int = 0
    pass_errors: int = 0
    writes: int = 0
    write_errors: int = 0
    corrections: int = 0
    moves: int = 0
    step_downs: int = 0
    duration_sum: float = 0.0
    durations: tuple[int, ...] = (0,) * (len(BUCKETS) + 1)

    def timed(self, seconds: float) -> Totals:
        """The totals with one more pass, which took ``seconds``."""
        slot = next((i for i, bound in enumerate(BUCKETS) if seconds <= bound), len(BUCKETS))
        return replace(
            self,
            passes=self.passes + 1,
            duration_sum=self.duration_sum + seconds,
            durations=tuple(n + (i == slot) for i, n in enumerate(self.durations)),
        )


@dataclass(frozen=True, slots=True)
class Recent:
    """What the daemon has sampled of late. ``seconds`` are the lengths of the intervals between
    samples, the newest last, and ``rates`` those of guests in each of them, None where a rate is
    not known. ``cpus`` has the shares of the last interval. ``bottlenecks`` are by guest,
    ``waited`` is the time that threads have stood in run queues, in seconds, ``budgets`` the share
    of its budget that each thread of class deadline used between two samples of its guest."""

    seconds: tuple[float, ...] = ()
    rates: Mapping[str, tuple[FrameRates | None, ...]] = field(default_factory=dict)
    cpus: Mapping[int, CpuShares] = field(default_factory=dict)
    bottlenecks: Mapping[str, Bottleneck] = field(default_factory=dict)
    waited: Mapping[ThreadKey, float] = field(default_factory=dict)
    budgets: Mapping[ThreadKey, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DaemonState:
    """The latest state; a scrape reads this and never the host."""

    snapshot: Snapshot | None = None
    guests: tuple[GuestState, ...] = ()
    totals: Totals = field(default_factory=Totals)
    policies: int = 0
    reload_success: bool = True
    last_pass: float = 0.0  # seconds since the epoch
    failure: str = ""  # why the last pass failed; "" when it did not
    # Settings that somebody changed, and what vsrtune does about them.
    drifts: tuple[Drift, ...] = ()
    # What the plan leaves undone, and why.
    plan: PlanState = field(default_factory=PlanState)
    # Other threads, which starve beside the guests' real-time threads.
    starved: tuple[Starved, ...] = ()
    recent: Recent = field(default_factory=Recent)
    # The guests of groups that the daemon watches.
    groups: tuple[GroupGuest, ...] = ()

    @property
    def tuned(self) -> int:
        """Number of guests that are as their policies say."""
        return sum(g.tuned for g in self.guests)

    @property
    def drift(self) -> int:
        """Number of settings that are not as the policies say."""
        return sum(g.drift for g in self.guests)


@dataclass(frozen=True, slots=True)
class Starved:
    """A thread that belongs to no tuned guest and waits for ``cpu``, which ``guest`` holds (""
    when no tuned guest does). ``vital``: it is a kernel thread of that CPU, without which the host
    hangs."""

    tid: int
    name: str
    cpu: int
    guest: str
    vital: bool = False

    def __str__(self) -> str:
        by = f", which real-time threads of {self.guest} hold" if self.guest else ""
        return f"{self.name} (tid {self.tid}) does not get to run on CPU {self.cpu}{by}"


@dataclass(frozen=True, slots=True)
class GroupGuest:
    """A router or balancer of a group that the daemon watches (docs/groups.md). ``fault`` says why
    a router gets no frames, or what is wrong with a balancer, "" when nothing is; ``since`` when
    that began or ended (epoch, 0 for never), ``faults`` how often it began, ``hint`` what an
    operator can do."""

    group: str
    guest: str
    role: str
    fault: str = ""
    since: float = 0.0
    faults: int = 0
    hint: str = ""
