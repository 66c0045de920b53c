"""The rules of all verdicts. They look at nothing but stored trials.

A rule is committed before the runs that it judges: `lab` measures nothing while the rules differ
from the commit, and puts its name into the raw file.

- More, or less: the 95 % interval of the ratios within rounds excludes 1.
- At least so many times as much: the interval lies at or above it. Below it, it is missed.
- P99 of the delay is that of the probes that came. A trial in which fewer than HEARD came decides nothing
  of it.
- The same: two one-sided tests at 5 %, hence a 90 % interval within 1 / SAME and SAME.
- Anything else is not shown.

Nothing is judged (Refused)

- where a round was not sent: its trials decide nothing in which the generator sent more than SENT
  off what was asked; with fewer than KEPT of the rounds left there is no verdict;
- of runs made one after the other, because the machine's mood may be all of the difference;
- of a run during which the machine was not quiet (BUSY);
- of a router that stood still (StoodStill), which is a finding of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from vsrtune.bench.spec.model import Trial
from vsrtune.core.stats import LEVEL, Ratio, median_interval, paired_ratio

from .beddata import BedRun, Value
from .data import Data, mix
from .plan import Verdict
from .text import offered, ranged

SENT = 0.02
KEPT = 0.75
SAME = 1.1
# What the lab does not take of the time that the CPUs work, or another machine takes from them (steal),
# as a share of all their time during a run.
BUSY = 0.05
# In older runs, a fixed loop of the lab's CPUs before and after: the slower over the faster. Such loops
# differ by as much where nothing else runs.
CALM = 0.9
# Frames in a trial.
ALIVE = 100
# Probes of a trial, without which its P99 is not known.
HEARD = 100

# Runs and their rules, of which a later change counts other rounds, and that change. It moved no verdict.
AMENDED = {("peers/overload", "57f8c5e9"): "e7474700"}

Judge = Callable[[Data], Verdict]
Why = Callable[[Data], str]


class Refused(Exception):
    """Why trials decide nothing."""


class StoodStill(Exception):
    """Which router forwarded nothing, and when."""


@dataclass(frozen=True)
class Place:
    """A run, one of its configurations (None for the only one), a load (None for the highest) and
    a size of frames, in a run of several."""

    run: str
    configuration: str | None = None
    load: float | None = None
    size: int | None = None

    def trials(self, data: Data) -> tuple[Trial, ...]:
        """One for each round, in their order."""
        load = top(data, self.run) if self.load is None else self.load
        return data.at(self.run, self.configuration, load, self.size).trials

    def __str__(self) -> str:
        return self.configuration or self.run


def top(data: Data, run: str) -> float:
    """The highest load of a run: overload."""
    return data.loads(run)[-1]


# -- what may be judged


def rounds(data: Data, *places: Place) -> list[tuple[Trial, ...]]:
    """The trials of several places of one run, by round, without rounds that were not sent.
    Raises Missing, Refused and StoodStill."""
    found = [place.trials(data) for place in places]
    for place, trials in zip(places, found, strict=True):
        for number, trial in enumerate(trials, 1):
            if trial.forwarded < ALIVE:
                raise StoodStill(
                    f"{place} forwarded {trial.forwarded} frames in round {number} at "
                    f"{offered(trial.load.total)}"
                )
    if len({place.run for place in places}) > 1:
        raise Refused(_in_turn(data, places))
    quiet(data.head(places[0].run))
    every = list(zip(*found, strict=False))
    return kept(every, lambda trial: all(map(_was_sent, trial)), places)


def kept(
    every: Sequence[Any],
    good: Callable[[Any], bool],
    what: Iterable[object],
    condition: str = f"the generator sent what was asked, within {100 * SENT:.0f} %",
    of: int | None = None,
) -> list[Any]:
    """The rounds that meet a condition: by default, that were sent. Raises Refused when too few are
    left ``of`` all that were made, of which ``every`` may have met another condition."""
    left = [one for one in every if good(one)]
    of = len(every) if of is None else of
    if len(left) < KEPT * of or not left:
        names = " and ".join(dict.fromkeys(map(str, what)))
        raise Refused(f"{names}: {condition}, in {len(left)} of {of} rounds")
    return left


def made(data: Data, places: Iterable[Place]) -> int:
    """How many rounds of places of one run there are, sent or not."""
    return min(len(place.trials(data)) for place in places)


def _was_sent(trial: Trial) -> bool:
    """Probes are among what was sent, and beside what was asked."""
    probes = trial.latency.sent if trial.latency is not None else 0
    asked = {router: rate * trial.seconds for router, rate in trial.load.pps.items()}
    return near(trial.sent - probes, sum(asked.values())) and all(
        near(trial.sent_by.get(router, 0), frames) for router, frames in asked.items()
    )


def near(given: float, asked: float) -> bool:
    """Whether the generator gave what was asked of it."""
    return abs(given - asked) <= SENT * asked


def quiet(head: Mapping[str, Any]) -> None:
    """Raises Refused where ``head`` of a run says that the machine had other work: ``others``, a
    share of its CPU time, or in older runs ``calibration``, turns of a fixed loop per second before
    and after. Of a run with neither nothing is known."""
    others = head.get("others")
    if others is not None and others > BUSY:
        raise Refused(f"the machine was not quiet: others took {others:.0%} of its CPU time")
    calibration = head.get("calibration")
    if calibration and min(calibration) < CALM * max(calibration):
        raise Refused(
            f"the machine was not quiet: a fixed loop ran at {min(calibration):,.0f} to "
            f"{max(calibration):,.0f} turns a second"
        )


def _in_turn(data: Data, places: Sequence[Place]) -> str:
    each = "; ".join(
        f"{p.run}{f', {p.configuration}' if p.configuration else ''}: "
        f"{ranged([t.pps for t in p.trials(data)])}"
        for p in places
    )
    return f"{each}: made one after the other, not interleaved"


# -- ratios

# Ratios of the same rounds, with their 95 % and 90 % intervals.
Both = tuple[Ratio, Ratio]
_NARROW = 1 - 2 * (1 - LEVEL)


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Both:
    """Of values of the same rounds."""
    return paired_ratio(ours, theirs), paired_ratio(ours, theirs, _NARROW)


def ratios(
    data: Data, ours: Place, theirs: Place, value: Callable[[Trial], float] = lambda t: t.pps
) -> Both:
    """Forwarded, or any ``value``, of ours over theirs, paired by round. Raises as ``rounds``."""
    pairs = rounds(data, ours, theirs)
    return paired([value(a) for a, _ in pairs], [value(b) for _, b in pairs])


def spreads(data: Data, ours: Place, theirs: Place) -> Both:
    """How far trials are from the median of their place, as shares of it: ours over theirs,
    paired by round. Raises as ``rounds``."""
    pairs = rounds(data, ours, theirs)
    return paired(_away([a.pps for a, _ in pairs]), _away([b.pps for _, b in pairs]))


def _away(values: Sequence[float]) -> list[float]:
    middle = median(values)
    return [abs(v / middle - 1) + 1e-6 for v in values]


def bed_rounds(
    run: BedRun, load: str, columns: Mapping[str, Sequence[float]], *beside: str
) -> list[tuple[float, ...]]:
    """As ``rounds``, of namespace routers: what ``columns`` say of each configuration, by round, at
    a load and at those ``beside`` it. Raises Refused."""
    quiet(run.head)
    loads = (load, *beside)
    sent = [
        run.values(name, one, partial(_bed_sent, run, one)) for name in columns for one in loads
    ]
    every = list(zip(zip(*sent, strict=True), zip(*columns.values(), strict=True), strict=True))
    left = kept(every, lambda one: all(one[0]), columns)
    return [values for _, values in left]


def _bed_sent(run: BedRun, load: str, trial: Mapping[str, Any]) -> bool:
    """Of each stream, because what one lacks is little of the sum. Probes alone are no load."""
    sent = trial.get("sent_pps", {})
    return all(
        near(sent.get(stream, 0.0), rate) for stream, rate in run.head["loads"][load].items()
    )


def bed_ratios(run: BedRun, ours: str, theirs: str, load: str, value: Value) -> Both:
    """Any ``value`` of namespace routers, ours over theirs. Raises Refused."""
    left = bed_rounds(run, load, {name: run.values(name, load, value) for name in (ours, theirs)})
    return paired([a for a, _ in left], [b for _, b in left])


# -- rules


Rule = Callable[[Both], str]


def above(least: float = 1.0) -> Rule:
    """Agrees where at least ``least`` is shown (more than 1), differs where less is."""

    def rule(both: Both) -> str:
        ratio, _ = both
        if ratio.low > least or (ratio.low == least and least != 1):
            return "agrees"
        return "differs" if ratio.high < least else "open"

    return rule


def below(most: float = 1.0) -> Rule:
    """The opposite of ``above``."""
    opposite = {"agrees": "differs", "differs": "agrees", "open": "open"}
    return lambda both: opposite[above(most)(both)]


def same(both: Both) -> str:
    """Agrees where nothing but equality within SAME is left, differs where more or less is shown."""
    ratio, narrow = both
    if narrow.low >= 1 / SAME and narrow.high <= SAME:
        return "agrees"
    return "differs" if ratio.shown else "open"


def all_of(answers: Sequence[str]) -> str:
    if all(answer == "agrees" for answer in answers):
        return "agrees"
    return "differs" if "differs" in answers else "open"


def interval(values: Sequence[float], least: float) -> str:
    """Agrees where the 95 % interval of the median lies at or above ``least``."""
    low, high = median_interval(values)
    if low >= least:
        return "agrees"
    return "differs" if high < least else "open"


# -- verdicts


def compared(
    rule: Rule,
    pairs: Iterable[tuple[Place, Place]],
    head: str = "{ours} / {theirs} at {load}: {ratio}",
    value: Callable[[Trial], float] = lambda t: t.pps,
) -> Judge:
    """By a rule that all pairs have to meet; one that does the opposite is enough for "differs"."""

    def judge(data: Data) -> Verdict:
        answers, texts = [], []
        for ours, theirs in pairs:
            both = ratios(data, ours, theirs, value)
            answers.append(rule(both))
            load = top(data, ours.run) if ours.load is None else ours.load
            words = {"ours": ours, "theirs": theirs, "load": offered(load), "size": ours.size}
            texts.append(head.format(ratio=both[0], **words))
        return Verdict(all_of(answers), "; ".join(texts))

    return judge


def more(run: str, ours: str, theirs: str, least: float = 1.0) -> Judge:
    """``ours`` forwards more than ``theirs`` in overload, or ``least`` times as much."""
    return best(run, ours, (theirs,), least)


def alike(run: str, ours: str, theirs: str) -> Judge:
    """They forward the same in overload."""
    return compared(same, [(Place(run, ours), Place(run, theirs))])


def best(run: str, ours: str, others: Sequence[str], least: float = 1.0) -> Judge:
    """``ours`` forwards more than each other in overload."""
    return compared(above(least), [(Place(run, ours), Place(run, other)) for other in others])


def worst(run: str, ours: str, others: Sequence[str]) -> Judge:
    """``ours`` forwards less than each other in overload."""
    return compared(below(), [(Place(run, ours), Place(run, other)) for other in others])


def stable(run: str, configuration: str | None, share: float = 0.95) -> Judge:
    """The highest load still forwards ``share`` of what the configuration's peak does."""
    return _against_peak(run, configuration, above(share))


def declines(run: str, configuration: str | None, share: float = 0.9) -> Judge:
    """The highest load forwards less than ``share`` of the peak."""
    return _against_peak(run, configuration, below(share))


def _against_peak(run: str, configuration: str | None, rule: Rule) -> Judge:
    """The peak is the load with the highest median. Where that is the highest load, nothing is
    less than it, and nothing shows that it is lower."""

    def judge(data: Data) -> Verdict:
        peak, last = data.peak(run, configuration), top(data, run)
        name = configuration or "it"
        text = f"{name} forwards most, {peak.pps:,.0f} pps, at {offered(peak.offered)}"
        if peak.offered >= last:
            return Verdict(rule((Ratio(1, 1, 1, 0),) * 2), text)
        places = Place(run, configuration), Place(run, configuration, peak.offered)
        both = ratios(data, *places)
        return Verdict(rule(both), f"{text}; of that, at {offered(last)}: {both[0]}")

    return judge


def p99(trial: Trial) -> float | None:
    """Of the one-way delay of the probes that came, in seconds; None where too few did."""
    found = trial.latency
    return found.p99 if found is not None and found.sent - found.lost >= HEARD else None


def sooner(
    run: str, ours: str, theirs: str, load: Callable[[Data], float], most: float = 1.0
) -> Judge:
    """P99 of the delay of ``ours`` is at most ``most`` of that of ``theirs``; less, without it."""

    def judge(data: Data) -> Verdict:
        places = [Place(run, name, load(data)) for name in (ours, theirs)]
        pairs = [(p99(a), p99(b)) for a, b in rounds(data, *places)]
        heard = f"at least {HEARD} probes came"
        known = kept(pairs, all, places, heard, made(data, places))
        both = paired(*zip(*known, strict=True))
        late = [f"{1000 * median(side):,.1f}" for side in zip(*known, strict=True)]
        return Verdict(below(most)(both), f"{' and '.join(late)} ms: {both[0]}")

    return judge


def impossible(text: str) -> Judge:
    """What this lab cannot show: there is no trial of it."""
    return lambda _: Verdict("missing", text)


def causes(run: str, *configurations: str) -> Why:
    """What the configurations spent and lost in overload, from the same trials."""

    def why(data: Data) -> str:
        at = top(data, run)
        parts = [f"{c}, {mix(data.at(run, c, at))}" for c in configurations]
        return f"At {offered(at)}: " + ". ".join(parts) + "."

    return why
