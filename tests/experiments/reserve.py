"""CPU time that threads were given by SCHED_DEADLINE, in results: whether a budget was in
force, and how far the rate follows it.

What is decided here was decided before anything was measured with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vsrtune.bench.report.points import Point

from .data import Data
from .judge import Judge, Refused, top
from .plan import Verdict

# Milliseconds. A trial is a whole number of periods, else its last one could be of nothing
# but budget and raise the rate.
PERIOD = 200.0
SECONDS = 1.6

# Of the variance of medians, by a line through them; and of the highest median, at no budget.
STRAIGHT = 0.95
STARTS = 0.1

# Threads are watched a little longer than traffic lasts, in which one more budget may
# begin; more than this above the budget was not a thread's to use.
_OVERDRAWN = 1.25

# Of a CPU, by role, over all threads of it.
Shares = Mapping[str, float]


def not_in_force(data: Data, run: str, reserved: Mapping[str, Shares]) -> str:
    """Why a run cannot speak of budgets, "" when it can. ``reserved`` is by configuration.

    A thread that slept while the policy was applied may have kept its class, and a trial
    tells nothing of that but by the CPU time it used.
    """
    environment = data.outcome(run).environment
    for name, shares in reserved.items():
        for role, share in shares.items():
            classes = _classes(environment.get(name, {}), role)
            other = next((c for c in classes if not c.startswith("deadline:")), None)
            if other is not None:
                return f"{name}: a {role} thread had class {other}"
            if not classes:
                return f"{name}: no {role} thread was seen"
            point = data.at(run, name, top(data, run))
            used = _most_used(point, role)
            if used > _OVERDRAWN * share:
                return (
                    f"{name}: {role} used {100 * used:.0f} % of a CPU in a trial, with "
                    f"{100 * share:.0f} % reserved"
                )
    return ""


def _classes(block: Mapping[str, Any], role: str) -> list[str]:
    return [
        str(thread["class"])
        for guest in block.get("guests", {}).values()
        for thread in guest["threads"]
        if thread["thread"].split()[0] == role
    ]


def _most_used(point: Point, role: str) -> float:
    return max((t.cpu_seconds.get(role, 0.0) / t.seconds for t in point.trials), default=0.0)


def in_force(run: str, reserved: Mapping[str, Shares], judge: Judge) -> Judge:
    """The same judge, which says nothing of a run whose budgets were not in force."""

    def guarded(data: Data) -> Verdict:
        why = not_in_force(data, run, reserved)
        if why:
            raise Refused(f"the budgets were not in force: {why}")
        return judge(data)

    return guarded
