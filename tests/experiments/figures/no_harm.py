"""Whether the policy that we give people ever makes a router slower than it was.

The rule stands before any measurement: in each of the labs, at each load, the median of the
paired ratios tuned / untuned is at least FLOOR, on two CPUs at the highest load at least GAIN,
and no tuned trial forwards fewer than ALIVE frames. A point of which the generator did not send
the load decides nothing (judge).

A load is so many times what the router of that lab forwards untuned in overload, measured before in
the same boot. Three and five emulated CPUs on two cores cannot send four times what a plain
router forwards there, so routers of several vcpus are slow ones: they compare every frame
with RULES routing rules for each vcpu. In the first measurement they were plain, the loads 12,000
to 48,000 pps everywhere, and 15 of 36 points had not been sent.

That measurement was all on two CPUs, where the policy then had several vcpus share one.
That lost against untuned routers, so `auto` refuses it now. Those runs stay, as runs of a
policy in which the CPU is written by hand (their files say auto, which then chose that CPU), and
tell why; the claims are about runs in which
the shipped policy acts: one CPU more than vcpus.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from experiments.data import Data, Missing
from experiments.judge import ALIVE, Place, Refused, ratios, top
from experiments.plan import Boot, Claim, Figure, Guest, Run, Verdict, policy, shipped, untuned
from experiments.text import bounded, offered, table

FLOOR, GAIN = 0.97, 2.0
# Of what the router forwards untuned.
_TIMES = (1.0, 2.0, 4.0)
# What the runs of before offered, and what finds out how much a router forwards.
_RATES = (12000, 24000, 48000)
_PEAK = "peak"
_UNTUNED, _OURS = "untuned", "vsrtune"
# Of a router of several vcpus, for each: it then forwards about 3,000 pps in these labs.
RULES = 1500
_RELEASES = (("bookworm", "6.1"), ("trixie", "6.12"))
_VCPUS = (1, 2, 4)


def _boot(release: str, vcpus: int, busy: bool, *, shared: bool) -> Boot:
    cpus = 2 if shared else vcpus + 1
    name = f"{release}-{vcpus}-{'busy' if busy else 'idle'}" + (f"-on-{cpus}" if cpus > 2 else "")
    guest = Guest(
        vcpus=vcpus, queues=vcpus, busy=vcpus if busy else 0,
        rules=0 if shared or vcpus == 1 else vcpus * RULES,
    )  # fmt: skip
    return Boot(f"harm-{name}", release, cpus, (guest,))


def _traffic(boot: Boot) -> dict[str, int]:
    # One flow would reach one queue of several.
    return {"size": 60, "flows": 1 if boot.guests[0].vcpus == 1 else 8}


def _run(release: str, vcpus: int, busy: bool, *, shared: bool) -> Run:
    boot = _boot(release, vcpus, busy, shared=shared)
    name = boot.name.removeprefix("harm-")
    text = shipped("router")
    text += "cpus: {vcpu: 1}\n" if shared else ""
    return Run(
        name, boot, (untuned(_UNTUNED), policy(_OURS, text)),
        rates=_RATES, scaled=None if shared else (f"no-harm/{name}-{_PEAK}", _TIMES),
        traffic=_traffic(boot), seconds=2.0, pairs=7, seed=41,
    )  # fmt: skip


def _peak(run: Run) -> Run:
    """What finds the rates of a run."""
    return Run(
        f"{run.name}-{_PEAK}", run.boot, (untuned(_UNTUNED),),
        rates=_RATES[:1], traffic=_traffic(run.boot), seconds=2.0, pairs=5, seed=42,
    )  # fmt: skip


def _runs(every: Sequence[int], *, shared: bool) -> dict[tuple[str, int, bool], Run]:
    return {
        (release, vcpus, busy): _run(release, vcpus, busy, shared=shared)
        for release, _ in _RELEASES
        for vcpus in every
        for busy in (False, True)
    }


_RUNS = _runs(_VCPUS, shared=False)
_SHARED = _runs(_VCPUS[1:], shared=True)
_TWO_CPUS = [run for run in _RUNS.values() if run.boot.cpus == 2]


def _every(
    runs: Sequence[Run], least: float, loads: Callable[[Data, str], list[float]]
) -> Callable[[Data], Verdict]:
    """Agrees when the median ratio reaches ``least`` at each of these loads of these runs. The text
    says of how many the whole interval does."""

    def judge(data: Data) -> Verdict:
        found, refused = [], []
        for run in runs:
            for load in loads(data, run.name):
                places = (Place(run.name, name, load) for name in (_OURS, _UNTUNED))
                try:
                    ratio, _ = ratios(data, *places)
                    found.append((ratio.median, run.name, load, ratio.low))
                except Refused as why:
                    refused.append(str(why))
        below = [r for r in found if r[0] < least]
        whole = sum(low >= least for *_, low in found)
        worst, name, load, _ = min(found)
        text = (
            f"{len(found) - len(below)} of {len(found)} medians reach {least:g}, {whole} with the whole "
            f"interval; the lowest median is {worst:.3f}, {name} at {offered(load)}"
        )
        if refused:
            text += f"; {len(refused)} more are not judged, such as {refused[0]}"
        return Verdict("differs" if below else "open" if refused else "agrees", text)

    return judge


def _alive(data: Data) -> Verdict:
    counts = [
        (trial.forwarded, run.name)
        for run in _RUNS.values()
        for load in data.loads(run.name)
        for trial in data.trials(run.name, _OURS, load)
    ]
    least, name = min(counts)
    text = f"{len(counts)} tuned trials; the fewest frames forwarded are {least:,.0f}, {name}"
    return Verdict("agrees" if least >= ALIVE else "differs", text)


def _table(data: Data) -> list[str]:
    return [
        *_rows(data, _RUNS, [f"{times:g} times" for times in _TIMES]),
        "",
        "Not carried out unless an operator writes the CPU by hand: the vcpus share one.",
        "",
        *_rows(data, _SHARED, [offered(load) for load in _RATES]),
    ]


def _rows(data: Data, runs: Mapping[tuple[str, int, bool], Run], loads: Sequence[str]) -> list[str]:
    rows = []
    for (release, vcpus, busy), run in runs.items():
        try:
            cells = [_cell(data, run, load) for load in data.loads(run.name)]
        except Missing:
            cells = ["not measured"] * len(loads)
        kernel = dict(_RELEASES)[release]
        guest = "busy" if busy else "idle"
        rows.append([kernel, str(run.boot.cpus), str(vcpus), guest, *cells])
    return table(["kernel", "CPUs", "vcpus", "guest", *loads], rows)


def _cell(data: Data, run: Run, load: float) -> str:
    ratio = data.ratio(run.name, _OURS, _UNTUNED, load)
    ours = data.at(run.name, _OURS, load).pps
    return f"{bounded(ratio)}, {ours:,.0f} of {load:,.0f}"


FIGURE = Figure(
    id="no-harm",
    title="No harm: the shipped policy against untuned",
    paper="",
    ours="One CPU more than vcpus, one router, the policy that is shipped and that `vsrtune policy init` writes "
    "(class rr). The machine has two cores: three and five emulated CPUs share them with the "
    "generator. The first two points go by medians alone, whatever the intervals are: their rule was "
    "written so before the runs. A busy guest runs as many processes that never sleep as it has vcpus. Each cell "
    "is the ratio to untuned in the same boot, its interval, and the tuned median of the pps offered. "
    f"A load is so many times what the router forwards untuned at {offered(_RATES[0])}. A router of "
    f"several vcpus compares every frame with {RULES:,} routing rules for each vcpu, because this "
    "machine cannot send four times what a plain one forwards on three or five emulated CPUs. The class "
    "was chosen by one run of six (raw/no-harm/candidates.json: two busy vcpus, 6.1, 3 rounds, so "
    "without an interval). Median ratios to untuned at 12,000 and 48,000 pps: fifo 0.00 and 0.00, "
    "rr with turns of 100 ms 0.96 and 1.26, of 4 ms 3.27 and 5.10, of 8 ms 3.36 and 6.98, batch "
    "4.06 and 5.57.",
    runs=(*(one for run in _RUNS.values() for one in (_peak(run), run)), *_SHARED.values()),
    plots=lambda _data: {},  # forty curves in one picture say nothing; the tables have it all
    claims=(
        Claim(f"Tuned forwards at least {FLOOR} of untuned everywhere, by the median.", _every(
            [*_RUNS.values()], FLOOR, lambda data, run: data.loads(run))),
        Claim(f"On two CPUs, at least {GAIN:g} times untuned at the highest load, by the median.", _every(
            _TWO_CPUS, GAIN, lambda data, run: [top(data, run)])),
        Claim(f"No tuned trial forwards fewer than {ALIVE} frames.", _alive),
    ),
    native=None,
    tables=_table,
)  # fmt: skip
