#!/usr/bin/python3
"""The lab's comparison of configurations on a router with FRR: that of `vsrtune bench compare`, with a
record of the router's sessions beside it, and a pause after each trial until they have been back for
a hold time: a session that overload has doomed is up until its peer's timer ends, and its loss would
otherwise count in the next trial.

    python3 sessions.py GUEST PAIRS SEED OUT SPEC...

leaves the bench's result in OUT. Each of its trials has one key more, "control":

    before      whether all sessions were up and all routes there before the bench warmed up
    loaded      how many of the ticks (half a second each) below were under load
    bgp, ospf, bfd, routes
                a digit a tick from the first under load until all was back: 1 for up, or for all
                routes at the peer behind the router
    drops       how often BGP's and BFD's session was lost since then
    converged   seconds from the end of the load until all was back to stay, null for never
    rested      whether all stayed back for a hold time
    snmp, ssh   milliseconds until the router answered each request, null for not at all
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from vsrtune.bench.cli import read_spec
from vsrtune.bench.progress import ProgressWatch
from vsrtune.bench.report.files import outcome_to_json
from vsrtune.bench.session import measure
from vsrtune.bench.spec.model import Trial
from vsrtune.host.libvirt import DEFAULT_URI

PEERS = "/run/lab/bin/lab-peers"
ROUTES = Path("/run/lab/frr/routes")
SESSIONS = ("bgp", "ospf", "bfd", "routes")
PATIENCE = 45.0
# BGP's, the longest of the sessions' (lab-peers).
HOLD = 9.0
# Of the load's rate, on a tick that counts as loaded.
_LOADED = 0.5


class Watch(ProgressWatch):
    """After each trial waits for the sessions, and says what they suffered."""

    def __init__(self, record: Path) -> None:
        super().__init__()
        self._record = record
        self._routes = int(ROUTES.read_text())
        self._read = 0
        self.controls: list[dict[str, Any]] = []

    def made(self, trial: Trial) -> None:
        super().made(trial)
        end = time.monotonic()
        while not rested(self._lines(), end, self._routes) and time.monotonic() < end + PATIENCE:
            time.sleep(0.5)
        self.controls.append(control(self._lines(), trial, self._routes, end))
        self._read = self._record.stat().st_size
        self.say(f"{ {k: v for k, v in self.controls[-1].items() if k not in ('snmp', 'ssh')} }")

    def _lines(self) -> list[dict[str, Any]]:
        """The ticks since the last trial, with the answers between them. The first and the last
        line may be parts of one."""
        with self._record.open() as file:
            file.seek(self._read)
            _, *whole, _ = file.read().split("\n")
        return in_order([json.loads(line) for line in whole])


def in_order(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ticks by time, each with the ``answers`` to what was asked since the one before."""
    ticks = sorted((one for one in lines if "bgp" in one), key=lambda one: one["at"])
    asked = sorted((one for one in lines if "bgp" not in one), key=lambda one: one["at"])
    for tick in ticks:
        tick["answers"] = []
        while asked and asked[0]["at"] <= tick["at"]:
            tick["answers"].append(asked.pop(0))
    return ticks


def up(tick: dict[str, Any], name: str, routes: int) -> bool:
    return bool(tick[name] == routes if name == "routes" else tick[name])


def whole(tick: dict[str, Any], routes: int) -> bool:
    return all(up(tick, name, routes) for name in SESSIONS)


def rested(ticks: list[dict[str, Any]], end: float, routes: int) -> bool:
    """Whether all sessions have been up for a hold time, which began after ``end``."""
    since = ticks[-1]["at"] - HOLD
    return since >= end and all(whole(tick, routes) for tick in ticks if tick["at"] >= since)


def control(ticks: list[dict[str, Any]], trial: Trial, routes: int, end: float) -> dict[str, Any]:
    """What the peers saw of the last trial, which ended before ``end``."""
    loaded = [
        number
        for number in range(1, len(ticks))
        if ticks[number]["sent"] - ticks[number - 1]["sent"]
        > _LOADED * trial.load.total * (ticks[number]["at"] - ticks[number - 1]["at"])
    ]
    last = loaded[-1]
    fresh = ticks[loaded[0] - 1]
    # Warming up is no part of it.
    first = next(n for n in loaded if ticks[n]["at"] > ticks[last]["at"] - trial.seconds)
    seen = ticks[first:]
    back = len(ticks)
    while back > last and whole(ticks[back - 1], routes):
        back -= 1
    answers = [one for tick in ticks[first : last + 1] for one in tick["answers"]]
    return {
        "before": whole(fresh, routes),
        "loaded": last - first + 1,
        **{name: "".join(str(int(up(t, name, routes))) for t in seen) for name in SESSIONS},
        "drops": {
            name: max(0, ticks[-1]["drops"][name] - fresh["drops"][name])
            for name in ticks[-1]["drops"]
        },
        "converged": round(ticks[back]["at"] - ticks[last]["at"], 1) if back < len(ticks) else None,
        "rested": rested(ticks, end, routes),
        **{
            name: [milliseconds(one[name]) for one in answers if name in one]
            for name in ("snmp", "ssh")
        },
    }


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)


def main() -> int:
    guest, pairs, seed, out, *paths = sys.argv[1:]
    first = read_spec(Path(paths[0]))
    specs = [first, *(read_spec(Path(path), first) for path in paths[1:])]
    subprocess.run([PEERS, "wait", guest], check=True)
    path = Path(out).with_suffix(".record")
    with path.open("w") as file, subprocess.Popen([PEERS, "record", guest], stdout=file) as record:
        try:
            time.sleep(2)
            with Watch(path) as watch:
                outcome = measure(specs, int(pairs), seed=int(seed), watch=watch, uri=DEFAULT_URI)
            # The router's interfaces may just have been plugged in as they were: until it has all
            # routes again, the lab is not at rest.
            subprocess.run([PEERS, "wait", guest], check=True)
            time.sleep(HOLD)
        finally:
            record.terminate()
    result = json.loads(outcome_to_json(outcome))
    for trial, seen in zip(result["trials"], watch.controls, strict=True):
        trial["control"] = seen
    Path(out).write_text(json.dumps(result | {"routes": int(ROUTES.read_text())}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
