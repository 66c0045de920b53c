# SPDX-License-Identifier: GPL-2.0-or-later
"""Outcomes as tables of text, for the output of `vsrtune bench` and its HTML report.

Pure, like vsrtune.views.tables: this module makes the texts, others draw them. The table of trials
also holds the results of a sweep; the tables of the summary (bench/methods/methods.py,
compare.py) give the figures that one reads first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from vsrtune.bench.methods.methods import LIMITS
from vsrtune.bench.paper import beside
from vsrtune.bench.report.points import DROPS, ROLES, Point, by_configuration, used
from vsrtune.bench.spec.model import Outcome
from vsrtune.views.tables import NOTHING, Table, filled

Summary = Mapping[str, Any]
Columns = dict[str, Callable[[Any], str]]


def number(value: float | None) -> str:
    """A figure with thousands separators; few digits for small ones. A dash for None."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.3g}"


def percent(share: float | None) -> str:
    """A share as a percentage; a small one keeps two places."""
    if share is None:
        return NOTHING
    return "0" if share == 0 else f"{100 * share:.2f}"


def _microseconds(seconds: float | None) -> str:
    return number(None if seconds is None else seconds * 1e6)


def listed(title: str, columns: Columns, items: Iterable[Any]) -> Table:
    """A row for each item; ``columns`` gives the text of an item by the head of its column."""
    rows = [tuple(text(item) for text in columns.values()) for item in items]
    return Table(title, tuple(columns), rows)


def outcome_tables(outcome: Outcome) -> list[Table]:
    """Everything a terminal shows of an outcome: the answer first, the host last."""
    found = [point for group in by_configuration(outcome).values() for point in group]
    tables = [header(outcome)]
    tables += summary_tables(outcome)
    tables += [throughput_table(found), cost_table(found), latency_table(found)]
    tables.append(notes_table(outcome))
    tables += environment_tables(outcome.environment)
    return filled(*tables)


def label(outcome: Outcome) -> str:
    """The kind of measurement, as environment.label names it."""
    labels = {str(block.get("label", "")) for block in outcome.environment.values()} - {""}
    return "; ".join(sorted(labels))


def header(outcome: Outcome) -> Table:
    """What was measured, how and when."""
    spec, traffic = outcome.spec, outcome.spec.traffic
    sizes = spec.method.sizes or (traffic.size,)
    size = " / ".join("IMIX" if s == "imix" else str(s) for s in sizes)
    size += "" if sizes == ("imix",) else " bytes without FCS"
    names = [f"{r.name} (native)" if r.native else r.name for r in spec.routers]
    between = names[0] if len(names) == 1 else f"{{{', '.join(names)}}}"
    both = "both directions" if traffic.bidirectional else "left to right"
    rows = [
        ("measured", label(outcome) or "unlabelled"),
        ("path", f"{spec.left} -> {between} -> {spec.right}, {both}"),
        ("frames", f"{size}, {traffic.flows:,} flow{'s' if traffic.flows != 1 else ''} each"),
        ("method", method_text(outcome)),
        ("trials", f"{len(outcome.trials)}, warm-up {spec.warmup:g} s before each"),
        ("started", outcome.started),
        ("by", f"vsrtune {outcome.version}"),
    ]
    if outcome.unfinished:
        rows.insert(0, ("unfinished", outcome.unfinished))
    if outcome.seed is not None:
        rows.append(("seed", str(outcome.seed)))
    tone = "warn" if outcome.unfinished else "plain"
    return Table(spec.name, ("", ""), [(a, b) for a, b in rows if b], tone)


def method_text(outcome: Outcome) -> str:
    """The method with the values that decide its answer: trial length, threshold, repeats."""
    m = outcome.spec.method
    length = f"trials of {m.seconds:g} s"
    if outcome.method in ("compare", "paper"):
        count = outcome.summary.get("pairs")
        many = f"{count} rounds" if count else "rounds"
        return f"comparison of interleaved {many} in shuffled order, {length}"
    if m.kind in ("ndr", "pdr"):
        return (
            f"{m.kind.upper()}: the highest rate with loss of at most {100 * m.loss:g} %, "
            f"{length}, the worst of {m.trials} deciding, precision {100 * m.precision:g} %"
        )
    return f"{m.kind}, {length}, {m.repeats} times"


def load_text(p: Point) -> str:
    """The load offered at a point: pps, and the size of the frames where it varies."""
    return number(p.offered) + ("" if p.size is None else f" of {p.size}")


def throughput_table(found: Sequence[Point]) -> Table:
    """A row for each configuration and load: rates, loss, and where frames were lost."""
    places = used(found, DROPS, "drops")
    looked = any(p.late is not None for p in found)
    rows = [
        {
            "configuration": p.configuration,
            "offered pps": load_text(p),
            "sent pps": number(p.sent_pps),
            "forwarded pps": number(p.pps),
            "lowest..highest": f"{number(p.low)}..{number(p.high)}",
            "trials": str(len(p.trials)),
            "lost %": percent(p.loss),
            **{DROPS[place]: percent(p.drop_share(place)) for place in places},
            **({"reordered %": percent(p.late)} if looked else {}),
        }
        for p in found
    ]
    return Table.of("Forwarded", rows)


def cost_table(found: Sequence[Point]) -> Table:
    """The cost of forwarding: CPU time by role, context switches, migrations."""
    roles = [r for r in used(found, ROLES, "cpu_seconds") if r != "idle"]
    rows = [
        {
            "configuration": p.configuration,
            "offered pps": load_text(p),
            **{role: number(p.cpu_per_million(role)) for role in roles},
            "switches per 1000 frames": number(p.switches_per_thousand()),
            "migrations/s": number(p.migrations_per_second()),
        }
        for p in found
        if roles
    ]
    return Table.of("Cost: CPU seconds for a million frames forwarded, by thread role", rows)


def latency_table(found: Sequence[Point]) -> Table:
    """One-way latency, where probes were sent."""
    columns: Columns = {
        "configuration": lambda one: one["point"].configuration,
        "offered pps": lambda one: load_text(one["point"]),
        "P50": lambda one: _microseconds(one["p50"]),
        "P90": lambda one: _microseconds(one["p90"]),
        "P99": lambda one: _microseconds(one["p99"]),
        "P99.9": lambda one: _microseconds(one["p999"]),
        "jitter": lambda one: _microseconds(one["jitter"]),
        "probes": lambda one: str(one["sent"]),
        "lost": lambda one: str(one["lost"]),
    }
    late = [{"point": p, **_middle(p)} for p in found if any(t.latency for t in p.trials)]
    return listed("One-way latency, microseconds: median of the trials", columns, late)


def _middle(p: Point) -> dict[str, Any]:
    """The latency of a point: medians of its trials' values, sums of the probes."""
    each = [asdict(t.latency) for t in p.trials if t.latency is not None]
    found: dict[str, Any] = {}
    for key in each[0]:
        values = [one[key] for one in each if one[key] is not None]
        found[key] = median(values) if values else None
    return found | {key: sum(one[key] for one in each) for key in ("sent", "lost")}


def notes_table(outcome: Outcome) -> Table:
    """The notes of trials, each note once with the number of trials that made it."""
    counts = Counter((t.configuration, note) for t in outcome.trials for note in t.notes)
    rows: list[tuple[str, ...]] = [(c, n, str(times)) for (c, n), times in counts.items()]
    return Table("Notes", ("configuration", "note", "trials"), rows, "warn", text=("note",))


def environment_tables(environment: Mapping[str, Any]) -> list[Table]:
    """One table of what the configurations share, and one of what differs between them."""
    flat = {name: dict(_flatten(block)) for name, block in environment.items()}
    keys = list(dict.fromkeys(key for block in flat.values() for key in block))
    shared = Table("Environment", ("", ""))
    varying = Table("Environment that differs", ("", *flat))
    for key in keys:
        values = [block.get(key, NOTHING) for block in flat.values()]
        if len(set(values)) == 1:
            shared.rows.append((key, values[0]))
        else:
            varying.rows.append((key, *values))
    return [shared, varying]


_SKIPPED = ("policy.text", "load")


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested data as dotted keys; threads and interfaces as one line each."""
    if prefix in _SKIPPED or value in (None, "", [], {}):
        return
    if isinstance(value, Mapping) and "thread" in value:
        yield f"{prefix}.{value['thread']}", f"CPUs {value['cpus']}, {value['class']}"
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    elif not isinstance(value, (list, tuple)):
        yield prefix, ("no", "yes")[value] if isinstance(value, bool) else str(value)
    elif any(isinstance(item, (Mapping, list, tuple)) for item in value):
        for index, item in enumerate(value):
            yield from _flatten(item, prefix if "thread" in item else f"{prefix}.{index}")
    else:
        yield prefix, ", ".join(str(item) for item in value)


def summary_tables(outcome: Outcome) -> list[Table]:
    """The tables of ``outcome.summary``; none for an empty summary."""
    summary = outcome.summary
    match summary.get("kind"):
        case "sweep":
            return [_sweep(summary)]
        case "ndr" | "pdr":
            return [_throughput(summary)]
        case "fairness":
            return [_fairness(summary), _shares(summary)]
        case "compare":
            return _compare(summary)
        case "paper":
            return [beside(outcome), *_compare(summary)]
        case _:
            return []


def _words(title: str, rows: list[tuple[str, str]]) -> Table:
    return Table(title, ("", ""), [(a, b) for a, b in rows if b])


def _sweep(s: Summary) -> Table:
    peak = s["peak"]
    rows = [("peak", f"{number(peak['pps'])} pps at {number(peak['offered'])} pps offered")]
    if s["at_highest"] is not None:
        rows.append(("at the highest load", f"{percent(s['at_highest'])} % of the peak"))
    if "drift_per_hour" in s:
        rate = f"{100 * s['drift_per_hour']:+.2f} % an hour of traffic"
        rows.append(("drift", f"{rate} (R squared {s['r_squared']:.2f})"))
    return _words("Sweep", rows)


def _throughput(s: Summary) -> Table:
    name = s["kind"].upper()
    rows = [
        (name, "none of the rates" if s["lower"] is None else f"{number(s['lower'])} pps"),
        ("fails at", "" if s["upper"] is None else f"{number(s['upper'])} pps"),
        ("limited by", LIMITS.get(s["limited_by"], str(s["limited_by"]))),
    ]
    return _words(f"{name} (throughput)", rows)


def _fairness(s: Summary) -> Table:
    columns: Columns = {
        "rate": lambda p: number(p["rate"]),
        "Jain's index": lambda p: "{median:.3f} ({low:.3f}..{high:.3f})".format(**p["jain"]),
    }
    return listed(f"Fairness between {s['unit']}s", columns, s["points"])


def _shares(s: Summary) -> Table:
    columns: Columns = {
        "rate": lambda one: number(one["rate"]),
        s["unit"]: lambda one: one["name"],
        "sent pps": lambda one: number(one["sent_pps"]),
        "forwarded pps": lambda one: number(one["pps"]),
        "of its own %": lambda one: percent(one["share"]),
    }
    return listed("Shares", columns, [{**p, **one} for p in s["points"] for one in p["shares"]])


def _compare(s: Summary) -> list[Table]:
    columns: Columns = {
        "configuration": lambda one: one["name"],
        "median pps": lambda one: number(one["median"]),
        "lowest..highest": lambda one: f"{number(one['low'])}..{number(one['high'])}",
        "verdict": lambda one: (
            one["ratio"]["text"].removeprefix(f"{one['name']}: ") if one["ratio"] else "baseline"
        ),
    }
    found = []
    for p in s["points"]:
        at = "" if p["offered"] is None else f" at {number(p['offered'])} pps offered"
        at += f" of {p['size']}" if "size" in p else ""
        title = f"Compared with {s['baseline']}{at}, {s['pairs']} pairs"
        found.append(listed(title, columns, p["configurations"]))
    found.append(Table("Notes on the comparison", ("",), [(note,) for note in s["notes"]], "warn"))
    return found
