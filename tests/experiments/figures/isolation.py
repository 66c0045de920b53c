"""Two routers with budgets on one CPU: what the overload of one costs the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from experiments.data import Data
from experiments.judge import Judge, Place, causes, rounds, top
from experiments.plan import FIFO, PAIR, Claim, Figure, Run, Verdict, budget, placed, policy
from experiments.reserve import in_force
from experiments.text import parts, table
from vsrtune.bench.report import plots
from vsrtune.bench.spec.model import Trial
from vsrtune.core.stats import median_interval

# Of a CPU, for each router. In overload, threads of equal priority, 58 to 59 % of a
# router's CPU time was the vcpu's (peers/own-peak): so is its part here. The rest is for
# two vhost workers, for which one rule holds.
_SHARE = 0.40
_VCPU = 0.24
_WORKER = (_SHARE - _VCPU) / 2
# Milliseconds. At the rate that 40 % of the lab's CPU carries, the tap's queue of 500
# holds what arrives while a thread waits for its next budget, which at 200 ms it would
# not. Much shorter budgets than these are overdrawn, because a tick has to end them, and
# paid back in periods without any.
_PERIOD = 40.0
_SECONDS = 2.0  # whole periods

_BUDGETS, _NONE = "budgets", "no budgets"
_BUSY, _OTHER = "vr1", "vr2"
_ALONE, _CONTROL = "alone", "control"
_LOAD = 0.8
_KEEPS = 0.95
# By how many times the busy router is overloaded.
_RUNS = {"tenfold": 10, "fourfold": 4}

_CONFIGURATION = policy(
    _BUDGETS, placed(budget(_VCPU * _PERIOD, _PERIOD), budget(_WORKER * _PERIOD, _PERIOD))
)
_CONTRAST = policy(_NONE, placed(FIFO, FIFO))


@dataclass(frozen=True)
class Kept:
    """The part of what was sent to the other router that it forwarded: median, and its
    exact 95 % interval. ``sent`` pps to it and ``load``, the same over what its budget
    carries; ``overload`` is what was sent to the busy one over that."""

    share: float
    low: float
    high: float
    sent: float
    load: float
    overload: float
    trials: int

    def __str__(self) -> str:
        return (
            f"{100 * self.share:.1f} % (95 % {100 * self.low:.1f}..{100 * self.high:.1f}, "
            f"{self.trials} trials) of {self.sent:,.0f} pps sent to it, {100 * self.load:.0f} % of "
            f"what its budget carries, with {self.overload:.1f} times that sent to the other"
        )


def shares(trials: Sequence[Trial], router: str) -> list[float]:
    """The part of what a router was sent that it forwarded, by trial."""
    return [t.forwarded_by.get(router, 0) / max(t.sent_by.get(router, 0), 1) for t in trials]


def kept(data: Data, run: str, configuration: str) -> Kept:
    """What was left to the other router in a run."""
    trials = [trial for (trial,) in rounds(data, Place(run, configuration))]
    found = shares(trials, _OTHER)
    low, high = median_interval(found)
    carries = max(data.peak(_ALONE).pps, 1.0)
    busy = median(t.sent_by.get(_BUSY, 0) / t.seconds for t in trials)
    sent = median(t.sent_by.get(_OTHER, 0) / t.seconds for t in trials)
    return Kept(median(found), low, high, sent, sent / carries, busy / carries, len(trials))


def _judged(run: str, configuration: str, keeps: bool) -> Judge:
    def judge(data: Data) -> Verdict:
        found = kept(data, run, configuration)
        text = f"{configuration}: {found}"
        if found.low < _KEEPS <= found.high:
            return Verdict("open", f"{text}: the interval spans {100 * _KEEPS:.0f} %")
        return Verdict("agrees" if (found.low >= _KEEPS) == keeps else "differs", text)

    return judge


def _guarded(run: str, judge: Judge) -> Judge:
    # Over both routers.
    reserved = {"vcpu": 2 * _VCPU, "vhost": 4 * _WORKER}
    return in_force(run, {_BUDGETS: reserved}, judge)


def _places() -> list[tuple[str, str]]:
    return [(run, name) for run in _RUNS for name in (_BUDGETS, _NONE)]


def _tables(data: Data) -> list[str]:
    heads = ("run", "configuration", "router", "sent", "forwarded", "of what was sent")
    rows = []
    for run, name in [(_CONTROL, _BUDGETS), *_places()]:
        trials = data.trials(run, name, top(data, run))
        for router in trials[0].load.pps:
            found = shares(trials, router)
            sent, got = (
                median(by.get(router, 0) / t.seconds for t, by in pairs)
                for pairs in (
                    [(t, t.sent_by) for t in trials],
                    [(t, t.forwarded_by) for t in trials],
                )
            )
            rows.append((run, name, router, f"{sent:,.0f}", f"{got:,.0f}", parts(found)))
    carries = data.peak(_ALONE)
    head = (
        f"A budget carries {carries.pps:,.0f} pps alone ({carries.low:,.0f}..{carries.high:,.0f}). "
        f"`{_CONTROL}` is {_OTHER} alone with {100 * _LOAD:.0f} % of that. Medians "
        "(lowest..highest):"
    )
    return [head, "", *table(heads, rows)]


def _plots(data: Data) -> Mapping[str, Any]:
    places = [(_CONTROL, _BUDGETS), *_places()]
    names = [f"{run}, {name}" if run != _CONTROL else "alone" for run, name in places]
    columns = [shares(data.trials(run, name, top(data, run)), _OTHER) for run, name in places]
    title = f"{_OTHER}: forwarded of what it was sent"
    return {"isolation": plots.scatter(names, columns, title, "share", line_at=_KEEPS)}


def _claims(run: str) -> tuple[Claim, ...]:
    times = {"tenfold": "ten", "fourfold": "four"}[run]
    load = f"{100 * _LOAD:.0f} % of what its budget carries"
    return (
        Claim(
            f"With one router overloaded {times} times, the other, offered {load}, keeps at least "
            f"{100 * _KEEPS:.0f} % of that.",
            _guarded(run, _judged(run, _BUDGETS, keeps=True)),
            causes(run, _BUDGETS, _NONE),
        ),
        Claim(
            f"Without budgets, one overloaded {times} times, the other keeps less.",
            _judged(run, _NONE, keeps=False),
        ),
    )


_SCALE = (f"isolation/{_ALONE}", (1.0,))

FIGURE = Figure(
    id="isolation",
    title="Isolation of two routers on one CPU",
    paper="A thread with a budget is sure of that time in every period and gets no more of it "
    "(section 3.4). The paper shows the second half of this, on one router.",
    ours=f"Two routers with {100 * _SHARE:.0f} % of CPU 1 each: the vcpu {100 * _VCPU:.0f} % and "
    f"each of the two vhost workers {100 * _WORKER:.0f} %, in the proportion in which a router in "
    f"overload divides a CPU by itself, of a period of {_PERIOD:.0f} ms, short enough "
    "for the tap's queue to hold what arrives in it. For contrast all of them under FIFO at one priority. Both "
    "loads come from one generator on CPU 0, which serves the interrupts too; where it cannot send "
    "ten times, it falls short for both routers alike. A physical core carries each of the two CPUs, "
    "so the generator takes hardly any time from the routers.",
    runs=(
        Run(
            _ALONE, PAIR, (_CONFIGURATION,), rates=(8000, 16000, 32000), router=_OTHER,
            seconds=_SECONDS, pairs=5, seed=41,
        ),
        Run(
            _CONTROL, PAIR, (_CONFIGURATION,), scaled=(_SCALE[0], (_LOAD,)), router=_OTHER,
            seconds=_SECONDS, pairs=5, seed=42,
        ),
        *(
            Run(
                name, PAIR, (_CONFIGURATION, _CONTRAST), scaled=_SCALE,
                by_router={_BUSY: float(times), _OTHER: _LOAD}, seconds=_SECONDS,
                seed=42 + times,
            )
            for name, times in _RUNS.items()
        ),
    ),
    claims=tuple(claim for run in _RUNS for claim in _claims(run)),
    plots=_plots,
    native=None,
    tables=_tables,
)  # fmt: skip
