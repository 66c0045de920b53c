"""Fig. 8: the size of the routing table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.data import Data
from experiments.judge import SAME, Judge, Place, above, compared
from experiments.plan import ROUTES, Claim, Figure, Run, fifo, policy
from vsrtune.bench.report import plots

from .fig07 import FIRST, RATES, run_name, traffic

_FLOWS = (1, 1_000_000)
_ENTRIES = {"vr1": 1, "vr2": ROUTES.guests[1].routes or 0}


def _keeps(flows: int) -> Judge:
    """Of the large table against the small one."""
    return compared(
        above(1 / SAME), [(Place(run_name("vr2", flows)), Place(run_name("vr1", flows)))]
    )


def _plots(data: Data) -> Mapping[str, Any]:
    lines = [
        plots.curve(f"{_ENTRIES[router]:,} prefixes, {flows:,} flows",
                    data.points(run_name(router, flows)))
        for router in _ENTRIES
        for flows in _FLOWS
    ]  # fmt: skip
    if data.has("fig07/native-1000000"):
        points = data.points("fig07/native-1000000")
        lines.append(plots.curve("native, 1 prefix, 1,000,000 flows", points, dashed=True))
    return {"fig08": plots.throughput(lines, "Size of the routing table")}


FIGURE = Figure(
    id="fig08",
    title="Fig. 8: size of the routing table",
    paper="A table of a million entries instead of one costs next to nothing, be it for one flow "
    "or for a million, in the virtual router as in the native one.",
    ours=f"{_ENTRIES['vr2']:,} prefixes of equal length, of which the million flows meet about "
    "16,000; a table of a million would take an emulated guest minutes to fill. Two guests in one "
    "lab, one with each table, tuned alike, measured in turn.",
    runs=tuple(
        Run(
            run_name(router, flows), ROUTES, (policy("tuned", fifo(10, 10)),),
            rates=RATES, router=router, destination=FIRST, traffic=traffic(flows), pairs=5, seed=8,
        )
        for flows in _FLOWS
        for router in _ENTRIES
    ),
    claims=(
        Claim("One flow does not feel the size of the table.", _keeps(1)),
        Claim("A million flows hardly feel it.", _keeps(1_000_000)),
    ),
    plots=_plots,
)  # fmt: skip
