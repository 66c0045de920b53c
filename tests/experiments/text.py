"""Numbers and tables as the pages write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from vsrtune.core.stats import Ratio


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown. A head may be empty."""
    head = "|".join(f" {name} " if name else " " for name in heads)
    return [
        f"|{head}|",
        "|" + "---|" * len(heads),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def offered(load: float) -> str:
    return f"{load:,.0f} pps offered"


def ranged(values: Sequence[float], digits: int = 0) -> str:
    """Trials of one load: their median, and from where to where they go."""
    if not values:
        return "-"
    return f"{median(values):,.{digits}f} ({min(values):,.{digits}f}..{max(values):,.{digits}f})"


def percent(values: Iterable[float]) -> str:
    """The same for shares of 1."""
    return ranged([100 * v for v in values], 1)


def parts(values: Sequence[float]) -> str:
    """The same with the sign."""
    low, high = 100 * min(values), 100 * max(values)
    return f"{100 * median(values):.1f} % ({low:.1f}..{high:.1f})"


def bounded(ratio: Ratio) -> str:
    """A ratio with its interval."""
    return f"{ratio.median:.2f} ({ratio.low:.2f}..{ratio.high:.2f})"
