"""The main job, shown: a router guest before, tuned, under overload, and restored.

Runs inside the lab. Everything it prints is read off this host while it runs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from statistics import median

from hoststate import capture, differences
from labhelp import POLICIES, scrape, sh, start, stop

from vsrtune.core.stats import paired_ratio

POLICY_SOURCE = Path("/usr/share/vsrtune/policies/router.yaml")
POLICY = POLICIES / "vr1.yaml"
METRICS = "http://127.0.0.1:9178/metrics"
SHOWN_METRICS = (
    "vsrtune_guest_tuned", "vsrtune_guest_drift", "vsrtune_thread_scheduling_priority",
    "vsrtune_interface_queue_length_frames", "vsrtune_interface_ring_dropped_frames_total",
)  # fmt: skip


def say(text: str) -> None:
    print(text, flush=True)


def title(text: str) -> None:
    say(f"\n=== {text}")


def run(*command: str) -> str:
    """Standard output of a command; its failure ends the demo with its own words."""
    return sh(*command).stdout


def traffic(rate: int, seconds: float) -> dict[str, int | float | dict[str, int]]:
    """One trial; the JSON object of lab-traffic."""
    text = run("lab-traffic", "--guest", "vr1", "--rate", str(rate), "--seconds", str(seconds))
    trial: dict[str, int | float | dict[str, int]] = json.loads(text)
    return trial


def pps(trial: dict[str, int | float | dict[str, int]]) -> float:
    return float(trial["forwarded"]) / float(trial["duration"])  # type: ignore[arg-type]


def describe(trial: dict[str, int | float | dict[str, int]]) -> str:
    drops = trial["drops"]
    assert isinstance(drops, dict)
    where = ", ".join(f"{name} {count}" for name, count in drops.items() if count)
    return f"{pps(trial):8.0f} pps forwarded, drops: {where or 'none'}"


def pairs(count: int, rate: int, seconds: float, seed: int) -> tuple[list[float], list[float]]:
    """Interleaved trials, tuned and untuned, the order within each pair drawn by ``seed``."""
    order = random.Random(seed)
    tuned: list[float] = []
    untuned: list[float] = []
    began = time.monotonic()
    for number in range(1, count + 1):
        first_tuned = order.random() < 0.5
        for want_tuned in (first_tuned, not first_tuned):
            (start if want_tuned else stop)()
            traffic(min(rate, 4000), 0.5)
            trial = traffic(rate, seconds)
            (tuned if want_tuned else untuned).append(pps(trial))
            label = "tuned  " if want_tuned else "untuned"
            say(f"pair {number}/{count} {label} {describe(trial)}")
        left = (time.monotonic() - began) / number * (count - number)
        say(f"pair {number}/{count} ratio {tuned[-1] / max(untuned[-1], 1):.2f}, {left:.0f} s left")
    return tuned, untuned


def metrics() -> None:
    lines = scrape()
    shown = [line for line in lines if line.startswith(SHOWN_METRICS)]
    say(f"$ curl {METRICS}   ({len(lines)} lines, of which)")
    for line in shown:
        say("  " + line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rate", type=int, default=48000)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10000)
    args = parser.parse_args()

    title("the host before: where the router's threads may run")
    before = capture()
    say(run("vsrtune", "show"))

    title(f"policy {POLICY}")
    POLICY.write_text(POLICY_SOURCE.read_text())
    say(POLICY.read_text())
    title("vsrtune plan: what would be changed, and what not")
    say(run("vsrtune", "plan", "-v"))

    title("systemctl start vsrtune")
    start()
    say(run("systemctl", "status", "--no-pager", "--lines=4", "vsrtune"))
    say(run("vsrtune", "show"))
    say("$ vsrtune verify\n" + run("vsrtune", "verify"))

    title(
        f"overload: {args.rate} pps offered for {args.seconds:g} s, {args.pairs} interleaved "
        f"pairs, seed {args.seed}"
    )
    tuned, untuned = pairs(args.pairs, args.rate, args.seconds, args.seed)

    title("metrics")
    start()
    metrics()

    title("systemctl stop vsrtune: every original value is back")
    stop()
    after = capture()
    changed = differences(before, after)
    for line in changed:
        say("  differs: " + line)
    say(f"{len(before)} values compared (masks, classes, cgroups, cpusets, queues): "
        f"{len(changed)} differ")  # fmt: skip

    title("result")
    say(f"untuned median {median(untuned):.0f} pps ({min(untuned):.0f}..{max(untuned):.0f})")
    say(f"tuned   median {median(tuned):.0f} pps ({min(tuned):.0f}..{max(tuned):.0f})")
    say("One machine, veth and pktgen, everything emulated: only the ratio means anything.")
    say(f"ratio {paired_ratio(tuned, untuned)}")
    return 1 if changed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AssertionError as error:  # of a command, with its own words
        sys.exit(f"demo: {error}")
