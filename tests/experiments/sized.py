"""Runs that try one load with frames of several sizes: judged and shown for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vsrtune.bench.report import plots
from vsrtune.bench.report.points import Point

from .data import Data, cpu_share
from .judge import Judge, Place, Rule, above, compared, near, same, top
from .plan import Boot
from .text import table

# Without the check sequence: 64, 512 and 1500 bytes with it.
SIZES = (60, 508, 1496)
# Less than this, beside the figure it is compared with, is not "at least as much".
AS_MUCH = 0.95
_THREADS = ("vcpu", "vhost", "emulator", "other", "napi")


def wire(size: int) -> str:
    return f"{size + 4} bytes"


def point(data: Data, place: Place, size: int) -> Point:
    """In overload."""
    return data.at(place.run, place.configuration, top(data, place.run), size)


def _sizes(rule: Rule, ours: Place, theirs: Place) -> Judge:
    pairs = [(replace(ours, size=size), replace(theirs, size=size)) for size in SIZES]
    return compared(rule, pairs, "{ours} / {theirs}, {size} bytes: {ratio}")


def as_much(run: str, ours: str, theirs: str) -> Judge:
    """No size forwards less, within a margin."""
    return _sizes(above(AS_MUCH), Place(run, ours), Place(run, theirs))


def more(run: str, ours: str, theirs: str) -> Judge:
    """Every size forwards more."""
    return more_than(Place(run, ours), Place(run, theirs))


def more_than(ours: Place, theirs: Place) -> Judge:
    """Every size forwards more at one place than at another."""
    return _sizes(above(), ours, theirs)


def alike(run: str, ours: str, theirs: str) -> Judge:
    """Every size forwards the same."""
    return _sizes(same, Place(run, ours), Place(run, theirs))


def idle_share(found: Point, boot: Boot) -> float:
    """Of the time of all the lab's CPUs."""
    return cpu_share(found, "idle") / boot.cpus


def threads_per_million(found: Point) -> float:
    """CPU seconds of all threads of all guests of the router for a million frames."""
    return sum(found.cpu_per_million(role) or 0.0 for role in _THREADS)


def tables(data: Data, rows: Mapping[str, Place], boot: Boot) -> list[str]:
    """What was forwarded, and what that cost. ``rows`` are by label."""

    def each(cell: Callable[[Point], str]) -> list[str]:
        cells = (
            [label, *(cell(point(data, place, size)) for size in SIZES)]
            for label, place in rows.items()
        )
        return table(["", *map(wire, SIZES)], cells)

    def cost(p: Point) -> str:
        softirq = p.cpu_per_million("softirq") or 0.0
        return f"{threads_per_million(p):.1f} / {softirq:.1f} / {100 * idle_share(p, boot):.0f} %"

    def rate(p: Point) -> str:
        sent = "" if near(p.sent_pps, p.offered) else f" of {p.sent_pps:,.0f} sent"
        return f"{p.pps:,.0f} ({p.low:,.0f}..{p.high:,.0f}){sent}"

    any_point = point(data, next(iter(rows.values())), SIZES[0])
    rates = (
        f"Frames per second forwarded of {any_point.offered:,.0f} offered, median "
        f"(lowest..highest of {len(any_point.trials)} rounds):"
    )
    costs = (
        "CPU seconds for a million frames forwarded: of all threads of all guests of the router, "
        "with the SoftIRQ work that ran on them / SoftIRQ of the whole host, the generator's and "
        "the sink's side included / and how much of the host's CPU time was idle:"
    )
    return [rates, "", *each(rate), "", costs, "", *each(cost)]


def drawn(
    data: Data,
    name: str,
    xs: Sequence[float],
    lines: Iterable[tuple[str, Sequence[Place], bool]],
    *,
    kind: str,
    x_label: str,
    offered: float,
) -> Mapping[str, Any]:
    """Two plots over ``xs``, ``name`` of rates and ``name``-cpu of CPU seconds: of each size,
    for each of ``lines`` (label, places, whether dashed)."""
    rates, costs = [], []
    for label, places, dashed in lines:
        for size in SIZES:
            found = [point(data, place, size) for place in places]
            called = f"{wire(size)}, {label}"
            trials = [[t.pps for t in p.trials] for p in found]
            rates.append(plots.spread(called, xs, trials, dashed=dashed))
            paid = [threads_per_million(p) for p in found]
            costs.append(plots.Curve(called, xs, paid, dashed=dashed))
    words: dict[str, Any] = {"ideal": False, "x_label": x_label}
    title = f"{kind} on two CPUs, {offered:,} pps offered"
    cost = "CPU s of the guests' threads per million frames"
    return {
        name: plots.throughput(rates, title, **words),
        f"{name}-cpu": plots.throughput(
            costs, f"{kind}: what forwarding cost", y_label=cost, **words
        ),
    }
