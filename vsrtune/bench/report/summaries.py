# SPDX-License-Identifier: GPL-2.0-or-later
"""The answer of each method (bench/methods/methods.py, rate_search.py, compare.py) as tables.

The table of trials also holds the results of a sweep and a soak; these tables give the
figures that one reads first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vsrtune.bench.spec.model import Outcome
from vsrtune.views.tables import NOTHING, Table

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


def interval(low: float | None, high: float | None) -> str:
    """``low..high``; a dash when there is none."""
    return NOTHING if low is None or high is None else f"{number(low)}..{number(high)}"


def _microseconds(seconds: float | None) -> str:
    return number(None if seconds is None else seconds * 1e6)


# Of a Latency as data.
PROBES: Columns = {
    "P50": lambda one: _microseconds(one["p50"]),
    "P90": lambda one: _microseconds(one["p90"]),
    "P99": lambda one: _microseconds(one["p99"]),
    "probes": lambda one: str(one["sent"]),
    "lost": lambda one: str(one["lost"]),
}


def listed(title: str, columns: Columns, items: Iterable[Any]) -> Table:
    """A row for each item; ``columns`` gives the text of an item by the head of its column."""
    rows = [tuple(text(item) for text in columns.values()) for item in items]
    return Table(title, tuple(columns), rows)


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
    if s.get("generator_limited"):
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
    if s["drift_per_hour"] is not None:
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
    columns: Columns = {
        "rate": lambda step: number(step["rate"]),
        "seconds": lambda step: f"{step['seconds']:g}",
        "trials": lambda step: str(step["trials"]),
        "forwarded pps": lambda step: number(step["pps"]),
        "lost %": lambda step: percent(step["loss"]),
        "result": lambda step: "passed" if step["passed"] else "failed",
    }
    return listed("Search", columns, s["steps"])


def _latency(s: Summary) -> Table:
    columns: Columns = {
        "load": lambda one: f"{100 * one['share']:g} % of {s['kind'].upper()}",
        "pps": lambda one: number(one["rate"]),
        **PROBES,
    }
    return listed("One-way latency under load, microseconds", columns, s["latency"])


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
    columns: Columns = {
        "rate": lambda p: number(p["rate"]),
        "forwarded pps": lambda p: number(p["pps"]["median"]),
        "lost %": lambda p: percent(p["loss"]["median"]),
        "Jain's index": lambda p: "{median:.3f} ({low:.3f}..{high:.3f})".format(**p["jain"]),
        "worst share / best": lambda p: number(p["least_to_most"]),
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
        f"median {s['what']}": lambda one: number(one["median"]),
        "lowest..highest": lambda one: interval(one["low"], one["high"]),
        "verdict": _verdict,
    }
    found = []
    for p in s["points"]:
        at = "" if p["offered"] is None else f" at {number(p['offered'])} pps offered"
        at += f" of {p['size']}" if "size" in p else ""
        title = f"Compared with {s['baseline']}{at}, {s['pairs']} pairs"
        found.append(listed(title, columns, p["configurations"]))
    columns = {"configuration": lambda kept: kept[0], "%": lambda kept: percent(kept[1])}
    title = "Rate at the highest load, share of the most at any"
    found.append(listed(title, columns, s["kept"].items()))
    found.append(Table("Notes on the comparison", ("",), [(note,) for note in s["notes"]], "warn"))
    return found


def _verdict(one: Mapping[str, Any]) -> str:
    if one["ratio"] is None:
        return "baseline"
    return str(one["ratio"]["text"]).removeprefix(f"{one['name']}: ")
