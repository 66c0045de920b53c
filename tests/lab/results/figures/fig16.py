"""Figs. 16 and 17: the length of the macvtap queue when the vcpu has a budget."""

from __future__ import annotations

from results.judge import Judge, alike, apart, causes
from results.plan import BASE, FIFO, Claim, Figure, Run, budget, placed, policy
from results.reserve import PERIOD, SECONDS, in_force

from .fig15 import LENGTHS

_RUN = "queue"
# As in Fig. 15, which these two are compared with.
_LOADS = (32000, 64000)
_REPEATS = 5
_FIG15, _FIG16 = f"fig15/{_RUN}", f"fig16/{_RUN}"
_FEW = (
    "Two physical cores carry the two CPUs, one each. Five rounds are too few for an interval of a ratio: a difference is one when no trial of one "
    "reaches any of the other. All trials of a figure are interleaved, those of two figures not."
)


def _name(length: int) -> str:
    return f"queue {length}"


def _run(runtime: int, seed: int) -> Run:
    configurations = tuple(
        policy(_name(n), placed(budget(runtime, PERIOD), FIFO, queue=n)) for n in LENGTHS
    )
    return Run(_RUN, BASE, configurations, rates=_LOADS, seconds=SECONDS, pairs=_REPEATS, seed=seed)


def _guarded(runtime: int, judge: Judge) -> Judge:
    shares = {"vcpu": runtime / PERIOD}
    return in_force(_RUN, {_name(n): shares for n in LENGTHS}, judge)


def _within(runtime: int, ours: int, theirs: int) -> Judge:
    return _guarded(runtime, apart((_RUN, _name(ours)), (_RUN, _name(theirs))))


_CAUSES = causes(_RUN, *map(_name, LENGTHS))

FIG16 = Figure(
    id="fig16",
    title="Fig. 16: queue length, vcpu with 170 ms of 200 ms",
    paper="As Fig. 15, with a budget for the vcpu that hardly binds it. Queues of 35 and 50 do as "
    "they did without, 500 does slightly better in overload than it did, because the budget "
    "protects vhost from the vcpu.",
    ours=f"vcpu with the budget and vhost under FIFO on CPU 1. {_FEW}",
    runs=(_run(170, 16),),
    claims=(
        *(
            Claim(
                f"A queue of {n} forwards in overload what it does in Fig. 15.",
                _guarded(170, alike((_RUN, _name(n)), (_FIG15, _name(n)))),
            )
            for n in (35, 50)
        ),
        Claim(
            "A queue of 500 forwards more in overload than in Fig. 15.",
            _guarded(170, apart((_RUN, _name(500)), (_FIG15, _name(500)))),
        ),
        Claim("50 forwards more than 500 in overload.", _within(170, 50, 500), _CAUSES),
        Claim("5 forwards less than 50.", _within(170, 50, 5)),
    ),
)
FIG17 = Figure(
    id="fig17",
    title="Fig. 17: queue length, vcpu with 90 ms of 200 ms",
    paper="The same with a budget in which the vcpu cannot route what it is offered: an overload "
    "beyond all others. Where a router is overloaded, short queues drop frames before work is "
    "done on them.",
    ours=f"vcpu with the budget and vhost under FIFO on CPU 1. {_FEW}",
    runs=(_run(90, 17),),
    claims=(
        *(
            Claim(
                f"A queue of {n} forwards less than with 170 ms.",
                _guarded(90, apart((_RUN, _name(n)), (_FIG16, _name(n)), "less")),
            )
            for n in LENGTHS
        ),
        Claim("50 forwards more than 500 in overload.", _within(90, 50, 500), _CAUSES),
        Claim("5 forwards less than 50.", _within(90, 50, 5)),
    ),
)
