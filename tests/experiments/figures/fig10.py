"""Fig. 10: one or two vhost workers, one or two vcpus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.data import Data
from experiments.judge import SAME, Judge, Place, below, compared
from experiments.plan import RATES, THREADS, Claim, Figure, Run, fifo, policy, untuned
from vsrtune.bench.report import plots

_ROUTERS = {
    "vr1": "1 vcpu, 2 vhost",
    "vr2": "2 vcpus, 2 vhost",
    "vr3": "2 vcpus, 4 vhost (2 queues)",
}
_TUNED = "equal FIFO off the interrupt CPU"


def _gains_nothing(ours: str, theirs: str) -> Judge:
    return compared(below(SAME), [(Place(ours, _TUNED), Place(theirs, _TUNED))])


def _plots(data: Data) -> Mapping[str, Any]:
    lines = [
        plots.curve(f"{label}, {name}", data.points(router, configuration))
        for router, label in _ROUTERS.items()
        for configuration, name in (("untuned", "untuned"), (_TUNED, "tuned"))
    ]
    if data.has("native/sweep"):
        lines.append(plots.curve("native", data.points("native/sweep"), dashed=True))
    return {"fig10": plots.throughput(lines, "vcpus and vhost workers")}


FIGURE = Figure(
    id="fig10",
    title="Fig. 10: one or two vhost and vcpu threads",
    paper="Splitting the one vhost thread, which is the bottleneck, into one for each direction "
    "raises the peak; a second vcpu without it does not, and costs something in overload.",
    ours="Today's kernels have a vhost worker for each interface, so that two is the least and "
    "what the paper proposed is the rule. Compared are one and two vcpus, and two queues (four "
    "workers). On two CPUs more threads cannot run at once with the interrupts' CPU "
    "kept free: only what they cost can be shown, not what they gain.",
    runs=tuple(
        Run(
            router, THREADS, (untuned(), policy(_TUNED, fifo(10, 10))),
            rates=RATES, router=router, pairs=6, seed=10,
        )
        for router in _ROUTERS
    ),
    claims=(
        Claim("A second vcpu alone gains nothing.", _gains_nothing("vr2", "vr1")),
        Claim("More threads than cores gain nothing.", _gains_nothing("vr3", "vr1")),
    ),
    plots=_plots,
)  # fmt: skip
