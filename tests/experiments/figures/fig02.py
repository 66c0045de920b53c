"""Fig. 2: one core or several, threads free or bound."""

from __future__ import annotations

from experiments.data import Data, mix, spread
from experiments.judge import (  # fmt: skip
    Place,
    below,
    causes,
    impossible,
    more,
    spreads,
    stable,
    top,
)
from experiments.plan import (
    BASE,
    PINS_ONLY,
    Claim,
    Figure,
    Run,
    Verdict,
    libvirt_pins,
    policy,
    untuned,
)
from experiments.text import offered

_ONE = libvirt_pins("all on the interrupt CPU", "0")
_FREE = untuned("2 CPUs, no bind")
_BOUND = policy("bound off the interrupt CPU", PINS_ONLY)
_RUN = "bindings"


def _migrations(data: Data) -> Verdict:
    load = top(data, _RUN)
    free, bound = (data.at(_RUN, c["name"], load) for c in (_FREE, _BOUND))
    both = spreads(data, Place(_RUN, bound.configuration), Place(_RUN, free.configuration))
    text = (
        f"at {offered(load)} the free threads move {free.migrations_per_second():.0f} times a "
        f"second and the trials spread {100 * spread(free):.0f} % of their median; bound ones move "
        f"{bound.migrations_per_second():.0f} times and spread {100 * spread(bound):.0f} %; distances "
        f"from the median, bound / free, within rounds: {both[0]}"
    )
    return Verdict(below()(both), text)


def _vhost(data: Data) -> str:
    load = top(data, _RUN)
    point = data.at(_RUN, _BOUND["name"], load)
    return f"At {offered(load)}, bound, {mix(point)}."


FIGURE = Figure(
    id="fig02",
    title="Fig. 2: CPU cores and bindings",
    paper="Forwarded against offered load for a router confined to one core together with the "
    "interrupts, with two and four cores and free threads, and with threads kept off the "
    "interrupt core: loosely (among the other cores) and tightly (a core each). More cores help "
    "only when the threads are kept off the core that serves the interrupts; bound loosely the "
    "mean is as high as bound tightly, but varies in overload. The peak is set by the one "
    "vhost thread, which fills a core.",
    ours="Two CPUs, so that all bindings off the interrupt CPU are the same one: CPU 1 for all "
    "three threads.",
    runs=(Run("bindings", BASE, (_FREE, _ONE, _BOUND), seed=2),),
    claims=(
        Claim(
            "Threads kept off the interrupt core forward more than free ones.",
            more(_RUN, _BOUND["name"], _FREE["name"]),
            causes(_RUN, _FREE["name"], _BOUND["name"]),
        ),
        Claim(
            "Everything on the one core that serves the interrupts forwards least.",
            more(_RUN, _FREE["name"], _ONE["name"]),
            causes(_RUN, _ONE["name"]),
        ),
        Claim("Binding makes the result steadier in overload.", _migrations),
        Claim(
            "Bound, the router keeps its peak rate in overload.",
            stable(_RUN, _BOUND["name"], 0.9),
            _vhost,
        ),
        Claim(
            "A core for each thread does no better on average than a loose binding.",
            impossible("three threads and the interrupts need four cores; the lab has two"),
        ),
    ),
)
