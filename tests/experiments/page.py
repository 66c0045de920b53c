"""Writes docs/results: a page each for the papers' figures, the peers, the levers and
NAPI-macvlan, and the plots. They are the appendix of the page that `found` writes.

Every figure on the pages is computed from the raw results; a run that was not made
leaves a line that says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from experiments.data import Data, Missing
from experiments.judge import ALIVE, AMENDED, KEPT, SAME, SENT, Refused, StoodStill
from experiments.plan import Claim, Figure, Run, Verdict, shipped
from experiments.text import table
from vsrtune.bench.report import plots
from vsrtune.bench.report.points import DROPS, Point, by_configuration, used
from vsrtune.bench.report.tables import number, percent
from vsrtune.bench.spec.model import Outcome
from vsrtune.policy.model import MAX_REST_MS
from vsrtune.policy.parser import parse

# Of a claim of a paper, of an aim of our own, and of a lever.
_NONE = {
    "open": "not shown",
    "refused": "not judged",
    "stood still": "🔴 **stood still**",
    "missing": "not measured",
}
_AGREES = {"agrees": "agrees", "differs": "**differs**", **_NONE}
REACHED = {"agrees": "reached", "differs": "**not reached**", **_NONE}
_HELPS = {"agrees": "helps", "differs": "**hurts**", **_NONE, "open": "no difference shown"}

START = "The start is [what was found, on one page](README.md); this page is its appendix."

_HEAD = """\
One machine, veth and pktgen, everything emulated (TCG): rates mean nothing beside those of
hardware, ratios of interleaved trials do. `make results` measures all of it anew and writes these
pages, `make results RESUME=1` only what is missing in `raw/`, `FIGURES=fig03` one figure.

Offered and forwarded are frames per second of 60 bytes without check sequence (64 on a wire) unless
said otherwise. A median is of all trials of a configuration at a load. A ratio is the median of
the ratios within rounds, with its exact 95 % interval; configurations of a run were interleaved,
their order shuffled with the seed in the raw file. CPU time of a thread includes the SoftIRQ
work that ran on it.
"""
_RULES = f"""\
The [rules of all verdicts](../../tests/experiments/judge.py) are committed before a run, and its
raw file names the commit; a run that is older than they are is marked. More or less: the interval
excludes 1. At least so many times: the interval lies at or above it; below it, the point is missed.
The same: a 90 % interval within 1/{SAME} and {SAME} (two one-sided tests). Otherwise the point is
"not shown". It is "not judged" where the generator sent over {100 * SENT:.0f} % off what was
asked in more than {100 * (1 - KEPT):.0f} % of the rounds (a round with such a trial never counts),
where runs were made one after the other, or where the machine was not quiet. A router that forwarded
fewer than {ALIVE} frames in a trial stood still.
"""

# Of probes that came, one way.
_DELAYS = {"p50": "P50", "p99": "P99", "p999": "P99.9", "jitter": "jitter"}

_NAPI_HEAD = """\
Seed 000 measured again on today's kernels: routers in namespaces whose interfaces are macvlan
devices of the kernel, or ours (`napi_macvlan`), beside plain IP forwarding. One machine, everything
emulated (TCG): rates mean nothing beside those of hardware, ratios of interleaved trials do.
`make results FIGURES=napi` measures it anew and writes this page.

A NIC here is one end of a veth pair with a NAPI and a ring of 256 frames of its own, which a timer
polls on CPU 1 as interrupts with moderation would; CPU 1 routes and does nothing else. pktgen on
CPU 0 only fills the rings, so overload is lost there first, as on a real NIC, and the egress device
is a dummy, so no receiver takes time on either CPU.

Rates are frames per second of 60 bytes without check sequence. Beside a median stand its lowest and
highest trial; a ratio is the median of the ratios within rounds, with its exact 95 % interval. In a
round every kind meets every load once, in an order drawn by a seed.
"""

_WAITS = """\
## What is missing here

- Fig. 14 is about netmap, which is in neither Debian nor the kernel.
"""


@dataclass(frozen=True)
class Page:
    """One page: the figures whose names begin with one of ``prefixes`` (none: all that no other
    page has), and the word for each answer of a verdict."""

    name: str
    title: str
    answers: Mapping[str, str]
    prefixes: tuple[str, ...] = ()
    head: str = _HEAD
    tail: str = ""


_PAGES = (
    Page("paper", "The papers' figures, measured again", _AGREES, tail=_WAITS),
    Page("peers", "What else an operator could use", REACHED, ("peers",)),
    Page("frr", "Real router software under overload", REACHED, ("frr",)),
    Page("order", "Whether frames of a flow change places", REACHED, ("order",)),
    Page("levers", "Which settings are worth something", _HELPS, ("levers",)),
    Page("no-harm", "Does the shipped policy ever cost a router anything?", REACHED, ("no-harm",)),
    Page("pod", "A router in a pod of KubeVirt", REACHED, ("pod",)),
    Page("module-guest", "A router guest on the kernel module", REACHED, ("module-guest",)),
    Page("early-drop", "Dropping early in a guest's queue", REACHED, ("early-drop",)),
    Page(
        "napi-macvlan", "NAPI-macvlan, macvlan and plain IP forwarding", _AGREES, ("napi-",),
        _NAPI_HEAD,
    ),
)  # fmt: skip
_TAKEN = tuple(prefix for page in _PAGES for prefix in page.prefixes)


def pages(figures: Sequence[Figure]) -> Iterator[tuple[Page, list[Figure]]]:
    """Each page with its figures."""
    for page in _PAGES:
        if page.prefixes:
            yield page, [f for f in figures if f.id.startswith(page.prefixes)]
        else:
            yield page, [f for f in figures if not f.id.startswith(_TAKEN)]


def write(figures: Sequence[Figure], docs: Path) -> None:
    """Write all pages; plots go to ``docs/png``."""
    (docs / "png").mkdir(parents=True, exist_ok=True)
    data = Data(docs / "raw")
    for page, own in pages(figures):
        text, drawn = made(page, own, data)
        (docs / f"{page.name}.md").write_text(text, encoding="utf-8")
        for name, plot in drawn.items():
            file = docs / "png" / f"{name}.png"
            plot.savefig(file, format="png", dpi=110, metadata={"Software": None})


def made(page: Page, figures: Sequence[Figure], data: Data) -> tuple[str, dict[str, plots.Figure]]:
    """The text of a page, and the plots that it shows, by name."""
    sections: list[str] = []
    drawn: dict[str, plots.Figure] = {}
    summary: list[tuple[str, ...]] = []
    for figure in figures:
        own = data.of(figure.id)
        verdicts = judged(figure, data)
        link = f"[{figure.title}](#{_anchor(figure.title)})"
        for claim, verdict in verdicts:
            summary.append((link, claim.text, page.answers[verdict.answer]))
            link = ""
        sections += _figure(figure, verdicts, own, drawn, page.answers)
    points = table(("", "point", "here"), summary)
    told = counted(answer for *_, answer in summary)
    text = [f"# {page.title}", "", START, "", page.head, _RULES, *_host(figures, data)]
    text += ["## Point by point", "", f"{len(summary)} points: {told}.", ""]
    text += [*points, "", *sections, page.tail]
    return "\n".join(text).rstrip() + "\n", drawn


def counted(answers: Iterable[str]) -> str:
    """How often each, the most frequent first."""
    return ", ".join(f"{count} {answer}" for answer, count in Counter(answers).most_common())


def judged(figure: Figure, data: Data) -> list[tuple[Claim, Verdict]]:
    """The verdict of each point of a figure."""
    own = data.of(figure.id)
    return [(claim, decided(claim, own)) for claim in figure.claims]


def decided(claim: Claim, data: Data) -> Verdict:
    try:
        return claim.judge(data)
    except Missing as run:
        return Verdict("missing", f"`{run}` has not been measured")
    except Refused as why:
        return Verdict("refused", str(why))
    except StoodStill as what:
        return Verdict("stood still", str(what))


def _anchor(title: str) -> str:
    """As GitHub makes it of a heading."""
    kept = (c for c in title.lower() if c.isalnum() or c in " -")
    return "".join(kept).replace(" ", "-")


def _host(figures: Sequence[Figure], data: Data) -> list[str]:
    """On what it was measured, from the environment blocks."""
    hosts: dict[str, set[str]] = {}
    for figure in figures:
        own = data.of(figure.id)
        for run in figure.runs:
            if not own.has(run.name):
                continue
            if run.bed is not None:
                described = [_bed_host(own.bed(run.name).head["environment"])]
            else:
                described = list(_described(own.outcome(run.name)))
            for line in described:
                hosts.setdefault(line, set()).add(figure.id)
    lines = [f"- {line} ({', '.join(sorted(ids))})" for line, ids in hosts.items()]
    return ["Measured on:", "", *lines, ""] if lines else ["Nothing has been measured yet.", ""]


def _described(outcome: Outcome) -> Iterator[str]:
    for block in list(outcome.environment.values())[:1]:
        kinds = sorted({g.get("vhost", "") for g in block.get("guests", {}).values()})
        if not kinds:  # native forwarding, on the host of the others
            return
        yield (
            f"{block.get('os') or 'unknown system'}, kernel {block.get('kernel', '?')}, QEMU "
            f"{block.get('qemu') or '?'}, libvirt {block.get('libvirt') or '?'}, CPUs "
            f"{block.get('cpus', {}).get('online', '?')}, vhost workers: {'/'.join(kinds)}"
        )


def _bed_host(environment: Mapping[str, Any]) -> str:
    return (
        f"{environment['os']}, kernel {environment['kernel']}, {environment['cpus']} CPUs, "
        f"net.core.netdev_max_backlog {environment['netdev_max_backlog']}"
    )


def _figure(
    figure: Figure,
    verdicts: Sequence[tuple[Claim, Verdict]],
    data: Data,
    drawn: dict[str, plots.Figure],
    answers: Mapping[str, str],
) -> list[str]:
    lines = [f"## {figure.title}", ""]
    if figure.paper:
        lines += [f"*The paper.* {figure.paper}", ""]
    lines += [f"*Here.* {figure.ours}", ""]
    for then in others_shipped(figure, data):
        lines += [then, ""]
    lines += _plots(figure, data, drawn)
    if verdicts:
        rows = ((c.text, answers[v.answer], v.text) for c, v in verdicts)
        lines += [*table(("point", "here", "by which figures"), rows), ""]
    for claim, verdict in verdicts:
        if claim.why is None:
            continue
        try:
            lines += [f"- {claim.text} ({answers[verdict.answer]}) {claim.why(data)}"]
        except Missing:
            continue
    if lines[-1]:
        lines.append("")
    if figure.tables is not None:
        try:
            lines += [*figure.tables(data), ""]
        except Missing as run:
            lines += [f"The table needs `{run}`, which has not been measured.", ""]
    else:
        for run in figure.runs:
            lines += _table(run, data)
    if figure.runs:
        lines += ["Raw: " + ", ".join(_links(figure, data)) + ".", ""]
    return lines


def others_shipped(figure: Figure, data: Data) -> Iterator[str]:
    """A sentence for each run whose shipped policy had other classes than today's, or, where that
    matters, the kernel's own rest for realtime threads."""
    own, now = data.of(figure.id), shipped("router")
    long: list[str] = []
    for run in figure.runs:
        names = [c["name"] for c in run.configurations if c.get("policy", "").startswith(now)]
        if not names or not own.has(run.name):
            continue
        configurations = own.outcome(run.name).configurations
        made = {c.name: c.policy or "" for c in configurations}
        old = {_classes(made[name]) for name in names if name in made} - {_classes(now)}
        if old:
            yield (
                f"The policy that was shipped when `{run.name}` was measured had {' and '.join(sorted(old))}. Today's "
                f"has {_classes(now)}: these figures are not of it."
            )
        elif run.boot.release == "bookworm":
            asking = {c["name"] for c in run.configurations if _rest(c.get("policy", ""))}
            asked = {
                c.name
                for c in configurations
                if "rest:" in made[c.name] or "sched_rt_runtime_us" in " ".join(c.apply)
            }
            long += [f"`{run.name}`"] * bool(asking - asked)
    if long:
        yield (
            f"When {', '.join(long)} {'was' if len(long) == 1 else 'were'} measured, realtime threads rested for "
            "the kernel's 50 ms of each second. The policy that is shipped now has 10 ms: these figures are not of it."
        )


def _rest(text: str) -> bool:
    """Whether a policy asks for less rest than the kernel's own."""
    return bool(text) and 0 < parse(text, "").rest_us < 1000 * MAX_REST_MS


def _classes(text: str) -> str:
    """Of the vcpus and the vhost workers of a policy."""
    one = parse(text, "")
    rules = [rule for rule in (one.vcpu_sched, one.vhost_sched) if rule is not None]
    told = [f"{r.cls.value}{f' with turns of {r.slice_ms} ms' * bool(r.slice_ms)}" for r in rules]
    return f"class {' beside '.join(dict.fromkeys(told))}"


def _links(figure: Figure, data: Data) -> Iterator[str]:
    for run in figure.runs:
        path = f"raw/{figure.id}/{run.name}.json"
        if not data.has(run.name):
            yield f"{run.name} (not measured)"
            continue
        rules = data.rules(run.name)
        later = AMENDED.get((f"{figure.id}/{run.name}", rules or ""))
        told = f"rules of {rules}" if rules else "older than the rules"
        yield f"[{run.name}]({path}) ({told}{f', amended by {later}' if later else ''})"


def _plots(figure: Figure, data: Data, drawn: dict[str, plots.Figure]) -> list[str]:
    """Draw the figure's own plots, or a line for each configuration of its runs."""
    try:
        own = dict(_default(figure, data) if figure.plots is None else figure.plots(data))
    except Missing as run:
        return [f"The plot needs `{run}`, which has not been measured.", ""]
    drawn |= own
    return [line for name in own for line in (f"![{figure.title}](png/{name}.png)", "")]


def _default(figure: Figure, data: Data) -> Iterator[tuple[str, plots.Figure]]:
    lines = []
    for run in figure.runs:
        for name, points in by_configuration(data.outcome(run.name)).items():
            lines.append(plots.curve(name, points))
    top = max(max(line.x) for line in lines)
    if figure.native is not None and data.has(figure.native):
        native = [p for p in data.points(figure.native) if p.offered <= top * 1.01]
        lines.append(plots.curve("native forwarding", native, dashed=True))
    yield figure.id, plots.throughput(lines, figure.title, note="one machine, veth and pktgen")


def _delay(point: Point, name: str) -> float | None:
    """Milliseconds, median of the trials that know it; None of none."""
    seen = (getattr(t.latency, name) for t in point.trials if t.latency is not None)
    known = [1000 * seconds for seconds in seen if seconds is not None]
    return median(known) if known else None


def _table(run: Run, data: Data) -> list[str]:
    if not data.has(run.name):
        return []
    outcome = data.outcome(run.name)
    found = [point for points in by_configuration(outcome).values() for point in points]
    places = used(found, DROPS, "drops")
    heads = ["configuration", "offered", "sent", "forwarded", "lowest..highest", "trials", "lost %"]
    heads += [place.replace("_", " ") + " %" for place in places]
    heads += ["vcpu s/M", "vhost s/M", "switches/1000"]
    late = [name for name in _DELAYS if any(_delay(p, name) is not None for p in found)]
    heads += [f"{_DELAYS[name]} ms" for name in late]
    rows = []
    for p in found:
        cells = [p.configuration, number(p.offered), number(p.sent_pps), number(p.pps)]
        cells += [f"{number(p.low)}..{number(p.high)}", str(len(p.trials)), percent(p.loss)]
        cells += [percent(p.drop_share(place)) for place in places]
        cells += [number(p.cpu_per_million("vcpu")), number(p.cpu_per_million("vhost"))]
        cells += [number(p.switches_per_thousand())]
        cells += [number(_delay(p, name)) for name in late]
        rows.append(cells)
    return [f"`{run.name}`, seed {outcome.seed}, {outcome.started}:", "", *table(heads, rows), ""]
