"""Fig. 20: one router of one to four guests (PVR)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from experiments.data import Data
from experiments.judge import Place, rounds
from experiments.plan import GROUP, Claim, Figure, Run, Verdict, fifo, policy, untuned
from experiments.sized import (
    SIZES,
    alike,
    as_much,
    drawn,
    idle_share,
    more,
    point,
    tables,
    wire,
)

MEMBERS = (1, 2, 3, 4)
# What a router of the lab forwards, tuned or not, is far below it at all sizes.
LOAD = 48000
# So many that no member goes without its share of them.
FLOWS = 256
BOUND, UNBOUND = "bound", "unbound"
_BINDINGS = (UNBOUND, BOUND)
_RUN = "members"
_GUESTS = tuple(f"vr{number}" for number in MEMBERS)
# Of the time of all CPUs. With more left a router of more threads could have used it.
_IDLE = 0.1


def name(members: int, binding: str) -> str:
    """Of a configuration."""
    return f"{members} {binding}"


def _configuration(members: int, binding: str) -> Mapping[str, Any]:
    scale = {"scale": {"edge": members}}
    if binding == BOUND:
        # Of those that are plugged in: the others have nothing to be kept apart from.
        text = fifo(10, 10, guest=f"vr[1-{members}]")
        return policy(name(members, binding), text, **scale)
    return untuned(name(members, binding), **scale)


def _place(members: int, binding: str) -> Place:
    return Place(_RUN, name(members, binding))


def _no_core_left(data: Data) -> Verdict:
    """Whether the CPUs were busy at every point, so that more threads had nowhere to run."""
    idle = {}
    for members in MEMBERS:
        for binding in _BINDINGS:
            for size in SIZES:
                place = _place(members, binding)
                sent = tuple(trial for (trial,) in rounds(data, replace(place, size=size)))
                found = replace(point(data, place, size), trials=sent)
                idle[name(members, binding), size] = idle_share(found, GROUP)
    where = max(idle, key=lambda key: idle[key])
    text = (
        f"of the time of both CPUs {100 * median(idle.values()):.0f} % were idle in the middle, "
        f"{100 * idle[where]:.0f} % at most ({where[0]}, {wire(where[1])})"
    )
    return Verdict("agrees" if idle[where] <= _IDLE else "differs", text)


def _tables(data: Data) -> list[str]:
    rows = {
        f"{members} member{'s' if members > 1 else ''}, {binding}": _place(members, binding)
        for members in MEMBERS
        for binding in _BINDINGS
    }
    return tables(data, rows, GROUP)


def _plots(data: Data) -> Mapping[str, Any]:
    lines = [(b, [_place(m, b) for m in MEMBERS], b == UNBOUND) for b in _BINDINGS]
    return drawn(
        data, "fig20", [float(m) for m in MEMBERS], lines,
        kind="PVR", x_label="members", offered=LOAD,
    )  # fmt: skip


FIGURE = Figure(
    id="fig20",
    title="Fig. 20: Parallel Virtual Routers",
    paper="Guests on the queues of one macvtap, on four cores. Two or more forward more than the "
    "best single router, over 1,100 kpps; with two, bindings hardly matter, with three they help, "
    "with four they matter less, and four cores forward no more than 1,200 kpps.",
    ours=f"A group of `vsrtune group` (docs/groups.md), {FLOWS} flows from one address to one, one "
    "way, 60, 508 and 1496 bytes without check sequence. **The lab has two CPUs, one of which "
    "sends all frames and receives them: so the CPUs limit the scaling here, not the "
    "routers**, and what forwarding costs says more than the rate. *Unbound* is as the kernel and "
    "libvirt do it; *bound* is every thread of every member off the interrupt CPU, hence all on "
    "one, FIFO at one priority. Every round visits each number of members once, and while they "
    "are plugged in both bindings, and with each of these all sizes. The order of the numbers is turned from "
    "round to round, those of bindings and sizes are drawn anew. In between the group is scaled, "
    "and the next trial waits until each member forwards. All four guests run throughout; those that are not plugged in idle. One "
    "member is a group of one, on the same devices.",
    runs=(
        Run(
            _RUN, GROUP, tuple(_configuration(m, b) for m in MEMBERS for b in _BINDINGS),
            rates=(LOAD,), sizes=SIZES, traffic={"flows": FLOWS}, pairs=6, seconds=1.0, seed=20,
            group={
                "name": "edge", "kind": "pvr", "members": _GUESTS,
                "lower": {"in": "p0", "out": "p1"},
            },
            guests=_GUESTS,
        ),
    ),
    claims=(
        *(
            Claim(
                f"Two members forward at least as much as one, {binding}, on two cores.",
                as_much(_RUN, name(2, binding), name(1, binding)),
            )
            for binding in (BOUND, UNBOUND)
        ),
        *(
            Claim(
                f"{members} members forward more than one router with bindings.",
                more(_RUN, name(members, BOUND), name(1, BOUND)),
            )
            for members in MEMBERS[1:]
        ),
        *(
            Claim(
                f"{members} member{'s' if members > 1 else ''} bound: more than unbound.",
                more(_RUN, name(members, BOUND), name(members, UNBOUND)),
            )
            for members in (1, 3, 4)
        ),
        Claim(
            "Of two members, bindings make no difference.",
            alike(_RUN, name(2, BOUND), name(2, UNBOUND)),
        ),
        Claim("A fourth member adds nothing.", alike(_RUN, name(4, BOUND), name(3, BOUND))),
        Claim("The CPUs have no time left at any point.", _no_core_left),
    ),
    plots=_plots,
    native=None,
    tables=_tables,
)  # fmt: skip
