"""The answer of each method (bench/methods/methods.py, rate_search.py, compare.py) as tables. Pure.

The table of trials also holds the results of a sweep and a soak; these tables give the
figures that one reads first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vsrtune.bench.spec.model import Outcome
from vsrtune.views.tables import NOTHING, Table

Summary = Mapping[str, Any]


def number(value: float | None) -> str:
    """A figure with thousands separators; few digits for small ones. A dash for None and NaN."""
    if value is None or math.isnan(value):
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.3g}"


def percent(share: float | None) -> str:
    """A share as a percentage; a small one keeps two places."""
    if share is None:
        return NOTHING
    return "0" if share == 0 else f"{100 * share:.2f}"


def interval(low: float | None, high: float | None) -> str:
    """``low..high``; a dash when there is none."""
    return NOTHING if low is None or high is None else f"{number(low)}..{number(high)}"


def tables(outcome: Outcome) -> list[Table]:
    """The tables of ``outcome.summary``; none for an empty summary."""
    summary = outcome.summary
    match summary.get("kind"):
        case "sweep":
            return [_sweep(summary)]
        case "soak":
            return [_soak(summary)]
        case "ndr" | "pdr":
            return [_throughput(summary), _steps(summary), _latency(summary)]
        case "back-to-back":
            return [_bursts(summary)]
        case "fairness":
            return [_fairness(summary), _shares(summary)]
        case "compare":
            return _compare(summary)
        case _:
            return []


def _words(title: str, rows: list[tuple[str, str]]) -> Table:
    return Table(title, ("", ""), [(a, b) for a, b in rows if b])


def _sweep(s: Summary) -> Table:
    peak = s["peak"]
    rows = [("peak", f"{number(peak['pps'])} pps at {number(peak['offered'])} pps offered")]
    if s["at_highest"] is not None:
        rows.append(("at the highest load", f"{percent(s['at_highest'])} % of the peak"))
    if s["generator_limited"]:
        limited = ", ".join(number(rate) for rate in s["generator_limited"])
        rows.append(("generator fell short", f"at {limited} pps offered"))
    return _words("Sweep", rows)


def _soak(s: Summary) -> Table:
    pps, worst = s["pps"], s["worst"]
    rows = [
        ("offered", f"{number(s['rate'])} pps, {s['trials']} trials"),
        ("forwarded", f"{number(pps['median'])} pps ({interval(pps['low'], pps['high'])})"),
        ("lost", f"{s['sent'] - s['forwarded']:,} of {s['sent']:,} frames"),
        ("trials with loss", str(s["lossy_trials"])),
        ("worst", (f"trial {worst['trial'] + 1}: {number(worst['pps'])} pps, "
         f"{percent(worst['loss'])} % lost")),
    ]  # fmt: skip
    if s.get("drift_per_hour") is not None:
        text = f"{100 * s['drift_per_hour']:+.2f} % an hour (R squared {s['r_squared']:.2f})"
        rows.append(("drift", text))
    return _words("Soak", rows)


_LIMITS = {
    "router": "the router",
    "generator": "the generator, which cannot send more",
    "high": "the highest rate of the search, which passed",
    "low": "the lowest rate of the search, which failed",
}


def _throughput(s: Summary) -> Table:
    name = s["kind"].upper()
    rows = [
        (name, "none of the rates" if s["lower"] is None else f"{number(s['lower'])} pps"),
        ("fails at", "" if s["upper"] is None else f"{number(s['upper'])} pps"),
        ("limited by", _LIMITS.get(s["limited_by"], str(s["limited_by"]))),
        ("loss allowed", f"{100 * s['loss']:g} %"),
        ("trial", f"{s['seconds']:g} s, the worst of {s['trials']} deciding"),
        ("precision", f"{100 * s['precision']:g} %"),
    ]
    return _words(f"{name} (throughput)", rows)


def _steps(s: Summary) -> Table:
    table = Table("Search", ("rate", "seconds", "trials", "forwarded pps", "lost %", "result"))
    for step in s["steps"]:
        table.rows.append(
            (
                number(step["rate"]),
                f"{step['seconds']:g}",
                str(step["trials"]),
                number(step["pps"]),
                percent(step["loss"]),
                "passed" if step["passed"] else "failed",
            )
        )
    return table


def _latency(s: Summary) -> Table:
    table = Table(
        "One-way latency under load, microseconds",
        ("load", "pps", "P50", "P90", "P99", "probes", "lost"),
    )
    for one in s["latency"]:
        shown = [NOTHING if one[k] is None else number(one[k] * 1e6) for k in ("p50", "p90", "p99")]
        load = f"{100 * one['share']:g} % of {s['kind'].upper()}"
        table.rows.append((load, number(one["rate"]), *shown, str(one["sent"]), str(one["lost"])))
    return table


def _bursts(s: Summary) -> Table:
    burst = s["burst"]
    rows = [
        ("burst rate", f"{number(s['rate'])} pps"),
        ("longest burst without loss", (f"{number(s['mean'])} frames (mean of {burst['count']}, "
         f"{interval(burst['low'], burst['high'])})")),
        ("buffer", (f"{1000 * s['buffer_seconds']:.3g} ms, corrected "
         f"{1000 * s['corrected_buffer_seconds']:.3g} ms")),
        ("drained at", f"{number(s['drain_pps'])} pps"),
        ("whole search passed", f"{s['at_high']} times" if s["at_high"] else ""),
    ]  # fmt: skip
    return _words("Back-to-back (RFC 9004)", rows)


def _fairness(s: Summary) -> Table:
    table = Table(
        f"Fairness between {s['unit']}s",
        ("rate", "forwarded pps", "lost %", "Jain's index", "worst share / best"),
    )
    for p in s["points"]:
        table.rows.append(
            (
                number(p["rate"]),
                number(p["pps"]["median"]),
                percent(p["loss"]["median"]),
                f"{p['jain']['median']:.3f} ({p['jain']['low']:.3f}..{p['jain']['high']:.3f})",
                NOTHING if p["least_to_most"] is None else f"{p['least_to_most']:.2f}",
            )
        )
    return table


def _shares(s: Summary) -> Table:
    table = Table("Shares", ("rate", s["unit"], "sent pps", "forwarded pps", "of its own %"))
    for p in s["points"]:
        for one in p["shares"]:
            table.rows.append(
                (
                    number(p["rate"]),
                    one["name"],
                    number(one["sent_pps"]),
                    number(one["pps"]),
                    percent(one["share"]),
                )
            )
    return table


def _compare(s: Summary) -> list[Table]:
    unit = s.get("what", "pps")
    found = []
    for p in s["points"]:
        at = "" if p.get("offered") is None else f" at {number(p['offered'])} pps offered"
        at += f" of {p['size']}" if "size" in p else ""
        table = Table(
            f"Compared with {s['baseline']}{at}, {s['pairs']} pairs",
            ("configuration", f"median {unit}", "lowest..highest", "verdict"),
        )
        for one in p["configurations"]:
            judged = "baseline" if one["ratio"] is None else one["ratio"]["text"]
            values = (number(one["median"]), interval(one["low"], one["high"]))
            table.rows.append((one["name"], *values, judged.removeprefix(f"{one['name']}: ")))
        found.append(table)
    if s.get("kept"):
        table = Table("Rate at the highest load, share of the most at any", ("configuration", "%"))
        table.rows.extend((name, percent(share)) for name, share in s["kept"].items())
        found.append(table)
    if s.get("notes"):
        found.append(Table("Notes on the comparison", ("",), [(n,) for n in s["notes"]], "warn"))
    return found
