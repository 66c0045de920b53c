"""Stored results of namespace routers (nslab), and the numbers made of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vsrtune.core.stats import Ratio, paired_ratio

# A number of one trial.
Value = Callable[[Mapping[str, Any]], float]


@dataclass(frozen=True)
class BedRun:
    """One run; ``trials`` as they were made, with "round", "configuration", "load"."""

    head: Mapping[str, Any]
    trials: tuple[Mapping[str, Any], ...]

    @property
    def configurations(self) -> list[str]:
        return [c["name"] for c in self.head["run"]["configurations"]]

    @property
    def loads(self) -> list[str]:
        """From the least of them to the most."""
        return sorted(self.head["loads"], key=self.rate)

    def rate(self, load: str) -> float:
        """Frames per second that a load consists of."""
        return float(sum(self.head["loads"][load].values()))

    def values(self, configuration: str, load: str, value: Value) -> list[float]:
        """One for each round, in their order."""
        found = sorted(
            (t for t in self.trials if (t["configuration"], t["load"]) == (configuration, load)),
            key=lambda t: t["round"],
        )
        return [value(t) for t in found]

    def ratio(self, ours: str, theirs: str, load: str, value: Value) -> Ratio:
        """Paired by round."""
        return paired_ratio(self.values(ours, load, value), self.values(theirs, load, value))

    def kept(self, configuration: str, load: str, alone: str, stream: str) -> list[float]:
        """The share of its frames that a stream gets through at a load, over the share that
        it gets through alone in the same round."""
        value = passed(stream)
        pairs = zip(
            self.values(configuration, load, value),
            self.values(configuration, alone, value),
            strict=True,
        )
        return [with_others / max(by_itself, 1e-6) for with_others, by_itself in pairs]


def bed_run(text: str) -> BedRun:
    data = json.loads(text)
    trials = tuple(data.pop("trials"))
    return BedRun(data, trials)


def through(stream: str) -> Value:
    """Frames per second of that stream that left its routers."""
    return lambda trial: float(trial["forwarded_pps"][stream])


def passed(stream: str) -> Value:
    """The share of what was sent of that stream that left its routers."""
    return lambda trial: trial["forwarded"][stream] / max(trial["sent"][stream], 1)


def forwarded(trial: Mapping[str, Any]) -> float:
    """Frames per second of all streams that left their routers."""
    return float(sum(trial["forwarded_pps"].values()))


def per_million(counter: str) -> Value:
    """Of the routers' CPU, for a million frames that were forwarded."""

    def value(trial: Mapping[str, Any]) -> float:
        frames = sum(trial["forwarded"].values())
        return 1e6 * float(trial["cpu"].get(counter, 0)) / max(frames, 1)

    return value


def lost_at(place: str) -> Value:
    """The share of all frames sent that a place dropped."""

    def value(trial: Mapping[str, Any]) -> float:
        return float(trial["counted"].get(place, 0)) / max(sum(trial["sent"].values()), 1)

    return value


def latency(which: str) -> Value:
    """Microseconds."""
    return lambda trial: float(trial["latency_us"][which])
