"""How far a guest's tuning is stepped down, and what is left of its policy then.

The guard (guard.py) steps a guest down when its real-time threads keep each other, or what
the host needs, from running. Each level takes less: round-robin instead of FIFO with the
same priorities, then the ordinary class with the pins kept, then nothing at all. A level
that changes nothing of a policy is passed over. The planner plans the lowered policy as it
plans any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType

from vsrtune.model import SchedClass
from vsrtune.policy import Policy, SchedRule


class Level(Enum):
    """From all that the policy asks to nothing of it."""

    POLICY = "policy"
    RR = "rr"
    OTHER = "other"
    UNDONE = "undone"

    @property
    def number(self) -> int:
        """0 for POLICY, 3 for UNDONE."""
        return list(Level).index(self)


@dataclass(frozen=True, slots=True)
class Step:
    """Where a guest stands, ``why`` in words, and since when (seconds since the epoch)."""

    level: Level
    why: str = ""
    at: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        return f"stepped down to {self.level.value}: {self.why}"


# By guest; a guest that is not in it is tuned as its policy says.
Steps = Mapping[str, Step]
NO_STEPS: Steps = MappingProxyType({})

UNTIL = "a reload (systemctl reload vsrtune) tunes it by its policy again"

_RULES = ("vcpu_sched", "vhost_sched", "softirq_sched", "napi_sched")
_REMEDIES = {
    Level.RR: {SchedClass.FIFO: SchedClass.RR},
    Level.OTHER: {
        SchedClass.FIFO: SchedClass.OTHER,
        SchedClass.RR: SchedClass.OTHER,
        SchedClass.DEADLINE: SchedClass.OTHER,
    },
}


def lowered(policy: Policy, level: Level) -> Policy:
    """The policy with its scheduling rules lowered, everything else as it is; the same
    object when that changes nothing. Of UNDONE there is no policy: whoever plans leaves the
    guest out."""
    remedies = _REMEDIES.get(level, {})
    changed: dict[str, SchedRule] = {}
    for name in _RULES:
        rule: SchedRule | None = getattr(policy, name)
        if rule is not None and rule.cls in remedies:
            cls = remedies[rule.cls]
            changed[name] = SchedRule(cls, 0 if cls is SchedClass.OTHER else rule.priority)
    return replace(policy, **changed, lowered=True) if changed else policy  # type: ignore[arg-type]


def next_level(policy: Policy, now: Level) -> Level:
    """The next level below ``now`` that changes what is planned. A guest with budgets goes
    to the ordinary class at once: they throttle themselves, and round-robin does not apply."""
    budgets = any(
        rule is not None and rule.deadline for rule in (getattr(policy, n) for n in _RULES)
    )
    for level in (Level.RR, Level.OTHER):
        if level.number <= now.number or (budgets and level is Level.RR):
            continue
        if lowered(policy, level) != lowered(policy, now):
            return level
    return Level.UNDONE
