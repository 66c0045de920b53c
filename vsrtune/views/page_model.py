"""The content of the status page, frozen: /status.json is its JSON form, / its HTML form.

Texts are those an operator reads, already cut to a bounded length. ``left_out`` beside a
list is the number of entries that the list leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass

# Raised when a field changes its meaning or is removed; new fields do not raise it.
PAGE_VERSION = 2

TUNED, DEGRADED, PENDING, REFUSED, NO_POLICY = (
    "tuned", "degraded", "pending", "refused", "no policy",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OnCpu:
    """A guest's thread on a CPU; ``pinned`` when it may run on no other."""

    guest: str
    thread: str
    sched: str
    pinned: bool


@dataclass(frozen=True, slots=True)
class CpuView:
    """A CPU. ``interrupts`` are the NICs that it serves. ``reserved`` is set when a policy
    keeps the CPU for interrupts. ``threads`` last ran here, or run here next."""

    cpu: int
    online: bool
    isolated: bool
    node: int
    interrupts: tuple[str, ...]
    reserved: bool
    threads: tuple[OnCpu, ...]
    left_out: int


@dataclass(frozen=True, slots=True)
class ThreadView:
    """A thread of a guest. ``priority`` is set for fifo and rr; ``runtime_ns``, ``period_ns``
    and ``used``, the share of the budget used, are set for deadline. ``load`` is the share of
    a CPU that the thread asked for, None when it was not measured."""

    tid: int
    thread: str
    sched_class: str
    sched: str
    priority: int | None
    runtime_ns: int | None
    period_ns: int | None
    used: float | None
    cpus: str
    last_cpu: int
    load: float | None
    pending: bool


@dataclass(frozen=True, slots=True)
class InterfaceView:
    """An interface of a guest. ``queue_length`` is in frames, ``ring_drops`` counts frames
    since the device was made."""

    device: str
    kind: str
    lower: str
    queues: int
    queue_length: int
    ring_drops: int


@dataclass(frozen=True, slots=True)
class GuestView:
    """A guest. ``state`` is tuned, degraded (not as its policy says), pending (waits until
    a thread has run), refused, or no policy; ``drift``, ``held`` and ``pending`` count
    settings."""

    name: str
    source: str
    state: str
    policy: str
    drift: int
    held: int
    pending: int
    threads: tuple[ThreadView, ...]
    threads_left_out: int
    interfaces: tuple[InterfaceView, ...]
    interfaces_left_out: int
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChangeView:
    """A planned change that is not made, and ``why``; ``because`` is the plan's reason."""

    guest: str
    setting: str
    now: str
    then: str
    because: str
    why: str


@dataclass(frozen=True, slots=True)
class SkippedView:
    """A setting that is left as it is, and why."""

    guest: str
    setting: str
    because: str
    held: bool
    pending: bool


@dataclass(frozen=True, slots=True)
class RefusalView:
    """A refused policy, the reason, and what to write instead."""

    guest: str
    policy: str
    because: str
    instead: str


@dataclass(frozen=True, slots=True)
class DriftView:
    """A setting that somebody has changed. ``by`` is "" when nobody knows who. ``left`` says
    why it is not put back, "" when it is."""

    guest: str
    setting: str
    was_set_to: str
    found: str
    by: str
    key: str
    rule: str
    left: str


@dataclass(frozen=True, slots=True)
class ProblemView:
    """A failure to read, or a thread that starves."""

    where: str
    what: str


@dataclass(frozen=True, slots=True)
class PlanView:
    """What remains of the plan after the last pass."""

    changes: tuple[ChangeView, ...] = ()
    changes_left_out: int = 0
    refusals: tuple[RefusalView, ...] = ()
    refusals_left_out: int = 0
    warnings: tuple[str, ...] = ()
    warnings_left_out: int = 0
    skipped: tuple[SkippedView, ...] = ()
    skipped_left_out: int = 0


@dataclass(frozen=True, slots=True)
class PageTotals:
    """Guests by state, and settings that differ from the policies."""

    guests: int = 0
    tuned: int = 0
    degraded: int = 0
    pending: int = 0
    refused: int = 0
    no_policy: int = 0
    drift: int = 0


@dataclass(frozen=True, slots=True)
class StatusPage:
    """The whole page. ``last_pass`` is in seconds since the epoch, 0 before the first one.
    ``reload_success`` is False while wrong policy files are ignored and older policies are
    in force. ``failure`` says why the last pass failed, "" when it did not; the page then
    shows an earlier pass."""

    vsrtune: str
    kernel: str
    last_pass: float
    policies: int
    reload_success: bool
    totals: PageTotals
    cpus: tuple[CpuView, ...] = ()
    cpus_left_out: int = 0
    guests: tuple[GuestView, ...] = ()
    guests_left_out: int = 0
    plan: PlanView = PlanView()
    drift: tuple[DriftView, ...] = ()
    drift_left_out: int = 0
    problems: tuple[ProblemView, ...] = ()
    problems_left_out: int = 0
    failure: str = ""
    version: int = PAGE_VERSION
