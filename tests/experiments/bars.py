"""A plot of bars, as vsrtune.bench.report.plots draws the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vsrtune.bench.report import plots


def bars(
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    title: str,
    y_label: str,
    *,
    note: str = "",
) -> Any:
    """Bars: one group for each of ``groups``, with one bar for each of ``series``."""
    figure, axes = plots.figure_of(title, y_label, note)
    width = 0.8 / max(1, len(series))
    for number, (name, values) in enumerate(series.items()):
        offset = (number - (len(series) - 1) / 2) * width
        places = [i + offset for i in range(len(groups))]
        colour = plots.COLOURS[number % len(plots.COLOURS)]
        axes.bar(places, list(values), width, label=name, color=colour)
    plots.columns(axes, groups)
    axes.legend(**plots.LEGEND)
    return figure
