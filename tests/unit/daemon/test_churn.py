"""200 guests on a host in memory, started, destroyed and plugged in random order: what is tuned
at the end is what the planner wants, and what stop leaves is what was there. Every write is in the
plan that is shown for the pass.

The seed is printed; VSRTUNE_CHURN_SEED repeats a run. tests/lab/inside/test_churn.py does the same to
the guests that a lab carries.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import shell_samples as samples
from fake_host import FakeHost

from vsrtune.cli.options import lasting
from vsrtune.daemon.reconciler import Reconciler
from vsrtune.execute.journal import Journal
from vsrtune.model.guest import Confidence, Guest, Role, WorkerKind
from vsrtune.model.snapshot import Snapshot
from vsrtune.plan import planner
from vsrtune.plan.full_plan import full_plan
from vsrtune.policy.model import Policy
from vsrtune.policy.parser import parse

GUESTS = 200
STEPS = 200
# Passes come this often among the changes, so that most passes see several at once.
PASS_EVERY = 0.05
EDGE = samples.POLICY.replace('"*"', '"edge*"')
QUEUES = 'guest: "edge*"\nqueue: {macvtap: 200}\nprofile: none\n'
CORE = 'guest: "core*"\ncpus: {vcpu: "1-2", vhost: 3}\nprofile: none\n'


def parsed(*texts: str) -> tuple[Policy, ...]:
    return tuple(parse(text, f"test{n}.yaml") for n, text in enumerate(texts))


class Churn:
    """What others do to the host, done alike to one that vsrtune never sees: ``plain``."""

    def __init__(self, chance: random.Random, host: FakeHost) -> None:
        self.chance, self.host = chance, host
        self.plain = FakeHost(*host.snapshot.guests)
        self.plain.snapshot = host.snapshot
        self.number = 1000

    def start(self) -> None:
        name = f"{self.chance.choice(('edge', 'core', 'other'))}{self.number}"
        guest = samples.guest(name, self.number)
        place = f"machine-qemu-{self.number}-{name}"
        threads = tuple(
            replace(t, cgroup=t.cgroup.replace("machine-qemu-1-vr1", place)) for t in guest.threads
        )
        self.number += 10
        for host in (self.host, self.plain):
            host.start(replace(guest, threads=threads))

    def destroy(self) -> None:
        victim = self.chance.choice(self.host.snapshot.guests)
        for host in (self.host, self.plain):
            host.destroy(victim.name)
            host.dirs = {d for d in host.dirs if f"-{victim.name}.scope" not in d}

    def plug(self) -> None:
        """A NIC with its worker, as libvirt plugs it: wherever the emulator may run."""
        self._change(self._plugged)

    def unplug(self) -> None:
        self._change(lambda g: replace(g, threads=g.threads[:3], interfaces=g.interfaces[:1]))

    def add_vcpu(self) -> None:
        self._change(self._with_vcpu)

    def _plugged(self, guest: Guest) -> Guest:
        number = self.number
        tap = replace(
            guest.interfaces[0],
            target=f"macvtap{number}",
            ifindex=number,
            mac=f"52:54:00:01:{number >> 8:02x}:{number & 255:02x}",
            txqueuelen=500,
        )
        worker = samples.thread(
            guest.pid, number, Role.VHOST,
            name=f"vhost-{guest.pid}", worker=WorkerKind.KTHREAD, interface=tap.target, queue=0,
            confidence=Confidence.ORDER, cgroup=guest.threads[0].cgroup,
        )  # fmt: skip
        return replace(guest, threads=(*guest.threads, worker), interfaces=(*guest.interfaces, tap))

    def _with_vcpu(self, guest: Guest) -> Guest:
        index = len(guest.by_role(Role.VCPU))
        vcpu = samples.thread(
            guest.pid, self.number, Role.VCPU, name=f"CPU {index}/KVM", index=index,
            cgroup=guest.threads[1].cgroup.replace("vcpu0", f"vcpu{index}"), pin=samples.ALL,
        )  # fmt: skip
        return replace(guest, threads=(*guest.threads, vcpu))

    def _change(self, change: Callable[[Guest], Guest]) -> None:
        name = self.chance.choice(self.host.snapshot.guests).name
        self.number += 1
        for host in (self.host, self.plain):
            host.snapshot = replace(
                host.snapshot,
                guests=tuple(change(g) if g.name == name else g for g in host.snapshot.guests),
            )


def by_name(snapshot: Snapshot) -> dict[str, Guest]:
    return {guest.name: guest for guest in snapshot.guests}


def test_what_is_left_after_churn_is_what_the_policies_say_and_then_what_was(
    tmp_path: Path,
) -> None:
    seed = int(os.environ.get("VSRTUNE_CHURN_SEED") or random.randrange(10**6))
    print(f"VSRTUNE_CHURN_SEED={seed}")
    chance = random.Random(seed)
    host = FakeHost()
    host.snapshot = replace(host.snapshot, guests=())
    churn = Churn(chance, host)
    while len(host.snapshot.guests) < GUESTS:
        churn.start()
    now = 1000.0
    with Journal.open(tmp_path / "journal.jsonl", samples.BOOT) as journal:
        passes = Reconciler(host, host, journal, parsed(EDGE, CORE), clock=lambda: now)

        def run() -> None:
            """A pass, which writes what `vsrtune plan` would show."""
            entries = lasting(journal.entries(), host.snapshot)
            shown = full_plan(host.snapshot, passes.policies, entries)
            begin = len(host.written)
            passes.run()
            assert host.written[begin:] == [(a.target, a.after) for a in shown.actions]

        run()
        for _ in range(STEPS):
            now += 1
            (change,) = chance.choices(
                (churn.start, churn.destroy, churn.plug, churn.unplug, churn.add_vcpu),
                (5, 5, 4, 2, 2),
            )
            change()
            if chance.random() < 0.01:
                passes.reload(chance.choice((parsed(EDGE, CORE), parsed(QUEUES), parsed(CORE))))
                run()
            elif chance.random() < PASS_EVERY:
                run()
        passes.reload(parsed(EDGE, CORE))
        run()
        plan = planner.plan(host.snapshot, passes.policies, journal.applied())
        assert (plan.actions, plan.refusals) == ((), ())
        assert all(g.tuned for g in passes.state.guests if not g.ref.startswith("other"))
        assert passes.state.totals.write_errors == 0
        assert host.snapshot != churn.plain.snapshot
        assert passes.stop()
        assert by_name(host.snapshot) == by_name(churn.plain.snapshot)
        assert host.dirs == set()
        assert journal.entries() == ()
