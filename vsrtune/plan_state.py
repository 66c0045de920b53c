"""What of a plan still stands after the pass that carried it out."""

from __future__ import annotations

from dataclasses import dataclass

from vsrtune.actions import Action, Plan, Refusal, Skipped


@dataclass(frozen=True, slots=True)
class Unmade:
    """A change that was planned and is not made, and ``why`` in words."""

    action: Action
    why: str


@dataclass(frozen=True, slots=True)
class PlanState:
    """Changes that are not made, settings that are left as they are, what is refused, and
    what is said of the host as a whole."""

    unmade: tuple[Unmade, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    warnings: tuple[str, ...] = ()

    @classmethod
    def after(cls, plan: Plan, unmade: tuple[Unmade, ...]) -> PlanState:
        """Of a pass over everything."""
        return cls(unmade, plan.skipped, plan.refusals, plan.warnings)

    def updated(self, part: PlanState, guests: frozenset[str]) -> PlanState:
        """With ``part``, which a pass over ``guests`` alone has left; what it does not look
        at, other guests and the host as a whole, stands as it was."""
        return PlanState(
            (*(u for u in self.unmade if u.action.target.guest not in guests), *part.unmade),
            (*(s for s in self.skipped if s.guest not in guests), *part.skipped),
            (*(r for r in self.refusals if r.guest not in guests), *part.refusals),
            self.warnings,
        )
