# SPDX-License-Identifier: GPL-2.0-or-later
"""The papers' core as one comparison: its configurations, its loads, and its results beside the
papers'. paper.yaml lists the configurations and the points.

The summary is that of compare, with the kind "paper", and in ``search`` the steps of the search
that came first. It doubles the load of the untuned router until half of it is lost or the generator
sends far less. The comparison offers multiples of the most that was forwarded, but no more than the
generator can send.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from importlib.resources import files
from string import Template
from typing import Any

from vsrtune.bench.methods.compare import CompareRun, compare
from vsrtune.bench.methods.methods import even_load
from vsrtune.bench.setup import commands
from vsrtune.bench.spec.model import SENT_ENOUGH, Configuration, Outcome, Spec, Trial
from vsrtune.core.codec import decode
from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import InputError, VsrtuneError, WriteError
from vsrtune.core.stats import paired_ratio
from vsrtune.model.guest import Guest, Role
from vsrtune.policy.yaml_reader import read
from vsrtune.views.tables import NOTHING, Table

FACTORS = (0.5, 1.0, 2.0, 4.0)
# Powers of two never equal the loads of the comparison, which are whole hundreds.
_FIRST = 1024
_LOST, _SENT = 0.5, 0.75
# A router that forwards fewer frames in a trial stands still.
_STILL = 100


def configurations(
    guest: Guest, online: CpuSet, cpus: str | None = None, only: Collection[str] = ()
) -> tuple[Configuration, ...]:
    """The configurations for this guest on these CPUs, of which the first serves interrupts; with
    ``only``, those of these names beside the untuned one. Raises VsrtuneError."""
    # Four, as the papers' host had.
    chosen = CpuSet.parse(cpus) if cpus else CpuSet([*online][:4])
    if len(chosen) < 2 or not chosen <= online:
        what = f"two CPUs or more are needed, of those that are online ({online})"
        raise InputError(what, where=f"--cpus {chosen}", hint="write a list such as 0-3")
    irq, *rest = chosen
    vcpu, vhost = rest[0], rest[:2][-1]
    begin = f"guest: {guest.uuid}\n      irq: {{set: true}}\n      standstill: accept\n      cpus: "
    profile = _profile()
    words = {
        "guest": guest.uuid,
        "irq": irq,
        "rest": CpuSet(rest),
        "one": f"{begin}{{irq: {irq}, vcpu: {vcpu}, vhost: {vcpu}, emulator: auto}}",
        "two": f"{begin}{{irq: {irq}, vcpu: {vcpu}, vhost: {vhost}, emulator: auto}}",
        "fifo": "{class: fifo, priority: 10}",
        "profile": profile,
    }
    found = {}
    for one in _paper(**words)["configurations"]:
        unfit = one.pop("alone", False) and len(guest.by_role(Role.VCPU)) > 1
        if not unfit and (profile or "apply" not in one):
            found[one["name"]] = decode(Configuration, one)
    if unknown := sorted(set(only) - set(found)):
        raise InputError(f"the kit has no {unknown[0]!r} here", hint=f"it has {', '.join(found)}")
    return tuple(found[name] for name in found if not only or name in ("untuned", *only))


def method(
    spec: Spec, configurations: Sequence[Configuration], pairs: int, seed: int,
    earlier: list[Trial],
) -> CompareRun:  # fmt: skip
    """As ``compare``, after the search. ``earlier`` are trials of an unfinished run, which whoever
    makes the trials takes from there. Raises VsrtuneError when nothing came through."""
    seconds, resumed = spec.method.seconds, bool(earlier)
    tried: list[Trial] = []
    rate = _FIRST
    while rate <= spec.limits.pps:
        last = yield 0, even_load(spec, rate, seconds)
        tried.append(last)
        if last.loss > _LOST or last.sent_pps < _SENT * rate:
            break
        rate *= 2
    peak = max(t.pps for t in tried)
    if peak * seconds < _STILL:
        raise VsrtuneError("the untuned router forwards nothing", where=spec.name)
    most = SENT_ENOUGH * max(t.sent_pps for t in tried) if last.fell_short else spec.limits.pps
    rates = sorted({max(100, int(min(factor * peak, most)) // 100 * 100) for factor in FACTORS})
    # The trials of a round belong together: one that was interrupted is measured anew.
    size = len(rates) * len(configurations)
    del earlier[len(earlier) // size * size :]
    whole = replace(spec, method=replace(spec.method, rates=tuple(rates)))
    summary = yield from compare(whole, configurations, pairs, seed)
    if resumed:
        summary["notes"].append("the run was interrupted; the round of that moment was made anew")
    steps = [{"offered": t.load.total, "sent_pps": t.sent_pps, "pps": t.pps} for t in tried]
    return {**summary, "kind": "paper", "search": steps}


def beside(outcome: Outcome) -> Table:
    """The points, what the papers and the lab have, and what was measured here."""
    rows = [
        {
            "figure": point["figure"],
            "point": " / ".join(point[key] for key in ("of", "to") if key in point),
            "the paper": point.get("paper", NOTHING),
            "the lab (emulated)": point["lab"],
            "here": _here(outcome, point["of"], point.get("to")),
        }
        for point in _paper()["points"]
    ]
    title = "Beside the paper: ratios within rounds, at the highest load; alone, the best rate"
    return Table.of(title, rows)


def _here(outcome: Outcome, of: str, to: str | None) -> str:
    by_name = [
        {one["name"]: one for one in point["configurations"]} for point in outcome.summary["points"]
    ]
    top = by_name[-1]
    if of not in top or to not in (None, "peak", *top):
        return "not measured"
    best = max((found[of] for found in by_name), key=lambda one: one["median"])
    if to is None:
        return f"{best['median']:,.0f} pps"
    ours, theirs = top[of], best if to == "peak" else top[to]
    for one in (ours, theirs):
        still = sum(pps * outcome.spec.method.seconds < _STILL for pps in one["values"])
        if still:
            return f"{one['name']} stood still in {still} of {len(one['values'])} trials"
        if one["generator_limited"]:
            return "the generator fell short"
    if to == "peak":
        return f"{ours['median'] / theirs['median']:.2f}"
    return str(paired_ratio(ours["values"], theirs["values"]))


def _paper(**words: object) -> Any:
    text = files("vsrtune.bench").joinpath("paper.yaml").read_text("utf-8")
    document = read(Template(text).safe_substitute(words), "paper.yaml")
    assert not document.errors, document.errors
    return document.data


def _profile() -> str:
    """Words for tuned-adm that bring TuneD's present profiles back, "" where it does not run."""
    try:
        told = commands.run(["tuned-adm", "active"])
    except WriteError:
        return ""
    found = re.search(r"^Current active profile: (.+)", told, re.MULTILINE)
    if "Cannot talk" in told:
        return ""
    return ", ".join(["profile", *found[1].split()]) if found else "off"
