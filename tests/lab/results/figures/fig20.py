"""Fig. 20: one router of one to four guests (PVR)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from results.data import Data
from results.judge import Judge, top
from results.plan import GROUP, Claim, Figure, Run, Verdict, fifo, policy, untuned
from vsrtune.bench.points import Point
from vsrtune.stats import Ratio

MEMBERS = (1, 2, 3, 4)
# Without the check sequence: 64, 512 and 1500 bytes with it.
SIZES = (60, 508, 1496)
# What an untuned router of the lab forwards, and a tuned one, is far below it at all sizes.
_LOAD = 48000
# So many that no member goes without its share of them.
_FLOWS = 256
_BOUND, _UNBOUND = "bound", "unbound"
_BINDINGS = (_UNBOUND, _BOUND)
_RUN = "members"
_GUESTS = tuple(f"vr{number}" for number in MEMBERS)
# Less than this, beside the figure it is compared with, is not "at least as much".
_AS_MUCH = 0.95
# Of the time of all CPUs. Beyond this a router of more threads could have used a CPU.
_IDLE = 0.1
_THREADS = ("vcpu", "vhost", "emulator", "other", "napi")


def name(members: int, binding: str) -> str:
    """Of a configuration."""
    return f"{members} {binding}"


def _configuration(members: int, binding: str) -> Mapping[str, Any]:
    scale = {"scale": {"edge": members}}
    if binding == _BOUND:
        # Of those that are plugged in: the others have nothing to be kept apart from.
        text = fifo(10, 10, guest=f"vr[1-{members}]")
        return policy(name(members, binding), text, **scale)
    return untuned(name(members, binding), **scale)


def _wire(size: int) -> str:
    return f"{size + 4} bytes"


def _point(data: Data, members: int, binding: str, size: int) -> Point:
    return data.at(_RUN, name(members, binding), top(data, _RUN), size)


def _ratios(data: Data, ours: str, theirs: str) -> dict[int, Ratio]:
    at = top(data, _RUN)
    return {size: data.ratio(_RUN, ours, theirs, at, size) for size in SIZES}


def _said(ours: str, theirs: str, ratios: Mapping[int, Ratio]) -> str:
    each = "; ".join(f"{_wire(size)} {ratio}" for size, ratio in ratios.items())
    return f"{ours} / {theirs}: {each}"


def as_much(ours: str, theirs: str) -> Judge:
    """Agrees when no size forwards less, within a margin, and differs when one is shown to."""

    def judge(data: Data) -> Verdict:
        ratios = _ratios(data, ours, theirs)
        text = _said(ours, theirs, ratios)
        if all(r.low >= _AS_MUCH for r in ratios.values()):
            return Verdict("agrees", text)
        return Verdict("differs" if any(r.high < 1 for r in ratios.values()) else "open", text)

    return judge


def more(ours: str, theirs: str) -> Judge:
    """Agrees when every size is shown to forward more; one that forwards less differs."""

    def judge(data: Data) -> Verdict:
        ratios = _ratios(data, ours, theirs)
        text = _said(ours, theirs, ratios)
        if all(r.low > 1 for r in ratios.values()):
            return Verdict("agrees", text)
        return Verdict("differs" if any(r.high < 1 for r in ratios.values()) else "open", text)

    return judge


def same(ours: str, theirs: str) -> Judge:
    """Agrees when no size shows a difference."""

    def judge(data: Data) -> Verdict:
        ratios = _ratios(data, ours, theirs)
        shown = any(r.shown for r in ratios.values())
        return Verdict("differs" if shown else "agrees", _said(ours, theirs, ratios))

    return judge


def _no_core_left(data: Data) -> Verdict:
    """Whether the CPUs were busy at every point, so that more threads had nowhere to run."""
    idle = {
        (members, binding, size): idle_share(_point(data, members, binding, size))
        for members in MEMBERS
        for binding in _BINDINGS
        for size in SIZES
    }
    (most, where) = max((share, key) for key, share in idle.items())
    text = (
        f"of the time of both CPUs {100 * median(idle.values()):.0f} % were idle in the middle, "
        f"{100 * most:.0f} % at most ({name(*where[:2])}, {_wire(where[2])})"
    )
    return Verdict("agrees" if most <= _IDLE else "differs", text)


def idle_share(point: Point) -> float:
    """Of the time of all the lab's CPUs."""
    return point.cpu_share("idle") / GROUP.cpus


def threads_per_million(point: Point) -> float:
    """CPU seconds of all threads of all members for a million frames forwarded."""
    return sum(point.cpu_per_million(role) or 0.0 for role in _THREADS)


def _tables(data: Data) -> list[str]:
    def rows(cells: Any) -> list[str]:
        lines = ["| members | | " + " | ".join(_wire(s) for s in SIZES) + " |"]
        lines.append("|---|---|" + "---|" * len(SIZES))
        for members in MEMBERS:
            for binding in _BINDINGS:
                found = [cells(_point(data, members, binding, size)) for size in SIZES]
                lines.append(f"| {members} | {binding} | " + " | ".join(found) + " |")
        return lines

    def rate(p: Point) -> str:
        return f"{p.pps:,.0f} ({p.low:,.0f}..{p.high:,.0f})"

    def cost(p: Point) -> str:
        softirq = p.cpu_per_million("softirq") or 0.0
        return f"{threads_per_million(p):.1f} / {softirq:.1f} / {100 * idle_share(p):.0f} %"

    head = (
        f"Frames per second forwarded of {_LOAD:,} offered, median (lowest..highest of "
        f"{len(_point(data, 1, _BOUND, SIZES[0]).trials)} rounds):"
    )
    second = (
        "CPU seconds for a million frames forwarded: of all threads of all members (what SoftIRQ "
        "work ran on them included) / SoftIRQ of the whole host, in which the generator's side "
        "and the sink are / CPU time of the host that was left idle:"
    )
    return [head, "", *rows(rate), "", second, "", *rows(cost)]


def _plots(data: Data) -> Mapping[str, Any]:
    from vsrtune.bench import plots

    def lines(of: Any, spread: bool) -> list[plots.Curve]:
        return [_curve(data, size, binding, of, spread) for size in SIZES for binding in _BINDINGS]

    words: dict[str, Any] = {"ideal": False, "x_label": "members"}
    return {
        "fig20": plots.throughput(
            lines(lambda p: p.pps, True), f"PVR, {_LOAD:,} pps offered, two CPUs", **words
        ),
        "fig20-cpu": plots.throughput(
            lines(threads_per_million, False), "PVR: what forwarding cost",
            y_label="CPU s of the guests' threads per million", **words,
        ),
    }  # fmt: skip


def _curve(data: Data, size: int, binding: str, of: Any, spread: bool) -> Any:
    from vsrtune.bench import plots

    found: Sequence[Point] = [_point(data, members, binding, size) for members in MEMBERS]
    low_high = ([p.low for p in found], [p.high for p in found]) if spread else ()
    xs = [float(members) for members in MEMBERS]
    label = f"{_wire(size)}, {binding}"
    return plots.Curve(label, xs, [of(p) for p in found], *low_high, dashed=binding == _UNBOUND)


FIGURE = Figure(
    id="fig20",
    title="Fig. 20: Parallel Virtual Routers",
    paper="Guests on the queues of one macvtap, on four cores. Two or more forward more than the "
    "best single router, over 1,100 kpps; with two, bindings hardly matter, with three they help, "
    "with four they matter less, and four cores forward no more than 1,200 kpps.",
    ours=f"A group of `vsrtune group` (docs/groups.md), {_FLOWS} flows from one address to one, one "
    "way, 60, 508 and 1496 bytes without check sequence. **The lab has two CPUs, one of which "
    "sends all frames and receives them: so the CPUs limit the scaling here, not the "
    "routers**, and what forwarding costs says more than the rate. *Unbound* is as the kernel and "
    "libvirt do it; *bound* is every thread of every member off the interrupt CPU, hence all on "
    "one, FIFO at one priority. A round visits every number of members with both bindings "
    "and all sizes, in an order of configurations that is shuffled so that each comes at each "
    "place equally often; in between the group is scaled and the next trial waits until each member "
    "forwards. All four guests run throughout; those that are not plugged in idle. One member is "
    "a group of one, on the same devices.",
    runs=(
        Run(
            _RUN, GROUP, tuple(_configuration(m, b) for m in MEMBERS for b in _BINDINGS),
            rates=(_LOAD,), sizes=SIZES, traffic={"flows": _FLOWS}, pairs=6, seconds=1.0, seed=20,
            group={
                "name": "edge", "kind": "pvr", "members": _GUESTS,
                "lower": {"in": "p0", "out": "p1"},
            },
            guests=_GUESTS,
        ),
    ),
    claims=(
        Claim(
            "Two members forward at least as much as one, bound, on two cores.",
            as_much(name(2, _BOUND), name(1, _BOUND)),
        ),
        Claim(
            "Two members forward at least as much as one, unbound, on two cores.",
            as_much(name(2, _UNBOUND), name(1, _UNBOUND)),
        ),
        *(
            Claim(
                f"{members} members forward more than one router with bindings.",
                more(name(members, _BOUND), name(1, _BOUND)),
            )
            for members in MEMBERS[1:]
        ),
        Claim(
            "One member forwards more bound than unbound.",
            more(name(1, _BOUND), name(1, _UNBOUND)),
        ),
        Claim(
            "Of two members, bindings make no difference.",
            same(name(2, _BOUND), name(2, _UNBOUND)),
        ),
        Claim(
            "Three members forward more bound than unbound.",
            more(name(3, _BOUND), name(3, _UNBOUND)),
        ),
        Claim(
            "Four members forward more bound than unbound.",
            more(name(4, _BOUND), name(4, _UNBOUND)),
        ),
        Claim(
            "A fourth member adds nothing.", same(name(4, _BOUND), name(3, _BOUND)),
        ),
        Claim("The CPUs have no time left at any point.", _no_core_left),
    ),
    plots=_plots,
    native=None,
    tables=_tables,
)  # fmt: skip
