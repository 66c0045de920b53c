# SPDX-License-Identifier: GPL-2.0-or-later
"""What passes remember about settings that others change: how often, and when to try again.

A pin that moved without libvirt's knowledge is observed for a moment before it is put back
(Memory.patient). A setting that is changed again and again after it was put back is put back
less and less often, and logged once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from vsrtune.core.retry import Pause
from vsrtune.daemon.systemd import LOGGER, fields
from vsrtune.model.plan import Action, Culprit, Drift, DriftRule, Place, Plan
from vsrtune.model.snapshot import SnapshotSlice
from vsrtune.model.targets import EmulatorPin, Target, Value, VcpuPin
from vsrtune.plan.drift import UNSURE, Memory, place

# Once a pin has stayed SURE seconds where it was moved to, nobody can have asked libvirt for
# it; a slow host takes its time between the two steps. The pin is read again after AGAIN.
SURE, AGAIN = 2.0, 1.0
# From the second time on, the next put-back waits 2, 4, 8, ... seconds, at most:
LONGEST = 300.0
# A setting is put back this often before the log says that somebody keeps changing it.
TOLD = 3
# A setting that stays as put back for this long, and twice its last wait, is forgotten. So is a
# change of which a pass has found nothing after this long.
CALM = 60.0

# So many last changes are remembered.
CULPRITS = 4096

# The guests of a pass; None means all.
Guests = frozenset[str] | None


@dataclass(frozen=True, slots=True)
class _Fight:
    count: int
    pause: Pause


class _ByGuest:
    """Values by target, grouped by guest."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Target, Value]] = {}

    def of(self, guests: Guests) -> dict[Target, Value]:
        names = self._values if guests is None else guests
        return {t: v for name in names for t, v in self._values.get(name, {}).items()}

    def replace(self, guests: Guests, values: Mapping[Target, Value]) -> None:
        for name in list(self._values) if guests is None else guests:
            self._values.pop(name, None)
        for target, value in values.items():
            self._values.setdefault(target.guest, {})[target] = value

    def clear(self) -> None:
        self._values.clear()


class DriftWatch:
    """One instance for the life of a daemon. Times are those of ``clock``, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._for_verify = _ByGuest()
        self._fights: dict[Target, _Fight] = {}
        # Pins that moved: when each was first found in its present place.
        self._moved: dict[tuple[Target, str], float] = {}
        # Who last changed what, the latest change last.
        self._culprits: dict[Place, Culprit] = {}

    def blame(self, where: Place, culprit: Culprit) -> None:
        """Note who has just changed something."""
        self._culprits.pop(where, None)
        self._culprits[where] = culprit
        if len(self._culprits) > CULPRITS:
            del self._culprits[next(iter(self._culprits))]

    def memory(self, guests: Guests = None) -> Memory:
        """What the planner must know for a pass over all guests or some."""
        now = self._clock()
        waits = {
            target: f"put back {fight.count} times and changed again each time; "
            "it is tried less and less often"
            for target, fight in self._fights.items()
            if fight.pause.left(now)
        }
        stayed = frozenset(key for key, since in self._moved.items() if now - since >= SURE)
        return Memory(
            self._for_verify.of(guests), waits, patient=True, stayed=stayed, culprits=self._culprits
        )

    def learn(self, plan: Plan, done: Iterable[Action], observed: SnapshotSlice) -> None:
        """Note a pass over ``observed`` that did ``done`` of the plan's actions."""
        now = self._clock()
        wrote = {action.target for action in done}
        for target in wrote:
            self._culprits.pop(place(target), None)
        drifting = {d.target: d for d in plan.drift}
        if observed.names is None:
            # A change that is no drift by now was made undone, or is somebody's wish.
            places = {place(target) for target in drifting}
            self._culprits = {
                where: culprit
                for where, culprit in self._culprits.items()
                if where in places or now - culprit.when < CALM
            }
        moved = {k: since for k, since in self._moved.items() if not observed.covers(k[0].guest)}
        for drift in plan.drift:
            key = drift.target, drift.found
            if _may_be_pinning(drift) and drift.target not in wrote:
                moved[key] = self._moved.get(key, now)
        self._moved = moved
        for target, drift in drifting.items():
            if target in wrote and drift.rule is DriftRule.ENFORCE:
                self._fought(drift, now)
        for_verify = self._for_verify.of(observed.names).items()
        kept = {t: v for t, v in for_verify if t in drifting and t not in wrote}
        self._for_verify.replace(observed.names, {**plan.for_verify, **kept})
        for target, fight in list(self._fights.items()):
            calm = now > fight.pause.until + max(CALM, 2 * fight.pause.delay)
            if calm and observed.covers(target.guest) and target not in drifting:
                del self._fights[target]

    def next_try(self, drifts: Iterable[Drift]) -> float | None:
        """Seconds until one of these that is held back is due; None when none is."""
        now = self._clock()
        held = list(filter(self._held, drifts))
        due = [AGAIN if d.left == UNSURE else self._fights[d.target].pause.left(now) for d in held]
        return min(due, default=None)

    def waiting(self, drifts: Iterable[Drift]) -> frozenset[str]:
        """The guests of those that are held back."""
        return frozenset(d.target.guest for d in filter(self._held, drifts))

    def _held(self, drift: Drift) -> bool:
        enforced = drift.rule is DriftRule.ENFORCE and drift.left != ""
        return enforced and (drift.left == UNSURE or drift.target in self._fights)

    def clear(self) -> None:
        """Forget everything, as a reload asks."""
        self._for_verify.clear()
        self._fights.clear()
        self._moved.clear()

    def _fought(self, drift: Drift, now: float) -> None:
        before = self._fights.get(drift.target)
        count = 1 if before is None else before.count + 1
        pause = Pause(until=now) if before is None else before.pause.longer(now, 2.0, LONGEST)
        self._fights[drift.target] = _Fight(count, pause)
        if count == TOLD:
            LOGGER.warning(
                "%s: put back %d times, and each time %s changed it again (to %s); it is put "
                "back less and less often now. Stop the other party, or write drift: "
                "{%s: report} in the policy",
                drift.target,
                count,
                drift.culprit or drift.by or "something unknown",
                drift.found,
                drift.setting,
                extra=fields(guest=drift.target.guest, by=drift.by),
            )


def _may_be_pinning(drift: Drift) -> bool:
    return drift.left == UNSURE or (
        drift.rule is DriftRule.ENFORCE
        and isinstance(drift.target, VcpuPin | EmulatorPin)
        and drift.by != "libvirt"
    )


def waiting(plan: Plan) -> Mapping[str, int]:
    """The number of settings that wait to be put back, by guest."""
    counts: dict[str, int] = {}
    for drift in plan.drift:
        if drift.rule is DriftRule.ENFORCE and drift.left:
            counts[drift.target.guest] = counts.get(drift.target.guest, 0) + 1
    return counts
