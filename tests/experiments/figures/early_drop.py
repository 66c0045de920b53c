"""Which frame a guest's queue on the kernel module loses: the new one, the oldest, those that have
waited too long, or those that CoDel names.

The rule stands before any measurement. A law is kept when, for each router, it forwards at least
KEEPS of what the fixed queue of 500 does, at every load, and at the highest load the P99 of the delay is at
most MOST of that queue's; each by the whole interval, and P99 by the rule of all figures: a trial in which
too few probes came decides nothing of it. It is then to be a key of the policy. A short
fixed queue is one already, and stands beside the laws.

The module has no such laws: `early_drop.patch` adds them for these runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from experiments.data import Data
from experiments.judge import Judge, Place, above, all_of, p99, ratios, sooner, top
from experiments.plan import Boot, Claim, Figure, Guest, Run, Verdict, policy, shipped, untuned
from experiments.text import bounded, offered, ranged, table
from vsrtune.bench.report import plots
from vsrtune.bench.spec.model import Trial
from vsrtune.core.stats import paired_ratio

KEEPS, MOST = 0.95, 0.5
DELAY_MS = 5
_TIMES = (1.0, 2.0, 4.0)
# As module_guest has them: the lab's usual one, and one whose overload the machine can send.
_ROUTERS = {"usual": Guest(), "slow": Guest(rules=1500)}
_FIXED, _SHORT = "fixed 500", "fixed 100"
_HEAD, _AGE, _CODEL = "oldest of 500", f"older than {DELAY_MS} ms", f"CoDel {DELAY_MS} ms"
# What the patched module calls them.
_LAWS = {_HEAD: 1, _AGE: 2, _CODEL: 3}

_NAMES = (_FIXED, _SHORT, *_LAWS)
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


def _runs(figure: str, release: str, router: str) -> tuple[Run, Run]:
    boot = Boot(f"{figure}-{router}", release, guests=(_ROUTERS[router],), patch="early_drop.patch")
    peak = f"{router}-peak"
    return (
        # Overload halves what an untuned router forwards, so that its peak is not at the highest.
        Run(peak, boot, (untuned(),), rates=(4000, 8000, 12000), pairs=3, seed=71),
        Run(
            router, boot, _CONFIGURATIONS, scaled=(f"{figure}/{peak}", _TIMES), latency=True,
            pairs=7, seed=72, seconds=5.5,
        ),
    )  # fmt: skip


def _reaches(run: str, law: str) -> Judge:
    def judge(data: Data) -> Verdict:
        answers, texts = [], []
        for load in data.loads(run):
            both = ratios(data, Place(run, law, load), Place(run, _FIXED, load))
            answers.append(above(KEEPS)(both))
            texts.append(f"{load:,.0f} pps: {both[0]}")
        late = sooner(run, law, _FIXED, partial(top, run=run), MOST)(data)
        rates = "; ".join(texts)
        text = f"of the rate at {rates}. P99 at the last: {late.text}"
        return Verdict(all_of([*answers, late.answer]), text)

    return judge


def _kept(data: Data) -> Verdict:
    found = {
        law: all_of([_reaches(router, law)(data).answer for router in _ROUTERS]) for law in _LAWS
    }
    good = [law for law, answer in found.items() if answer == "agrees"]
    answer = "agrees" if good else "differs" if set(found.values()) == {"differs"} else "open"
    return Verdict(answer, ", ".join(good) or "none of them")


def _claims() -> tuple[Claim, ...]:
    return (
        *(
            Claim(
                f"{law[0].upper()}{law[1:]}, {router} router: {KEEPS:g} of the rate of a fixed 500, with "
                f"{MOST:g} of its P99 at {_TIMES[-1]:g} times the load.",
                _reaches(router, law),
            )
            for router in _ROUTERS
            for law in (_SHORT, *_LAWS)
        ),
        Claim("A law reaches that for both routers and is kept.", _kept),
    )


def _tables(data: Data) -> list[str]:
    def cells(name: str, value: Callable[[Trial], float | None], digits: int) -> list[str]:
        """Of all rounds that have it, whether they may be judged or not."""
        sides = ([value(t) for t in data.trials(router, n, load)] for n in (name, _FIXED))
        pairs = [(a, b) for a, b in zip(*sides, strict=True) if a is not None and b is not None]
        if not pairs:
            return ["-", "-"]
        ours, theirs = zip(*pairs, strict=True)
        return [ranged(ours, digits), bounded(paired_ratio(ours, theirs))]

    rows = []
    for router in _ROUTERS:
        for times, load in zip(_TIMES, data.loads(router), strict=True):
            for name in _NAMES:
                row = [router, f"{times:g}x, {load:,.0f}", name, *cells(name, lambda t: t.pps, 0)]
                rows.append([*row, *cells(name, _milliseconds, 1)])
    heads = ["router", "offered", "lost is", "forwarded", "of fixed 500"]
    return table([*heads, "P99, ms", "of fixed 500"], rows)


def _milliseconds(trial: Trial) -> float | None:
    late = p99(trial)
    return None if late is None else 1000 * late


def _plots(figure: str, data: Data) -> Mapping[str, Any]:
    made = {}
    for router in _ROUTERS:
        load = top(data, router)
        late = [map(_milliseconds, data.trials(router, name, load)) for name in _NAMES]
        columns = [[value for value in values if value is not None] for values in late]
        title = f"P99 of the {router} router, {offered(load)}"
        made[f"{figure}-{router}"] = plots.scatter(_NAMES, columns, title, "milliseconds")
    return made


def _figure(figure: str, release: str, title: str) -> Figure:
    return Figure(
        id=figure,
        title=title,
        paper="",
        ours="One router of one vcpu on two CPUs, on napi_macvtap, with the shipped policy; the slow one has "
        f"{_ROUTERS['slow'].rules:,} routing rules. A load is so many times what it forwards untuned on "
        "macvtap. What is lost: a new frame when the queue has 500 or 100 (fixed, tail drop); the oldest of "
        f"500; every frame that has waited for {DELAY_MS} ms; what CoDel's law names, target {DELAY_MS} ms, "
        f"interval {20 * DELAY_MS} ms. The oldest is looked at when a new one arrives, in tap.ko's ring "
        "itself, because its reader tells nobody when it takes one. The delay is one way through the whole "
        "router, guest included; lost probes have none.",
        runs=tuple(run for router in _ROUTERS for run in _runs(figure, release, router)),
        claims=_claims(),
        plots=partial(_plots, figure),
        native=None,
        tables=_tables,
    )  # fmt: skip


FIGURE = _figure("early-drop", "trixie", "Dropping early, kernel 6.12 (Debian 13)")
BOOKWORM_FIGURE = _figure("early-drop-6.1", "bookworm", "Dropping early, kernel 6.1 (Debian 12)")
