"""Fig. 10: one or two vhost workers, one or two vcpus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.data import Data
from experiments.judge import in_turn
from experiments.plan import RATES, THREADS, Claim, Figure, Run, Verdict, fifo, policy, untuned
from experiments.text import offered, ranged
from vsrtune.bench.report import plots

_ROUTERS = {
    "vr1": "1 vcpu, 2 vhost",
    "vr2": "2 vcpus, 2 vhost",
    "vr3": "2 vcpus, 4 vhost (2 queues)",
}
_TUNED = "equal FIFO off the interrupt CPU"


def _ratio(ours: str, theirs: str) -> Any:
    def judge(data: Data) -> Verdict:
        load = data.loads(ours)[-1]
        a = [t.pps for t in data.trials(ours, _TUNED, load)]
        b = [t.pps for t in data.trials(theirs, _TUNED, load)]
        text = (
            f"{_ROUTERS[ours]} {ranged(a)}, {_ROUTERS[theirs]} {ranged(b)} "
            f"at {offered(load)}, tuned; measured in turn, not interleaved"
        )
        return in_turn(b, a, {"less", "same"}, text)

    return judge


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
        Claim("A second vcpu alone gains nothing.", _ratio("vr2", "vr1")),
        Claim("More threads than cores gain nothing.", _ratio("vr3", "vr1")),
    ),
    plots=_plots,
)  # fmt: skip
