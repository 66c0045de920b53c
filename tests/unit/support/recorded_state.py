"""What the daemon knows after passes over a recorded host: its own passes, on the recording in
memory."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import recorded_hosts
from advanced_root import proc_stat
from fake_host import FakeHost
from planning_samples import ran

from vsrtune.core.errors import Lasting, WriteError
from vsrtune.daemon.load_tracker import RecentKeeper
from vsrtune.daemon.reconciler import Reconciler
from vsrtune.execute.journal import Journal
from vsrtune.model.daemon_state import DaemonState
from vsrtune.policy.parser import parse

POLICY = """\
guest: "{guest}"
cpus: {{irq: auto, vcpu: auto, vhost: auto}}
scheduler:
  vcpu: {{class: rr, priority: 10}}
  vhost: {{class: rr, priority: 10}}
  softirq: {{class: fifo, priority: 10}}
queue: {{macvtap: 300}}
drift: {{queue: report}}
profile: none
"""
# The guests of hosts without libvirt that are no plain QEMUs.
PLAIN = {"trixie-proxmox": "proxmox:*", "trixie-kubevirt": "kubevirt:*/*"}
# A host with more vcpus than CPUs that auto would give them.
CROWDED = {"trixie-e1000e": ("vcpu: auto", "vcpu: 2")}


@contextmanager
def passes(
    name: str, *, rename: str = "", source: str = POLICY
) -> Iterator[tuple[FakeHost, Reconciler]]:
    """A recorded host and the passes over it, under a policy for all libvirt guests and one
    for the others. ``rename`` is another name for the first guest."""
    host = FakeHost()
    host.snapshot = recorded_hosts.shown(recorded_hosts.file(name))
    if rename:
        first, *others = host.snapshot.guests
        host.snapshot = replace(host.snapshot, guests=(replace(first, name=rename), *others))
    source = source.replace(*CROWDED.get(name, ("", "")))
    plain = PLAIN.get(name, "qemu:*")
    if plain.startswith("kubevirt:"):
        # Its devices are its pod's.
        source = source.replace("irq: auto", "irq: 0").replace("queue: {{macvtap: 300}}\n", "")
    policies = tuple(
        parse(source.format(guest=guest), f"/etc/vsrtune/policies/{file}.yaml")
        for file, guest in (("routers", "*"), ("plain", plain))
    )
    with (
        tempfile.TemporaryDirectory() as place,
        Journal.open(Path(place) / "journal.jsonl", host.snapshot.host.boot_id) as journal,
    ):
        yield host, Reconciler(host, host, journal, policies)


# Made-up traffic: the shares of a CPU's time, and the frames a second that every device received,
# lost (a macvtap counts them as received) and sent, ten seconds each.
BUSY = {0: (0.665, 0.585), 1: (1.0, 0.0), 2: (0.02, 0.01)}
RATES = tuple((n * 1000, n * 100, n * 800) for n in range(1, 31))


class Traffic:
    """The files of a host with that traffic, after ``now`` intervals."""

    def __init__(self, devices: Collection[str], now: int = 0) -> None:
        self.devices = devices
        self.now = now

    def clock(self) -> float:
        return 10.0 * self.now

    def read(self, path: str) -> str:
        if path == "/proc/stat":
            shares = {cpu: (busy, soft, 1 - busy) for cpu, (busy, soft) in BUSY.items()}
            return proc_stat(
                {cpu: tuple(round(1000 * self.now * s) for s in of) for cpu, of in shares.items()}  # type: ignore[misc]
            )
        assert path == "/proc/net/dev"
        rx, lost, tx = (10 * sum(row[n] for row in RATES[: self.now]) for n in range(3))
        lines = [f"{name}: 0 {rx} 0 {lost} 0 0 0 0 0 {tx} 0 0 0 0 0 0" for name in self.devices]
        return "\n".join(["h", "h", *lines, ""])


def with_traffic(state: DaemonState) -> DaemonState:
    """The state of a daemon that has sampled that traffic."""
    assert state.snapshot is not None
    traffic: Any = Traffic({i.target for g in state.snapshot.guests for i in g.interfaces})
    keeper = RecentKeeper(traffic, traffic.clock)
    for _ in RATES:
        keeper.update(state)
        traffic.now += 1
    return keeper.update(state)


def set_queue(host: FakeHost, guest: int, length: int) -> str:
    """Somebody sets the queue of a guest's first interface; the name of that."""
    found = host.snapshot.guests[guest]
    first, *others = found.interfaces
    changed = replace(found, interfaces=(replace(first, txqueuelen=length), *others))
    guests = list(host.snapshot.guests)
    guests[guest] = changed
    host.snapshot = replace(host.snapshot, guests=tuple(guests))
    return first.target


def run_threads(host: FakeHost) -> None:
    """Every thread runs for a moment, on the first CPU where it may."""
    host.each(lambda g: replace(g, threads=tuple(map(ran, g.threads))))


def refuse_classes(host: FakeHost) -> None:
    """The host lets no thread have another class for now."""
    host.fail["thread-sched"] = WriteError("not permitted", lasting=Lasting.TRANSIENT)
