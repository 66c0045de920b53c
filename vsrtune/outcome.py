"""Which changes of a plan are not made, and why, in words."""

from __future__ import annotations

from vsrtune.execute.executor import Result
from vsrtune.model.daemon_state import Unmade
from vsrtune.model.plan import Plan
from vsrtune.model.targets import Target

WAITING = "it failed before, and is tried again less and less often"
WITH_ANOTHER = "taken back, because another change of the guest failed"


def unmade(plan: Plan, result: Result) -> tuple[Unmade, ...]:
    """Every action of the plan that the pass, with this result, has not done. Those of
    threads and devices that are gone are none."""
    done = {(a.target, a.after) for a in result.done}
    gone = set(result.vanished)
    told: dict[Target, str] = {a.target: WITH_ANOTHER for a in result.skipped}
    told |= {a.target: f"failed: {error}" for a, error in result.failed}
    told |= {a.target: f"pending: {error}" for a, error in result.pending}
    told |= {a.target: f"the kernel refuses it: {error}" for a, error in result.fixed}
    failed = {a.target.guest for a, _ in result.failed}
    fixed = {a.target for a, _ in result.fixed}
    left = []
    for action in plan.actions:
        target = action.target
        if (target, action.after) in done or target in gone:
            continue
        why = WITH_ANOTHER if target.guest in failed else WAITING
        left.append(Unmade(action, told.get(target, why), target in fixed))
    return tuple(left)
