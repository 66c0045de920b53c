"""Seed 000, Table 1, where today's kernels still have the shared queue: from guest to guest
and for broadcasts."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

from experiments.beddata import BedRun, lost_at, passed, through
from experiments.data import Data
from experiments.judge import Judge, above, bed_ratios, bed_rounds, interval
from experiments.plan import BARE, Boot, Claim, Figure, Run, Verdict
from experiments.text import percent, ranged, table
from vsrtune.bench.report import plots

from .napi_forward import MACVLAN, NOTE, OURS, THREADED

_KINDS = (MACVLAN, OURS, THREADED)
_PAIRS = 7
_SECONDS = 0.8
_TIMES = (3.0, 10.0)
_FLOODS = (1.0, 4.0)
# Issue 5 asks for it.
_KEEPS = 0.95
_BARE_61 = Boot("bare-6.1", release="bookworm", guests=())
_LOST = {
    "nic_ring_full": "NIC rings",
    "backlog": "backlog",
    "rx_dropped_queue_full": "own queues",
}


def _keeps(run: str, name: str) -> Judge:
    """Agrees when what the victim keeps at the highest load is shown to be enough."""

    def judge(data: Data) -> Verdict:
        found = data.bed(run)
        load = found.loads[-1]
        left = bed_rounds(found, load, {name: found.kept(name, load, "alone", "b")}, "alone")
        share = [one for (one,) in left]
        text = f"with {name} it keeps {percent(share)} % at {load}, {len(share)} rounds"
        return Verdict(interval(share, _KEEPS), text)

    return judge


def _more(run: str) -> Judge:
    """Agrees when the victim is shown to get more with ours than with macvlan."""

    def judge(data: Data) -> Verdict:
        found = data.bed(run)
        load = found.loads[-1]
        both = bed_ratios(found, OURS["name"], MACVLAN["name"], load, passed("b"))
        names = f"{OURS['name']} / {MACVLAN['name']}"
        return Verdict(above()(both), f"what the victim gets through at {load}, {names}: {both[0]}")

    return judge


def _where(run: str, name: str, data: Data) -> str:
    """Where frames of all streams were lost at the highest load."""
    found = data.bed(run)
    load = found.loads[-1]
    lost = {
        text: 100 * median(found.values(name, load, lost_at(place)))
        for place, text in _LOST.items()
    }
    places = ", ".join(f"{share:.1f} % in the {text}" for text, share in lost.items())
    return (
        f"Of all frames that were sent at {load}, with {name}: {places}. A NIC's ring and an own "
        "queue hold frames of one chain only; the backlog holds those of both, and drops whichever "
        "comes when it is full."
    )


def _rows(run: BedRun) -> list[list[str]]:
    rows = []
    for load in run.loads:
        rates = run.head["loads"][load]
        for one in run.configurations:
            cells = [load, one]
            cells += [f"{rates[s]:,.0f}" if s in rates else "-" for s in ("a", "flood", "b")]
            cells.append(ranged(run.values(one, load, through("a"))) if "a" in rates else "-")
            cells.append(ranged(run.values(one, load, through("b"))))
            cells.append(percent(run.kept(one, load, "alone", "b")))
            cells += [percent(run.values(one, load, lost_at(place))) for place in _LOST]
            rows.append(cells)
    return rows


_HEADS = (
    *("load", "kind", "offered to A", "flood", "offered to B", "A forwards", "B forwards"),
    *("B keeps %", *(f"lost: {where} %" for where in _LOST.values())),
)


def _table(names: dict[str, str], data: Data) -> list[str]:
    lines: list[str] = []
    for name, text in names.items():
        if not data.has(name):
            lines += [f"{text}: `{name}` has not been measured.", ""]
            continue
        run = data.bed(name)
        lines += [f"{text}, kernel {run.head['environment']['kernel']}:", ""]
        lines += [*table(_HEADS, _rows(run)), ""]
    return lines[:-1]


def _plots(figure: str, runs: dict[str, str], data: Data) -> dict[str, Any]:
    drawn = {}
    for name, text in runs.items():
        if not data.has(name):
            continue
        run = data.bed(name)
        load = run.loads[-1]
        columns = {
            one: [100 * share for share in run.kept(one, load, "alone", "b")]
            for one in run.configurations
        }
        drawn[f"{figure}-{name}"] = plots.scatter(
            list(columns), list(columns.values()), f"{text}: what B keeps at {load}",
            "% of what B gets alone", note=NOTE, line_at=100 * _KEEPS,
        )  # fmt: skip
    return drawn


def _claims(run: str, text: str) -> tuple[Claim, ...]:
    return (
        Claim(f"{text}: with NAPI-macvlan the victim keeps at least 95 %.", _keeps(run, OURS["name"]),
              partial(_where, run, OURS["name"])),
        Claim(f"{text}: also with a thread for each queue.", _keeps(run, THREADED["name"])),
        Claim(f"{text}: it gets more than with macvlan.", _more(run),
              partial(_where, run, MACVLAN["name"])),
    )  # fmt: skip


def _run(name: str, boot: Boot, stages: int, seed: int, **bed: Any) -> Run:
    wanted = {"topology": "chains", "stages": stages, **bed}
    return Run(name, boot, _KINDS, rates=(), bed=wanted, seconds=_SECONDS, pairs=_PAIRS, seed=seed)


_CHAINS = {
    "two": "Chains of two routers",
    "three": "Chains of three routers",
    "two-6.1": "Chains of two routers",
}
_FLOOD = {"flood": "A flood of broadcasts"}

ISOLATION = Figure(
    id="napi-isolation",
    title="Table 1: isolation of routers that share a CPU",
    paper="Two routers with 300 kpps each forward all of it. With 1000 offered to the first, the "
    "second falls to 55 with macvlan and keeps 300 with NAPI-macvlan, because the backlog of the CPU "
    "was common to both.",
    ours="Unicast from a NIC meets no backlog any more, but frames from guest to guest do. So two "
    "chains, A and B, of two and of three namespace routers, each chain with a NIC of its own, all "
    "on one lower device behind, all on CPU 1. B is offered its fair rate: 40 % of what the "
    "weakest kind forwards in all when both chains are overloaded; A that, and 3 and 10 times "
    "that, or as much as the generator can send "
    "without falling short of B's rate. "
    "What B keeps is the share of its frames that get through, over that share alone, by round.",
    runs=(
        _run("two", BARE, 2, 81, method="isolation", factors=_TIMES, more_loads=2),
        _run("three", BARE, 3, 82, method="isolation", factors=_TIMES[1:], more_loads=2),
        _run("two-6.1", _BARE_61, 2, 83, method="isolation", factors=_TIMES[1:], more_loads=2),
    ),
    claims=(
        *_claims("two", "Chains of two routers"),
        *_claims("three", "Chains of three routers"),
        *_claims("two-6.1", "Chains of two routers, kernel 6.1"),
    ),
    plots=partial(_plots, "napi-isolation", _CHAINS),
    tables=partial(_table, _CHAINS),
)

FLOOD = Figure(
    id="napi-flood",
    title="A flood of broadcasts beside a router",
    paper="",
    ours="Chains of two routers again, A silent; broadcasts come from the wire of the lower device "
    "that all routers share, 1 and 4 times as many as the frames of B. macvlan hands them to a "
    "worker thread and that to the backlog, for every device; ours puts them into the own queue of "
    "every device, B's among them, for B is a receiver of broadcasts as well.",
    runs=(_run("flood", BARE, 2, 84, method="flood", flood=True, factors=_FLOODS, more_loads=1),),
    claims=_claims("flood", "Under the flood"),
    plots=partial(_plots, "napi-flood", _FLOOD),
    tables=partial(_table, _FLOOD),
)

FIGURES = (ISOLATION, FLOOD)
