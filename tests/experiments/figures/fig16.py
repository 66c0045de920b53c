"""Figs. 16 and 17: the length of the macvtap queue when the vcpu has a budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.data import Data
from experiments.judge import Judge, alike, causes, more, top
from experiments.plan import BASE, FIFO, Claim, Figure, Run, budget, placed, policy
from experiments.reserve import PERIOD, SECONDS, in_force
from experiments.text import offered
from vsrtune.bench.report import plots

from .fig15 import LENGTHS

_RUN = "queue"
# Milliseconds of every period; None is class fifo, as in Fig. 15.
_HARDLY, _BOUND, _NONE = "170 ms", "90 ms", "no budget"
_BUDGETS: Mapping[str, int | None] = {_NONE: None, _HARDLY: 170, _BOUND: 90}
_LOAD = 64000
# The fewest rounds whose median ratio has an interval of 95 % other than all of them.
_ROUNDS = 7


def _name(which: str, length: int) -> str:
    return f"{which}, queue {length}"


def _configurations() -> tuple[dict[str, Any], ...]:
    return tuple(
        policy(
            _name(which, length),
            placed(FIFO if runtime is None else budget(runtime, PERIOD), FIFO, queue=length),
        )
        for which, runtime in _BUDGETS.items()
        for length in LENGTHS
    )


def _guarded(judge: Judge) -> Judge:
    shares = {
        _name(which, length): {"vcpu": runtime / PERIOD}
        for which, runtime in _BUDGETS.items()
        if runtime is not None
        for length in LENGTHS
    }
    return in_force(_RUN, shares, judge)


def _within(which: str, ours: int, theirs: int) -> Judge:
    return _guarded(more(_RUN, _name(which, ours), _name(which, theirs)))


def _queues(which: str) -> tuple[Claim, ...]:
    names = (_name(which, n) for n in LENGTHS)
    return (
        Claim(
            f"With {which}, 50 forwards more than 500 in overload.",
            _within(which, 50, 500),
            causes(_RUN, *names),
        ),
        Claim(f"With {which}, 5 forwards less than 50.", _within(which, 50, 5)),
    )


def _plots(data: Data) -> Mapping[str, Any]:
    load = top(data, _RUN)
    lines = []
    for which in _BUDGETS:
        found = [data.at(_RUN, _name(which, n), load) for n in LENGTHS]
        rates = [[t.pps for t in p.trials] for p in found]
        lines.append(plots.spread(which, LENGTHS, rates))
    made = plots.throughput(
        lines, f"Figs. 16 and 17: queue length, {offered(load)}", ideal=False,
        note="one machine, veth and pktgen", x_label="macvtap queue, frames",
        y_label="forwarded, frames per second",
    )  # fmt: skip
    return {"fig16": made}


FIGURE = Figure(
    id="fig16",
    title="Figs. 16 and 17: queue length, vcpu with a budget",
    paper="As Fig. 15, with 170 ms of 200 ms for the vcpu, which hardly bind it, and with 90 ms, in "
    "which it cannot route what it is offered. With 170 ms queues of 35 and 50 do as they did "
    "without a budget, 500 does slightly better in overload than it did, because the budget "
    "protects vhost from the vcpu. Where a router is overloaded, short queues drop frames before "
    "work is done on them.",
    ours="vcpu with the budget, or under FIFO (no budget), and vhost under FIFO on CPU 1, one load "
    f"of {_LOAD:,} pps, all fifteen configurations interleaved. Two physical cores carry the two "
    "CPUs, one each.",
    runs=(
        Run(_RUN, BASE, _configurations(), rates=(_LOAD,), seconds=SECONDS, pairs=_ROUNDS, seed=16),
    ),
    claims=(
        *(
            Claim(
                f"With {_HARDLY} a queue of {n} forwards what it does without a budget.",
                _guarded(alike(_RUN, _name(_HARDLY, n), _name(_NONE, n))),
            )
            for n in (35, 50)
        ),
        Claim(
            f"With {_HARDLY} a queue of 500 forwards more than without a budget.",
            _guarded(more(_RUN, _name(_HARDLY, 500), _name(_NONE, 500))),
        ),
        *_queues(_HARDLY),
        *(
            Claim(
                f"A queue of {n} forwards less with {_BOUND} than with {_HARDLY}.",
                _guarded(more(_RUN, _name(_HARDLY, n), _name(_BOUND, n))),
            )
            for n in LENGTHS
        ),
        *_queues(_BOUND),
    ),
    plots=_plots,
    native=None,
)
