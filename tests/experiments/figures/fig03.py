"""Fig. 3: the order of priorities of vcpu and vhost on one core."""

from __future__ import annotations

from experiments.judge import best, causes, declines, impossible, stable, worst
from experiments.plan import BASE, PINS_ONLY, Claim, Figure, Run, fifo, policy

_RUN = "priorities"
_EQUAL, _VCPU, _VHOST, _FAIR = (
    "vcpu = vhost", "vcpu above vhost", "vhost above vcpu", "no real-time class",
)  # fmt: skip

FIGURE = Figure(
    id="fig03",
    title="Fig. 3: priorities of vcpu and vhost",
    paper="Both threads on one core under SCHED_FIFO, interrupts on another. With vhost above the "
    "vcpu the router forwards least: the core fills the guest with frames that the guest has no "
    "time to route. With the vcpu above, the peak is higher, but overload starves vhost, and the "
    "rate falls. Equal priorities are best and keep their rate. A core for each thread is drawn "
    "as the reference.",
    ours="CPU 1 for vcpu and both vhost workers (one for each interface: today's kernels have no "
    "single one), interrupts and generator on CPU 0.",
    runs=(
        Run(
            _RUN,
            BASE,
            (
                policy(_FAIR, PINS_ONLY),
                policy(_EQUAL, fifo(10, 10)),
                policy(_VCPU, fifo(11, 10)),
                policy(_VHOST, fifo(10, 11)),
            ),
            seed=3,
        ),
    ),
    claims=(
        Claim(
            "vhost above vcpu forwards least.",
            worst(_RUN, _VHOST, (_EQUAL, _VCPU)),
            causes(_RUN, _VHOST),
        ),
        Claim(
            "Equal priorities forward most in overload.",
            best(_RUN, _EQUAL, (_VCPU, _VHOST)),
            causes(_RUN, _EQUAL),
        ),
        Claim(
            "With the vcpu above vhost, the rate falls in overload.",
            declines(_RUN, _VCPU),
            causes(_RUN, _VCPU),
        ),
        Claim("Equal priorities keep their peak rate in overload.", stable(_RUN, _EQUAL)),
        Claim(
            "Three separate cores do better than any order on one.",
            impossible("three threads on three cores need a host with four; the lab has two"),
        ),
    ),
)
