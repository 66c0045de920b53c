"""Writes docs/results/README.md: what was found, on one page with five pictures.

Every figure on the page is computed: from the raw results, from the verdicts of the figures'
points, and, for what many guests cost, from the page that `make bench-scale` writes. The other
pages are its appendix.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from experiments.data import Data, Missing
from experiments.figures import fairness, fig03, fig20, frr, isolation, napi_isolation, peers
from experiments.judge import (
    AMENDED,
    Judge,
    Place,
    Refused,
    above,
    bed_rounds,
    compared,
    rounds,
    sooner,
    top,
)
from experiments.page import REACHED, counted, decided, judged, others_shipped, pages
from experiments.plan import GROUP, Claim, Figure, Run, Verdict
from experiments.sized import SIZES, wire
from experiments.text import offered, ranged, table
from vsrtune.core.stats import paired_ratio

WIDTH = 150
_DELAY = "P99 of the delay, at most 0.1 of untuned"

_HEAD = """\
One machine, everything emulated: only ratios of interleaved trials mean anything. A ratio is a median \
with its 95 % interval. Verdicts are by [rules](../../tests/experiments/judge.py): *not shown* means that \
the trials allow the point and its opposite, *not judged* that they decide nothing."""

_NOT = (
    "A real NIC, a link, a host that is not emulated (TCG, veth); VyOS, OPNsense, OpenWrt: the guests are Debian, "
    "some with FRR."
)
# Pages to which nothing above leads.
_APPENDIX = ("levers", "queue", "early-drop")


@dataclass(frozen=True)
class _Point:
    """A point of a figure, and the word for its verdict on the page that has its figures."""

    page: str
    figure: str
    claim: Claim
    verdict: Verdict
    word: str

    @property
    def certain(self) -> bool:
        return self.verdict.answer in ("agrees", "differs")

    @property
    def told(self) -> str:
        """By which figures, without examples of what was not judged."""
        text = self.verdict.text.partition(", such as ")[0]
        return f"{self}. {text[:1].upper()}{text[1:]}."

    def __str__(self) -> str:
        return f"“{self.claim.text.rstrip('.')}”: {self.word}"


@dataclass(frozen=True)
class _Found:
    """What stands in a directory of results."""

    figures: Sequence[Figure]
    docs: Path
    data: Data
    points: Sequence[_Point]

    def of(self, figure: str) -> list[_Point]:
        return [one for one in self.points if one.figure == figure]

    def on(self, page: str) -> list[_Point]:
        return [one for one in self.points if one.page == page]


def write(figures: Sequence[Figure], docs: Path) -> None:
    """Write the page. Its pictures are among those that ``page.write`` draws."""
    (docs / "README.md").write_text(text(figures, docs), encoding="utf-8")


def text(figures: Sequence[Figure], docs: Path) -> str:
    """The page."""
    data = Data(docs / "raw")
    points = [
        _Point(page.name, figure.id, claim, verdict, page.answers[verdict.answer])
        for page, own in pages(figures)
        for figure in own
        for claim, verdict in judged(figure, data)
    ]
    found = _Found(figures, docs, data, points)
    lines = ["# What was found", "", *_wrapped(_HEAD), ""]
    for part in (_forwards, _sessions, _costs, _beside, _rest, _not_measured):
        lines += [*part(found), ""]
    links = ", ".join(f"[{name}]({name}.md)" for name in _APPENDIX)
    return "\n".join([*lines, f"**Appendix**, beside the pages above: {links}."]) + "\n"


def _wrapped(words: str, first: str = "", rest: str = "") -> list[str]:
    return textwrap.wrap(
        words, WIDTH, initial_indent=first, subsequent_indent=rest,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _item(words: str) -> list[str]:
    return _wrapped(words, "- ", "  ")


def _tally(points: Sequence[_Point]) -> str:
    words = counted(one.word.replace("*", "") for one in points)
    return f"{len(points)} points ({words})"


def _gain(points: Sequence[_Point]) -> str:
    """The same of points that would each be a gain."""
    none = "" if any(one.verdict.answer == "agrees" for one in points) else "; none is shown"
    return f"{_tally(points)}{none}"


def _listed(points: Sequence[_Point]) -> str:
    return "; ".join(map(str, points))


# -- parts of the page


def _forwards(found: _Found) -> list[str]:
    """Against what an operator has otherwise, on each kernel."""
    rows: list[list[str]] = []
    aims: list[str] = []
    for figure in (peers.FIGURE, peers.BOOKWORM_FIGURE):
        data = found.data.of(figure.id)
        kernel = figure.title.rpartition(", ")[2]
        if not all(data.has(run.name) for run in figure.runs):
            rows.append([kernel, "", *["not measured"] * 3])
            continue
        for factor in peers.FACTORS:
            load = peers.load_of(data, factor)
            ours = Place(peers.RUN, peers.OURS, load)
            others = (Place(peers.RUN, name, load) for name in (peers.UNTUNED, peers.LIBVIRT))
            judges = [*(_more(ours, other) for other in others), peers.sooner(factor, 0.1)]
            cells = [_said(decided(Claim("", judge), data)) for judge in judges]
            rows.append([kernel, f"{factor:g}x, {load:,.0f} pps", *cells])
        aims.append(f"{kernel.partition(' (')[0]}, {_tally(found.of(figure.id))}")
    if found.data.of(peers.NIC_FIGURE.id).has(peers.RUN):
        aims.append(f"on e1000e, {_tally(found.of(peers.NIC_FIGURE.id))}")
    return [
        "## How much more a router forwards, and how much sooner", "",
        *table(("", "offered", "more than untuned", "more than with libvirt's pins", _DELAY), rows), "",
        *_item(f"[The aims](peers.md): {'; '.join(aims) or 'not measured'}."),
        *(line for then in others_shipped(peers.FIGURE, found.data) for line in _item(then)), "",
        *_pictures(
            found,
            (f"{peers.FIGURE.id}-delay", _see_peers),
            (fig03.FIGURE.id, _see_orders),
        ),
    ]  # fmt: skip


def _more(ours: Place, theirs: Place) -> Judge:
    return compared(above(), [(ours, theirs)], "{ratio}")


def _said(verdict: Verdict) -> str:
    """Without the names of what was compared."""
    return f"{REACHED[verdict.answer]}: {_figures(verdict)}"


def _figures(verdict: Verdict) -> str:
    return verdict.text.rpartition(": ")[2]


def _sessions(found: _Found) -> list[str]:
    """Of a router with FRR, on each kernel."""
    rows = []
    names = frr.CONFIGURATIONS
    for figure in (frr.FIGURE, frr.BOOKWORM_FIGURE):
        data = found.data.of(figure.id)
        kernel = figure.title.rpartition(", ")[2]
        if not data.has(frr.RUN):
            rows.append([kernel, "", *("not measured" for _ in names)])
            continue
        for times, load in zip(frr.TIMES, data.loads(frr.RUN), strict=True):
            cells = [frr.told(data, name, load) for name in names]
            rows.append([kernel, f"{times:g}x, {load:,.0f} pps", *cells])
    return [
        "## Whether FRR keeps its BGP session", "",
        *table(("", "offered", *names), rows), "",
        *_item("A cell: in how many trials the session was kept, and for how much of the load's time it "
               "was up. [OSPF, BFD, SNMP and SSH, and the aims](frr.md)."),
    ]  # fmt: skip


def _costs(found: _Found) -> list[str]:
    """Every point of the figure on harm, whatever they are, and every load with a longer delay."""
    told = " ".join(one.told for one in found.on("no-harm"))
    made = [figure for figure in peers.FIGURES if found.data.of(figure.id).has(peers.RUN)]
    late = [text for figure in made for text in _later(figure, found.data)]
    return [
        "## Whether it ever costs anything", "", *_item(f"{told} [Each](no-harm.md)."),
        *_item(
            "**The delay is longer**, by P99, of one vcpu on two CPUs at "
            f"{len(made) * len(peers.FACTORS)} loads: {'; '.join(late) or 'not shown'}."
        ),
    ]  # fmt: skip


def _later(figure: Figure, every: Data) -> Iterator[str]:
    """Where the whole interval of our P99 over that of another is above 1."""
    data = every.of(figure.id)
    for factor in peers.FACTORS:
        load = partial(peers.load_of, factor=factor)
        judges = {name: sooner(peers.RUN, peers.OURS, name, load) for name in frr.OTHERS}
        verdicts = {name: decided(Claim("", one), data) for name, one in judges.items()}
        longer = ", ".join(
            f"{_figures(one)} times {name}'s"
            for name, one in verdicts.items()
            if one.answer == "differs"
        )
        if longer:
            yield f"{figure.title.partition(' (')[0]}, {factor:g}x: {longer}"


def _beside(found: _Found) -> list[str]:
    """What a router keeps beside one that is overloaded."""
    data = found.data.of(isolation.FIGURE.id)
    several = [run for run in isolation.FIGURE.runs if len(run.configurations) > 1]
    claims = {run.name: Claim("", _beyond(run)) for run in several}
    verdicts = {name: decided(claim, data) for name, claim in claims.items()}
    shown = any(verdict.answer == "agrees" for verdict in verdicts.values())
    plain = (
        "CPU budgets isolate routers more than equal priority alone does."
        if shown
        else "CPU budgets are not shown to isolate anything beyond what equal priority alone does."
    )
    each = "; ".join(f"{name}, {_said(verdict)}" for name, verdict in verdicts.items())
    certain = [one for one in found.of(isolation.FIGURE.id) if one.certain]
    flows = [one for one in found.of(fairness.FIGURE.id) if one.claim.text.endswith(", bound.")]
    alike = _listed(flows).replace(", bound", "")
    return [
        "## What one router leaves to another", "",
        *_item(
            f"**{plain}** One router overloaded, the other keeps more with budgets than without: {each}."
            + "".join(f" {one}." for one in certain)
        ),
        *_item(f"Two flows to two routers at equal priority: {alike}."),
    ]  # fmt: skip


def _beyond(run: Run) -> Judge:
    """Whether the router that is not overloaded keeps more in the first configuration."""
    ours, theirs = (str(c["name"]) for c in run.configurations)
    other = min(run.by_router, key=run.by_router.__getitem__)

    def judge(data: Data) -> Verdict:
        pairs = rounds(data, Place(run.name, ours), Place(run.name, theirs))
        with_it, without = (isolation.shares(c, other) for c in zip(*pairs, strict=True))
        ratio = paired_ratio(with_it, without)
        return Verdict(above()((ratio, ratio)), str(ratio))

    return judge


def _rest(found: _Found) -> list[str]:
    module = [
        one for one in found.on("napi-macvlan") if re.search(r"than (with )?macvlan", str(one))
    ]
    gains = [one for one in found.of("fig20") if "more than one" in str(one)]
    stages = [one for one in found.of("fig21") if "forwards more than" in str(one)]
    better = "".join(f" {one}, {_figures(one.verdict)}." for one in module if one.certain)
    return [
        "## The rest, a line each", "",
        *_item(f"**Kernel module**, [a guest on it](module-guest.md) against macvtap: {_tally(found.on('module-guest'))}. "
               f"[Routers in namespaces](napi-macvlan.md), better than the kernel's macvlan: {_gain(module)}.{better}"),
        *_item(f"**Groups**: more members (PVR) or fewer stages (MSR) forward more: {_gain([*gains, *stages])}."),
        *_item(f"**[Cost](scale.md)**: {_cost(found.docs)}"),
        *_item(f"**[Reaction](events.md)**: {_reaction(found.docs)}"),
        *_item(f"**[Bottlenecks](bottlenecks.md)**: {_named(found.docs)}"
               f"{_beside_it(found, 'order', 'Order within a flow')}"
               f"{_beside_it(found, 'pod', 'A router in a pod')}"),
        *_item(f"**[The papers](paper.md)**: {_tally(found.on('paper'))}."), "",
        *_pictures(
            found,
            ("isolation", _see_isolation),
            ("napi-isolation-two", _see_chains),
            (fig20.FIGURE.id, _see_members),
        ),
    ]  # fmt: skip


def _beside_it(found: _Found, page: str, what: str) -> str:
    """A sentence about a page that something was measured for."""
    points = found.on(page)
    if all(one.verdict.answer == "missing" for one in points):
        return ""
    return f" **[{what}]({page}.md)**: {_tally(points)}."


def _cost(docs: Path) -> str:
    """Of the daemon, from the last row of scale.md: the most guests."""
    try:
        rows = [line for line in (docs / "scale.md").read_text().splitlines() if line[:1] == "|"]
    except FileNotFoundError:
        return "Not measured."
    heads, *_, last = ([cell.strip() for cell in row.strip("|").split("|")] for row in rows)
    most = dict(zip(heads, last, strict=True))
    hour = float(most["idle hour, CPU s"])
    return (
        f"With {most['guests']} guests ({most['threads']} threads, synthetic) the daemon takes {hour:.0f} s of a "
        f"CPU an idle hour, {most['resident, MiB']} MiB, and {most['one changed guest, ms']} ms for one change."
    )


def _named(docs: Path) -> str:
    told = [
        json.loads(line)["right"]
        for path in sorted((docs / "raw/bottlenecks").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    if not told:
        return "Not measured."
    return f"`vsrtune top` named {sum(told)} of {len(told)} limits right."


def _reaction(docs: Path) -> str:
    lines = [
        line
        for path in sorted((docs / "raw/events").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    if not lines:
        return "Not measured."
    told = [json.loads(line) for line in lines]
    page = (docs / "events.md").read_text()
    aim = re.search(r"within \d+ ms", page)
    met = re.findall(r"^(\w+): ((?:not )?reached); (\d+) seen later", page, re.MULTILINE)
    return (
        f"{len({one['event'] for one in told})} kinds of events; the last write comes "
        f"{ranged([one['seconds'] for one in told], 1)} s after one, median (least..most), "
        f"{ranged([one['seconds'] / one['start'] for one in told], 2)} of a `virsh start`. The aim that each "
        f"change by others is seen {aim[0] if aim else 'soon'}: "
        f"{'; '.join(f'{on} {answer}, {late} later' for on, answer, late in met) or 'not measured'}."
    )


def _not_measured(found: _Found) -> list[str]:
    runs = [(f, found.data.of(f.id), run) for f in found.figures for run in f.runs]
    made = [(f"{f.id}/{run.name}", data) for f, data, run in runs if data.has(run.name)]
    rules = [(key, data.rules(key)) for key, data in made]
    old = [one for one in rules if one[1] is None or one in AMENDED]
    never = dict.fromkeys(f.title for f, data, run in runs if not data.has(run.name))
    items = [f"Planned, not made: runs of {', '.join(never)}."] if never else []
    if old:
        items.append(
            f"{len(old)} of {len(made)} runs were made before the rules that now judge them."
        )
    return [
        "## What was not measured",
        "",
        *(line for one in (_NOT, " ".join(items)) if one for line in _item(one)),
    ]


# -- pictures, and what to see in them


def _pictures(found: _Found, *pictures: tuple[str, Callable[[Data], tuple[str, str]]]) -> list[str]:
    """Side by side. Beside a name stands what gives the figure's title and what to see in it."""
    shown, seen = [], []
    for name, see in pictures:
        try:
            title, sentence = see(found.data)
        except Missing as run:
            title, sentence = "", f"The picture {name} needs `{run}`, which has not been measured."
        shown.append(f"![{title}](png/{name}.png)" if title else "")
        seen.append(sentence)
    return table(shown, [seen])


def _see_peers(every: Data) -> tuple[str, str]:
    data = every.of(peers.FIGURE.id)
    load = top(data, peers.RUN)
    names = [c.name for c in data.outcome(peers.RUN).configurations]
    ends = _each({name: _rate(data, Place(peers.RUN, name)) for name in names})
    seen = (
        "Each line goes from half of the untuned peak to four times it. To the right more is "
        f"forwarded, below it comes sooner. At {offered(load)}: {ends} pps."
    )
    return peers.FIGURE.title, seen


def _see_orders(every: Data) -> tuple[str, str]:
    data = every.of(fig03.FIGURE.id)
    (run,) = (run.name for run in fig03.FIGURE.runs)
    load = top(data, run)
    ends = {c.name: data.at(run, c.name, load).pps for c in data.outcome(run).configurations}
    best = max(ends, key=ends.__getitem__)
    return fig03.FIGURE.title, (
        f"Of the guest's lines the one that ends highest, at {_rate(data, Place(run, best))} pps, is “{best}”: "
        "the priorities of its threads on one CPU."
    )


def _rate(data: Data, *places: Place) -> str:
    """What each forwards in overload, where that may be judged."""
    try:
        for place in places:
            rounds(data, place)
    except Refused:
        return "not judged"
    return " to ".join(f"{median(t.pps for t in place.trials(data)):,.0f}" for place in places)


def _see_isolation(every: Data) -> tuple[str, str]:
    data = every.of(isolation.FIGURE.id)
    kept = {}
    for run in isolation.FIGURE.runs:
        if run.by_router:
            other = min(run.by_router, key=run.by_router.__getitem__)
            for c in run.configurations:
                try:
                    sent = [trial for (trial,) in rounds(data, Place(run.name, c["name"]))]
                    told = _percent(isolation.shares(sent, other))
                except Refused:
                    told = "not judged"
                kept[f"{run.name}, {c['name']}"] = told
    return (
        isolation.FIGURE.title,
        f"What the other router forwards of its own load, median: {_each(kept)}.",
    )


def _see_chains(every: Data) -> tuple[str, str]:
    figure = napi_isolation.ISOLATION
    run = every.of(figure.id).bed("two")
    load = run.loads[-1]
    names = run.configurations
    kept = {name: run.kept(name, load, "alone", "b") for name in names}
    try:
        each = zip(*bed_rounds(run, load, kept, "alone"), strict=True)
        told = _each(dict(zip(names, map(_percent, each), strict=True)))
    except Refused:
        told = "not judged"
    return figure.title, f"What chain B keeps while A is overloaded {load}, median: {told}."


def _see_members(every: Data) -> tuple[str, str]:
    data = every.of(fig20.FIGURE.id)
    (run,) = (run.name for run in fig20.FIGURE.runs)
    ends = {}
    for binding in (fig20.UNBOUND, fig20.BOUND):
        first, last = (
            Place(run, fig20.name(members, binding), size=SIZES[0])
            for members in (fig20.MEMBERS[0], fig20.MEMBERS[-1])
        )
        ends[binding] = _rate(data, first, last)
    return fig20.FIGURE.title, (
        f"A line goes from {fig20.MEMBERS[0]} member to {fig20.MEMBERS[-1]}, on {GROUP.cpus} CPUs that all "
        f"share; with {wire(SIZES[0])}: {_each(ends)} pps."
    )


def _each(values: Mapping[str, str]) -> str:
    return "; ".join(f"{name} {value}" for name, value in values.items())


def _percent(shares: Sequence[float]) -> str:
    return f"{100 * median(shares):.1f} %"
