"""The adaptive queue against fixed ones, below, at and above what the router forwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments.data import Data
from experiments.judge import Judge
from experiments.plan import BASE, Claim, Figure, Run, Verdict, fifo, policy

_ALONE = "alone"
_FACTORS = (0.5, 0.8, 1.0, 1.5, 2.0, 4.0)
_FIXED = (50, 500)
_OURS = "adaptive"
_WORTH = 0.97
_BURST = 0.02
_RUNS = {"steady": 0.0, "bursts": _BURST}
# Long enough for the rule to find overload and to try a shorter queue.
_SECONDS = 4.0
_PAIRS = 5


class _More(NamedTuple):
    """A run that decides where so few pairs cannot. One load, and of the fixed lengths only
    those that may be the better one: then the two sides of a pair are close in time."""

    of: str
    factor: float
    pairs: int
    seconds: float
    fixed: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.pairs} pairs of {self.seconds:g} s"


_MORE = {
    "steady-more": _More("steady", 4.0, 15, _SECONDS, _FIXED),
    **{
        f"bursts-more-{factor:g}": _More("bursts", factor, 21, 6.0, _FIXED[1:])
        for factor in (1.5, 2.0, 4.0)
    },
    **{
        f"bursts-long-{factor:g}": _More("bursts", factor, 15, 15.0, _FIXED[1:])
        for factor in (1.0, 2.0)
    },
}

_SERVICE = "vsrtune-queue"
_PLACE = f"/run/{_SERVICE}"


def _kept(name: str, queue: str) -> dict[str, Any]:
    """A policy carried out by the daemon, which is what adapts, with a journal of its own
    beside the bench's. Fixed lengths too, so that the daemon costs all of them the same."""
    text = fifo(10, 10) + f"queue: {{macvtap: {queue}}}\n"
    begin = (
        f'mkdir -p {_PLACE}; printf %s "$1" >{_PLACE}/policy.yaml; '
        f"systemd-run --quiet --collect --service-type=notify --unit {_SERVICE} "
        f"vsrtune daemon --policies {_PLACE} --journal {_PLACE}/journal.jsonl "
        f"--attach-ledger {_PLACE}/attach.jsonl --metrics off"
    )
    end = f"systemctl stop {_SERVICE} 2>/dev/null || true; rm -rf {_PLACE}"
    return {
        "name": name,
        "tuning": "command",
        "apply": ["sh", "-ec", begin, "sh", text],
        "revert": ["sh", "-ec", end],
    }


def _fixed(length: int) -> str:
    return f"fixed {length}"


def _configurations(fixed: tuple[int, ...] = _FIXED) -> tuple[dict[str, Any], ...]:
    return (
        *(_kept(_fixed(length), str(length)) for length in fixed),
        _kept(_OURS, "adaptive, min: 16, max: 500"),
    )


def _better(data: Data, run: str, load: float) -> str:
    """The fixed length that forwards more at a load, by the median of its trials."""
    fixed = _MORE[run].fixed if run in _MORE else _FIXED
    return max(map(_fixed, fixed), key=lambda name: data.at(run, name, load).pps)


def _keeps(run: str, factor: float) -> Judge:
    """Reached when the median ratio within rounds to the better fixed length is at least
    _WORTH."""

    def judge(data: Data) -> Verdict:
        load = data.loads(run)[_FACTORS.index(factor)]
        other = _better(data, run, load)
        ratio = data.ratio(run, _OURS, other, load)
        text = f"{_OURS} / {other}: {ratio}"
        for name, more in _MORE.items():
            if more.of == run and factor == more.factor and data.has(name):
                (load,) = data.loads(name)
                other = _better(data, name, load)
                ratio = data.ratio(name, _OURS, other, load)
                text += f"; with {more}, adaptive / {other}: {ratio}"
        return Verdict("agrees" if ratio.median >= _WORTH else "differs", text)

    return judge


def _tables(data: Data) -> list[str]:
    heads = ["arrivals", "offered", "sent", *map(_fixed, _FIXED), _OURS, "adaptive / better fixed"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    rows = [(run, run, _FACTORS, _FIXED) for run in _RUNS]
    rows += [(run, f"{m.of}, {m}", (m.factor,), m.fixed) for run, m in _MORE.items()]
    for run, called, factors, fixed in rows:
        if not data.has(run):
            continue
        for factor, load in zip(factors, data.loads(run), strict=True):
            cells = [called, f"{factor:g}x, {load:,.0f}"]
            cells.append(f"{data.at(run, _OURS, load).sent_pps:,.0f}")
            for length in _FIXED:
                cells.append(_rate(data, run, _fixed(length), load) if length in fixed else "")
            cells.append(_rate(data, run, _OURS, load))
            other = _better(data, run, load)
            cells.append(f"{data.ratio(run, _OURS, other, load)} of {other}")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _rate(data: Data, run: str, name: str, load: float) -> str:
    point = data.at(run, name, load)
    return f"{point.pps:,.0f} ({point.low:,.0f}..{point.high:,.0f})"


def _plots(data: Data) -> Mapping[str, Any]:
    from vsrtune.bench.report import plots
    from vsrtune.bench.report.points import by_configuration

    found = {}
    for run in (run for run in _RUNS if data.has(run)):
        lines = [
            plots.curve(name, points)
            for name, points in by_configuration(data.outcome(run)).items()
        ]
        title = f"Adaptive queue, {run} arrivals"
        found[f"queue-{run}"] = plots.throughput(lines, title, note="one machine, veth and pktgen")
    return found


FIGURE = Figure(
    id="queue",
    title="A queue that adapts",
    paper="",
    ours="Threads of one router on CPU 1 under equal FIFO, kept so by the daemon in all three "
    "configurations: a queue of 50, one of 500, and one that the daemon adapts between 16 and 500. "
    f"1x is the most that the router forwards by itself with 500. Bursts are {1000 * _BURST:.0f} ms of "
    "twice the rate and as long a pause. Frames per second, medians (lowest..highest); ratios within "
    f"rounds, trials of {_SECONDS:g} s, in which the rule meets overload, tries shorter queues "
    f"and pays for that. The emulated machine's speed drifts by a third within a minute, so {_PAIRS} "
    "pairs say little in overload. A point that they put below the mark, and bursts in overload, "
    "were measured once more, load by load, and the last of its runs decides; those of bursts are "
    "longer, since the first search for a shorter queue, which comes once in an overload, weighs less "
    "in them.",
    runs=(
        Run(
            _ALONE, BASE, (policy("500", fifo(10, 10, queue=500)),), rates=(32000, 64000),
            seconds=2.0, pairs=3, seed=51,
        ),
        *(
            Run(
                name, BASE, _configurations(), scaled=(f"queue/{_ALONE}", _FACTORS),
                traffic={"size": 60, **({"burst": burst} if burst else {})}, seconds=_SECONDS,
                pairs=_PAIRS, seed=52 + number,
            )
            for number, (name, burst) in enumerate(_RUNS.items())
        ),
        *(
            Run(
                name, BASE, _configurations(more.fixed), scaled=(f"queue/{_ALONE}", (more.factor,)),
                traffic={"size": 60, **({"burst": _RUNS[more.of]} if _RUNS[more.of] else {})},
                seconds=more.seconds, pairs=more.pairs, seed=61 + number,
            )
            for number, (name, more) in enumerate(_MORE.items())
        ),
    ),
    claims=tuple(
        Claim(
            f"{run.capitalize()} at {factor:g}x: at least {_WORTH} of the better fixed length.",
            _keeps(run, factor),
        )
        for run in _RUNS
        for factor in _FACTORS
    ),
    plots=_plots,
    native=None,
    tables=_tables,
)  # fmt: skip
