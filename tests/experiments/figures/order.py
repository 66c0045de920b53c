"""Whether frames of a flow change places in a router of several queues.

The rules stand before any measurement. A configuration keeps the order when none of the frames that were
looked at came out of order, in every round at every load. It keeps it better than another when fewer of
its frames came out of order in so many rounds that chance explains it in at most 5 % (two-sided sign
test; rounds in which both lost none are left out).
"""

from __future__ import annotations

from math import comb
from typing import Any

from experiments.data import Data
from experiments.judge import Judge, Place, rounds
from experiments.plan import Boot, Claim, Figure, Guest, Run, Verdict, policy, untuned
from experiments.text import percent, ranged, table
from vsrtune.bench.spec.model import Trial

_TIMES = (1.0, 2.0, 4.0)
UNTUNED, _BOUND, _OURS = "untuned", "threads bound", "vsrtune"
# As many vcpus as queues. The router of so many queues is named so in the lab.
_ROUTERS = {1: "vr1", 2: "vr2", 4: "vr3"}
# Vcpus of one router share no CPU with a real-time class, so the shipped policy leaves a router of
# four vcpus alone on two CPUs.
_MOST = 2
# Two CPUs for the threads of a queue to run on apart from one another, beside that of the interrupts.
_BOOT = Boot("order", cpus=3, guests=tuple(Guest(vcpus=n, queues=n) for n in _ROUTERS))
_FLOWS = 4
# Frames of a trial, without which it says nothing of their order.
_ENOUGH = 1000
_CHANCE = 0.05


def _run(queues: int) -> str:
    return f"queues-{queues}"


def configurations(queues: int) -> tuple[str, ...]:
    """The configurations that a router of so many queues is measured in."""
    return (UNTUNED, _BOUND, _OURS)[: 3 if queues <= _MOST else 2]


def _specs(queues: int) -> tuple[dict[str, Any], ...]:
    """Of the router that is loaded; the others are idle, and left alone."""
    named = f"guest: {_ROUTERS[queues]}\n"
    vcpus = ", ".join(f"{number}: {1 + number % 2}" for number in range(queues))
    bound = f"profile: none\ncpus: {{irq: 0, vcpu: {{{vcpus}}}, vhost: auto, emulator: auto}}\n"
    found = untuned(UNTUNED), policy(_BOUND, named + bound), policy(_OURS, named)
    return found[: len(configurations(queues))]


def _share(trial: Trial) -> float:
    return trial.reordered / max(trial.sampled, 1)


def _sign_test(fewer: int, more: int) -> float:
    """How often chance alone makes so many rounds, or more, of ``fewer`` and ``more`` fall to one
    side: two-sided."""
    count = fewer + more
    tail = sum(comb(count, k) for k in range(max(fewer, more), count + 1)) / 2**count
    return min(1.0, 2 * tail)


def _kept(run: str, name: str) -> Judge:
    def judge(data: Data) -> Verdict:
        trials = [
            trial for load in data.loads(run) for (trial,) in rounds(data, Place(run, name, load))
        ]
        looked, late = (sum(getattr(t, k) for t in trials) for k in ("sampled", "reordered"))
        with_late = sum(t.reordered > 0 for t in trials)
        text = f"{late:,} of {looked:,} frames, in {with_late} of {len(trials)} trials"
        if late:
            return Verdict("differs", text)
        few = sum(t.sampled < _ENOUGH for t in trials)
        if few:
            return Verdict("open", f"{text}; {few} trials had fewer than {_ENOUGH:,}")
        return Verdict("agrees", text)

    return judge


def _better(run: str, ours: str, theirs: str) -> Judge:
    def judge(data: Data) -> Verdict:
        pairs = rounds(data, Place(run, ours), Place(run, theirs))
        differences = [_share(b) - _share(a) for a, b in pairs]
        fewer, more = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
        text = f"fewer in {fewer} rounds, more in {more}, none in {len(pairs) - fewer - more}"
        if _sign_test(fewer, more) > _CHANCE:
            return Verdict("open", text)
        return Verdict("agrees" if fewer > more else "differs", text)

    return judge


def _claims() -> tuple[Claim, ...]:
    found = []
    for queues in _ROUTERS:
        word = f"{queues} queue{'s' if queues > 1 else ''}"
        found += [
            Claim(f"{word}, {name}: not one frame out of order.", _kept(_run(queues), name))
            for name in configurations(queues)[1:]
        ]
        found += [
            Claim(
                f"{word}, {name}: fewer frames out of order than untuned, at {_TIMES[-1]:g} times the load.",
                _better(_run(queues), name, UNTUNED),
            )
            for name in configurations(queues)[1:]
        ]
    return tuple(found)


def _tables(data: Data) -> list[str]:
    rows = []
    for queues in _ROUTERS:
        run = _run(queues)
        for times, load in zip(_TIMES, data.loads(run), strict=True):
            for name in configurations(queues):
                trials = data.trials(run, name, load)
                looked = f"{sum(t.sampled for t in trials):,}"
                with_late = f"{sum(t.reordered > 0 for t in trials)} of {len(trials)}"
                row = [
                    str(queues),
                    f"{times:g}x, {load:,.0f}",
                    name,
                    ranged([t.pps for t in trials]),
                ]
                rows.append([*row, looked, percent(map(_share, trials)), with_late])
    heads = ["queues", "offered", "configuration", "forwarded", "looked at", "out of order, %"]
    return table([*heads, "trials with any"], rows)


FIGURE = Figure(
    id="order",
    title="Order within a flow, kernel 6.12 (Debian 13)",
    paper="",
    ours="Routers of 1, 2 and 4 queues and as many vcpus on three CPUs, one of them loaded at a time with "
    f"{_FLOWS} flows. A load is so many times what the router of one queue forwards untuned. Untuned; only "
    "bound (CPUs of vcpu, vhost and emulator, no class; of four vcpus two share a CPU); the shipped policy, "
    "which refuses four vcpus on two CPUs. A frame is out of order if a "
    "frame of its flow that was sent later came before it (RFC 4737), on the whole way from generator to "
    "sink. The three CPUs are emulated on two, which says nothing of rates, but the order is the "
    "kernel's own. Fewer frames out of order: by a two-sided sign test at 5 %.",
    runs=(
        Run("peak", _BOOT, (untuned(),), rates=(4000, 8000, 12000), pairs=3, seed=81),
        *(
            Run(
                _run(queues), _BOOT, _specs(queues), scaled=("order/peak", _TIMES), router=router,
                traffic={"flows": _FLOWS}, reordering=True, seed=81 + queues,
            )
            for queues, router in _ROUTERS.items()
        ),
    ),
    claims=_claims(),
    plots=lambda _: {},
    native=None,
    tables=_tables,
)  # fmt: skip
