#!/usr/bin/env python3
"""`make events`: the tests of what happens to a host in months, on both releases, and how soon the
daemon had written after each event: docs/results/events.md."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from labtool.session import EMULATOR_DIED

LAB = Path(__file__).parent / "lab"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
RAW, RAW_CHANGES = DOCS / "raw" / "events", DOCS / "raw" / "changes"
RELEASES = ("bookworm", "trixie")
TESTS = ("migration", "travel", "churn", "events", "changes", "drift")
AIM = 100.0
TOLD, CHANGES = "events.jsonl", "changes.jsonl"
# Labs that ran a second time: their own dumps prove that the emulator failed.
DEATHS: list[str] = []
PASSED_ON = ("LAB_CHURN", "LAB_CROWD", "LAB_SEED", "LAB_TRIALS")
VETH = ("--guest-name", "vr 1.ü", "--plain-qemu")
E1000E = ("--nic", "e1000e")

PAGE = """\
# How soon after an event

The start is [what was found, on one page](README.md); this page is its appendix.

`make events` measured this. The daemon is idle, its interval is an hour away, and one thing happens. The
seconds run from that event to the last setting that the daemon writes after it. The column beside
gives them as a part of the time that the last `virsh start` before the event took on the same host.
The hosts are emulated: QEMU's TCG emulates AMD SVM, and 3 CPUs share two real cores with other work.
Seconds therefore tell little. The part tells more, because emulation slows a pass and a `virsh start`
down alike.

Some events change nothing of a guest. The test then takes the class of a vcpu away just before the
event. Nothing announces that change while the daemon has no kprobes, so it finds the change only because
the event made it look. The daemon reads its policies again before the test, because it puts back less and less often what somebody
changes again and again. A row gives the median where a test measured an event more than once.

A pass begins 0.3 s after the last of a burst of events, at most 3 s after its first, and a second after
the pass before ([daemon.md](../daemon.md)). The seconds include these pauses.

{table}

## Changes by other programs

A program changes a setting of a tuned router. The milliseconds run from the kernel's entry into that
change to the line in the daemon's log that names the process. The process is right when its pid and name
are those of the program, and its unit those of the program's, or "which has ended": a program that sets
one value and ends may be gone when the daemon looks for its unit. `virsh` asks libvirt's daemon, which is
the process that is named. The aim, written before the first run that it judges: each change is seen
within {aim:.0f} ms, and its process is right.

{changes}
"""
# Where the seconds begin, if not at the event itself.
BEGINS = {
    "migrated in": "from the begin of `virsh migrate`",
    "restored": "from the begin of `virsh restore`",
    "libvirtd restarted": "from the begin of `systemctl restart`",
    "interrupt affinity changed": "e1000e devices below, in a lab of their own",
    "crash and start": "from the end of `virsh start`",
    "vcpu plugged": "no event, found by the interval, 2 s here",
}


def measure(release: str, tests: list[str]) -> int:
    """A boot for most tests, one where devices have interrupts, and one for changes by other
    programs. The status of their tests."""
    status, most = 0, [test for test in tests if test != "changes"]
    if most:
        status = boot(release, "veth", VETH, most)
    if "changes" in tests:
        made = boot(release, "veth", (), ["changes"], told=CHANGES, raw=RAW_CHANGES)
        status = max(status, made)
    if "events" in tests:
        status = max(
            status, boot(release, "e1000e", E1000E, ["events"], "-k", "interrupt_affinity")
        )
    return status


def boot(
    release: str,
    name: str,
    options: Sequence[str],
    tests: list[str],
    *chosen: str,
    told: str = TOLD,
    raw: Path = RAW,
) -> int:
    """One boot; keeps what was told in ``raw``. The status of its tests."""
    share = Path(tempfile.mkdtemp(prefix="vsrtune-events-"))
    command = [str(LAB), "run", "--release", release, "--cpus", "3", *options]
    command += ["--timeout", "2400", "--share", str(share), "--", "env"]
    given = {k: v for k, v in os.environ.items() if k in PASSED_ON}
    command += [f"{key}={value}" for key, value in given.items()]
    command += ["python3", "-B", "-m", "pytest", "-p", "no:cacheprovider", "-v", "-rs", "-s"]
    command += ["--tb=short", "--durations=20", *chosen]
    command += [f"/mnt/tests/lab/inside/test_{one}.py" for one in tests]
    status = subprocess.run(command, check=False).returncode
    if status == EMULATOR_DIED:
        DEATHS.append(f"{release}-{name}")
        (share / told).unlink(missing_ok=True)
        status = subprocess.run(command, check=False).returncode
    if (share / told).exists():
        raw.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(share / told, raw / f"{release}-{name}.jsonl")
    shutil.rmtree(share)
    return status


def table() -> str:
    """A row for each event, a column for each release."""
    values: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for release in RELEASES:
        for path in sorted(RAW.glob(f"{release}-*.jsonl")):
            for one in map(json.loads, path.read_text().splitlines()):
                row = values.setdefault(one["event"], {}).setdefault(release, [])
                row.append((one["seconds"], one["seconds"] / one["start"]))
    lines = [
        f"| event | {' | '.join(f'{r}, s | of `virsh start`' for r in RELEASES)} | |",
        f"|---|{'---:|---:|' * len(RELEASES)}---|",
    ]
    for event, by_release in values.items():
        cells = [_cell(by_release.get(release, [])) for release in RELEASES]
        lines.append(f"| {event} | {' | '.join(cells)} | {BEGINS.get(event, '')} |")
    return "\n".join(lines)


def changes() -> str:
    """A row for each program and release: how soon its changes were seen."""
    lines = [
        "| program | release | changes | seen | median, ms | worst, ms | process right | unit known |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    verdicts: list[str] = []
    for release in RELEASES:
        path = RAW_CHANGES / f"{release}-veth.jsonl"
        rows = list(map(json.loads, path.read_text().splitlines())) if path.exists() else []
        names = sorted({row["change"] for row in rows})
        for name in [*names, *(["all"] if rows else [])]:
            own = [row for row in rows if name in (row["change"], "all")]
            delays = [1000 * row["seconds"] for row in own if row["seconds"] is not None]
            lines.append(
                f"| {name} | {release} | {len(own)} | {len(delays)} | "
                f"{statistics.median(delays):.0f} | {max(delays):.0f} | "
                f"{sum(row['right'] for row in own)} | {sum(row['unit'] for row in own)} |"
            )
        late = sum(1 for row in rows if row["seconds"] is None or 1000 * row["seconds"] > AIM)
        wrong = sum(not row["right"] for row in rows)
        reached = "not reached" if late or wrong else "reached"
        if rows:
            verdicts += [
                f"{release}: {reached}; {late} seen later or not, {wrong} with another process."
            ]
    return "\n".join([*lines, "", *verdicts])


def _cell(measured: list[tuple[float, float]]) -> str:
    if not measured:
        return "| "
    seconds, parts = (statistics.median(column) for column in zip(*measured, strict=True))
    return f"{seconds:.2f} | {parts:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", action="append", choices=RELEASES)
    parser.add_argument("--tests", default=",".join(TESTS), metavar="NAME,...", help="only these")
    parser.add_argument("--page", action="store_true", help="measure nothing, only write the page")
    arguments = parser.parse_args()
    releases = [] if arguments.page else arguments.release or RELEASES
    statuses = [measure(release, arguments.tests.split(",")) for release in releases]
    (DOCS / "events.md").write_text(PAGE.format(table=table(), changes=changes(), aim=AIM), "utf-8")
    if DEATHS:
        print(f"events: an emulator died, and these labs ran once more: {', '.join(DEATHS)}")
    return max(statuses, default=0)


if __name__ == "__main__":
    sys.exit(main())
