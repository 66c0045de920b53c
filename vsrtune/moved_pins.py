"""Pins that are found elsewhere than where a pass had put them: looked at twice.

libvirt moves the thread first and notes the pin afterwards. A pass that looks in between
takes what an operator is just asking for (virsh vcpupin) for a thread that something moved
beneath libvirt, and would set it back. The next look tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from vsrtune.actions import EmulatorPin, Plan, Target, Value, VcpuPin


class MovedPins:
    """Remembers from pass to pass which pins had moved, and to where. ``waiting`` is True
    after a pass that left a guest alone because of that."""

    def __init__(self) -> None:
        self._moved: set[tuple[Target, str]] = set()
        self.waiting = False

    def sure(self, plan: Plan, ours: Mapping[Target, Value]) -> tuple[Plan, dict[str, int]]:
        """The plan without guests whose pin has moved since the last pass, and how many
        settings of each wait. ``ours`` is what was last written."""
        moved: set[tuple[Target, str]] = {
            (a.target, str(a.before))
            for a in plan.actions
            if isinstance(a.target, VcpuPin | EmulatorPin) and ours.get(a.target) == a.after
        }
        unsure = {target.guest for target, _ in moved - self._moved}
        self._moved = moved
        self.waiting = bool(unsure)
        due = tuple(a for a in plan.actions if a.target.guest not in unsure)
        left = Counter(a.target.guest for a in plan.actions if a.target.guest in unsure)
        return replace(plan, actions=due), dict(left)
