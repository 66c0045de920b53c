"""Statistics for ratios measured side by side in interleaved pairs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Ratio:
    """A median of paired ratios with its bootstrap interval (``low``..``high``)."""

    median: float
    low: float
    high: float
    pairs: int

    @property
    def shown(self) -> bool:
        """True when the interval excludes 1, that is, a difference was shown."""
        return self.low > 1.0 or self.high < 1.0

    def __str__(self) -> str:
        return f"{self.median:.2f} (95% {self.low:.2f}..{self.high:.2f}, {self.pairs} pairs)"


def paired_ratio(
    ours: Sequence[float], theirs: Sequence[float], *, seed: int = 1, level: float = 0.95
) -> Ratio:
    """The median of ``ours[i] / theirs[i]`` with a percentile bootstrap interval.

    The pairs are resampled, not the two series apart, because the two members of
    a pair were measured one after the other and share the machine's mood. A pair
    in which nothing at all was forwarded by ``theirs`` counts as one packet.
    Raises ValueError for series of unequal length or without any pair.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"need pairs, have {len(ours)} and {len(theirs)} values")
    ratios = [a / max(b, 1.0) for a, b in zip(ours, theirs, strict=True)]
    generator = random.Random(seed)
    medians = sorted(median(generator.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    cut = (1.0 - level) / 2.0
    low = medians[int(cut * RESAMPLES)]
    high = medians[min(RESAMPLES - 1, int((1.0 - cut) * RESAMPLES))]
    return Ratio(median(ratios), low, high, len(ratios))
