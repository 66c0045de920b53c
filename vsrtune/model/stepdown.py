# SPDX-License-Identifier: GPL-2.0-or-later
"""How far a guest's tuning is stepped down.

The guard steps a guest down when its real-time threads keep each other, or threads that the host
needs, from running. Each level keeps less of the policy: round-robin instead of FIFO with the same
priorities, then the ordinary class with the pins kept, then nothing at all. The guard skips a
level that changes nothing of a policy. The planner plans the lowered policy like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType


class StepLevel(Enum):
    """From the whole policy to nothing of it."""

    POLICY = "policy"
    RR = "rr"
    OTHER = "other"
    UNDONE = "undone"

    @property
    def number(self) -> int:
        """0 for POLICY, 3 for UNDONE."""
        return list(StepLevel).index(self)


@dataclass(frozen=True, slots=True)
class Step:
    """The level of a guest, ``why`` in words, and since when (seconds since the epoch)."""

    level: StepLevel
    why: str = ""
    at: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        return f"stepped down to {self.level.value}: {self.why}"


# By guest; a guest that is not in it is tuned as its policy says.
Steps = Mapping[str, Step]
NO_STEPS: Steps = MappingProxyType({})

UNTIL = "a reload (systemctl reload vsrtune) tunes it by its policy again"
