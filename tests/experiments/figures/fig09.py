"""Fig. 9: what the CPUs do as the load grows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.bars import bars
from experiments.data import Data, cpu_share, mix
from experiments.judge import Place, above, paired, rounds
from experiments.plan import BASE, Claim, Figure, Run, Verdict, fifo, policy
from experiments.text import offered

_RUN = "use"
_NAME = "bound, equal FIFO"
_ROLES = ("vcpu", "vhost", "softirq", "ksoftirqd", "idle")


def _bottleneck(data: Data) -> Verdict:
    point = data.points(_RUN)[-1]
    trials = [trial.cpu_seconds for (trial,) in rounds(data, Place(_RUN))]
    both = paired(*([used.get(role, 0.0) for used in trials] for role in ("vhost", "vcpu")))
    text = f"at {offered(point.offered)}, {mix(point)}; vhost / vcpu: {both[0]}"
    return Verdict(above()(both), text)


def _plots(data: Data) -> Mapping[str, Any]:
    points = data.points(_RUN)
    series = {r: [cpu_share(p, r) for p in points] for r in _ROLES}
    groups = [f"{p.offered:,.0f}" for p in points]
    title = "CPU use by role against offered load (1 is one CPU)"
    return {"fig09-cpu": bars(groups, series, title, "CPUs")}


FIGURE = Figure(
    id="fig09",
    title="Figs. 9, 11, 12: where the CPU time goes",
    paper="CPU use by core and kind against load, one figure for each split of threads. With one "
    "vhost thread it is that thread whose core is full at the peak; with two, it is the vcpu's, "
    "and the interrupts' core is nearly full.",
    ours="CPU time by thread role, since all the router's threads share CPU 1. Both vhost workers "
    "are counted together.",
    runs=(
        Run(
            _RUN, BASE, (policy(_NAME, fifo(10, 10)),),
            rates=(4000, 8000, 16000, 24000, 32000, 48000, 64000), pairs=3, seed=9,
        ),
    ),
    claims=(Claim("vhost needs more CPU time than the vcpu.", _bottleneck),),
    plots=_plots,
)  # fmt: skip
