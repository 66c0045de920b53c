"""Ways to judge a claim. All of them look only at the stored trials."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from statistics import median

from vsrtune.core.stats import Ratio

from .data import Data, mix
from .plan import Verdict
from .text import offered, ranged

Judge = Callable[[Data], Verdict]
Why = Callable[[Data], str]


def _say(ours: str, theirs: str, ratio: Ratio, load: float) -> str:
    return f"{ours} / {theirs} at {offered(load)}: {ratio}"


def top(data: Data, run: str) -> float:
    """The highest load of a run: overload."""
    return data.loads(run)[-1]


def shown(ratio: Ratio, text: str) -> Verdict:
    """Agrees when a ratio is shown to be above 1, differs when it is shown to be below."""
    if not ratio.shown:
        return Verdict("open", f"{text}: no difference shown")
    return Verdict("agrees" if ratio.low > 1 else "differs", text)


def more(run: str, ours: str, theirs: str) -> Judge:
    """Agrees when ``ours`` is shown to forward more than ``theirs`` in overload."""

    def judge(data: Data) -> Verdict:
        at = top(data, run)
        ratio = data.ratio(run, ours, theirs, at)
        return shown(ratio, _say(ours, theirs, ratio, at))

    return judge


def same(run: str, ours: str, theirs: str) -> Judge:
    """Agrees when no difference is shown in overload."""

    def judge(data: Data) -> Verdict:
        at = top(data, run)
        ratio = data.ratio(run, ours, theirs, at)
        text = _say(ours, theirs, ratio, at)
        if ratio.shown:
            return Verdict("differs", text)
        return Verdict("agrees", f"{text}: no difference shown")

    return judge


def best(run: str, ours: str, others: Sequence[str]) -> Judge:
    """Agrees when ``ours`` is shown to forward more than each other in overload."""
    return _against_each(run, ours, others, lambda r: r.low > 1, lambda r: r.high < 1)


def worst(run: str, ours: str, others: Sequence[str]) -> Judge:
    """Agrees when ``ours`` is shown to forward less than each other in overload."""
    return _against_each(run, ours, others, lambda r: r.high < 1, lambda r: r.low > 1)


def _against_each(
    run: str,
    ours: str,
    others: Sequence[str],
    agrees: Callable[[Ratio], bool],
    differs: Callable[[Ratio], bool],
) -> Judge:
    """All ratios must agree for one answer; a single one that differs gives the other."""

    def judge(data: Data) -> Verdict:
        at = top(data, run)
        ratios = {o: data.ratio(run, ours, o, at) for o in others}
        text = "; ".join(_say(ours, o, r, at) for o, r in ratios.items())
        if all(agrees(r) for r in ratios.values()):
            return Verdict("agrees", text)
        if any(differs(r) for r in ratios.values()):
            return Verdict("differs", text)
        return Verdict("open", f"{text}: not shown against each")

    return judge


def stable(run: str, configuration: str | None, share: float = 0.95) -> Judge:
    """Agrees when the highest load still forwards ``share`` of the configuration's peak."""

    def judge(data: Data) -> Verdict:
        found, text = _decline(data, run, configuration)
        return Verdict("agrees" if found >= share else "differs", text)

    return judge


def declines(run: str, configuration: str | None, share: float = 0.9) -> Judge:
    """Agrees when the highest load forwards less than ``share`` of the peak."""

    def judge(data: Data) -> Verdict:
        found, text = _decline(data, run, configuration)
        return Verdict("agrees" if found < share else "differs", text)

    return judge


def _decline(data: Data, run: str, configuration: str | None) -> tuple[float, str]:
    peak = data.peak(run, configuration)
    last = data.at(run, configuration, top(data, run))
    found = last.pps / peak.pps if peak.pps else 0.0
    name = configuration or "it"
    return found, (
        f"{name} forwards {last.pps:,.0f} pps at {offered(last.offered)}, {100 * found:.0f} % of "
        f"its peak of {peak.pps:,.0f} at {peak.offered:,.0f}"
    )


# A run, and one of its configurations.
Place = tuple[str, str]


def _rates(data: Data, place: Place) -> list[float]:
    run, configuration = place
    return [t.pps for t in data.trials(run, configuration, top(data, run))]


def _both(data: Data, ours: Place, theirs: Place) -> tuple[str, str]:
    """What became of the rate from theirs to ours in overload, and the figures."""
    a, b = _rates(data, ours), _rates(data, theirs)
    where = f" in {theirs[0]}" if theirs[0] != ours[0] else ""
    text = f"{ours[1]}: {ranged(a)}; {theirs[1]}{where}: {ranged(b)}"
    return change(b, a), f"{text}, at {offered(top(data, ours[0]))}"


def apart(ours: Place, theirs: Place, became: str = "more") -> Judge:
    """Agrees when no trial of one reaches any of the other in overload, and it is ours
    that forwards ``became`` ("more" or "less"). For runs that are not interleaved, and for
    those with too few rounds for an interval."""

    def judge(data: Data) -> Verdict:
        found, text = _both(data, ours, theirs)
        if found not in ("more", "less"):
            return Verdict("open", f"{text}: trials overlap")
        return Verdict("agrees" if found == became else "differs", text)

    return judge


def alike(ours: Place, theirs: Place) -> Judge:
    """Agrees when trials overlap and their medians are close (``change``)."""

    def judge(data: Data) -> Verdict:
        found, text = _both(data, ours, theirs)
        if found == "open":
            return Verdict("open", f"{text}: trials overlap, medians are apart")
        return Verdict("agrees" if found == "same" else "differs", text)

    return judge


def change(before: Sequence[float], after: Sequence[float], margin: float = 0.1) -> str:
    """What became of a rate between two runs that were not interleaved: "less" or "more"
    when no trial of one reaches any of the other, "same" when the medians are within
    ``margin`` of each other, else "open", for then the machine's mood may be all of it."""
    if max(after) < min(before):
        return "less"
    if min(after) > max(before):
        return "more"
    return "same" if abs(median(after) / max(median(before), 1.0) - 1.0) <= margin else "open"


def in_turn(
    before: Sequence[float], after: Sequence[float], agrees: Collection[str], text: str
) -> Verdict:
    """Of two runs that were not interleaved: agrees when the rate became one of ``agrees``
    (``change``)."""
    became = change(before, after)
    if became == "open":
        return Verdict("open", text)
    return Verdict("agrees" if became in agrees else "differs", text)


def impossible(text: str) -> Judge:
    """What this lab cannot show."""
    return lambda _: Verdict("open", text)


def causes(run: str, *configurations: str) -> Why:
    """What the configurations spent and lost in overload, from the same trials."""

    def why(data: Data) -> str:
        at = top(data, run)
        parts = [f"{c}, {mix(data.at(run, c, at))}" for c in configurations]
        return f"At {offered(at)}: " + ". ".join(parts) + "."

    return why
