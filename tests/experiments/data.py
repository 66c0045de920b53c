"""Stored results, and the numbers that judgements are made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vsrtune.bench.report.files import outcome_from_json
from vsrtune.bench.report.points import Point, by_configuration
from vsrtune.bench.spec.model import Outcome, Trial
from vsrtune.core.stats import Ratio, paired_ratio

from .beddata import BedRun, bed_run

# What stands beside the bench's own result.
_HEAD = ("others", "calibration", "rules", "routes")


class Missing(Exception):
    """A run that has not been made."""


class Data:
    """The raw results below a directory, by "figure/run"."""

    def __init__(self, raw: Path, figure: str = "") -> None:
        self._raw = raw
        self._figure = figure
        self._read: dict[str, Outcome] = {}
        self._heads: dict[str, dict[str, Any]] = {}
        self._controls: dict[str, list[dict[str, Any]]] = {}
        self._beds: dict[str, BedRun] = {}

    def of(self, figure: str) -> Data:
        """The same for another figure, whose runs can be named without it."""
        other = Data(self._raw, figure)
        other._read = self._read
        other._heads = self._heads
        other._controls = self._controls
        other._beds = self._beds
        return other

    def outcome(self, run: str) -> Outcome:
        """One result. Raises Missing."""
        key = self._key(run)
        if key not in self._read:
            found = json.loads(self._text(f"{key}.json"))
            self._heads[key] = {name: found.pop(name, None) for name in _HEAD}
            self._controls[key] = [trial.pop("control", {}) for trial in found["trials"]]
            self._read[key] = outcome_from_json(json.dumps(found), key)
        return self._read[key]

    def head(self, run: str) -> dict[str, Any]:
        """What stands beside the bench's own result."""
        self.outcome(run)
        return self._heads[self._key(run)]

    def routes(self, run: str) -> int:
        """How many routes a router with FRR had."""
        return int(self.head(run)["routes"])

    def control(self, run: str, trial: Trial) -> dict[str, Any]:
        """What the peers of a router with FRR saw of a trial (sessions.py)."""
        trials = self.outcome(run).trials
        return next(
            seen
            for one, seen in zip(trials, self._controls[self._key(run)], strict=True)
            if one is trial
        )

    def rules(self, run: str) -> str | None:
        """The commit of the rules that stood when a run was made; None of an old one."""
        found: str | None = json.loads(self._text(f"{self._key(run)}.json")).get("rules")
        return found

    def bed(self, run: str) -> BedRun:
        """The result of a run of namespace routers. Raises Missing."""
        key = self._key(run)
        if key not in self._beds:
            self._beds[key] = bed_run(self._text(f"{key}.json"))
        return self._beds[key]

    def text(self, run: str, name: str) -> str:
        """What a run's command left beside its result. Raises Missing."""
        return self._text(f"{self._figure}/{run}.{name}.txt")

    def _text(self, path: str) -> str:
        try:
            return (self._raw / path).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise Missing(path.rpartition(".")[0]) from None

    def has(self, run: str) -> bool:
        return (self._raw / f"{self._key(run)}.json").exists()

    def _key(self, run: str) -> str:
        return run if "/" in run else f"{self._figure}/{run}"

    def points(self, run: str, configuration: str | None = None) -> list[Point]:
        """The points of a configuration, by load; of the only one when not named. Raises Missing
        for one that the run was made without."""
        found = by_configuration(self.outcome(run))
        if configuration is None:
            (points,) = found.values()
            return list(points)
        if configuration not in found:
            raise Missing(f"{run}: {configuration}")
        return list(found[configuration])

    def loads(self, run: str) -> list[float]:
        return sorted({t.load.total for t in self.outcome(run).trials})

    def scaled(self, run: str, factors: Sequence[float], factor: float) -> float:
        """The load that was ``factor`` times the rate by which a run was scaled, of ascending
        ``factors``."""
        return self.loads(run)[factors.index(factor)]

    def at(
        self, run: str, configuration: str | None, load: float, size: int | None = None
    ) -> Point:
        """``size`` of the frames, for a run of several."""
        for point in self.points(run, configuration):
            if abs(point.offered - load) < 1 and point.size == size:
                return point
        raise Missing(f"{run}: {configuration} at {load:g}")

    def trials(
        self, run: str, configuration: str, load: float, size: int | None = None
    ) -> list[Trial]:
        """In the order in which they were made: the nth belongs to the nth round."""
        return list(self.at(run, configuration, load, size).trials)

    def ratio(
        self, run: str, ours: str, theirs: str, load: float, size: int | None = None
    ) -> Ratio:
        """Paired by round: forwarded by ``ours`` over ``theirs``."""
        a = [t.pps for t in self.trials(run, ours, load, size)]
        b = [t.pps for t in self.trials(run, theirs, load, size)]
        count = min(len(a), len(b))
        return paired_ratio(a[:count], b[:count])

    def peak(self, run: str, configuration: str | None = None) -> Point:
        """The point that forwards most."""
        return max(self.points(run, configuration), key=lambda p: p.pps)


def cpu_share(point: Point, role: str) -> float:
    """CPU seconds of a role for each second of the trials (1.0 is one busy CPU)."""
    used = sum(trial.cpu_seconds.get(role, 0.0) for trial in point.trials)
    return used / sum(trial.seconds for trial in point.trials)


def spread(point: Point) -> float:
    """(highest - lowest) / median of the forwarded pps; 0 when nothing was forwarded."""
    return (point.high - point.low) / point.pps if point.pps else 0.0


def mix(point: Point, roles: Sequence[str] = ("vcpu", "vhost", "softirq")) -> str:
    """What a point's CPU time went to and where its frames were lost, in one clause."""
    cpu = ", ".join(f"{role} {100 * cpu_share(point, role):.0f} %" for role in roles)
    places = {
        "nic": "the NIC",
        "softnet_backlog": "the backlog",
        "macvtap_ring": "the tap's queue",
        "elsewhere": "elsewhere",
    }
    lost = [f"{100 * point.drop_share(k):.0f} % at {v}" for k, v in places.items()
            if point.drop_share(k) >= 0.005]  # fmt: skip
    switches = point.switches_per_thousand()
    tail = "" if switches is None else f", {switches:.0f} context switches per 1000 frames"
    return f"of a CPU: {cpu}; lost: {', '.join(lost) or 'nothing'}{tail}"
