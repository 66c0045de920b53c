"""CPUs that go offline under a tuned guest and come back, one at a time or, as SMT siblings do when
somebody writes `off` to /sys/devices/system/cpu/smt/control, several at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_host import FakeHost

from vsrtune.core.cpuset import CpuSet
from vsrtune.daemon.reconciler import Reconciler
from vsrtune.execute.journal import Journal
from vsrtune.model.guest import DATA_PLANE, Guest, Sched, SchedClass
from vsrtune.plan import planner
from vsrtune.policy.parser import parse

POLICY = """\
guest: "*"
cpus: {irq: 0, vcpu: auto, vhost: auto}
scheduler: {vcpu: {class: rr, priority: 10}, vhost: {class: rr, priority: 10}}
profile: none
"""


def lose(host: FakeHost, *gone: int) -> None:
    """Take these CPUs offline and all others online. The kernel gives a thread without any CPU all
    that are left."""
    machine = host.snapshot.host
    cpus = tuple(replace(cpu, online=cpu.id not in gone) for cpu in machine.cpus)
    machine = replace(machine, cpus=cpus)

    def moved(guest: Guest) -> Guest:
        threads = (
            t if t.affinity & machine.online else replace(t, affinity=machine.online)
            for t in guest.threads
        )
        return replace(guest, threads=tuple(threads))

    guests = tuple(map(moved, host.snapshot.guests))
    host.snapshot = replace(host.snapshot, host=machine, guests=guests)


@pytest.mark.parametrize("gone", [(1,), (2,), (3,), (1, 3), (2, 3)])
def test_the_guest_moves_to_what_is_left_and_is_restored(
    gone: tuple[int, ...], tmp_path: Path
) -> None:
    host, now = FakeHost(), 1000.0
    before = host.snapshot
    policies = (parse(POLICY, "p.yaml"),)
    with Journal.open(tmp_path / "journal.jsonl", before.host.boot_id) as journal:
        passes = Reconciler(host, host, journal, policies, clock=lambda: now)

        def settled() -> list[CpuSet]:
            """Where the data plane runs after some passes, which leave nothing to do."""
            nonlocal now
            for _ in range(3):
                now += 60
                passes.run()
            plan = planner.plan(host.snapshot, policies, journal.applied())
            assert (plan.actions, plan.refusals) == ((), ())
            assert all(g.tuned for g in passes.state.guests)
            (guest,) = host.snapshot.guests
            return [t.affinity for t in guest.threads if t.role in DATA_PLANE]

        apart = len(set(settled()))
        assert apart > 1
        lose(host, *gone)
        left = host.snapshot.host.online - CpuSet([0])
        assert all(cpus <= left for cpus in settled())
        lose(host)
        assert len(set(settled())) == apart, "no longer crowded"
        assert passes.stop()
        assert journal.entries() == ()
    assert host.snapshot == before


@pytest.mark.parametrize("pinned", [False, True], ids=["vsrtune's pin", "a pin found so"])
def test_no_thread_stays_realtime_when_the_cpu_in_its_list_goes(
    tmp_path: Path, pinned: bool
) -> None:
    """The guest is refused as long as the CPU is offline, and tuned as before when it is back."""
    host = FakeHost()
    if pinned:
        host.change("vcpu", affinity=CpuSet([3]), pin=CpuSet([3]))
    before = host.snapshot
    by_hand = POLICY.replace("vcpu: auto, vhost: auto", "vcpu: 3, vhost: 2")
    with Journal.open(tmp_path / "journal.jsonl", before.host.boot_id) as journal:
        passes = Reconciler(host, host, journal, (parse(by_hand, "p.yaml"),))
        passes.run()
        tuned = host.snapshot.guests
        lose(host, 3)
        passes.run()
        vcpu, worker = (t for t in host.snapshot.guests[0].threads if t.role in DATA_PLANE)
        assert (vcpu.sched, vcpu.affinity) == (Sched(), CpuSet([0, 1, 2]))
        assert worker.sched.cls is SchedClass.RR, "it has its CPU"
        assert not passes.run()
        assert passes.state.totals.write_errors == 0
        lose(host)
        host.change("vcpu", affinity=CpuSet([3]))
        passes.run()
        assert host.snapshot.guests == tuned
        assert passes.stop()
    assert host.snapshot == before
