# SPDX-License-Identifier: GPL-2.0-or-later
"""The policy of a guest that is stepped down (model/stepdown.py)."""

from __future__ import annotations

from dataclasses import replace

from vsrtune.model.guest import SchedClass
from vsrtune.model.stepdown import StepLevel
from vsrtune.policy.model import Policy, SchedRule

_RULES = ("vcpu_sched", "vhost_sched", "softirq_sched", "napi_sched")
_REMEDIES = {
    StepLevel.RR: {SchedClass.FIFO: SchedClass.RR},
    StepLevel.OTHER: {
        SchedClass.FIFO: SchedClass.OTHER,
        SchedClass.RR: SchedClass.OTHER,
        SchedClass.DEADLINE: SchedClass.OTHER,
    },
}


def lowered(policy: Policy, level: StepLevel) -> Policy:
    """The policy with lowered scheduling rules and everything else as it is; the same object when
    nothing changes. UNDONE has no policy: the planner leaves the guest out."""
    remedies = _REMEDIES.get(level, {})
    changed: dict[str, SchedRule] = {}
    for name in _RULES:
        rule: SchedRule | None = getattr(policy, name)
        if rule is not None and rule.cls in remedies:
            cls = remedies[rule.cls]
            changed[name] = SchedRule(cls, 0 if cls is SchedClass.OTHER else rule.priority)
    return replace(policy, **changed, lowered=True) if changed else policy  # type: ignore[arg-type]


def next_level(policy: Policy, now: StepLevel) -> StepLevel:
    """The next level below ``now`` that changes the plan. A guest with budgets goes to the
    ordinary class at once, because budgets throttle themselves and round-robin does not apply."""
    for level in (StepLevel.RR, StepLevel.OTHER):
        if level.number <= now.number or (policy.deadline and level is StepLevel.RR):
            continue
        if lowered(policy, level) != lowered(policy, now):
            return level
    return StepLevel.UNDONE
