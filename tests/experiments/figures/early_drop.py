"""Which frame a guest's queue on the kernel module loses: the new one, the oldest, those that have
waited too long, or those that CoDel names.

The rule stands before any measurement. A law is kept when, for each router, it forwards at least
KEEPS of what the fixed queue of 500 does, at every load, and at the highest load the P99 of the delay is at
most MOST of that queue's; each by the whole interval. It is then to be a key of the policy. A short
fixed queue is one already, and stands beside the laws.

The module has no such laws: `early_drop.patch` adds them for these runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from experiments.data import Data
from experiments.judge import Judge, Place, above, all_of, below, ratios, top
from experiments.plan import Boot, Claim, Figure, Guest, Run, Verdict, policy, shipped, untuned
from experiments.text import bounded, ranged, table
from vsrtune.bench.report import plots
from vsrtune.bench.spec.model import Trial
from vsrtune.core.stats import paired_ratio

KEEPS, MOST = 0.95, 0.5
DELAY_MS = 5
_TIMES = (1.0, 2.0, 4.0)
_RELEASES = {"bookworm": "6.1", "trixie": "6.12"}
# As module_guest has them: the lab's usual one, and one whose overload the machine can send.
_ROUTERS = {"usual": Guest(), "slow": Guest(rules=1500)}
_FIXED, _SHORT = "fixed 500", "fixed 100"
_HEAD, _AGE, _CODEL = "oldest of 500", f"older than {DELAY_MS} ms", f"CoDel {DELAY_MS} ms"
# What the patched module calls them.
_LAWS = {_HEAD: 1, _AGE: 2, _CODEL: 3}

_PARAMETERS = "/sys/module/napi_macvlan/parameters"


def _on_the_module(name: str, more: str = "", law: int = 0) -> dict[str, Any]:
    def write(value: int) -> list[str]:
        return ["sh", "-ec", f"echo {value} >{_PARAMETERS}/drop"]

    return policy(
        name, shipped("router") + more, attachment="napi-macvtap", apply=write(law), revert=write(0)
    )


_CONFIGURATIONS = (
    _on_the_module(_FIXED),
    _on_the_module(_SHORT, "queue: {macvtap: 100}\n"),
    *(_on_the_module(name, law=law) for name, law in _LAWS.items()),
)


def _run(release: str, router: str) -> str:
    return f"{release}-{router}"


def _runs(release: str, router: str) -> tuple[Run, Run]:
    name = f"early-drop-{router}-{release}"
    boot = Boot(name, release, guests=(_ROUTERS[router],), patch="early_drop.patch")
    run = _run(release, router)
    return (
        Run(f"{run}-peak", boot, (untuned(),), rates=(12000,), seconds=2.0, pairs=5, seed=71),
        Run(
            run, boot, _CONFIGURATIONS, scaled=(f"early-drop/{run}-peak", _TIMES), latency=True, seed=72,
        ),
    )  # fmt: skip


def p99(trial: Trial) -> float:
    """Milliseconds; of a trial from which no probe came, its length."""
    return _milliseconds(trial, "p99")


def _milliseconds(trial: Trial, part: str) -> float:
    found = getattr(trial.latency, part) if trial.latency else None
    return 1000 * (trial.seconds if found is None else found)


def _reaches(run: str, law: str) -> Judge:
    def judge(data: Data) -> Verdict:
        answers, texts = [], []
        for load in data.loads(run):
            both = ratios(data, Place(run, law, load), Place(run, _FIXED, load))
            answers.append(above(KEEPS)(both))
            texts.append(f"{load:,.0f} pps: {both[0]}")
        both = ratios(data, Place(run, law), Place(run, _FIXED), p99)
        answers.append(below(MOST)(both))
        rates = "; ".join(texts)
        return Verdict(all_of(answers), f"of the rate at {rates}. P99 at the last: {both[0]}")

    return judge


def _kept(release: str) -> Judge:
    def judge(data: Data) -> Verdict:
        found = {
            law: all_of([_reaches(_run(release, router), law)(data).answer for router in _ROUTERS])
            for law in _LAWS
        }
        good = [law for law, answer in found.items() if answer == "agrees"]
        answer = "agrees" if good else "differs" if set(found.values()) == {"differs"} else "open"
        return Verdict(answer, ", ".join(good) or "none of them")

    return judge


def _claims(release: str, kernel: str) -> tuple[Claim, ...]:
    return (
        *(
            Claim(
                f"On {kernel}, the {router} router, {law}: {KEEPS:g} of the rate of a fixed 500, with "
                f"{MOST:g} of its P99 at {_TIMES[-1]:g} times the load.",
                _reaches(_run(release, router), law),
            )
            for router in _ROUTERS
            for law in (_SHORT, *_LAWS)
        ),
        Claim(f"On {kernel}, a law reaches that for both routers and is kept.", _kept(release)),
    )


def _tables(data: Data) -> list[str]:
    def cells(name: str, value: Callable[[Trial], float], digits: int) -> list[str]:
        """Of all rounds, whether they may be judged or not."""
        ours, theirs = ([value(t) for t in data.trials(run, n, load)] for n in (name, _FIXED))
        return [ranged(ours, digits), bounded(paired_ratio(ours, theirs))]

    rows = []
    for release, kernel in _RELEASES.items():
        for router in _ROUTERS:
            run = _run(release, router)
            if not data.has(run):
                continue
            for times, load in zip(_TIMES, data.loads(run), strict=True):
                for name in (_FIXED, _SHORT, *_LAWS):
                    p50 = [_milliseconds(t, "p50") for t in data.trials(run, name, load)]
                    row = [f"{kernel}, {router}", f"{times:g}x, {load:,.0f}", name]
                    row += [*cells(name, lambda t: t.pps, 0), ranged(p50, 1), *cells(name, p99, 1)]
                    rows.append(row)
    heads = ["router", "offered", "lost is", "forwarded", "of fixed 500"]
    return table([*heads, "P50, ms", "P99, ms", "of fixed 500"], rows)


def _plots(data: Data) -> Mapping[str, Any]:
    made = {}
    for release, kernel in _RELEASES.items():
        for router in _ROUTERS:
            run = _run(release, router)
            if not data.has(run):
                continue
            names = (_FIXED, _SHORT, *_LAWS)
            columns = [[p99(t) for t in data.trials(run, n, top(data, run))] for n in names]
            title = f"P99 in overload, {router} router on {kernel}"
            made[f"early-drop-{run}"] = plots.scatter(names, columns, title, "milliseconds")
    return made


FIGURE = Figure(
    id="early-drop",
    title="Dropping early in a guest's queue",
    paper="",
    ours="One router of one vcpu on two CPUs, on napi_macvtap, with the shipped policy; the slow one has "
    f"{_ROUTERS['slow'].rules:,} routing rules. A load is so many times what it forwards untuned on macvtap. "
    "What is lost: a new frame when the queue has 500 or 100 (fixed, tail drop); the oldest of 500; "
    f"every frame that has waited for {DELAY_MS} ms; what CoDel's law names, target {DELAY_MS} ms, interval "
    f"{20 * DELAY_MS} ms. The oldest is looked at when a new one arrives, in tap.ko's ring itself, because "
    "its reader tells nobody when it takes one. The delay is one way through the whole router, guest "
    "included; lost probes have none.",
    runs=tuple(
        run for release in _RELEASES for router in _ROUTERS for run in _runs(release, router)
    ),
    claims=tuple(claim for release, kernel in _RELEASES.items() for claim in _claims(release, kernel)),
    plots=_plots,
    native=None,
    tables=_tables,
)  # fmt: skip
