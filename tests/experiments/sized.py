"""Runs that try one load with frames of several sizes: judged and shown for all of them.

A place is a run and one of its configurations, as in ``judge``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vsrtune.bench.report import plots
from vsrtune.bench.report.points import Point
from vsrtune.core.stats import Ratio

from .data import Data
from .judge import Judge, Place, change, top
from .plan import Boot, Verdict
from .text import ranged, table

# Without the check sequence: 64, 512 and 1500 bytes with it.
SIZES = (60, 508, 1496)
# Less than this, beside the figure it is compared with, is not "at least as much".
AS_MUCH = 0.95
# The generator fell short when it sent less of what was asked; where nearly all of that came
# through, the router was not in overload.
_SENT, _THROUGH = 0.95, 0.9
_THREADS = ("vcpu", "vhost", "emulator", "other", "napi")


def wire(size: int) -> str:
    return f"{size + 4} bytes"


def point(data: Data, place: Place, size: int) -> Point:
    """In overload."""
    run, configuration = place
    return data.at(run, configuration, top(data, run), size)


def underfed(found: Point) -> bool:
    """Whether the generator, and not the router, may have set the rate."""
    return found.sent_pps < _SENT * found.offered and found.pps > _THROUGH * found.sent_pps


def _judged(
    run: str,
    ours: str,
    theirs: str,
    agrees: Callable[[Sequence[Ratio]], bool],
    differs: Callable[[Sequence[Ratio]], bool],
) -> Judge:
    def judge(data: Data) -> Verdict:
        at = top(data, run)
        ratios = {size: data.ratio(run, ours, theirs, at, size) for size in SIZES}
        each = "; ".join(f"{wire(size)} {ratio}" for size, ratio in ratios.items())
        found = list(ratios.values())
        answer = "agrees" if agrees(found) else "differs" if differs(found) else "open"
        text = f"{ours} / {theirs}: {each}"
        if any(underfed(point(data, (run, c), size)) for c in (ours, theirs) for size in SIZES):
            return Verdict("open", f"{text}; the generator sent less than asked")
        return Verdict(answer, text)

    return judge


def _any_less(ratios: Sequence[Ratio]) -> bool:
    return any(r.high < 1 for r in ratios)


def as_much(run: str, ours: str, theirs: str) -> Judge:
    """Agrees when no size forwards less, within a margin, and differs when one is shown to."""
    return _judged(run, ours, theirs, lambda rs: all(r.low >= AS_MUCH for r in rs), _any_less)


def more(run: str, ours: str, theirs: str) -> Judge:
    """Agrees when every size is shown to forward more, and differs when one is shown to
    forward less."""
    return _judged(run, ours, theirs, lambda rs: all(r.low > 1 for r in rs), _any_less)


def same(run: str, ours: str, theirs: str) -> Judge:
    """Agrees when no size shows a difference."""
    return _judged(
        run, ours, theirs, lambda rs: not any(r.shown for r in rs),
        lambda rs: any(r.shown for r in rs),
    )  # fmt: skip


def apart(ours: Place, theirs: Place) -> Judge:
    """Agrees when, at every size, no trial of theirs reaches any of ours, and differs when
    it is so the other way at one. For runs that are not interleaved."""

    def judge(data: Data) -> Verdict:
        became, texts = [], []
        for size in SIZES:
            a, b = ([t.pps for t in point(data, p, size).trials] for p in (ours, theirs))
            became.append(change(b, a))
            texts.append(f"{wire(size)} {ranged(a)} and {ranged(b)}")
        text = f"{' '.join(ours)} and {' '.join(theirs)}: {'; '.join(texts)}"
        if all(one == "more" for one in became):
            return Verdict("agrees", text)
        return Verdict("differs" if "less" in became else "open", text)

    return judge


def idle_share(found: Point, boot: Boot) -> float:
    """Of the time of all the lab's CPUs."""
    return found.cpu_share("idle") / boot.cpus


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
        sent = f" of only {p.sent_pps:,.0f} sent" if underfed(p) else ""
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
