"""What a host with many guests costs the daemon: `make bench-scale`.

Each size is a synthetic host (synthetic.py) on tmpfs, tuned once by the daemon's own passes,
and then measured: looking at everything and planning, against only opening and reading the
very same files; a pass for one guest that something changed; the look from time to time; a
scrape. Writes docs/results/scale.md and prints the same.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hostroot import TreeRoot, TreeVirt
from synthetic import Synthetic
from treeops import TreeOps

from vsrtune.cli.daemon import GC_THRESHOLD
from vsrtune.daemon.http import exposition
from vsrtune.daemon.reconciler import Reconciler
from vsrtune.daemon.scope import FULL, UNANNOUNCED, Scope
from vsrtune.daemon.systemd import LOGGER
from vsrtune.execute.journal import Journal
from vsrtune.observe.observer import LONG_ROUND, ROUND, SELDOM, Observer
from vsrtune.observe.one_pass import FEW
from vsrtune.plan import planner
from vsrtune.policy.parser import parse

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "scale.md"
SIZES = (10, 100, 1000)
POLICY = """\
guest: "*"
cpus: {irq: "0", vcpu: auto, vhost: auto}
scheduler:
  vcpu: {class: rr, priority: 7}
  vhost: {class: rr, priority: 7}
queue: {macvtap: 300}
profile: none
"""
PAIRS = 5
INTERVAL = 10.0
TURNS = LONG_ROUND * SELDOM
WANTED = 3.0


@dataclass(frozen=True)
class Row:
    """One size. Times in seconds, memory in MiB; ``ratio`` is median, least and most."""

    guests: int
    threads: int
    files: int
    whole: float
    plan: float
    floor: float
    ratio: tuple[float, float, float]
    peak: float
    resident: float
    one: float
    turn: float
    idle_hour: float
    idle_files: float
    scrape: float
    scrape_size: float


class Recorded(TreeRoot):
    """Counts what is read."""

    def __init__(self, base: str) -> None:
        super().__init__(base)
        self.files: list[str] = []
        self.links: list[str] = []
        self.listed: list[str] = []

    def read(self, path: str) -> str:
        self.files.append(self._base + path)
        return super().read(path)

    def listdir(self, path: str, most: int | None = None) -> list[str]:
        self.listed.append(self._base + path)
        return super().listdir(path, most)

    def readlink(self, path: str) -> str:
        self.links.append(self._base + path)
        return super().readlink(path)


def floor(root: Recorded) -> None:
    """Only open and read what was read, list what was listed; nothing is kept."""
    for path in root.files:
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        while os.read(fd, 16384):
            pass
        os.close(fd)
    for path in root.listed:
        try:
            os.listdir(path)
        except OSError:
            continue
    for path in root.links:
        try:
            os.readlink(path)
        except OSError:
            continue


def timed(work: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """Seconds of ``clock`` that the work takes."""
    begin = clock()
    work()
    return clock() - begin


def measure(guests: int, place: Path, say: Callable[[str], None]) -> Row:
    """One size, in this process."""
    gc.set_threshold(*GC_THRESHOLD)  # as the daemon does
    host = Synthetic(place, guests)
    say(f"{guests} guests: made")
    root = TreeRoot(str(place))
    virt = TreeVirt(host, root)
    observer = Observer(root, virt)
    policies = (parse(POLICY, "scale.yaml"),)
    journal = Journal.open(place / "journal.jsonl", root.read("/proc/sys/kernel/random/boot_id"))
    before = resident()
    passes = Reconciler(observer, TreeOps(host, root), journal, policies)
    passes.run()
    passes.run()
    tuned = passes.state.tuned
    if tuned != guests:
        raise SystemExit(f"only {tuned} of {guests} guests are tuned")
    say(f"{guests} guests: tuned, {len(journal.entries())} settings in the journal")
    grown = resident() - before

    recorded = Recorded(str(place))
    snapshot = Observer(recorded, TreeVirt(host, recorded)).observe()
    ours = journal.applied()

    def both() -> None:
        planner.plan(Observer(root, virt).observe(), policies, ours)

    pairs = []
    for number in range(PAIRS):
        order = (both, lambda: floor(recorded))
        first, second = order if number % 2 else order[::-1]
        one, two = timed(first), timed(second)
        pairs.append((one, two) if number % 2 else (two, one))
    ratios = sorted(a / b for a, b in pairs)
    plan = statistics.median(
        timed(lambda: planner.plan(snapshot, policies, ours)) for _ in range(3)
    )
    ones = []
    for number in range(1, 10):
        names = host.guests[number % guests]
        host.file(f"/sys/devices/virtual/net/{names.device(0)}/tx_queue_len", "77\n")
        ones.append(timed(lambda: passes.run(Scope(frozenset([names.name])))))  # noqa: B023
        if root.read(f"/sys/devices/virtual/net/{names.device(0)}/tx_queue_len") != "300\n":
            raise SystemExit(f"{names.name} was not put back")
    counting = Recorded(str(place))
    quiet = Observer(counting, TreeVirt(host, counting), told=lambda: True)
    idle = Reconciler(quiet, TreeOps(host, root), journal, policies)
    idle.run(FULL)
    counting.files.clear()
    turns = [timed(lambda: idle.run(idle.again().merge(UNANNOUNCED))) for _ in range(TURNS)]
    scrape = timed(lambda: exposition(passes.state))
    size = len(exposition(passes.state))
    gc.collect()
    tracemalloc.start()
    both()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    journal.close()
    return Row(
        guests=guests,
        threads=sum(len(g.threads) for g in snapshot.guests),
        files=len(recorded.files),
        whole=statistics.median(a for a, _ in pairs),
        plan=plan,
        floor=statistics.median(b for _, b in pairs),
        ratio=(statistics.median(ratios), ratios[0], ratios[-1]),
        peak=peak / 2**20,
        resident=grown,
        one=statistics.median(ones),
        turn=statistics.median(turns),
        idle_hour=sum(turns) / len(turns) * 3600 / INTERVAL,
        idle_files=len(counting.files) / len(turns),
        scrape=scrape,
        scrape_size=size / 2**20,
    )


def resident() -> float:
    """Resident memory of this process now, in MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


COLUMNS = (
    ("guests", lambda r: f"{r.guests:,}"),
    ("threads", lambda r: f"{r.threads:,}"),
    ("files read", lambda r: f"{r.files:,}"),
    ("look and plan, s", lambda r: f"{r.whole:.3f}"),
    ("of it plan, s", lambda r: f"{r.plan:.3f}"),
    ("floor, s", lambda r: f"{r.floor:.3f}"),
    ("ratio", lambda r: f"{r.ratio[0]:.2f} ({r.ratio[1]:.2f}..{r.ratio[2]:.2f})"),
    ("peak, MiB", lambda r: f"{r.peak:.1f}"),
    ("resident, MiB", lambda r: f"{r.resident:.0f}"),
    ("one changed guest, ms", lambda r: f"{r.one * 1e3:.1f}"),
    ("turn, ms", lambda r: f"{r.turn * 1e3:.0f}"),
    ("files in a turn", lambda r: f"{r.idle_files:,.0f}"),
    ("idle hour, CPU s", lambda r: f"{r.idle_hour:.0f}"),
    ("scrape, s", lambda r: f"{r.scrape:.2f}"),
    ("scrape, MiB", lambda r: f"{r.scrape_size:.1f}"),
)  # fmt: skip


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table, one line a size."""
    head = "| " + " | ".join(name for name, _ in COLUMNS) + " |"
    rule = "|" + "---:|" * len(COLUMNS)
    lines = ["| " + " | ".join(show(row) for _, show in COLUMNS) + " |" for row in rows]
    return "\n".join([head, rule, *lines])


def page(rows: list[Row]) -> str:
    """docs/results/scale.md."""
    last = rows[-1]
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    model = next(
        (
            x.partition(":")[2].strip()
            for x in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in x
        ),
        platform.machine(),
    )
    return f"""# Many guests on one host

The start is [what was found, on one page](README.md); this page is its appendix.

`make bench-scale` measured this on synthetic hosts, made after a recorded one (tests/scale), on
tmpfs. Guests have {last.threads // last.guests} threads: 8 that are named as vcpus, of which the domain
has 2, and 4 vhost workers. They are under one policy that chooses CPUs (`auto`), asks for rr and sets
the queues. They are tuned by the daemon's own passes first, so everything is as it is on a host that
runs.

Machine: {model}, {os.cpu_count()} CPUs, Linux {platform.release()}, Python {platform.python_version()}; load
averages at the end {load}. Times are CPU time of this process.

{table(rows)}

- **look and plan**: everything is looked at and all is planned. **floor**: the very same files
  only opened, read and closed, directories listed, links read, {PAIRS} times each in turns; the
  **ratio** is the median of the pairs, with the least and the most. A file of tmpfs is cheaper to
  read than one of /proc, whose text the kernel makes first: the ratio is higher here than there.
- **peak** is what a look and a plan allocate at most (tracemalloc), **resident** what the process
  had grown by after its second pass, journal and snapshot included.
- **one changed guest**: the median of nine passes, each for one guest whose queue length
  something had changed: looked at alone, planned alone, put back through the journal.
- **turn**: what the daemon does every {INTERVAL:.0f} s without an event, while the kernel tells it of changes by
  other programs; the median. Each turn lists /proc and counts the threads of every guest. With up to {FEW}
  guests each, otherwise every {ROUND * SELDOM}th, reads the threads of all guests that a policy can name; every {ROUND}th
  compares the host; every {TURNS}th looks at everything. **files in a turn** is the mean of {TURNS} turns,
  **idle hour** their CPU time extrapolated to an hour. The guard, which samples four times a second
  beside, is not in it.
- **scrape**: the text of /metrics for all threads, which is made from what the last pass has seen.

A guest that comes, one whose CPUs are chosen anew, and one whose lists have changed are planned
with all others, in memory: **of it plan** is what that costs.

floor ratio {last.ratio[0]:.2f}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", default=str(PAGE))
    options = parser.parse_args()
    LOGGER.setLevel(logging.ERROR)
    if options.size:
        return _one(options.size)
    rows = []
    for size in map(int, options.sizes.split(",")):
        # A process each: what one size allocated must not stand in the next one's way.
        done = subprocess.run(
            [sys.executable, __file__, "--size", str(size)], stdout=subprocess.PIPE, check=True
        )
        rows.append(eval(done.stdout, {"Row": Row}))
    text = page(rows)
    Path(options.out).write_text(text)
    print(table(rows))
    last = rows[-1].ratio[0]
    print(f"floor ratio {last:.2f}")
    return 0 if last <= WANTED else 1


def _one(size: int) -> int:
    base = "/dev/shm" if os.path.isdir("/dev/shm") else None
    place = tempfile.mkdtemp(prefix="vsrtune-scale-", dir=base)
    try:
        row = measure(size, Path(place) / "host", lambda text: print(text, file=sys.stderr))
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(repr(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
