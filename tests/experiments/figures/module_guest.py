"""A router guest on the kernel module's devices, beside the same router on macvtap.

The rules stand before any measurement: at the highest load the module forwards at least KEEPS of
macvtap, by the whole interval, a forwarded frame costs at most COSTS of its CPU time, and GOAL
is what the module is for. With a neighbour that is overloaded, the other router forwards at least
SHARE of what is sent to it, by the whole interval. All configurations have the shipped policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.data import Data
from experiments.judge import Judge, Place, above, below, causes, compared, interval, rounds, top
from experiments.plan import Boot, Claim, Figure, Guest, Run, Verdict, policy, shipped, untuned
from experiments.text import bounded, parts, table
from vsrtune.bench.report import plots
from vsrtune.bench.report.points import ROLES
from vsrtune.bench.spec.model import Trial

from .isolation import shares

KEEPS, COSTS, GOAL, SHARE = 0.97, 1.03, 1.05, 0.95
_TIMES = (1.0, 2.0, 4.0)
_MODULE, _MACVTAP = "napi-macvtap", "macvtap"
_RELEASES = {"bookworm": "6.1", "trixie": "6.12"}
_CONFIGURATIONS = tuple(
    policy(name, shipped("router"), attachment=name) for name in (_MACVTAP, _MODULE)
)
# Two slow routers, whose overload the machine can send, with a CPU for each.
_BUSY, _VICTIM = "vr1", "vr2"
_SLOW = Guest(rules=1500)
_NEIGHBOUR = (4, 10)
_LOAD = 0.8


def _runs(release: str) -> tuple[Run, Run]:
    boot = Boot(f"module-{release}", release)
    peak = f"{release}-peak"
    return (
        Run(
            peak, boot, (untuned(),), rates=(12000,), traffic={"size": 60},
            seconds=2.0, pairs=5, seed=51,
        ),
        Run(
            release, boot, _CONFIGURATIONS, scaled=(f"module-guest/{peak}", _TIMES), traffic={"size": 60},
            seconds=2.0, pairs=9, seed=52,
        ),
    )  # fmt: skip


def _two(release: str, times: int) -> str:
    return f"{release}-beside-{times}"


def _runs_of_two(release: str) -> tuple[Run, ...]:
    boot = Boot(f"module-two-{release}", release, 3, (_SLOW, _SLOW))
    peak = f"{release}-slow-peak"
    return (
        Run(
            peak, boot, (untuned(),), rates=(8000,), router=_VICTIM, traffic={"size": 60},
            seconds=2.0, pairs=5, seed=53,
        ),
        *(
            Run(
                _two(release, times), boot, _CONFIGURATIONS, scaled=(f"module-guest/{peak}", (1.0,)),
                by_router={_BUSY: float(times), _VICTIM: _LOAD}, traffic={"size": 60},
                seconds=2.0, pairs=7, seed=54 + times,
            )
            for times in _NEIGHBOUR
        ),
    )  # fmt: skip


def cost(trial: Trial) -> float:
    """CPU seconds for each forwarded frame: of all threads and of SoftIRQs, whose work on a thread
    counts as both."""
    spent = sum(trial.cpu_seconds.get(role, 0.0) for role in ROLES if role != "idle")
    return spent / max(trial.forwarded, 1)


def _forwards(release: str, least: float) -> Judge:
    return compared(above(least), [(Place(release, _MODULE), Place(release, _MACVTAP))])


def _costs(release: str) -> Judge:
    places = [(Place(release, _MODULE), Place(release, _MACVTAP))]
    return compared(
        below(COSTS), places, "CPU of a frame, {ours} / {theirs} at {load}: {ratio}", cost
    )


def _keeps(release: str, times: int) -> Judge:
    def judge(data: Data) -> Verdict:
        run = _two(release, times)
        found, beside = (
            shares([trial for (trial,) in rounds(data, Place(run, name))], _VICTIM)
            for name in (_MODULE, _MACVTAP)
        )
        text = f"{parts(found)} of what was sent to it, on macvtap {parts(beside)}"
        return Verdict(interval(found, SHARE), text)

    return judge


def _claims(release: str, kernel: str) -> tuple[Claim, ...]:
    times = f"{_TIMES[-1]:g} times its load"
    return (
        Claim(
            f"On {kernel}, at {times}, the module forwards at least {KEEPS:g} of macvtap.",
            _forwards(release, KEEPS), causes(release, _MACVTAP, _MODULE),
        ),
        Claim(f"On {kernel}, at {times}, a frame costs at most {COSTS:g} of the CPU time.", _costs(release)),
        Claim(f"On {kernel}, at {times}, the module forwards at least {GOAL:g} of macvtap.", _forwards(release, GOAL)),
        *(
            Claim(
                f"On {kernel}, beside a router at {more} times its load, another at {_LOAD:g} of its "
                f"own keeps at least {SHARE:g} of that.",
                _keeps(release, more),
            )
            for more in _NEIGHBOUR
        ),
    )  # fmt: skip


def _tables(data: Data) -> list[str]:
    rows = []
    for release, kernel in _RELEASES.items():
        for load in data.loads(release):
            points = [data.at(release, name, load) for name in (_MACVTAP, _MODULE)]
            ratio = data.ratio(release, _MODULE, _MACVTAP, load)
            rates = [f"{p.pps:,.0f}" for p in points]
            rows.append((kernel, f"{load:,.0f}", *rates, bounded(ratio)))
    return table(["kernel", "offered", _MACVTAP, _MODULE, "ratio"], rows)


def _plots(data: Data) -> Mapping[str, Any]:
    names, columns = [], []
    for release, kernel in _RELEASES.items():
        for name in (_MACVTAP, _MODULE):
            names.append(f"{kernel}, {name}")
            columns.append([t.pps for t in data.trials(release, name, top(data, release))])
    return {"module-guest": plots.scatter(names, columns, "Forwarded in overload", "pps")}


FIGURE = Figure(
    id="module-guest",
    title="A router guest on the kernel module",
    paper="The NAPI-macvlan paper compares virtual devices without guests; the KVM paper's guests stand "
    "on macvtap.",
    ours="One router of one vcpu on two CPUs, the shipped policy; its interfaces are moved between "
    "macvtap and napi_macvtap in every round, by the product's own switch. A load is so many times "
    "what the router forwards untuned on macvtap. Where two routers are measured, both are slow, with "
    f"{_SLOW.rules:,} routing rules and a CPU each, and one of them is overloaded: three emulated CPUs on "
    "two cores.",
    runs=tuple(
        run for made in (_runs, _runs_of_two) for release in _RELEASES for run in made(release)
    ),
    claims=tuple(claim for release, kernel in _RELEASES.items() for claim in _claims(release, kernel)),
    plots=_plots,
    native=None,
    tables=_tables,
)  # fmt: skip
