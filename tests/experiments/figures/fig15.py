"""Fig. 15: the length of the macvtap queue, threads on one core with real-time priorities."""

from __future__ import annotations

from experiments.judge import alike, best, causes, declines, more
from experiments.plan import BASE, Claim, Figure, Run, fifo, policy

_RUN = "queue"
LENGTHS = (500, 110, 50, 35, 5)
_NAMES = tuple(f"queue {n}" for n in LENGTHS)
_CONFIGURATIONS = tuple(
    policy(name, fifo(10, 10, queue=n)) for name, n in zip(_NAMES, LENGTHS, strict=True)
)
_SHORT = ("queue 50", "queue 35")


FIGURE = Figure(
    id="fig15",
    title="Fig. 15: length of the macvtap queue",
    paper="vcpu and vhost on one core with real-time priorities. A queue of 500 does well until "
    "overload and then loses most of its rate; 110 has the highest peak and declines; 50 and 35 "
    "peak a little lower and do not decline; 5 loses frames at low load already. Hence the "
    "advice: 35 to 50.",
    ours="Equal FIFO on CPU 1. Figs. 16 and 17 are the same with a budget for the vcpu.",
    runs=(Run(_RUN, BASE, _CONFIGURATIONS, rates=(32000, 64000), seed=15),),
    claims=(
        Claim("A queue of 500 loses much of its rate in overload.", declines(_RUN, "queue 500")),
        Claim(
            "50 forwards more than 500 in overload.",
            more(_RUN, "queue 50", "queue 500"),
            causes(_RUN, *_NAMES),
        ),
        Claim("35 forwards more than 500 in overload.", more(_RUN, "queue 35", "queue 500")),
        Claim("50 and 35 do equally well.", alike(_RUN, *_SHORT)),
        Claim(
            "5 forwards less than 50.",
            more(_RUN, "queue 50", "queue 5"),
            causes(_RUN, "queue 50", "queue 5"),
        ),
        Claim(
            "110 is the best at its peak, beside 500.",
            best(_RUN, "queue 110", ("queue 50", "queue 35", "queue 5")),
        ),
    ),
)
