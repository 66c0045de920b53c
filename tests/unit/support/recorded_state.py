"""What the daemon knows after passes over a recorded host: its own passes, on the recording in
memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import recorded_hosts
from fake_host import FakeHost

from vsrtune.core.errors import Lasting, WriteError
from vsrtune.daemon.reconciler import Reconciler
from vsrtune.execute.journal import Journal
from vsrtune.model.guest import Thread
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
    policies = tuple(
        parse(source.format(guest=guest), f"/etc/vsrtune/policies/{file}.yaml")
        for file, guest in (("routers", "*"), ("plain", "qemu:*"))
    )
    with (
        tempfile.TemporaryDirectory() as place,
        Journal.open(Path(place) / "journal.jsonl", host.snapshot.host.boot_id) as journal,
    ):
        yield host, Reconciler(host, host, journal, policies)


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

    def run(thread: Thread) -> Thread:
        here = thread.last_cpu in thread.affinity
        return thread if here else replace(thread, last_cpu=thread.affinity.first())

    guests = (replace(g, threads=tuple(run(t) for t in g.threads)) for g in host.snapshot.guests)
    host.snapshot = replace(host.snapshot, guests=tuple(guests))


def refuse_classes(host: FakeHost) -> None:
    """The host lets no thread have another class for now."""
    host.fail["thread-sched"] = WriteError("not permitted", lasting=Lasting.TRANSIENT)
