# SPDX-License-Identifier: GPL-2.0-or-later
"""Plots of outcomes with matplotlib, as SVG text.

matplotlib is imported when a plot is drawn: a router host need not have it, because any
other machine can plot a stored result.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import TYPE_CHECKING, Any

from vsrtune.bench.methods.methods import OFTEN
from vsrtune.bench.report.points import Point, points
from vsrtune.bench.spec.model import Outcome
from vsrtune.core.errors import VsrtuneError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE = (8.0, 4.6)
LEGEND: dict[str, Any] = {"fontsize": 8, "frameon": False}
_MARKERS = "osD^v<>Ph*"
# Colour-blind safe (Okabe and Ito), without the yellow, which is invisible on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")


@dataclass(frozen=True, slots=True)
class Curve:
    """One line: a name, and for each x the value with the interval around it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dashed: bool = False


def spread(
    name: str, x: Sequence[float], values: Sequence[Sequence[float]], *, dashed: bool = False
) -> Curve:
    """The median of the values at each x, with the lowest and the highest of them."""
    low, high = [min(v) for v in values], [max(v) for v in values]
    return Curve(name, x, [median(v) for v in values], low, high, dashed)


def curve(name: str, points_: Sequence[Point], *, dashed: bool = False) -> Curve:
    """Forwarded against offered pps, with the lowest and highest trial."""
    ordered = sorted(points_, key=lambda p: p.offered)
    rates = [[t.pps for t in p.trials] for p in ordered]
    return spread(name, [p.offered for p in ordered], rates, dashed=dashed)


def throughput(
    curves: Sequence[Curve],
    title: str,
    *,
    note: str = "",
    x_label: str = "offered, frames per second",
    y_label: str = "forwarded, frames per second",
    ideal: bool = True,
) -> Figure:
    """Throughput against load. ``ideal`` draws the line of no loss."""
    figure, axes = figure_of(title, y_label, note)
    if ideal and curves:
        top = max((max(c.x, default=0.0) for c in curves), default=0.0)
        axes.plot([0, top], [0, top], color="#999999", linestyle=":", label="nothing lost")
    for number, line in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        below = [max(0.0, y - low) for y, low in zip(line.y, line.low, strict=False)]
        above = [max(0.0, high - y) for y, high in zip(line.y, line.high, strict=False)]
        axes.errorbar(
            line.x,
            line.y,
            yerr=[below, above] if line.low and line.high else None,
            label=line.name,
            color=colour,
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=5,
            capsize=3,
            linewidth=1.6,
            elinewidth=0.9,
            linestyle="--" if line.dashed else "-",
        )
    axes.set_xlabel(x_label)
    axes.xaxis.set_major_formatter(_tick)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.legend(**LEGEND)
    return figure


def scatter(
    groups: Sequence[str],
    values: Sequence[Sequence[float]],
    title: str,
    y_label: str,
    *,
    note: str = "",
    line_at: float | None = None,
) -> Figure:
    """Every value as a dot in the column of its group, with the median as a bar."""
    figure, axes = figure_of(title, y_label, note)
    for column, found in enumerate(values):
        colour = COLOURS[column % len(COLOURS)]
        # Side by side in order, so that equal values do not overlap.
        places = [column + (i - (len(found) - 1) / 2) * 0.04 for i in range(len(found))]
        axes.plot(places, list(found), "o", color=colour, alpha=0.7, markersize=5)
        if found:
            axes.hlines(median(found), column - 0.3, column + 0.3, color=colour, linewidth=2.2)
    if line_at is not None:
        axes.axhline(line_at, color="#999999", linestyle=":")
    columns(axes, groups)
    axes.set_ylim(bottom=0)
    return figure


def of_outcome(outcome: Outcome, note: str) -> list[tuple[str, Figure]]:
    """The plots of one outcome, each with its caption. ``note`` is printed in each."""
    everything = points(outcome.trials)
    title = f"{outcome.spec.name}: {outcome.method}"
    figures: list[tuple[str, Figure]] = []
    often = len(everything) == 1 and len(everything[0].trials) >= OFTEN
    if often:
        [p] = everything
        times = list(accumulate(t.seconds for t in p.trials))
        lines = [Curve(p.configuration, times, [t.pps for t in p.trials])]
        figure = throughput(lines, title, note=note, x_label="seconds", ideal=False)
        figures.append(("Forwarded rate over time.", figure))
    elif len({p.offered for p in everything}) > 1:
        sized: dict[str, list[Point]] = {}
        for p in everything:
            name = p.configuration + ("" if p.size is None else f", {p.size}")
            sized.setdefault(name, []).append(p)
        lines = [curve(name, group) for name, group in sized.items()]
        caption = "Forwarded against offered rate: median, and the lowest and highest trial."
        figures.append((caption, throughput(lines, title, note=note)))
    loads: dict[str, list[Point]] = {}
    for p in sorted(everything, key=lambda p: p.offered):
        size = "" if p.size is None else f" of {p.size}"
        loads.setdefault(f"{p.offered:,.0f} pps{size}", []).append(p)
    for offered, here in loads.items():
        if max(len(p.trials) for p in here) < 2 or often:
            continue
        names = [p.configuration for p in here]
        values = [[t.pps for t in p.trials] for p in here]
        caption = f"Every trial at {offered} offered; the bar is the median."
        name = f"{title} at {offered}"
        figures.append((caption, scatter(names, values, name, "forwarded pps", note=note)))
    return figures


def svg(figure: Figure, key: str) -> str:
    """The figure as an SVG element for HTML. ``key`` keeps the ids of several figures on one
    page apart."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": key, "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    return re.sub(r'( id="|"#|\(#)', lambda found: found[1] + key + "-", text)


def require() -> None:
    """Raises VsrtuneError when matplotlib is missing."""
    try:
        from matplotlib.figure import Figure  # noqa: F401 (it is about whether this works)
    except ImportError as error:
        raise VsrtuneError(
            f"plots need matplotlib, which cannot be imported ({error})",
            hint="apt install python3-matplotlib, or store the result with --json and run "
            "`vsrtune bench report` on a machine that has it",
        ) from None


def figure_of(title: str, y_label: str, note: str) -> tuple[Figure, Axes]:
    require()
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=11)
    if note:
        figure.supxlabel(note, fontsize=7.5, color="#666666")
    axes.set_ylabel(y_label)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.yaxis.set_major_formatter(_tick)
    return figure, axes


def _tick(value: float, _position: float | None) -> str:
    """A number on an axis, with thousands separators."""
    return f"{value:,.4g}" if abs(value) < 100 else f"{value:,.0f}"


def columns(axes: Axes, groups: Sequence[str]) -> None:
    axes.set_xticks(range(len(groups)))
    axes.set_xticklabels(list(groups), rotation=20 if len(groups) > 4 else 0)
