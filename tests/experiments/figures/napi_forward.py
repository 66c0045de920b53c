"""Seed 000 without competition: throughput by ingress interfaces, routers, virtual
interfaces; latency; interrupts and SoftIRQs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from experiments import beddata
from experiments.beddata import BedRun, latency, lost_at, per_million, ranged
from experiments.data import Data
from experiments.judge import Judge
from experiments.plan import BARE, Boot, Claim, Figure, Run, Verdict
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


def against(run: str, ours: str, theirs: str, value: beddata.Value, aim: str, unit: str) -> Judge:
    """Compares at the highest load. With ``aim`` "more" (or "less") agrees when ours is shown
    to have more (less), with "tie" when no difference is shown or it is below 5 %."""

    def judge(data: Data) -> Verdict:
        found = data.bed(run)
        load = found.loads[-1]
        ratio = found.ratio(ours, theirs, load, value)
        text = f"{ours} / {theirs}, {unit}: {ratio}"
        if aim == "tie":
            near = not ratio.shown or abs(ratio.median - 1) < 0.05
            return Verdict("agrees" if near else "differs", text)
        if not ratio.shown:
            return Verdict("open", f"{text}: no difference shown")
        return Verdict("agrees" if (ratio.median > 1) == (aim == "more") else "differs", text)

    return judge


def _rates(run: BedRun, names: Mapping[str, str] | None = None) -> list[str]:
    """A row for each load: forwarded by each configuration, and the ratios."""
    lines = []
    for load in run.loads:
        cells = [f"{run.rate(load):,.0f}"]
        for one in run.configurations:
            cells.append(ranged(run.values(one, load, beddata.forwarded)))
        for other in (MACVLAN["name"], PLAIN["name"]):
            ratio = run.ratio(OURS["name"], other, load, beddata.forwarded)
            cells.append(f"{ratio.median:.2f} ({ratio.low:.2f}..{ratio.high:.2f})")
        lines.append("| " + " | ".join([*(names or {}).values(), *cells]) + " |")
    return lines


def _head(*first: str) -> list[str]:
    heads = [*first, "offered", *(c["name"] for c in _THREE), "ours / macvlan", "ours / plain"]
    return ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]


def _sizes(prefix: str, label: str, sizes: tuple[int, ...], data: Data) -> list[str]:
    lines = _head(label)
    for size in sizes:
        lines += _rates(data.bed(f"{prefix}{size}"), {"size": str(size)})
    return lines


def _cases(data: Data) -> list[str]:
    lines = _head("case")
    for count, numeral in _CASES.items():
        lines += _rates(data.bed(f"nics{count}"), {"case": numeral})
    return lines


def _case_plots(data: Data) -> dict[str, Any]:
    drawn = {}
    for count, numeral in _CASES.items():
        run = data.bed(f"nics{count}")
        curves = []
        for one in run.configurations:
            found = [run.values(one, load, beddata.forwarded) for load in run.loads]
            curves.append(
                plots.Curve(
                    one,
                    [run.rate(load) for load in run.loads],
                    [beddata.median(v) for v in found],
                    [min(v) for v in found],
                    [max(v) for v in found],
                    dashed=one == PLAIN["name"],
                )
            )
        title = f"Case {numeral}: {count} ingress NIC{'s' if count > 1 else ''}, one egress"
        drawn[f"napi-case{count}"] = plots.throughput(curves, title, note=NOTE)
    return drawn


def _size_plot(
    figure: str, prefix: str, label: str, sizes: tuple[int, ...], data: Data
) -> dict[str, Any]:
    curves = []
    for configuration in _THREE:
        name = configuration["name"]
        found = []
        for size in sizes:
            run = data.bed(f"{prefix}{size}")
            found.append(run.values(name, run.loads[-1], beddata.forwarded))
        curves.append(
            plots.Curve(
                name,
                [float(s) for s in sizes],
                [beddata.median(v) for v in found],
                [min(v) for v in found],
                [max(v) for v in found],
                dashed=name == PLAIN["name"],
            )
        )
    drawn = plots.throughput(
        curves, f"Throughput by {label}", note=NOTE, x_label=label, ideal=False
    )
    return {figure: drawn}


def _latency_table(data: Data) -> list[str]:
    heads = ["routers in a row", "kind", "P50 µs", "P90 µs", "P99 µs", "P50 against macvlan"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, row in _LATENCY.items():
        run = data.bed(name)
        for one in run.configurations:
            cells = [
                ranged(run.values(one, "probes", latency(p)), 1) for p in ("p50", "p90", "p99")
            ]
            ratio = run.ratio(one, MACVLAN["name"], "probes", latency("p50"))
            cells.append("1" if one == MACVLAN["name"] else str(ratio))
            lines.append("| " + " | ".join([row, one, *cells]) + " |")
    return lines


_COUNTED = {
    "interrupts of all kinds": "interrupts",
    "SoftIRQs NET_RX": "net_rx",
    "frames through backlog or NAPI": "softnet_processed",
}


def _counted(data: Data, name: str, head: str, counted: Mapping[str, str]) -> list[str]:
    """Rows of one run: for a million frames forwarded, at its lowest and highest load."""
    run = data.bed(name)
    lines = []
    for load in dict.fromkeys((run.loads[0], run.loads[-1])):
        for one in run.configurations:
            cells = [ranged(run.values(one, load, beddata.forwarded))]
            cells += [ranged(run.values(one, load, per_million(c))) for c in counted.values()]
            cells.append(beddata.percent(run.values(one, load, lost_at("backlog"))))
            lines.append("| " + " | ".join([head, f"{run.rate(load):,.0f}", one, *cells]) + " |")
    return lines


def _counted_head(first: str, counted: Mapping[str, str]) -> list[str]:
    heads = [first, "offered", "kind", "forwarded", *counted, "lost in the backlog %"]
    return ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]


def _interrupts(data: Data) -> list[str]:
    lines = _counted_head("case", _COUNTED)
    for count, numeral in _CASES.items():
        lines += _counted(data, f"napi-cases/nics{count}", numeral, _COUNTED)
    lines += ["", "With NICs that have interrupts (e1000e), case I:", ""]
    counted = {"interrupts of the NIC": "nic_interrupts"} | _COUNTED
    lines += _counted_head("NIC of macvlan, of ours", counted)
    for name, lowers in _REAL.items():
        lines += _counted(data, name, ", ".join(lowers.values()), counted)
    return lines


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
        place: 100 * beddata.median(found.values(MACVLAN["name"], load, lost_at(place)))
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
        run, OURS["name"], MACVLAN["name"], beddata.forwarded, "more", "forwarded in overload"
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
            against(run, OURS["name"], MACVLAN["name"], latency("p50"), "less", "P50"),
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
                "less", "SoftIRQs for a million frames",
            ),
        )
        for n, numeral in _CASES.items()
    ),
    plots=lambda _: {},
    tables=_interrupts,
)  # fmt: skip

FIGURES = (CASES, ROUTERS, INTERFACES, LATENCY, INTERRUPTS)
