# SPDX-License-Identifier: GPL-2.0-or-later
"""Outcomes as tables of text, for the output of `vsrtune bench` and its HTML report.

Pure, like vsrtune.views.tables: this module makes the texts, others draw them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vsrtune.bench.report import summaries
from vsrtune.bench.report.points import DROPS, ROLES, Point, by_configuration, used
from vsrtune.bench.report.summaries import PROBES, Columns, interval, listed, number, percent
from vsrtune.bench.spec.model import Outcome, Router
from vsrtune.views.tables import NOTHING, Table, filled

_DROP_HEADS = {
    "nic": "nic %",
    "softnet_backlog": "backlog %",
    "macvtap_ring": "tap ring %",
    "elsewhere": "elsewhere %",
}


def outcome_tables(outcome: Outcome) -> list[Table]:
    """Everything a terminal shows of an outcome: the answer first, the host last."""
    found = [point for group in by_configuration(outcome).values() for point in group]
    tables = [header(outcome)]
    tables += summaries.tables(outcome)
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
    both = "both directions" if traffic.bidirectional else "left to right"
    bursts = f", in bursts of {1000 * traffic.burst:g} ms" if traffic.burst else ""
    rows = [
        ("measured", label(outcome) or "unlabelled"),
        ("path", f"{spec.left} -> {_routers(spec.routers)} -> {spec.right}, {both}"),
        (
            "frames",
            f"{size}, {traffic.flows:,} flow{'s' if traffic.flows != 1 else ''} each{bursts}",
        ),
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


def _routers(routers: Sequence[Router]) -> str:
    names = [f"{r.name} (native)" if r.native else r.name for r in routers]
    return names[0] if len(names) == 1 else f"{{{', '.join(names)}}}"


def method_text(outcome: Outcome) -> str:
    """The method with the values that decide its answer: trial length, threshold, repeats."""
    m = outcome.spec.method
    length = f"trials of {m.seconds:g} s"
    if outcome.method == "compare":
        count = outcome.summary.get("pairs")
        many = f"{count} rounds" if count else "rounds"
        return f"comparison of interleaved {many} in shuffled order, {length}"
    if m.kind in ("ndr", "pdr"):
        return (
            f"{m.kind.upper()}: the highest rate with loss of at most {100 * m.loss:g} %, "
            f"{length}, the worst of {m.trials} deciding, precision {100 * m.precision:g} %"
        )
    if m.kind == "soak":
        return f"soak for {m.duration:g} s, {length}"
    name = f"{m.kind}, {length}"
    if m.kind == "back-to-back":
        name = "back-to-back bursts (RFC 9004)"
    return f"{name}, {m.repeats} times"


def load_text(p: Point) -> str:
    """The load offered at a point: pps, and the size of the frames where it varies."""
    return number(p.offered) + ("" if p.size is None else f" of {p.size}")


def throughput_table(found: Sequence[Point]) -> Table:
    """A row for each configuration and load: rates, loss, and where frames were lost."""
    places = used(found, DROPS, "drops")
    rows = [
        {
            "configuration": p.configuration,
            "offered pps": load_text(p) + (f" x {p.frames:,}" if p.frames else ""),
            "sent pps": number(p.sent_pps),
            "forwarded pps": number(p.pps),
            "lowest..highest": interval(p.low, p.high),
            "trials": str(len(p.trials)),
            "lost %": percent(p.loss),
            **{_DROP_HEADS[place]: percent(p.drop_share(place)) for place in places},
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
        **PROBES,
    }
    latencies = ((p, t.latency) for p in found for t in p.trials)
    late = [{"point": p, **asdict(latency)} for p, latency in latencies if latency is not None]
    return listed("One-way latency, microseconds", columns, late)


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
