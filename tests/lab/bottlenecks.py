#!/usr/bin/env python3
"""`make bottlenecks`: what `vsrtune top` names in trials that each made one stage the limit, on both
releases: docs/results/bottlenecks.md."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path

import events

RAW = events.DOCS / "raw" / "bottlenecks"
TOLD = "bottleneck.jsonl"
TRIALS = 10
# Written before the first run that it judges.
RULE = 0.9

PAGE = """\
# Is the right bottleneck named?

The start is [what was found, on one page](README.md); this page is its appendix.

`make bottlenecks` measured this. Each trial makes one stage of a guest's path the limit, sends frames, and
compares what `vsrtune top` names ([top.md](../top.md#bottlenecks)) with it. The order of the trials is
drawn. The lab's guest has one vcpu on CPU 1 and its vhost workers on CPU 2; the generator has CPU 0. A
row is a kind of trial, a column what was named. A trial counts as right when the stage, the thread and
what would help are all right. The rule of the verdict: at least {rule:.0%} of the trials of every kind.
The thresholds of the product were chosen on other trials; none of those counts here. Among them is a
whole run of this on Debian 12, in which two kinds missed the rule: nothing lost, but a vcpu 91 % busy,
was called a full CPU (now 95 %), and the interrupts were not the only limit (they had 2,000 rules).

How each limit was made:

- interrupts: RPS gives the frames to CPU 2, where 5,000 rules of nftables look at each of them;
- tap ring: its length is 1, at 0.4 of what the guest forwards at its best;
- vhost receive or transmit waits: a real-time process on its CPU leaves it what the kernel enforces, 5 %;
- vhost transmit, CPU full: 2,000 rules at the egress of the lower device, which the worker runs;
- vcpu, CPU full: four times what the guest forwards at its best;
- vcpu waits: a process with nice -5 on its CPU, at twice the best;
- outside: nothing, at 0.4 of the best.

A vhost worker that is full of receiving alone was not made: in this lab a vcpu takes longer for a frame
than its worker does.

{tables}
"""


def table(path: Path) -> str:
    """The confusion matrix of one release."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = list(dict.fromkeys(sorted(row["kind"] for row in rows)))
    named = Counter((row["kind"], f"{row['stage']}: {short(row['help'])}") for row in rows)
    columns = sorted({name for _, name in named})
    lines = [
        f"## {path.stem}",
        "",
        f"| made | {' | '.join(columns)} | right |",
        f"|---|{'---:|' * len(columns)}---:|",
    ]
    for kind in kinds:
        cells = [str(named[kind, name] or "") for name in columns]
        own = [row["right"] for row in rows if row["kind"] == kind]
        lines.append(f"| {kind} | {' | '.join(cells)} | {sum(own)} of {len(own)} |")
    least = min(
        sum(r["right"] for r in rows if r["kind"] == k) / sum(r["kind"] == k for r in rows)
        for k in kinds
    )
    sure = [row["right"] for row in rows if row["sure"]]
    reached = "reached" if least >= RULE else "not reached"
    lines.append(f"\nVerdict: {reached}; the worst kind has {least:.0%} right.")
    lines.append(f"Of {len(sure)} that were said to be sure, {sum(sure)} were right.")
    return "\n".join(lines)


def short(text: str) -> str:
    """What helps, without the names of threads and CPUs."""
    return re.split(r"[:,(]", text)[0].strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", action="append", choices=events.RELEASES)
    parser.add_argument("--page", action="store_true", help="measure nothing, only write the page")
    arguments = parser.parse_args()
    os.environ.setdefault("LAB_TRIALS", str(TRIALS))
    releases = [] if arguments.page else arguments.release or events.RELEASES
    statuses = [
        events.boot(release, "bench", (), ["bottleneck"], told=TOLD, raw=RAW)
        for release in releases
    ]
    tables = "\n\n".join(table(path) for path in sorted(RAW.glob("*.jsonl")))
    (events.DOCS / "bottlenecks.md").write_text(PAGE.format(rule=RULE, tables=tables), "utf-8")
    return max(statuses, default=0)


if __name__ == "__main__":
    sys.exit(main())
