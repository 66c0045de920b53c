"""Bianco et al., Table I: two flows to two routers of one host."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from experiments.bars import bars
from experiments.data import Data
from experiments.judge import Judge, Place, rounds, top
from experiments.plan import PAIR, Claim, Figure, Run, Verdict, fifo, policy, untuned
from experiments.text import parts, table
from vsrtune.core.stats import median_interval, paired_ratio

from .isolation import shares

_UNBOUND, _BOUND = "unbound", "bound"
_CONFIGURATIONS = (untuned(_UNBOUND), policy(_BOUND, fifo(10, 10)))
_FIRST, _SECOND = "vr1", "vr2"
_PEAK = "peak"
# Of the peak. The paper's 100 % (of the line) is 2.6 times what its two routers forwarded
# of it with even shares, so it is set beside the highest of ours as well.
LOADS = (0.5, 1.0, 2.6)
SHARES = (0.5, 0.3, 0.1)
# The paper's table: what came out of flow 1 and of flow 2, per cent, by load and the share
# of flow 1.
_PAPER = {
    (0.5, 0.5): (68.3, 64.4), (0.5, 0.3): (42.1, 97.5), (0.5, 0.1): (75.0, 97.5),
    (1.0, 0.5): (37.6, 39.2), (1.0, 0.3): (17.9, 47.9), (1.0, 0.1): (13.3, 42.9),
}  # fmt: skip
# A small flow that keeps this share of what the large one keeps is not penalised.
_AS_MUCH = 0.95
_WHOLE = 0.99
_HEADS = (
    *("load", "in 1", "in 2", "paper: out 1", "out 2", "unbound: out 1", "out 2"),
    *("bound: out 1", "out 2", "unbound: forwarded", "bound: forwarded"),
)


def name(load: float, share: float) -> str:
    """Of the run in which flow 1 has ``share`` of ``load``."""
    return f"{round(100 * load)}-{round(100 * share)}"


def kept(data: Data, load: float, share: float, configuration: str) -> tuple[list[float], ...]:
    """The parts of flow 1 and of flow 2 that were forwarded, by trial."""
    run = name(load, share)
    trials = data.trials(run, configuration, top(data, run))
    return shares(trials, _FIRST), shares(trials, _SECOND)


def _judged(data: Data, load: float, share: float, configuration: str) -> tuple[list[float], ...]:
    """The same of the rounds that may be judged."""
    trials = [trial for (trial,) in rounds(data, Place(name(load, share), configuration))]
    return shares(trials, _FIRST), shares(trials, _SECOND)


def _whole(configuration: str, load: float) -> Judge:
    """Agrees when neither flow loses any to speak of, whatever their shares."""

    def judge(data: Data) -> Verdict:
        found = {share: _judged(data, load, share, configuration) for share in SHARES}
        text = f"{configuration}: {_out(found)}"
        lows = [median_interval(flow)[0] for pair in found.values() for flow in pair]
        highs = [median_interval(flow)[1] for pair in found.values() for flow in pair]
        if min(lows) >= _WHOLE:
            return Verdict("agrees", text)
        return Verdict("differs" if min(highs) < _WHOLE else "open", text)

    return judge


def _penalised(configuration: str, load: float) -> Judge:
    """Agrees when the smaller flow is shown to lose more at both uneven shares, differs
    when it is shown at neither to keep less than nearly as much."""

    def judge(data: Data) -> Verdict:
        found = {s: _judged(data, load, s, configuration) for s in SHARES if s != 0.5}
        ratios = {s: paired_ratio(small, large) for s, (small, large) in found.items()}
        each = "; ".join(f"{share:g}/{1 - share:g} {ratio}" for share, ratio in ratios.items())
        text = f"{configuration}, {_out(found)}. Smaller / larger: {each}"
        if all(r.high < 1 for r in ratios.values()):
            return Verdict("agrees", text)
        if all(r.low >= _AS_MUCH for r in ratios.values()):
            return Verdict("differs", text)
        return Verdict("open", text)

    return judge


def _out(found: Mapping[float, tuple[list[float], ...]]) -> str:
    return "; ".join(
        f"{share:g}/{1 - share:g}: " + " and ".join(f"{100 * median(f):.1f} %" for f in flows)
        for share, flows in found.items()
    )


def _tables(data: Data) -> list[str]:
    rows = []
    for load in LOADS:
        for share in SHARES:
            paper = _PAPER.get((load, share))
            cells = [f"{100 * load:.0f} %", f"{share:g}", f"{1 - share:g}"]
            cells += [f"{out} %" for out in paper] if paper else ["", ""]
            totals = []
            for configuration in (_UNBOUND, _BOUND):
                cells += [parts(flow) for flow in kept(data, load, share, configuration)]
                run = name(load, share)
                point = data.at(run, configuration, top(data, run))
                totals.append(f"{point.pps:,.0f} of {point.sent_pps:,.0f}")
            rows.append([*cells, *totals])
    peaks = {c: data.peak(_PEAK, c) for c in (_UNBOUND, _BOUND)}
    each = ", ".join(
        f"{c} {p.pps:,.0f} ({p.low:,.0f}..{p.high:,.0f}) at {p.offered:,.0f} offered"
        for c, p in peaks.items()
    )
    head = (
        f"Both routers loaded alike forward at most, in frames per second: {each}. 100 % is the "
        "greater of the two. Medians (lowest..highest trial):"
    )
    return [head, "", *table(_HEADS, rows)]


def _plots(data: Data) -> Mapping[str, Any]:
    groups = [f"{100 * load:.0f} %, {share:g}/{1 - share:g}" for load in LOADS for share in SHARES]
    series = {
        f"{configuration}, flow {flow + 1}": [
            100 * median(kept(data, load, share, configuration)[flow])
            for load in LOADS
            for share in SHARES
        ]
        for configuration in (_UNBOUND, _BOUND)
        for flow in (0, 1)
    }
    title = "Two flows to two routers"
    return {"fairness": bars(groups, series, title, "forwarded of what was sent, %")}


def _run(load: float, share: float) -> Run:
    return Run(
        name(load, share), PAIR, _CONFIGURATIONS, scaled=(f"fairness/{_PEAK}", (1.0,)),
        by_router={_FIRST: round(load * share, 4), _SECOND: round(load * (1 - share), 4)},
        seconds=1.0, pairs=6, seed=round(1000 * load + 100 * share),
    )  # fmt: skip


FIGURE = Figure(
    id="fairness",
    title="Bianco et al., Table I: two flows to two routers",
    paper="Two flows of 64-byte packets to two back-end routers, virtual machines of VMware ESXi on "
    "one host; *in* is a flow's share of the load, *out* how much of it is forwarded. In overload "
    "the flows are not isolated: the smaller one is penalised significantly.",
    ours="Two guests of KVM on the two CPUs of the lab, with addresses of their own, a flow of 60 "
    "bytes without check sequence to each. The paper's load is that of the line, which here does not "
    "exist: **100 % is the most that both routers forward together when loaded alike, in the "
    "better of the two configurations.** That is far less overload than the paper's: its 100 % was "
    "2.6 times what its routers forwarded, so 260 % is measured as well. *Unbound* is as "
    "the kernel and libvirt do it, *bound* has every thread of both routers off the interrupt CPU, "
    "at one FIFO priority. CPU budgets are measured above; they are not shown to isolate more than that.",
    runs=(
        Run(
            _PEAK, PAIR, _CONFIGURATIONS, rates=(16000, 32000, 64000),
            together=(_FIRST, _SECOND), seconds=1.0, pairs=5, seed=3,
        ),
        *(_run(load, share) for load in LOADS for share in SHARES),
    ),
    claims=(
        *(
            Claim(
                f"At 50 % neither flow loses frames, {configuration}.",
                _whole(configuration, LOADS[0]),
            )
            for configuration in (_UNBOUND, _BOUND)
        ),
        *(
            Claim(
                f"At {100 * load:.0f} % the smaller flow is penalised, {configuration}.",
                _penalised(configuration, load),
            )
            for load in LOADS[1:]
            for configuration in (_UNBOUND, _BOUND)
        ),
    ),
    plots=_plots,
    native=None,
    tables=_tables,
)  # fmt: skip
