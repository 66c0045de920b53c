"""Rojas-Cessa et al.: one, two and four flows of frames of several sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from experiments.data import Data
from experiments.plan import BASE, NATIVE, Claim, Figure, Run, Verdict, fifo, policy, untuned
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


def _grows(data: Data) -> Verdict:
    small, large = (_megabits(data, "vr1", 1, s, _UNTUNED) for s in (SIZES[0], SIZES[-1]))
    ratio = large / max(small, 1e-9)
    text = (
        f"untuned, one flow: {small:,.1f} Mbit/s of 64-byte frames, {large:,.1f} of 1472-byte "
        f"ones, {ratio:.1f} times as much"
    )
    return Verdict("agrees" if ratio > 2 else "differs", text)


def _loses(data: Data) -> Verdict:
    parts = []
    for size in SIZES:
        native = _megabits(data, NATIVE, 1, size, None)
        ours = _megabits(data, "vr1", 1, size, _UNTUNED)
        parts.append((size, ours / max(native, 1e-9)))
    text = "untuned / native, one flow: " + ", ".join(f"{s + 4} bytes {r:.2f}" for s, r in parts)
    return Verdict("agrees" if all(r < 0.9 for _, r in parts) else "differs", text)


def _more_flows(data: Data) -> Verdict:
    one, four = (_megabits(data, "vr1", f, SIZES[-1], _UNTUNED) for f in (1, 4))
    tuned = [_megabits(data, "vr1", f, SIZES[-1], _TUNED) for f in (1, 4)]
    text = (
        f"1472 bytes: untuned {one:,.1f} Mbit/s of one flow, {four:,.1f} of four; tuned "
        f"{tuned[0]:,.1f} and {tuned[1]:,.1f}"
    )
    return Verdict("agrees" if four < one else "differs", text)


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
        Claim("Throughput in bits grows with the frame size.", _grows),
        Claim("The virtual router forwards less than the native one at every size.", _loses),
        Claim("Four flows of large frames get less through than one.", _more_flows),
    ),
    plots=_plots,
    tables=_tables,
)
