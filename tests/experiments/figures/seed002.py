"""Rojas-Cessa et al.: one, two and four flows of frames of several sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from experiments.data import Data
from experiments.judge import Place, above, below, compared
from experiments.plan import BASE, NATIVE, Claim, Figure, Run, fifo, policy, untuned
from experiments.text import table
from vsrtune.bench.report import plots

# Without the check sequence: 64, 576 and 1472 bytes with it.
SIZES = (60, 572, 1468)
FLOWS = (1, 2, 4)
_LOAD = 48000
_TUNED, _UNTUNED = "tuned", "untuned"


def _name(router: str, flows: int, size: int) -> str:
    return f"{router}-{flows}x{size + 4}"


def _traffic(flows: int, size: int) -> dict[str, Any]:
    # Four flows are two each way, as in the paper.
    both = {"flows": 2, "bidirectional": True}
    return {"size": size, **(both if flows == 4 else {"flows": flows})}


def _megabits(data: Data, router: str, flows: int, size: int, configuration: str | None) -> float:
    """Forwarded Mbit/s in overload, frames counted with their check sequence."""
    point = data.points(_name(router, flows, size), configuration)[-1]
    return point.pps * (size + 4) * 8 / 1e6


def _place(router: str, flows: int, size: int, configuration: str | None = None) -> Place:
    return Place(_name(router, flows, size), configuration)


# By label: a router of the lab, and one of its configurations.
_PLACES: tuple[tuple[str, str, str | None], ...] = (
    ("untuned", "vr1", _UNTUNED), ("tuned", "vr1", _TUNED), ("native", NATIVE, None),
)  # fmt: skip


def _each(data: Data) -> Iterator[tuple[int, str, list[float]]]:
    """Mbit/s by size, for each number of flows and each label."""
    for flows in FLOWS:
        for label, router, configuration in _PLACES:
            yield flows, label, [_megabits(data, router, flows, s, configuration) for s in SIZES]


def _tables(data: Data) -> list[str]:
    heads = ["flows", "router", *(f"{s + 4} bytes" for s in SIZES)]
    rows = ([str(n), label, *(f"{r:,.1f}" for r in rates)] for n, label, rates in _each(data))
    return [f"Mbit/s forwarded of {_LOAD:,} frames per second offered:", "", *table(heads, rows)]


def _plots(data: Data) -> Mapping[str, Any]:
    xs = [float(s + 4) for s in SIZES]
    lines = [
        plots.Curve(f"{n} flow{'s' if n > 1 else ''}, {label}", xs, rates, dashed=label == "native")
        for n, label, rates in _each(data)
    ]
    figure = plots.throughput(
        lines, "Flows and frame sizes", ideal=False,
        x_label="frame size with check sequence, bytes", y_label="forwarded, Mbit/s",
    )  # fmt: skip
    return {"seed002": figure}


def _runs() -> tuple[Run, ...]:
    made = []
    for flows in FLOWS:
        for size in SIZES:
            traffic = _traffic(flows, size)
            made.append(
                Run(
                    _name("vr1", flows, size), BASE,
                    (untuned(), policy(_TUNED, fifo(10, 10))),
                    rates=(_LOAD,), traffic=traffic, pairs=3, seed=size + flows, seconds=1.0,
                )
            )  # fmt: skip
            made.append(
                Run(
                    _name(NATIVE, flows, size), BASE, (untuned("native"),),
                    rates=(_LOAD,), router=NATIVE, traffic=traffic, pairs=2, seconds=1.0,
                )
            )  # fmt: skip
    return tuple(made)


FIGURE = Figure(
    id="seed002",
    title="Rojas-Cessa et al., Figs. 4 to 7: flows and frame sizes",
    paper="Software routers, virtual and not, on a machine with one core and one with two, 100 "
    "Mbit/s lines, VMware: throughput against offered load for 1, 2 and 4 flows and frames of 64 "
    "to 1472 bytes. The virtual router is far behind with small frames, its throughput grows "
    "with the frame size, four flows of the largest frames overload it while one and two "
    "do not, and then it declines.",
    ours="One guest on KVM, no line rate: one load far above what it forwards, the same sizes, "
    "1 and 2 flows one way and 2 flows each way. Their 2 and 4 flows used four interfaces, ours "
    "two.",
    runs=_runs(),
    claims=(
        Claim(
            "Throughput in bits grows with the frame size: the largest frames bring twice the bits.",
            # So many fewer frames are twice the bits.
            compared(
                above(2 * (SIZES[0] + 4) / (SIZES[-1] + 4)),
                [(_place("vr1", 1, SIZES[-1], _UNTUNED), _place("vr1", 1, SIZES[0], _UNTUNED))],
            ),
        ),
        Claim(
            "The virtual router forwards less than the native one at every size.",
            compared(
                below(), [(_place("vr1", 1, s, _UNTUNED), _place(NATIVE, 1, s)) for s in SIZES]
            ),
        ),
        Claim(
            "Four flows of large frames get less through than one.",
            compared(
                below(),
                [(_place("vr1", 4, SIZES[-1], _UNTUNED), _place("vr1", 1, SIZES[-1], _UNTUNED))],
            ),
        ),
    ),
    plots=_plots,
    tables=_tables,
)
