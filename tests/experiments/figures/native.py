"""The lab host itself forwarding: the upper bound drawn into every plot."""

from __future__ import annotations

from experiments.plan import BASE, NATIVE, RATES, Figure, Run, untuned

FIGURE = Figure(
    id="native",
    title="Native IP forwarding: the upper bound",
    paper="Where the paper draws a router that is not virtualised, it forwards more than any "
    "virtual one at the same load.",
    ours="The lab host forwards between the same two devices. Everything then happens on CPU 0, "
    "the generator included, so where the line bends the generator may be what is exhausted: the "
    "bound is a lower one.",
    runs=(
        Run(
            "sweep", BASE, (untuned("native"),), rates=(8000, *RATES, 96000), router=NATIVE, pairs=5
        ),
    ),
    claims=(),
    native=None,
)
