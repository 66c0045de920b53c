# SPDX-License-Identifier: GPL-2.0-or-later
"""SCHED_DEADLINE arithmetic: percentages, bandwidths, and what the kernel admits.

Bandwidths are integers in units of 1/2**20 of one CPU, rounded down as the kernel
rounds them (``to_ratio`` in kernel/sched/core.c), so that a sum here equals the sum the
kernel compares (``__dl_overflow`` in kernel/sched/deadline.c). Times are nanoseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import VsrtuneError
from vsrtune.model.guest import Sched, SchedClass
from vsrtune.model.host import Host

UNIT = 1 << 20  # one whole CPU
# __checkparam_dl: a runtime of 2**DL_SCALE ns; the default of sched_deadline_period_min_us.
MIN_RUNTIME_NS = 1024
MIN_PERIOD_NS = 100_000
# Below sched_deadline_period_max_us (4.19 s by default).
MAX_PERIOD_NS = 4_000_000_000

TICK = 0.01  # seconds, with CONFIG_HZ=100
# Seconds. Timers have been 80 ms late on a host that is itself a guest.
_LATE = 0.15
_LEFT = re.compile(r"^dl\.runtime\s*:\s*(-?\d+)", re.ASCII | re.MULTILINE)
# fair_server_init: 50 ms in 1 s.
FAIR_SERVER = 50_000_000 * UNIT // 1_000_000_000

# The budget that a sleeping thread gets just before it leaves class deadline; it books nothing
# (runtime * UNIT < period). When a thread leaves while it sleeps, its bandwidth stays booked until
# its root domain is rebuilt (``switched_from_dl``). The bandwidth of a thread that stays DEADLINE
# is booked anew at once (``sched_dl_overflow``).
LEAVING = Sched(
    SchedClass.DEADLINE,
    reset_on_fork=True,
    runtime_ns=MIN_RUNTIME_NS,
    deadline_ns=MAX_PERIOD_NS,
    period_ns=MAX_PERIOD_NS,
)

PERCENT_PATTERN = r"^\s*[0-9]{1,18}(\.[0-9]{1,18})?\s*%\s*$"
_PERCENT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*%", re.ASCII)


def parse_percent(text: str) -> Fraction:
    """The share of one CPU that ``85%`` stands for, 1 for all of it. Raises VsrtuneError."""
    match = _PERCENT.fullmatch(text.strip())
    if match is None:
        raise VsrtuneError(f"{text!r} is not a percentage", hint="write a number and %, as 85%")
    return Fraction(match[1]) / 100


def bandwidth(sched: Sched) -> int:
    """The bandwidth that the kernel books for a DEADLINE thread; 0 without a period."""
    return sched.runtime_ns * UNIT // sched.period_ns if sched.period_ns > 0 else 0


def percent(booked: int) -> str:
    """A bandwidth in percent of one CPU, to a tenth."""
    return f"{100 * booked / UNIT:.1f} %".replace(".0 %", " %")


def served_by_kernel(host: Host, cpus: CpuSet) -> int:
    """The bandwidth that the kernel books on ``cpus`` for itself: its fair_server from 6.12 on.
    The default is assumed when debugfs is not readable."""
    if not host.deadline and has_fair_server(host):
        return FAIR_SERVER * len(cpus)
    return sum(c.fair_server for c in host.deadline if c.cpu in cpus)


def has_fair_server(host: Host) -> bool:
    """Whether the kernel makes realtime threads give way to threads that starve only
    (``fair_server_init`` in kernel/sched/fair.c, 6.12), not in every period in which they reach
    ``sched_rt_runtime_us``."""
    return host.release >= (6, 12)


def limit(host: Host, cpus: CpuSet) -> int | None:
    """The bandwidth that the kernel admits for DEADLINE threads in a root domain of ``cpus``, less
    its own share (``served_by_kernel``). None when admission control is off (sched_rt_runtime_us =
    -1) or the limit is not known."""
    if host.sched_rt_runtime_us < 0 or host.sched_rt_period_us <= 0:
        return None
    each = host.sched_rt_runtime_us * UNIT // host.sched_rt_period_us
    return each * len(cpus) - served_by_kernel(host, cpus)


def is_deadline(value: object) -> bool:
    """Whether a value of a target is class deadline."""
    return isinstance(value, Sched) and value.cls is SchedClass.DEADLINE


def total(scheds: Iterable[Sched]) -> int:
    """The sum of bandwidths as the kernel adds them."""
    return sum(bandwidth(s) for s in scheds)


def limit_text(host: Host, cpus: CpuSet) -> str:
    """The limit and its parts: ``90 % (95 % less 5 % of the fair_server)``."""
    most = limit(host, cpus)
    if most is None:
        return "anything (admission control is off)"
    own = served_by_kernel(host, cpus)
    text = percent(most)
    return f"{text} ({percent(most + own)} less {percent(own)} of the fair_server)" if own else text


def used(sched: Sched, run_ns: int, elapsed_ns: int) -> float:
    """The share of its budget that a thread used: its run time divided by the runtime that the
    budget gives it in ``elapsed_ns``; about 1 for a throttled thread."""
    given = sched.runtime_ns * elapsed_ns
    return run_ns * sched.period_ns / given if given > 0 else 0.0


def parse_overrun(text: str) -> int:
    """How far a DEADLINE thread overran its runtime, in nanoseconds, from /proc/TID/sched
    (``dl.runtime``, the remaining runtime); 0 when the kernel does not report it."""
    found = _LEFT.search(text)
    return max(-int(found[1]), 0) if found else 0


def lag_seconds(sched: Sched, overrun_ns: int = 0) -> float:
    """The longest time after a DEADLINE thread left the class until the kernel takes its bandwidth
    off the books: the rest of its period, plus its overrun times period / runtime
    (``task_non_contending``). The kernel notices an overrun at ticks only, so one tick is added to
    ``overrun_ns``, which was read before the thread left. A host that is itself a guest may lose
    several ticks, and its timer may be late."""
    if sched.runtime_ns <= 0:
        return 0.0
    period = sched.period_ns / 1e9
    over = (TICK + overrun_ns / 1e9) * sched.period_ns / sched.runtime_ns
    return period + min(over, MAX_PERIOD_NS / 1e9) + _LATE
