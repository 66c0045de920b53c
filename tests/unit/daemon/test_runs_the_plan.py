"""The daemon runs the plan that `vsrtune plan` prints, and writes nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import shell_samples as samples
from fake_host import FakeHost
from plan_cases import CASES, read
from shell_samples import policies

from vsrtune.cli.options import lasting
from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import Lasting, WriteError
from vsrtune.daemon.reconciler import Reconciler
from vsrtune.execute.journal import Journal
from vsrtune.model.guest import Role, Sched
from vsrtune.model.journal_records import Entry
from vsrtune.model.plan import Plan
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import (
    CgroupDir,
    CpusetList,
    PartitionState,
    Pin,
    Target,
    ThreadCgroup,
    TimeSlice,
    Value,
)
from vsrtune.plan.full_plan import full_plan
from vsrtune.policy.model import Policy


class Daemon:
    """Passes over a host in memory, each compared with the plan that was printed before it."""

    def __init__(self, host: FakeHost, journal: Journal) -> None:
        self.host, self.journal = host, journal
        self.passes = Reconciler(host, host, journal, ())

    def reload(self, policies: tuple[Policy, ...]) -> Plan:
        """A reload with these policies; the plan for it."""
        entries = lasting(self.journal.entries(), self.host.snapshot)
        shown = full_plan(self.host.snapshot, policies, entries, reassert=True)
        begin, errors = len(self.host.written), self.passes.state.totals.write_errors
        self.passes.reload(policies)
        self.passes.run()
        assert self.passes.state.failure == ""
        assert self.passes.state.totals.write_errors == errors
        assert self.host.written[begin:] == [(a.target, a.after) for a in shown.actions]
        return shown


def original(snapshot: Snapshot, target: Target, written: Value) -> Value:
    """What may have been there before a value of ours."""
    if isinstance(target, ThreadCgroup):
        guest = next(g for g in snapshot.guests if g.ref == target.guest)
        return guest.by_role(Role.EMULATOR)[0].cgroup
    match written:
        case Pin():
            return Pin(snapshot.host.online, None if written.cpuset is None else "")
        case CpuSet():
            return snapshot.host.online
        case Sched():
            return Sched()
        case CpusetList():
            return CpusetList("")
        case PartitionState():
            return PartitionState("member")
        case TimeSlice():
            return TimeSlice(100)
        case bool():
            return False
        case int():
            return 1000
    raise AssertionError(written)


@pytest.mark.parametrize("file", CASES, ids=lambda p: p.stem)
def test_each_reload_runs_the_plan_that_is_printed(
    file: Path, tmp_path: Path, journal: Journal
) -> None:
    case = read(file)
    host = FakeHost()
    host.snapshot = case.snapshot
    for target, value in case.ours.items():
        journal.adopt(Entry(target, original(case.snapshot, target, value), value, "done"))
        if isinstance(target, CgroupDir):
            host.dirs.add(target.path)
    daemon = Daemon(host, journal)
    policies = case.load(tmp_path)
    daemon.reload(policies)
    daemon.reload(policies)
    back = daemon.reload(())
    assert all(a.release for a in back.actions)
    busy = {g.ref for g in case.snapshot.guests if g.waits}
    assert {e.target.guest for e in journal.entries()} <= busy
    assert daemon.passes.stop()
    assert journal.entries() == ()


VCPU = 'guest: "*"\ncpus: {vcpu: 1}\nprofile: none\n'
AWAY = WriteError("libvirt is away", lasting=Lasting.TRANSIENT)


@pytest.fixture
def daemon(host: FakeHost, journal: Journal) -> Daemon:
    made = Daemon(host, journal)
    made.reload(policies(samples.POLICY))
    return made


def test_releases_come_first_and_in_the_plan(daemon: Daemon) -> None:
    shown = daemon.reload(policies('guest: "*"\ncpus: {vcpu: 1, vhost: 3}\nprofile: none\n'))
    kinds = [(a.target.kind, a.release) for a in shown.actions]
    assert kinds == [
        ("thread-sched", True),
        ("thread-sched", True),
        ("txqueuelen", True),
        ("thread-affinity", False),
    ]


def test_what_somebody_else_changed_is_no_longer_ours(
    daemon: Daemon, host: FakeHost, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    host.set_queue(77)
    shown = daemon.reload(policies(VCPU))
    assert "txqueuelen" not in {a.target.kind for a in shown.actions}
    (skipped,) = [s for s in shown.skipped if "somebody else has changed it" in s.reason]
    assert "queue" in skipped.subject
    assert "txqueuelen" not in {e.target.kind for e in journal.entries()}
    assert [r for r in caplog.records if r.message.startswith("left alone: vr1: ")]
    host.set_queue(300)
    assert daemon.reload(policies(VCPU)).actions == ()


def test_a_release_that_fails_stops_its_guest_only_and_undoes_no_other_release(
    daemon: Daemon, host: FakeHost, journal: Journal
) -> None:
    second = samples.guest("vr2", pid=200)
    threads = (replace(t, cgroup=t.cgroup.replace("vr1", "vr2")) for t in second.threads)
    host.start(replace(second, threads=tuple(threads)))
    daemon.reload(policies(samples.POLICY))
    real = host.write

    def write(target: Target, value: Value) -> None:
        if target.guest == "vr1" and target.kind == "vcpu-pin":
            raise AWAY
        real(target, value)

    host.write = write  # type: ignore[method-assign]
    daemon.passes.reload(policies('guest: "*"\nqueue: {macvtap: 200}\nprofile: none\n'))
    daemon.passes.run()
    assert {g.ref: g.tuned for g in daemon.passes.state.guests} == {"vr1": False, "vr2": True}
    assert [g.interfaces[0].txqueuelen for g in host.snapshot.guests] == [300, 200]
    left = {e.target.kind for e in journal.entries(frozenset(["vr1"]))}
    assert left == {"vcpu-pin", "txqueuelen"}
    host.write = real  # type: ignore[method-assign]
    daemon.reload(policies('guest: "*"\nqueue: {macvtap: 200}\nprofile: none\n'))
    assert [g.interfaces[0].txqueuelen for g in host.snapshot.guests] == [200, 200]


def test_a_setting_that_fails_keeps_the_releases_of_its_guest(
    daemon: Daemon, host: FakeHost
) -> None:
    host.fail["thread-affinity"] = AWAY
    daemon.passes.reload(policies('guest: "*"\ncpus: {vcpu: 2, vhost: 3}\nprofile: none\n'))
    daemon.passes.run()
    (guest,) = host.snapshot.guests
    assert guest.by_role(Role.VCPU)[0].sched == Sched()
    assert guest.by_role(Role.VCPU)[0].affinity == CpuSet([1]), "as before: the guest is as it was"
    assert guest.interfaces[0].txqueuelen == 500


def test_a_thread_that_is_gone_is_in_no_plan(daemon: Daemon, host: FakeHost) -> None:
    (guest,) = host.snapshot.guests
    threads = tuple(t for t in guest.threads if t.role is not Role.VHOST)
    host.snapshot = replace(host.snapshot, guests=(replace(guest, threads=threads),))
    shown = daemon.reload(())
    assert {a.target.kind for a in shown.actions} == {
        "vcpu-pin", "thread-sched", "txqueuelen", "cgroup-dir",
    }  # fmt: skip
