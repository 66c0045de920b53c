"""Seed 000 without competition: throughput by ingress interfaces, routers, virtual
interfaces; latency; interrupts and SoftIRQs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from experiments import beddata
from experiments.beddata import BedRun, latency, lost_at, per_million
from experiments.data import Data
from experiments.judge import Judge, Rule, above, bed_ratios, below
from experiments.plan import BARE, Boot, Claim, Figure, Run, Verdict
from experiments.text import bounded, percent, ranged, table
from vsrtune.bench.report import plots

PLAIN = {"name": "plain IP forwarding", "kind": "plain"}
MACVLAN = {"name": "macvlan", "kind": "macvlan"}
OURS = {"name": "napi_macvlan", "kind": "napi_macvlan"}
THREADED = {"name": "napi_macvlan, threaded", "kind": "napi_macvlan", "threaded": True}
_THREE = (PLAIN, MACVLAN, OURS)
_PAIRS = 6
_SECONDS = 0.6
# Shares of what plain forwarding carried at most, in the same lab just before.
_FACTORS = (0.5, 1.0, 2.0)
_CASES = {1: "I", 2: "II", 3: "III"}
_ROUTERS = (1, 8, 32)
_INTERFACES = (2, 128, 512)


def against(run: str, ours: str, theirs: str, value: beddata.Value, rule: Rule, unit: str) -> Judge:
    """Compares at the highest load."""

    def judge(data: Data) -> Verdict:
        found = data.bed(run)
        both = bed_ratios(found, ours, theirs, found.loads[-1], value)
        return Verdict(rule(both), f"{ours} / {theirs}, {unit}: {both[0]}")

    return judge


def _rates(run: BedRun, first: str) -> list[list[str]]:
    """A row for each load: forwarded by each configuration, and the ratios."""
    rows = []
    for load in run.loads:
        cells = [first, f"{run.rate(load):,.0f}"]
        for one in run.configurations:
            cells.append(ranged(run.values(one, load, beddata.forwarded)))
        for other in (MACVLAN["name"], PLAIN["name"]):
            cells.append(bounded(run.ratio(OURS["name"], other, load, beddata.forwarded)))
        rows.append(cells)
    return rows


def _rate_table(label: str, runs: Mapping[str, str], data: Data) -> list[str]:
    """The rates of ``runs``, names by what stands in the first column."""
    names = (str(c["name"]) for c in _THREE)
    heads = [label, "offered", *names, "ours / macvlan", "ours / plain"]
    return table(
        heads, [row for first, run in runs.items() for row in _rates(data.bed(run), first)]
    )


def _sizes(prefix: str, label: str, sizes: tuple[int, ...], data: Data) -> list[str]:
    return _rate_table(label, {str(size): f"{prefix}{size}" for size in sizes}, data)


def _cases(data: Data) -> list[str]:
    return _rate_table("case", {text: f"nics{n}" for n, text in _CASES.items()}, data)


def _curve(name: str, xs: Sequence[float], places: Iterable[tuple[BedRun, str]]) -> plots.Curve:
    """What a configuration forwarded at each of ``places``, runs with one of their loads."""
    found = [run.values(name, load, beddata.forwarded) for run, load in places]
    return plots.spread(name, xs, found, dashed=name == PLAIN["name"])


def _case_plots(data: Data) -> dict[str, Any]:
    drawn = {}
    for count, numeral in _CASES.items():
        run = data.bed(f"nics{count}")
        xs = [run.rate(load) for load in run.loads]
        curves = [_curve(one, xs, [(run, at) for at in run.loads]) for one in run.configurations]
        title = f"Case {numeral}: {count} ingress NIC{'s' if count > 1 else ''}, one egress"
        drawn[f"napi-case{count}"] = plots.throughput(curves, title, note=NOTE)
    return drawn


def _size_plot(
    figure: str, prefix: str, label: str, sizes: tuple[int, ...], data: Data
) -> dict[str, Any]:
    runs = [data.bed(f"{prefix}{size}") for size in sizes]
    xs = [float(size) for size in sizes]
    curves = [_curve(str(c["name"]), xs, [(r, r.loads[-1]) for r in runs]) for c in _THREE]
    drawn = plots.throughput(
        curves, f"Throughput by {label}", note=NOTE, x_label=label, ideal=False
    )
    return {figure: drawn}


def _latency_table(data: Data) -> list[str]:
    rows = []
    for name, row in _LATENCY.items():
        run = data.bed(name)
        for one in run.configurations:
            cells = [
                ranged(run.values(one, "probes", latency(p)), 1) for p in ("p50", "p90", "p99")
            ]
            ratio = run.ratio(one, MACVLAN["name"], "probes", latency("p50"))
            rows.append([row, one, *cells, "1" if one == MACVLAN["name"] else str(ratio)])
    heads = ["routers in a row", "kind", "P50 µs", "P90 µs", "P99 µs", "P50 against macvlan"]
    return table(heads, rows)


_COUNTED = {
    "interrupts of all kinds": "interrupts",
    "SoftIRQs NET_RX": "net_rx",
    "frames through backlog or NAPI": "softnet_processed",
}


def _counted(
    first: str, runs: Mapping[str, str], counted: Mapping[str, str], data: Data
) -> list[str]:
    """For a million frames forwarded, at the lowest and highest load of each of ``runs``, names
    by what stands in the first column."""
    rows = []
    for head, name in runs.items():
        run = data.bed(name)
        for load in dict.fromkeys((run.loads[0], run.loads[-1])):
            for one in run.configurations:
                cells = [head, f"{run.rate(load):,.0f}", one]
                cells.append(ranged(run.values(one, load, beddata.forwarded)))
                cells += [ranged(run.values(one, load, per_million(c))) for c in counted.values()]
                rows.append([*cells, percent(run.values(one, load, lost_at("backlog")))])
    return table([first, "offered", "kind", "forwarded", *counted, "lost in the backlog %"], rows)


def _interrupts(data: Data) -> list[str]:
    cases = {numeral: f"napi-cases/nics{count}" for count, numeral in _CASES.items()}
    real = {", ".join(lowers.values()): name for name, lowers in _REAL.items()}
    counted = {"interrupts of the NIC": "nic_interrupts"} | _COUNTED
    return [
        *_counted("case", cases, _COUNTED, data),
        "",
        "With NICs that have interrupts (e1000e), case I:",
        "",
        *_counted("NIC of macvlan, of ours", real, counted, data),
    ]


NOTE = "one emulated machine: veth polled by a timer, pktgen; generator on CPU 0, routers on CPU 1"
_E1000E = Boot("bare-e1000e", guests=(), nic="e1000e")
_REAL = {
    "e1000e": {"macvlan": "p0", "napi_macvlan": "p1"},
    "e1000e-crossed": {"macvlan": "p1", "napi_macvlan": "p0"},
}
_LATENCY = {"one": "1", "two": "2, over a common lower device", "three": "3, the same"}


def _run(name: str, bed: Mapping[str, Any], seed: int, **more: Any) -> Run:
    kinds = more.pop("kinds", _THREE)
    options: dict[str, Any] = {"pairs": _PAIRS, "seconds": _SECONDS, **more}
    boot = options.pop("boot", BARE)
    return Run(name, boot, kinds, rates=(), seed=seed, bed=bed, **options)


def _unshared(run: str, data: Data) -> str:
    """What the kernel's macvlan lost in overload, and where."""
    found = data.bed(run)
    load = found.loads[-1]
    lost = {
        place: 100 * median(found.values(MACVLAN["name"], load, lost_at(place)))
        for place in ("backlog", "nic_ring_full")
    }
    return (
        f"At {found.rate(load):,.0f} pps offered macvlan lost {lost['backlog']:.1f} % of the frames in "
        f"the backlog and {lost['nic_ring_full']:.1f} % in the NICs' rings: on this way it has no "
        "queue of its own."
        if lost["backlog"] < 0.1
        else f"macvlan lost {lost['backlog']:.1f} % in the backlog."
    )


def _tie(run: str, where: str) -> Claim:
    judge = against(
        run, OURS["name"], MACVLAN["name"], beddata.forwarded, above(), "forwarded in overload"
    )
    text = f"{where}: NAPI-macvlan forwards more than macvlan in overload."
    return Claim(text, judge, partial(_unshared, run))


CASES = Figure(
    id="napi-cases",
    title="Cases I, II, III: one, two, three ingress interfaces",
    paper="Unicast from the NIC went through the backlog with macvlan of 2.6: its rate fell in "
    "overload, the more so the more ingress interfaces shared the queue. NAPI-macvlan and plain IP "
    "forwarding kept theirs (Figs. 3 to 5).",
    ours="One router in a namespace with a virtual interface on each NIC, a dummy device for an "
    "egress NIC. Offered: shares of what plain forwarding carried at most. Today's macvlan hands "
    "unicast on in the NIC's own SoftIRQ too, so a tie is what is expected between it and ours.",
    runs=tuple(
        _run(f"nics{n}", {"topology": "cases", "nics": n, "routers": 1, "method": "sweep", "factors": _FACTORS}, 50 + n)
        for n in _CASES
    ),
    claims=tuple(_tie(f"nics{n}", f"Case {numeral}") for n, numeral in _CASES.items()),
    plots=_case_plots,
    tables=_cases,
)  # fmt: skip

ROUTERS = Figure(
    id="napi-routers",
    title="Number of virtual routers",
    paper="1 to 32 routers with three ingress interfaces each, one of them loaded at a time: neither "
    "kind loses by their number (Fig. 6).",
    ours="Case III with as many routers, all of them loaded evenly, with twice what plain "
    "forwarding by a single one carries.",
    runs=tuple(
        _run(f"routers{n}", {"topology": "cases", "nics": 3, "routers": n, "method": "sweep", "factors": (2.0,)}, 60 + n)
        for n in _ROUTERS
    ),
    claims=(_tie("routers32", "32 routers"),),
    plots=partial(_size_plot, "napi-routers", "routers", "number of routers", _ROUTERS),
    tables=partial(_sizes, "routers", "routers", _ROUTERS),
)  # fmt: skip

INTERFACES = Figure(
    id="napi-interfaces",
    title="Number of virtual interfaces",
    paper="From 2 to 512 interfaces, with as many destinations: macvlan falls from 660 to 300 kpps, "
    "NAPI-macvlan from 700 to 670 (Figs. 7 and 8).",
    ours="One router, half of the interfaces on the NIC and half on the egress device, a destination "
    "and a route for each pair; frames take all of them in turn, one way.",
    runs=tuple(
        _run(f"interfaces{n}", {"topology": "interfaces", "count": n, "method": "sweep", "factors": (2.0,)}, 100 + n)
        for n in _INTERFACES
    ),
    claims=(_tie("interfaces512", "512 interfaces"),),
    plots=partial(_size_plot, "napi-interfaces", "interfaces", "number of virtual interfaces", _INTERFACES),
    tables=partial(_sizes, "interfaces", "interfaces", _INTERFACES),
)  # fmt: skip

LATENCY = Figure(
    id="napi-latency",
    title="Latency",
    paper="Without loss, macvlan took twice as long as plain forwarding and NAPI-macvlan, because "
    "of the backlog between two SoftIRQs (Fig. 9).",
    ours="Probes alone, 500 a second, sent on the routers' CPU: the way through one router, and "
    "through two and three in a row, where each hop from guest to guest is through the backlog "
    "with macvlan, and through the receiver's own queue with ours.",
    runs=(
        _run("one", {"topology": "cases", "nics": 1, "routers": 1, "method": "latency"}, 71),
        *(
            _run(
                name, {"topology": "chains", "stages": stages, "method": "latency"}, 70 + stages,
                kinds=(MACVLAN, OURS, THREADED),
            )
            for name, stages in (("two", 2), ("three", 3))
        ),
    ),
    claims=tuple(
        Claim(
            f"{text}: NAPI-macvlan takes less time than macvlan.",
            against(run, OURS["name"], MACVLAN["name"], latency("p50"), below(), "P50"),
        )
        for run, text in (("one", "One router"), ("three", "Three in a row"))
    ),
    plots=lambda _: {},
    tables=_latency_table,
)  # fmt: skip

INTERRUPTS = Figure(
    id="napi-interrupts",
    title="Interrupts and SoftIRQs for a million frames",
    paper="Under high load macvlan of 2.6 cost 10, 53 and 20 times the hardware interrupts of "
    "NAPI-macvlan in cases I, II, III (the slides' table).",
    ours="Counted on the routers' CPU while the cases above ran, at 0.5 and at 2 times what plain "
    "forwarding carries, for a million frames forwarded. The NICs here are polled by a timer every "
    "200 µs while idle, as with interrupt moderation, so their interrupts are timer interrupts; "
    "the clock's tick is among them. Real interrupts are counted on two emulated e1000e, one under "
    "each kind, and then the other way round.",
    runs=tuple(
        _run(
            name, {"topology": "cases", "lowers": lowers, "method": "sweep", "factors": (0.5, 2.0)},
            90 + turn, boot=_E1000E, kinds=(MACVLAN, OURS),
        )
        for turn, (name, lowers) in enumerate(_REAL.items())
    ),
    claims=tuple(
        Claim(
            f"Case {numeral}: NAPI-macvlan takes fewer SoftIRQs than macvlan in overload.",
            against(
                f"napi-cases/nics{n}", OURS["name"], MACVLAN["name"], per_million("net_rx"),
                below(), "SoftIRQs for a million frames",
            ),
        )
        for n, numeral in _CASES.items()
    ),
    plots=lambda _: {},
    tables=_interrupts,
)  # fmt: skip

FIGURES = (CASES, ROUTERS, INTERFACES, LATENCY, INTERRUPTS)
