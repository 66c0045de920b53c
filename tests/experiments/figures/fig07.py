"""Fig. 7: one flow, thousands, a million."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.data import Data, mix
from experiments.judge import SAME, Judge, Place, Rule, above, below, compared
from experiments.plan import NATIVE, ROUTES, Claim, Figure, Run, fifo, policy, untuned
from experiments.text import offered
from vsrtune.bench.report import plots
from vsrtune.bench.spec.model import MAX_DESTINATIONS

FLOWS = (1, 16384, 1_000_000)
FIRST = "10.128.0.0"
RATES = (16000, 32000, 64000)


def traffic(flows: int) -> dict[str, int]:
    """So many flows, each to a destination of its own as in the paper; above what the
    bench can have of these, several to each."""
    destinations = flows if flows <= MAX_DESTINATIONS else flows // 16
    return {"flows": flows, "destinations": destinations}


def run_name(router: str, flows: int) -> str:
    return f"{router}-{flows}"


def _many(router: str, flows: int, rule: Rule) -> Judge:
    """Of many flows against one."""
    return compared(rule, [(Place(run_name(router, flows)), Place(run_name(router, 1)))])


def _why(data: Data) -> str:
    load = data.loads(run_name("vr1", 1))[-1]
    parts = [f"{n:,} flows, {mix(data.at(run_name('vr1', n), None, load))}" for n in FLOWS]
    return (
        "The routing cache, which the paper names as the cause, left the kernel in 3.6, before "
        "the kernels measured here. At " + offered(load) + ": " + ". ".join(parts) + "."
    )


def _plots(data: Data) -> Mapping[str, Any]:
    lines = [
        plots.curve(f"{router}, {n:,} flows", data.points(run_name(router, n)),
                    dashed=router == NATIVE)
        for router in ("vr1", NATIVE)
        for n in FLOWS
    ]  # fmt: skip
    return {"fig07": plots.throughput(lines, "Number of flows, virtual and native")}


def _runs() -> tuple[Run, ...]:
    made = []
    for flows in FLOWS:
        made.append(
            Run(
                run_name("vr1", flows), ROUTES, (policy("tuned", fifo(10, 10)),),
                rates=RATES, destination=FIRST, traffic=traffic(flows), pairs=5, seed=7,
            )
        )  # fmt: skip
        made.append(
            Run(
                run_name(NATIVE, flows), ROUTES, (untuned("native"),),
                rates=RATES, router=NATIVE, destination=FIRST, traffic=traffic(flows), pairs=5,
                seed=7,
            )
        )  # fmt: skip
    return tuple(made)


FIGURE = Figure(
    id="fig07",
    title="Fig. 7: number of flows",
    paper="Flows to as many destinations, through a virtual router and through one that is not. "
    "Up to 16,384 flows nothing changes; a million flows cost both of them much, because the "
    "kernel's routing cache overflows.",
    ours="The same flows, each to its own destination, through a tuned router and the lab host.",
    runs=_runs(),
    claims=(
        Claim(
            "16,384 flows cost the virtual router nothing.", _many("vr1", 16384, above(1 / SAME))
        ),
        Claim(
            "A million flows cost the virtual router much.",
            _many("vr1", 1_000_000, below()),
            _why,
        ),
        Claim("A million flows cost the native router too.", _many(NATIVE, 1_000_000, below())),
    ),
    plots=_plots,
)
