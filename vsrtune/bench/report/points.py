# SPDX-License-Identifier: GPL-2.0-or-later
"""Groups trials of the same configuration and load, for tables and plots.

Pure: trials in, numbers out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from vsrtune.bench.spec.model import Outcome, Trial

# Where frames are lost, and the head of its column.
DROPS = {
    "nic": "nic %",
    "softnet_backlog": "backlog %",
    "macvtap_ring": "tap ring %",
    "elsewhere": "elsewhere %",
}
ROLES = ("vcpu", "vhost", "napi", "emulator", "other", "ksoftirqd", "softirq", "idle")


@dataclass(frozen=True, slots=True)
class Point:
    """All trials of one configuration at one load.

    ``offered`` is the pps asked for over all routers; ``size`` the frames' size, None for the
    spec's.
    """

    configuration: str
    offered: float
    trials: tuple[Trial, ...]
    size: int | str | None = None

    @property
    def pps(self) -> float:
        """Median of the forwarded pps."""
        return median(t.pps for t in self.trials)

    @property
    def low(self) -> float:
        return min(t.pps for t in self.trials)

    @property
    def high(self) -> float:
        return max(t.pps for t in self.trials)

    @property
    def sent_pps(self) -> float:
        """Median of the pps that the generator really sent."""
        return median(t.sent_pps for t in self.trials)

    @property
    def loss(self) -> float:
        """Share of all frames sent that were not forwarded."""
        return max(0.0, self._share(lambda t: t.sent - t.forwarded, lambda t: t.sent))

    @property
    def late(self) -> float | None:
        """Share of the sampled frames that came out of order; None where nobody looked."""
        share = self._share(lambda t: t.reordered, lambda t: t.sampled)
        return share if any(t.sampled for t in self.trials) else None

    def drop_share(self, place: str) -> float:
        """Share of all frames sent that were lost at ``place``."""
        return self._share(lambda t: t.drops.get(place, 0), lambda t: t.sent)

    def cpu_per_million(self, role: str) -> float | None:
        """CPU seconds of a role for each million frames forwarded; None without any."""
        return self._per_frames(lambda t: t.cpu_seconds.get(role, 0.0), 1_000_000)

    def switches_per_thousand(self) -> float | None:
        """Context switches of the guests' threads for each thousand frames forwarded."""
        return self._per_frames(lambda t: sum(t.switches.values()), 1000)

    def migrations_per_second(self) -> float:
        """Moves of the guests' threads between CPUs, for each second."""
        return self._share(lambda t: sum(t.migrations.values()), lambda t: t.seconds)

    def _per_frames(self, part: Callable[[Trial], float], frames: int) -> float | None:
        share = self._share(part, lambda t: t.forwarded)
        return share * frames if any(t.forwarded for t in self.trials) else None

    def _share(self, part: Callable[[Trial], float], whole: Callable[[Trial], float]) -> float:
        """Over all trials; 0 of nothing."""
        total = sum(map(whole, self.trials))
        return sum(map(part, self.trials)) / total if total else 0.0


def points(trials: Iterable[Trial]) -> list[Point]:
    """Points in order of first appearance of their configuration, then by size and load."""
    groups: dict[tuple[str, str | int | None, float], list[Trial]] = {}
    order: dict[str, int] = {}
    for trial in trials:
        order.setdefault(trial.configuration, len(order))
        load = trial.load
        key = (trial.configuration, load.size, round(load.total, 3))
        groups.setdefault(key, []).append(trial)
    # IMIX comes after the sizes that are numbers.
    keys = sorted(groups, key=lambda k: (order[k[0]], isinstance(k[1], str), k[1] or 0, k[2]))
    return [Point(name, pps, tuple(groups[name, size, pps]), size) for name, size, pps in keys]


def by_configuration(outcome: Outcome) -> Mapping[str, list[Point]]:
    """The points of each configuration, in the order of the outcome's configurations."""
    found: dict[str, list[Point]] = {c.name: [] for c in outcome.configurations}
    for point in points(outcome.trials):
        found.setdefault(point.configuration, []).append(point)
    return found


def used(points_: Iterable[Point], values: Iterable[str], attribute: str) -> tuple[str, ...]:
    """Those of ``values`` for which any trial has more than 0 in its mapping ``attribute``."""
    present = [getattr(t, attribute) for p in points_ for t in p.trials]
    return tuple(v for v in values if any(m.get(v) for m in present))
