"""What of a plan still stands after the pass that carried it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vsrtune.actions import Action, Plan, Refusal, Skipped


@dataclass(frozen=True, slots=True)
class Unmade:
    """A change that was planned and is not made, and ``why`` in words. ``fixed``: the kernel
    will never make it."""

    action: Action
    why: str
    fixed: bool = False


@dataclass(slots=True)
class _Left:
    """Of one guest, or of the host itself; not changed any more once a PlanState has it."""

    unmade: list[Unmade] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PlanState:
    """Changes that are not made, settings that are left as they are, what is refused, and
    what is said of the host as a whole. Kept by guest, so that a pass over one guest renews
    its own without going through all others'."""

    warnings: tuple[str, ...] = ()
    _by_guest: Mapping[str, _Left] = field(default_factory=dict)

    @classmethod
    def after(cls, plan: Plan, unmade: tuple[Unmade, ...]) -> PlanState:
        """Of a pass over everything, or over some guests."""
        found: dict[str, _Left] = {}
        for change in unmade:
            found.setdefault(change.action.target.guest, _Left()).unmade.append(change)
        for skipped in plan.skipped:
            found.setdefault(skipped.guest, _Left()).skipped.append(skipped)
        for refusal in plan.refusals:
            found.setdefault(refusal.guest, _Left()).refusals.append(refusal)
        return cls(plan.warnings, found)

    def updated(self, part: PlanState, guests: frozenset[str]) -> PlanState:
        """With ``part``, which a pass over ``guests`` alone has left; what it does not look
        at, other guests and the host as a whole, stands as it was."""
        found = dict(self._by_guest)
        for guest in guests:
            found.pop(guest, None)
        found.update(part._by_guest)
        return PlanState(self.warnings, found)

    @property
    def unmade(self) -> tuple[Unmade, ...]:
        """Changes that are not made, guest by guest in the plan's order."""
        return tuple(u for left in self._by_guest.values() for u in left.unmade)

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Settings that are left as they are, guest by guest."""
        return tuple(s for left in self._by_guest.values() for s in left.skipped)

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """What is refused, guest by guest."""
        return tuple(r for left in self._by_guest.values() for r in left.refusals)
