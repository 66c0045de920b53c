"""Fig. 21, and Fig. 6 of Bianco et al.: a multistage router of one or two balancers and
routers (MSR)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.data import Data
from experiments.judge import Place
from experiments.plan import PAIR_ALIKE, Claim, Figure, Run, fifo, policy, untuned
from experiments.sized import SIZES, drawn, more, more_than, tables

from .fig20 import BOUND, FLOWS, LOAD, UNBOUND
from .fig20 import name as members

_BINDINGS = (UNBOUND, BOUND)
_ONE, _TWO = "1+1", "2+2"
_STAGES = {
    _ONE: ({"lb1": ["in", "out"]}, ["vr1"]),
    _TWO: ({"lb1": ["in"], "lb2": ["out"]}, ["vr1", "vr2"]),
}
# One router of a group of one, on the same devices as the group's.
_ALONE = Place("fig20/members", members(1, BOUND))


def _run(name: str) -> Run:
    balancers, routers = _STAGES[name]
    return Run(
        name, PAIR_ALIKE,
        # Both kinds of guests are named lbN and vrN.
        (untuned(UNBOUND), policy(BOUND, fifo(10, 10, guest="[lv][br]*"))),
        rates=(LOAD,), sizes=SIZES, traffic={"flows": FLOWS}, pairs=6, seconds=1.0, seed=21,
        group={
            "name": "edge", "kind": "msr", "lower": {"in": "p0", "out": "p1"},
            "balancers": balancers, "routers": routers, "links": "bridge",
        },
        guests=(*balancers, *routers),
    )  # fmt: skip


def _rows() -> Mapping[str, Place]:
    return {
        f"{stage}, {binding}": Place(stage, binding) for stage in _STAGES for binding in _BINDINGS
    }


def _tables(data: Data) -> list[str]:
    return tables(data, _rows(), PAIR_ALIKE)


def _plots(data: Data) -> Mapping[str, Any]:
    lines = [(b, [Place(stage, b) for stage in _STAGES], b == UNBOUND) for b in _BINDINGS]
    return drawn(
        data, "fig21", [1.0, 2.0], lines,
        kind="MSR", x_label="balancers, and routers", offered=LOAD,
    )  # fmt: skip


FIGURE = Figure(
    id="fig21",
    title="Fig. 21, and Bianco et al., Fig. 6: the multistage router",
    paper="A balancer in front of a router, each a guest: five busy threads on two cores, which "
    "bindings help a lot, though the best of them is hard to find and overload hurts it. It forwards "
    "far less than a PVR, because frames pass one more guest; the balancer's vcpu is the limit. "
    "On VMware, one balancer and one router forward more than two of each on the same machine, "
    "whose CPU is the bottleneck, and how they are linked makes no difference.",
    ours=f"A group of kind msr of `vsrtune group` (docs/groups.md), linked by a bridge, whose "
    f"balancers are guests with the rules of `vsrtune group rules`. {FLOWS} flows from one address "
    "to one, one way, 60, 508 and 1496 bytes without check sequence. **The lab has two CPUs, one "
    "of which sends all frames and receives them, so the CPUs limit all of it.** 1+1 is one "
    "balancer for both sides and one router, 2+2 a balancer for each side and two routers. "
    "*Bound* is every thread of every guest off the interrupt CPU, hence all on one, FIFO at one "
    "priority. Bindings and sizes are interleaved; 1+1 and 2+2 are not, since changing between "
    "them takes a minute.",
    runs=tuple(_run(stage) for stage in _STAGES),
    claims=(
        *(
            Claim(f"{stage} bound: more than unbound.", more(stage, BOUND, UNBOUND))
            for stage in _STAGES
        ),
        *(
            Claim(
                f"1+1 forwards more than 2+2, {binding}.",
                more_than(Place(_ONE, binding), Place(_TWO, binding)),
            )
            for binding in _BINDINGS
        ),
        Claim("A PVR of one guest forwards more than 1+1, bound.", more_than(_ALONE, Place(_ONE, BOUND))),
    ),
    plots=_plots,
    native=None,
    tables=_tables,
)  # fmt: skip
