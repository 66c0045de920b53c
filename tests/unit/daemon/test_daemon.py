"""reconciler.py and loop.py with the real planner, executor and journal, on a host in memory."""

from __future__ import annotations

import errno
import gc
import os
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import planning_samples as planned
import pytest
import recorded_state
import shell_samples as samples
from fake_host import FakeHost
from shell_samples import POLICY, Clock, policies

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import (
    JournalError,
    Lasting,
    LateError,
    ObserveError,
    PendingError,
    PolicyError,
    WriteError,
)
from vsrtune.core.exit_codes import ExitCode
from vsrtune.daemon import attachments
from vsrtune.daemon.events.changes import Change
from vsrtune.daemon.http import exposition
from vsrtune.daemon.loop import Daemon, Timing
from vsrtune.daemon.reconciler import Reconciler
from vsrtune.daemon.scope import FULL, NOTHING, UNANNOUNCED, Scope
from vsrtune.execute import executor
from vsrtune.execute.journal import Journal
from vsrtune.model.daemon_state import DaemonState
from vsrtune.model.guest import Confidence, Role, Sched, SchedClass, Thread
from vsrtune.model.journal_records import undo_action
from vsrtune.model.plan import Culprit
from vsrtune.model.snapshot import Problem
from vsrtune.model.stepdown import StepLevel
from vsrtune.model.targets import ThreadSched
from vsrtune.observe.config_files import load_dirs
from vsrtune.policy.model import Policy
from vsrtune.views.page_data import status_page

# It names no guest.
OTHER = 'guest: "none"\nprofile: none\n'
RR = Sched(SchedClass.RR, 7, reset_on_fork=True)
BUDGET = """\
guest: "*"
cpus: {irq: 0, vcpu: 1, vhost: 2}
scheduler: {vhost: {class: deadline, runtime: 1ms, period: 10ms}}
profile: none
"""
# An operator's `virsh vcpupin`.
PINNED: dict[str, object] = {
    "affinity": CpuSet([3]), "pin": CpuSet([3]), "cpuset_cpus": "3", "cpuset_effective": CpuSet([3]),
}  # fmt: skip


def thread(host: FakeHost, role: Role, guest: int = 0) -> Thread:
    (found,) = host.snapshot.guests[guest].by_role(role)
    return found


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def passes(host: FakeHost, journal: Journal, clock: Clock) -> Reconciler:
    return Reconciler(host, host, journal, policies(), trace=0.5, clock=clock)


class TestPass:
    def test_an_idle_turn_asks_for_nothing_more(self, passes: Reconciler) -> None:
        """Otherwise a turn on a host with few guests would observe everything."""
        assert passes.run()
        assert passes.again() == FULL
        assert not passes.run(passes.again())
        assert passes.again() == NOTHING
        assert not passes.run(passes.again().merge(UNANNOUNCED))

    def test_tunes_as_the_policy_says_and_then_has_nothing_to_do(
        self, host: FakeHost, passes: Reconciler
    ) -> None:
        assert passes.run()
        assert thread(host, Role.VCPU).affinity == CpuSet([1])
        assert thread(host, Role.VHOST).affinity == CpuSet([2])
        assert thread(host, Role.VCPU).sched == RR
        assert host.snapshot.guests[0].interfaces[0].txqueuelen == 300
        assert not passes.run()
        (state,) = passes.state.guests
        assert (state.tuned, state.drift) == (True, 0)
        assert passes.state.totals.passes == 2

    def test_no_policy_means_no_write(self, host: FakeHost, passes: Reconciler) -> None:
        passes.policies = ()
        assert not passes.run()
        assert host.writes == 0
        assert passes.state.tuned == 0

    def test_a_libvirt_that_nothing_needs_is_no_problem(
        self, host: FakeHost, passes: Reconciler
    ) -> None:
        """It is one while a policy names a guest that only a libvirt can show."""
        gone = Problem("libvirt", "libvirt does not answer")
        host.snapshot = replace(host.snapshot, guests=(), problems=(gone,))
        told = 'vsrtune_unread{reader="libvirt"} 1.0'
        passes.run()
        assert told in exposition(passes.state)
        passes.policies = ()
        passes.run()
        assert told not in exposition(passes.state)
        assert status_page(passes.state)["problems"] == []

    def test_guest_started_later_is_tuned_and_a_destroyed_one_forgotten(
        self, host: FakeHost, passes: Reconciler, journal: Journal
    ) -> None:
        passes.run()
        host.start(samples.guest("vr 2.ü", pid=200))
        passes.run()
        assert {e.target.guest for e in journal.entries()} == {"vr1", "vr 2.ü"}
        assert passes.state.tuned == 2
        host.destroy("vr1")
        host.dirs = {d for d in host.dirs if "vr1" not in d}
        passes.run()
        assert "vr1" not in {
            e.target.guest for e in journal.entries() if e.target.kind != "cgroup-dir"
        }
        assert [g.ref for g in passes.state.guests] == ["vr 2.ü"]

    def test_guest_missing_because_its_reader_failed_keeps_all_but_its_classes(
        self, host: FakeHost, passes: Reconciler, journal: Journal
    ) -> None:
        """The guard does not see it either."""
        untuned = thread(host, Role.VCPU).sched
        passes.run()
        whole = host.snapshot
        hidden = replace(whole, guests=())
        host.observe = lambda trace_seconds=0.0: hidden  # type: ignore[method-assign]
        passes.run()
        assert {e.target.guest for e in journal.entries()} == {"vr1"}
        assert thread(host, Role.VCPU) == replace(
            *whole.guests[0].by_role(Role.VCPU), sched=untuned
        )
        del host.observe  # type: ignore[method-assign]
        passes.run()
        assert host.snapshot == whole

    def test_drift_is_corrected_and_counted(self, host: FakeHost, passes: Reconciler) -> None:
        passes.run()
        host.change("vhost", affinity=samples.ALL)
        passes.run()
        assert thread(host, Role.VHOST).affinity == CpuSet([2])
        assert passes.state.totals.corrections == 1

    def test_a_pin_that_has_moved_is_looked_at_twice(
        self, host: FakeHost, passes: Reconciler, clock: Clock
    ) -> None:
        """libvirt moves the thread and notes the pin later."""
        elsewhere = {"cpuset_cpus": "3", "cpuset_effective": CpuSet([3]), "affinity": CpuSet([3])}
        passes.run()
        host.change("vcpu", **elsewhere)
        assert not passes.run()
        assert passes.state.drift > 0
        assert passes.next_try() is not None
        host.change("vcpu", pin=CpuSet([3]))
        assert not passes.run()
        assert passes.state.guests[0].held == 1
        host.change("vcpu", pin=CpuSet([1]))
        assert not passes.run()
        clock.now += 1
        assert not passes.run(), "a slow host may have had two passes in between"
        assert passes.next_try() == 1
        clock.now += 1
        assert passes.run(), "nobody asked libvirt for it"
        assert thread(host, Role.VCPU).affinity == CpuSet([1])
        assert passes.next_try() is None
        host.change("vcpu", **PINNED)
        assert not passes.run()
        assert passes.state.guests[0].held == 1
        assert passes.next_try() is None, "held for the operator: no pause ends"
        assert passes.again() == NOTHING

    def test_operators_pin_is_held_until_a_reload(
        self, host: FakeHost, passes: Reconciler, caplog: pytest.LogCaptureFixture
    ) -> None:
        passes.run()
        host.change("vcpu", **PINNED)
        for _ in range(3):
            passes.run()
        assert thread(host, Role.VCPU).affinity == CpuSet([3])
        (state,) = passes.state.guests
        assert (state.drift, state.held) == (1, 1)
        warned = [
            r for r in caplog.records if r.levelname == "WARNING" and "left alone" in r.message
        ]
        assert len(warned) == 1
        passes.reload(passes.policies)
        passes.run()
        assert thread(host, Role.VCPU).affinity == CpuSet([1])
        assert passes.state.drift == 0

    @pytest.mark.parametrize("how", ["refused", "broken off"])
    def test_a_reload_that_fails_overrules_the_operator_later(
        self, host: FakeHost, passes: Reconciler, clock: Clock, how: str
    ) -> None:
        passes.run()
        host.change("vcpu", **PINNED)
        passes.run()
        error = WriteError("libvirt is away", lasting=Lasting.TRANSIENT)
        if how == "refused":
            host.fail["vcpu-pin"] = error
        else:
            host.fail_observe = error
        passes.reload(passes.policies)
        passes.run()
        assert thread(host, Role.VCPU).affinity == CpuSet([3])
        host.fail.clear()
        host.fail_observe = None
        wait = passes.next_try()
        assert wait is not None
        clock.now += wait
        passes.run()
        assert thread(host, Role.VCPU).affinity == CpuSet([1])
        host.change("vcpu", **PINNED)
        passes.run()
        assert thread(host, Role.VCPU).affinity == CpuSet([3]), "pinned after the reload: held"
        assert passes.next_try() is None

    def test_what_a_reload_could_not_take_back_is_taken_back_later(
        self, host: FakeHost, passes: Reconciler, clock: Clock
    ) -> None:
        before = host.snapshot
        passes.run()
        passes.policies = ()
        host.fail["vcpu-pin"] = WriteError("libvirt is away", lasting=Lasting.TRANSIENT)
        passes.reload(passes.policies)
        passes.run()
        assert host.snapshot != before
        waits = []
        for _ in range(8):
            waits.append(passes.next_try() or 0.0)
            clock.now += waits[-1]
            passes.run()
        assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
        host.fail.clear()
        passes.run()
        assert host.snapshot != before, "not before its time"
        clock.now += 60
        passes.run()
        assert host.snapshot == before
        assert passes.next_try() is None

    def test_a_reload_reaches_a_guest_with_which_libvirt_is_busy_when_it_is_done(
        self, host: FakeHost, passes: Reconciler, clock: Clock
    ) -> None:
        passes.run()
        host.change("vcpu", **PINNED)
        (guest,) = host.snapshot.guests
        host.snapshot = replace(host.snapshot, guests=(replace(guest, busy=True),))
        passes.reload(passes.policies)
        passes.run()
        assert thread(host, Role.VCPU).affinity == CpuSet([3])
        host.snapshot = replace(host.snapshot, guests=(replace(guest, busy=False),))
        passes.run()
        assert thread(host, Role.VCPU).affinity == CpuSet([1])
        clock.now += 60
        passes.run()
        assert passes.next_try() is None

    def test_what_was_put_back_is_not_what_stop_restores(
        self, host: FakeHost, passes: Reconciler, clock: Clock
    ) -> None:
        """stalld sets FIFO 50 for a moment; a realtime class that stays would be nobody's wish."""
        before = host.snapshot
        passes.run()
        for _ in range(3):
            host.change("vhost", sched=Sched(SchedClass.FIFO, 50))
            host.set_queue(77)
            clock.now += 60
            assert passes.run()
            assert thread(host, Role.VHOST).sched == RR
        assert passes.stop()
        assert host.snapshot == before

    def test_what_was_as_asked_and_is_put_back_is_not_what_stop_restores(
        self, host: FakeHost, passes: Reconciler
    ) -> None:
        host.set_queue(300)
        host.change("vhost", sched=RR)
        before = host.snapshot
        passes.run()
        host.change("vhost", sched=Sched(SchedClass.FIFO, 50))
        host.set_queue(77)
        assert passes.run()
        assert host.snapshot.guests[0].interfaces[0].txqueuelen == 300
        assert passes.stop()
        assert host.snapshot == before

    def test_what_is_reported_is_left_alone_and_counted_until_a_reload(
        self, host: FakeHost, passes: Reconciler, caplog: pytest.LogCaptureFixture
    ) -> None:
        passes.policies = policies(POLICY + "drift: report\n")
        passes.run()
        theirs = Sched(SchedClass.FIFO, 50)
        host.change("vhost", sched=theirs)
        host.change("vcpu", affinity=CpuSet([3]))
        for _ in range(3):
            assert not passes.run()
        assert thread(host, Role.VHOST).sched == theirs
        assert (passes.state.guests[0].held, passes.state.drift) == (2, 2)
        assert {d.setting for d in passes.state.drifts} == {"cpus.vcpu", "scheduler.vhost"}
        assert len([r for r in caplog.records if "left alone: reported" in r.message]) == 2
        passes.reload(passes.policies)
        passes.run()
        assert thread(host, Role.VHOST).sched == RR
        assert thread(host, Role.VCPU).affinity == CpuSet([1])
        assert passes.state.drifts == ()

    def test_what_was_as_asked_and_never_written_can_drift_too(
        self, host: FakeHost, passes: Reconciler
    ) -> None:
        host.set_queue(300)
        passes.policies = policies(POLICY + "drift: {queue: report}\n")
        passes.run()
        host.set_queue(1000)
        for _ in range(2):
            assert not passes.run()
        assert host.snapshot.guests[0].interfaces[0].txqueuelen == 1000
        assert passes.state.drift == 1
        host.set_queue(300)
        passes.run()
        assert passes.state.drift == 0

    def test_what_is_adopted_is_right_until_a_reload_and_stays_at_the_end(
        self, host: FakeHost, passes: Reconciler
    ) -> None:
        passes.policies = policies(POLICY + "drift: {queue.macvtap: adopt}\n")
        passes.run()
        for length in (1000, 900):
            host.set_queue(length)
            assert not passes.run()
            assert passes.state.drift == 0
            assert passes.state.tuned == 1
        (drift,) = passes.state.drifts
        assert (drift.setting, drift.rule.value, drift.found) == ("queue.macvtap", "adopt", "900")
        assert passes.stop()
        assert host.snapshot.guests[0].interfaces[0].txqueuelen == 900
        assert thread(host, Role.VCPU).sched == Sched()

    def test_reload_takes_back_what_was_adopted_and_undo_gives_it_back(
        self, host: FakeHost, passes: Reconciler
    ) -> None:
        passes.policies = policies(POLICY + "drift: adopt\n")
        passes.run()
        host.set_queue(900)
        passes.run()
        passes.reload(passes.policies)
        passes.run()
        assert host.snapshot.guests[0].interfaces[0].txqueuelen == 300
        assert passes.stop()
        assert host.snapshot.guests[0].interfaces[0].txqueuelen == 900

    def test_enforcing_backs_off_and_names_who_changes_it_back(
        self, host: FakeHost, passes: Reconciler, clock: Clock, caplog: pytest.LogCaptureFixture
    ) -> None:
        passes.policies = policies(POLICY + "drift: {cpus.vcpu: enforce}\n")
        passes.run()
        waits = []
        for _ in range(12):
            host.change("vcpu", **PINNED)
            passes.run()
            if thread(host, Role.VCPU).affinity == CpuSet([1]):
                continue
            (drift,) = passes.state.drifts
            assert drift.by == "libvirt"
            assert passes.state.tuned == 0
            wait = passes.next_try()
            assert wait is not None
            waits.append(wait)
            if len(waits) == 2:
                host.set_queue(77)
                passes.run()
                assert host.snapshot.guests[0].interfaces[0].txqueuelen == 300, "does not wait"
            clock.now += wait
        assert waits[:4] == [2.0, 4.0, 8.0, 16.0]
        (said,) = [r for r in caplog.records if "put back less and less often" in r.message]
        assert "libvirt changed it again" in said.message
        assert "vcpu 0 pin" in said.message
        # Peace for long enough: the next change is put back at once.
        host.change("vcpu", affinity=CpuSet([1]), pin=CpuSet([1]))
        clock.now += 3600
        passes.run()
        host.change("vcpu", **PINNED)
        passes.run()
        assert thread(host, Role.VCPU).affinity == CpuSet([1])

    def test_what_a_new_policy_drops_is_taken_back(
        self, host: FakeHost, passes: Reconciler
    ) -> None:
        passes.run()
        passes.reload(
            policies('guest: "*"\ncpus: {vcpu: 1}\nqueue: {macvtap: 200}\nprofile: none\n')
        )
        passes.run()
        assert thread(host, Role.VCPU).sched == Sched()
        assert thread(host, Role.VCPU).affinity == CpuSet([1])
        assert thread(host, Role.VHOST).affinity == samples.ALL
        assert host.snapshot.guests[0].interfaces[0].txqueuelen == 200
        passes.policies = ()
        passes.run()
        assert host.snapshot == samples.snapshot()

    def test_failed_guest_is_put_back_and_tried_again_later_and_later(
        self, host: FakeHost, passes: Reconciler, clock: Clock, caplog: pytest.LogCaptureFixture
    ) -> None:
        host.fail["txqueuelen"] = WriteError("busy", lasting=Lasting.TRANSIENT)
        passes.run()
        assert host.snapshot == samples.snapshot()
        assert passes.state.tuned == 0
        assert passes.state.drift > 0
        tried = passes.state.totals.write_errors
        passes.run()
        assert passes.state.totals.write_errors == tried
        waits = []
        for _ in range(4):
            wait = passes.next_try()
            assert wait is not None
            waits.append(wait)
            clock.now += wait
            passes.run()
        assert waits == [1.0, 2.0, 4.0, 8.0]
        said = [r for r in caplog.records if "busy" in r.message]
        assert len(said) == 1
        host.fail.clear()
        clock.now += 60
        passes.run()
        assert passes.state.tuned == 1
        assert passes.next_try() is None

    def test_a_guest_that_failed_and_is_as_asked_or_gone_is_not_waited_for(
        self, host: FakeHost, passes: Reconciler, clock: Clock
    ) -> None:
        passes.policies = policies('guest: "*"\nqueue: {macvtap: 300}\nprofile: none\n')
        host.fail["txqueuelen"] = WriteError("busy", lasting=Lasting.TRANSIENT)
        passes.run()
        clock.now += 1
        passes.run()
        assert passes.next_try() == 2
        host.set_queue(300)
        clock.now += 60
        passes.run()
        assert passes.next_try() is None
        host.set_queue(77)
        passes.run()
        assert passes.next_try() == 1, "a failure of its own, not one more of the old"
        host.destroy("vr1")
        clock.now += 60
        passes.run()
        assert passes.next_try() is None

    @pytest.mark.parametrize("how", ["busy", "refused", "unread"])
    def test_a_guest_that_failed_and_is_put_off_is_neither_waited_for_nor_healed(
        self, host: FakeHost, passes: Reconciler, clock: Clock, how: str
    ) -> None:
        both = policies('guest: "*"\nqueue: {macvtap: 300}\nprofile: none\n')
        passes.policies = both
        host.fail["txqueuelen"] = WriteError("busy", lasting=Lasting.TRANSIENT)
        passes.run()
        before = host.snapshot
        (guest,) = before.guests
        if how == "busy":
            host.snapshot = replace(before, guests=(replace(guest, busy=True),))
        elif how == "refused":
            passes.policies = both + policies("guest: v*\nqueue: {macvtap: 300}\nprofile: none\n")
        else:
            host.snapshot = replace(before, guests=())
        clock.now += 60
        passes.run()
        assert passes.next_try() is None
        host.snapshot, passes.policies = before, both
        passes.run()
        assert passes.next_try() == 2, "it is the same failure"

    def test_one_guests_failure_is_not_anothers(self, host: FakeHost, passes: Reconciler) -> None:
        host.start(samples.guest("vr2", pid=200))
        real = host.write

        def write(target, value):  # type: ignore[no-untyped-def]
            if target.guest == "vr1" and target.kind == "thread-sched":
                raise WriteError("not permitted")
            real(target, value)

        host.write = write  # type: ignore[method-assign]
        passes.run()
        assert {g.ref: g.tuned for g in passes.state.guests} == {"vr1": False, "vr2": True}

    @pytest.mark.parametrize("scope", [FULL, Scope(frozenset(["vr1", "vr2"]), hurried=True)])
    def test_nobody_becomes_realtime_while_interrupts_wait_to_be_moved(
        self, host: FakeHost, passes: Reconciler, clock: Clock, scope: Scope
    ) -> None:
        """A pass for these guests alone plans no moves, so it would not know."""
        passes.policies = policies(
            POLICY.replace("cpus: {", "cpus: {irq: 3, ") + "irq: {set: true}\n"
        )
        host.fail["irq-affinity"] = WriteError("no vector is left")
        passes.run()
        host.start(samples.guest("vr2", pid=200))
        for _ in range(4):
            clock.now += 2
            passes.run(scope)
            vcpus = [thread(host, Role.VCPU, n) for n in (0, 1)]
            assert [(t.sched, t.affinity) for t in vcpus] == [(Sched(), samples.ALL)] * 2
            assert [(g.tuned, g.drift > 0) for g in passes.state.guests] == [(False, True)] * 2
        host.fail.clear()
        clock.now += 300
        passes.run()
        assert all(g.tuned for g in passes.state.guests)
        assert [thread(host, Role.VCPU, n).sched for n in (0, 1)] == [RR, RR]

    @pytest.mark.parametrize("last", [0, 2])
    def test_a_thread_that_has_to_run_first_is_tried_ever_less_often(
        self, host: FakeHost, passes: Reconciler, clock: Clock, last: int
    ) -> None:
        """A worker without traffic does not run for days. After the first pass the planner skips
        one that was last on a CPU elsewhere; only the kernel knows of the other one."""
        host.snapshot = planned.with_cpusets(planned.snapshot(planned.router()))
        host.change("vhost", last_cpu=last)
        passes.policies = policies(BUDGET)
        real = host.write

        def write(target, value):  # type: ignore[no-untyped-def]
            if isinstance(target, ThreadSched):
                raise PendingError("the thread has not run there", lasting=Lasting.TRANSIENT)
            real(target, value)

        host.write = write  # type: ignore[method-assign]
        waits = []
        for _ in range(6):
            passes.run()
            waits.append(passes.next_try())
            clock.now += waits[-1] or 0.0
        assert waits == [1, 2, 4, 8, 10, 10]
        host.write = real  # type: ignore[method-assign]
        recorded_state.run_threads(host)
        passes.run()
        assert passes.next_try() is None

    def test_a_guest_that_libvirt_keeps_waiting_takes_nobodys_turn(
        self, host: FakeHost, passes: Reconciler, clock: Clock
    ) -> None:
        """A pass waits once, and every retry would otherwise wait for the same guest first."""
        host.start(samples.guest("vr2", pid=200))
        real = host.write
        waited: list[str] = []

        def write(target, value):  # type: ignore[no-untyped-def]
            if target.guest == "vr1" and target.kind == "vcpu-pin":
                waited.append(target.guest)
                raise LateError("cannot acquire state change lock", lasting=Lasting.TRANSIENT)
            real(target, value)

        def tuned() -> list[str]:
            return [g.ref for g in passes.state.guests if g.tuned]

        host.write = write  # type: ignore[method-assign]
        passes.run()
        assert (tuned(), len(waited)) == ([], 1)
        assert passes.next_try() == 1
        clock.now += 1
        passes.run()
        assert (tuned(), len(waited)) == (["vr2"], 1)
        passes.run()
        assert (tuned(), len(waited)) == (["vr2"], 2)

    @pytest.mark.parametrize("what", ["observe", "renew"])
    def test_a_failing_pass_is_counted_and_repeated_ever_less_often(
        self,
        host: FakeHost,
        passes: Reconciler,
        journal: Journal,
        clock: Clock,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        what: str,
    ) -> None:
        """A pass whose journal fails goes on to its end, and finds all guests well."""

        def fail(*_: object) -> None:
            raise JournalError("no luck", lasting=Lasting.TRANSIENT)

        host.snapshot = replace(host.snapshot, problems=())
        for _ in range(2):
            with monkeypatch.context() as broken:
                broken.setattr(host if what == "observe" else journal, what, fail)
                waits = []
                for _ in range(4):
                    passes.run()
                    waits.append(passes.next_try())
                    clock.now += waits[-1] or 0.0
            assert waits == [1, 2, 4, 8]
            assert passes.again() == FULL
            assert "no luck" in passes.state.failure
            passes.run()
            assert (passes.state.failure, passes.next_try()) == ("", None)
            assert passes.state.guests[0].tuned
        assert passes.state.totals.pass_errors == 8
        assert len([r for r in caplog.records if "no luck" in r.message]) == 2

    def test_traces_only_while_that_can_teach_something(
        self, host: FakeHost, passes: Reconciler
    ) -> None:
        passes.run()
        assert host.traces == [0.5]
        host.traces.clear()
        passes.run()
        assert host.traces == [0.0], "an idle worker cannot be seen transmitting"
        host.traces.clear()
        host.change("vhost", cpu_ns=2_000_000_000)
        passes.run()
        assert host.traces == [0.0, 0.5], "it has worked: a trace may see it"
        host.traces.clear()
        host.change("vhost", cpu_ns=3_000_000_000, confidence=Confidence.EXACT)
        passes.run()
        assert host.traces == [0.0]

    def test_traces_less_and_less_often_for_a_worker_of_which_that_teaches_nothing(
        self, host: FakeHost, passes: Reconciler
    ) -> None:
        def traced(count: int, *, works: bool = False) -> list[int]:
            """Which of so many passes make a trace."""
            found = []
            for number in range(count):
                host.traces.clear()
                host.change("vhost", cpu_ns=thread(host, Role.VHOST).cpu_ns + works)
                passes.run()
                if 0.5 in host.traces:
                    found.append(number)
            return found

        passes.run()
        host.change("vhost", confidence=Confidence.UNCERTAIN)
        assert traced(130) == [0, 2, 6, 14, 30, 62, 94, 126]
        assert traced(40, works=True) == [0, 32], "what begins to work is seen at once"
        host.start(samples.guest("vr2", pid=200))
        assert traced(3) == [0], "a new one as well"
        host.change("vhost", confidence=Confidence.EXACT)
        assert traced(40, works=True) == []


class FakeNotifier:
    """Records what the service manager would hear."""

    watchdog_seconds: float | None = 30.0

    def __init__(self) -> None:
        self.heard: list[str] = []

    def ready(self) -> None:
        self.heard.append("READY")

    def reloading(self) -> None:
        self.heard.append("RELOADING")

    def stopping(self) -> None:
        self.heard.append("STOPPING")

    def status(self, text: str) -> None:
        self.heard.append(f"STATUS {text}")

    def ping(self) -> None:
        self.heard.append("PING")

    def states(self) -> list[str]:
        return [h for h in self.heard if h.isupper() and h != "PING"]

    def told(self) -> list[str]:
        return [h for h in self.heard if h.startswith("STATUS")]


QUICK = Timing(interval=600, debounce=0.01, gap=0.01, policy_pause=0.2)


class Running:
    """A daemon in a thread, steered like the real one by its flags."""

    def __init__(
        self,
        host: FakeHost,
        journal: Journal,
        *,
        keep: bool = False,
        timing: Timing = QUICK,
        attachments: attachments.AttachThread | None = None,
    ) -> None:
        self.notifier = FakeNotifier()
        self.load: Callable[[], tuple[Policy, ...]] = policies
        self.states: list[DaemonState] = []
        self.looks: list[Scope] = []
        reconciler = Reconciler(host, host, journal, policies())
        real = reconciler.run

        def run(scope: Scope = FULL, **more: bool) -> bool:
            self.looks.append(scope)
            return real(scope, **more)

        reconciler.run = run  # type: ignore[method-assign,assignment]
        self.daemon = Daemon(
            reconciler,
            lambda: self.load(),
            self.notifier,
            publish=self.states.append,
            timing=timing,
            keep=keep,
            attachments=attachments,
        )
        self.code: int | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.until(lambda: "READY" in self.notifier.heard)

    def _run(self) -> None:
        self.code = self.daemon.run()

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end, self.notifier.heard
            time.sleep(0.005)

    def stop(self) -> int | None:
        self.daemon.ask_stop()
        self.thread.join(20)
        return self.code


@pytest.fixture
def running(host: FakeHost, journal: Journal) -> Iterator[Running]:
    daemon = Running(host, journal)
    yield daemon
    daemon.stop()


@pytest.mark.parametrize(("seconds", "named"), [(1, True), (120, False)])
def test_a_change_that_came_to_nothing_is_blamed_for_no_later_one(
    host: FakeHost, journal: Journal, caplog: pytest.LogCaptureFixture, seconds: int, named: bool
) -> None:
    caplog.set_level("INFO")
    clock = Clock()
    passes = Reconciler(host, host, journal, policies(), clock=clock)
    passes.run()
    worker = thread(host, Role.VHOST)
    passes.blame(("scheduler", worker.key.tid), Culprit(4711, "chrt", "a.scope", clock()))
    clock.now += seconds
    passes.run()
    host.change("vhost", sched=Sched(SchedClass.FIFO, 50))
    passes.run()
    assert ("chrt (pid 4711, a.scope) has changed it" in caplog.text) is named


class TestLoop:
    def test_ready_comes_after_the_first_pass_and_stop_restores(
        self, host: FakeHost, running: Running
    ) -> None:
        status = running.notifier.heard.index("STATUS 1 guest tuned, 0 drift")
        assert status < running.notifier.heard.index("READY")
        assert running.stop() == 0
        assert host.snapshot == samples.snapshot()
        assert running.notifier.states() == ["READY", "STOPPING"]

    def test_event_leads_to_a_pass_long_before_the_interval(
        self, host: FakeHost, running: Running
    ) -> None:
        host.start(samples.guest("vr2", pid=200))
        running.daemon.mark_dirty("started vr2")
        running.until(lambda: running.states[-1].tuned == 2)

    def test_pass_is_told_whose_events_it_is_for(self, running: Running) -> None:
        running.until(lambda: len(running.states) == 2)  # the pass, and the look after it
        assert running.looks == [FULL, FULL]
        running.daemon.mark_dirty("device added", "vr1")
        running.daemon.mark_dirty("started", "vr 2.ü")
        running.until(lambda: len(running.looks) == 3)
        assert running.looks[2] == Scope(frozenset({"vr1", "vr 2.ü"}))
        running.daemon.mark_dirty("tunable", "vr1")
        running.daemon.mark_dirty("a link has changed")
        running.until(lambda: len(running.looks) == 4)
        assert running.looks[3].host

    @pytest.mark.parametrize(
        ("unit", "during", "named"),
        [
            ("session-3.scope", False, True),
            ("libvirtd.service", False, True),
            ("session-3.scope", True, True),
            ("libvirtd.service", True, False),
        ],
    )
    def test_who_changes_a_setting_is_named_unless_it_is_libvirt_for_us(
        self, host: FakeHost, running: Running, caplog: pytest.LogCaptureFixture,
        unit: str, during: bool, named: bool,
    ) -> None:  # fmt: skip
        """What libvirt does while a pass writes, the pass has asked for."""
        caplog.set_level("INFO")
        running.until(lambda: len(running.states) == 2)
        when = time.monotonic()
        if during:
            host.set_queue(1)
            running.daemon.mark_dirty("queue", "vr1")
            # Published at the end of the pass, when it is known how long it wrote.
            running.until(lambda: len(running.states) == 3)
            when = sum(running.daemon._wrote) / 2
        host.change("vhost", sched=Sched(SchedClass.FIFO, 50))
        tid = thread(host, Role.VHOST).key.tid
        who = Culprit(4711, "chrt", unit, when)
        running.daemon.changed(Change(("scheduler", tid), who, Scope.of("vr1")))
        running.until(lambda: thread(host, Role.VHOST).sched == RR)
        told = [m for m in caplog.messages if f"chrt (pid 4711, {unit}) has changed it" in m]
        assert len(told) == named
        # The thread alone is read: libvirt answers once it has noted the pin, and then tells so.
        look = Scope(frozenset({"vr1"}), hurried=True, places=frozenset({("scheduler", tid)}))
        assert during or running.looks[2] == look

    def test_a_change_waits_for_no_pause_but_for_the_last_hurried_pass(
        self, host: FakeHost, journal: Journal
    ) -> None:
        running = Running(host, journal, timing=Timing(interval=600, debounce=60, gap=600))
        try:
            change = Change(("irq", 1), Culprit(1, "x", when=1.0), Scope.of("vr1"))
            running.daemon.changed(change)
            running.until(lambda: len(running.looks) == 2)
            running.daemon.changed(change)
            time.sleep(0.2)
            assert len(running.looks) == 2
        finally:
            running.stop()

    def test_changes_without_end_keep_no_other_pass_from_its_turn(
        self, running: Running, host: FakeHost
    ) -> None:
        running.until(lambda: len(running.states) == 2)
        change = Change(("irq", 1), Culprit(1, "x", when=1.0), Scope.of("vr1"))
        running.daemon.mark_dirty("started", "vr2")

        def other_pass() -> bool:
            running.daemon.changed(change)
            return any("vr2" in look.guests for look in running.looks)

        running.until(other_pass)
        running.until(lambda: running.daemon.changed(change) or len(running.looks) > 6)
        assert [look for look in running.looks[2:] if not look.hurried] == [Scope.of("vr2")]

    def test_changes_without_end_put_off_no_retry(
        self, running: Running, host: FakeHost, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each hurried pass came before the retry that the one before it had announced anew."""
        running.until(lambda: len(running.states) == 2)
        monkeypatch.setattr(Reconciler, "next_try", lambda _: 0.5)
        monkeypatch.setattr(Reconciler, "again", lambda _: Scope.of("vr2"))
        change = Change(("irq", 1), Culprit(1, "x", when=1.0), Scope.of("vr1"))

        def retried() -> bool:
            running.daemon.changed(change)
            return Scope.of("vr2") in running.looks

        running.until(retried)
        assert sum(look.hurried for look in running.looks) > 2

    def test_storm_of_events_is_a_few_passes(self, host: FakeHost, running: Running) -> None:
        before = running.states[-1].totals.passes
        for _ in range(500):
            running.daemon.mark_dirty("storm")
        running.until(lambda: running.states[-1].totals.passes > before)
        time.sleep(0.3)
        assert running.states[-1].totals.passes - before < 10

    def test_broken_policy_on_reload_keeps_the_old_one_and_says_so(
        self, host: FakeHost, running: Running
    ) -> None:
        tuned = host.snapshot

        def broken() -> tuple[Policy, ...]:
            raise PolicyError("unknown key", where="p.yaml:3")

        running.load = broken
        running.daemon.ask_reload()
        running.until(lambda: running.notifier.heard.count("READY") == 2)
        assert host.snapshot == tuned
        assert not running.states[-1].reload_success
        assert any("older policies are kept" in h for h in running.notifier.heard)
        assert running.notifier.states() == ["READY", "RELOADING", "READY"]
        running.load = lambda: policies('guest: "*"\nqueue: {macvtap: 123}\nprofile: none\n')
        running.daemon.ask_reload()
        running.until(lambda: running.notifier.heard.count("READY") == 3)
        assert running.states[-1].reload_success
        assert host.snapshot.guests[0].interfaces[0].txqueuelen == 123
        assert thread(host, Role.VCPU).affinity == samples.ALL

    def test_changed_files_are_a_reload_and_a_burst_of_them_is_one(
        self, host: FakeHost, running: Running
    ) -> None:
        reads: list[float] = []

        def load() -> tuple[Policy, ...]:
            reads.append(time.monotonic())
            return policies('guest: "*"\nqueue: {macvtap: 123}\nprofile: none\n')

        running.load = load
        for _ in range(5):
            running.daemon.policies_changed("p.yaml has changed")
        running.until(lambda: running.notifier.heard.count("READY") == 2)
        assert len(reads) == 1
        assert host.snapshot.guests[0].interfaces[0].txqueuelen == 123
        assert thread(host, Role.VCPU).affinity == samples.ALL

    def test_files_that_say_the_same_change_nothing(
        self, host: FakeHost, running: Running, tmp_path: Path
    ) -> None:
        """Nor does a comment, or a name that has them read in another order."""
        for name, text in (("b", POLICY), ("c", OTHER)):
            (tmp_path / f"{name}.yaml").write_text(text)
        running.load = lambda: load_dirs([tmp_path])
        running.daemon.ask_reload()
        running.until(lambda: running.notifier.heard.count("READY") == 2)
        running.daemon.step_down("vr1", "it has waited", StepLevel.POLICY)
        running.until(lambda: running.states[-1].guests[0].step is not None)
        host.change("vcpu", affinity=CpuSet([3]), pin=CpuSet([3]))
        (tmp_path / "b.yaml").unlink()
        (tmp_path / "d.yaml").write_text(f"# ticket 4711\n{POLICY}")
        passed = len(running.looks)
        running.daemon.policies_changed("d.yaml has come")
        running.until(lambda: len(running.looks) > passed)
        running.until(lambda: running.states[-1].guests[0].policy == str(tmp_path / "d.yaml"))
        assert thread(host, Role.VCPU).affinity == CpuSet([3]), "a pin by hand is not taken back"
        assert running.states[-1].guests[0].step is not None
        assert running.notifier.heard.count("READY") == 2

    def test_broken_files_are_told_and_the_older_policies_stay(
        self, host: FakeHost, running: Running, caplog: pytest.LogCaptureFixture
    ) -> None:
        tuned = host.snapshot

        def broken() -> tuple[Policy, ...]:
            raise PolicyError("unknown key", where="p.yaml:3")

        running.load = broken
        running.daemon.policies_changed("p.yaml has changed")
        running.until(lambda: not running.states[-1].reload_success)
        assert host.snapshot == tuned
        assert any("p.yaml:3" in r.message for r in caplog.records)
        running.until(lambda: "older policies are kept" in running.notifier.told()[-1])
        running.load = policies
        running.daemon.policies_changed("p.yaml has changed")
        running.until(lambda: running.states[-1].reload_success)

    def test_idle_daemon_pings_and_does_not_look(
        self, host: FakeHost, journal: Journal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(FakeNotifier, "watchdog_seconds", 0.06)
        daemon = Running(host, journal)
        daemon.until(lambda: len(daemon.states) == 2)  # the pass, and the look after it
        pings = daemon.notifier.heard.count("PING")
        daemon.until(lambda: daemon.notifier.heard.count("PING") > pings + 5)
        assert len(daemon.states) == 2
        daemon.stop()


def test_keep_leaves_the_host_tuned_and_the_journal_in_place(
    host: FakeHost, journal: Journal
) -> None:
    daemon = Running(host, journal, keep=True)
    tuned = host.snapshot
    assert daemon.stop() == 0
    assert host.snapshot == tuned
    assert journal.entries()


def test_handing_over_leaves_the_guests_tuned_and_the_next_one_restores(
    host: FakeHost, tmp_path: Path
) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal.open(path, samples.BOOT) as first:
        daemon = Running(host, first)
        tuned, writes = host.snapshot, host.writes
        daemon.daemon.ask_handover()
        daemon.thread.join(20)
        assert daemon.code == ExitCode.HANDED_OVER
        assert host.snapshot == tuned
    with Journal.open(path, samples.BOOT) as second:
        daemon = Running(host, second)
        assert host.writes == writes, "the next one finds all as it wants it"
        daemon.stop()
    assert host.snapshot == samples.snapshot()


@pytest.mark.parametrize("asked", [("stop", "handover"), ("handover", "stop")])
def test_a_stop_overrules_a_handover_of_the_same_pass(
    host: FakeHost, journal: Journal, asked: tuple[str, ...]
) -> None:
    daemon = Daemon(
        Reconciler(host, host, journal, policies()), policies, FakeNotifier(), timing=QUICK
    )
    for ask in asked:
        getattr(daemon, f"ask_{ask}")()
    assert daemon.run() == ExitCode.DONE
    assert host.snapshot == samples.snapshot()
    assert host.writes > 0


@pytest.mark.parametrize("text", [samples.POLICY, "guest: vr1\ncpus: 7\n", "guest: [\n"])
def test_reading_policies_leaves_nothing_to_collect(
    host: FakeHost, journal: Journal, tmp_path: Path, text: str
) -> None:
    (tmp_path / "vr1.yaml").write_text(text)
    reconciler = Reconciler(host, host, journal, policies())
    daemon = Daemon(reconciler, lambda: load_dirs([tmp_path]), FakeNotifier())
    gc.disable()
    try:
        for _ in range(2):
            assert (daemon._read() is not None) == (text == samples.POLICY)
        assert gc.collect() == 0
    finally:
        gc.enable()


UNIT = (Path(__file__).resolve().parents[3] / "units" / "vsrtune.service").read_text()


def test_systemd_starts_it_again_after_a_handover() -> None:
    assert f"RestartForceExitStatus={ExitCode.HANDED_OVER}\n" in UNIT


def test_it_starts_behind_what_writes_the_same_and_is_not_the_first_to_go_when_memory_is_short() -> (
    None
):
    first = {
        name for line in re.findall("^After=(.*)$", UNIT, re.MULTILINE) for name in line.split()
    }
    assert {f"{name}.service" for name in ("irqbalance", "tuned", "libvirtd", "virtqemud")} <= first
    assert "nss-user-lookup.target" in first, "a policy's user is looked up at the start"
    (score,) = re.findall(r"^OOMScoreAdjust=(-\d+)$", UNIT, re.MULTILINE)
    assert -1000 < int(score) < 0


@pytest.mark.parametrize(
    ("result", "code", "on_stop", "told"),
    [
        ("success", "killed", "restore", "undo\n"),  # before there were handlers
        ("success", "killed", "", "undo\n"),
        ("success", "killed", "keep", ""),
        ("success", "exited", "restore", ""),
        ("signal", "killed", "restore", ""),  # systemd starts the next one
        ("watchdog", "killed", "restore", ""),
        ("exit-code", "exited", "restore", ""),
    ],
)
def test_a_stop_that_kills_a_starting_daemon_restores(
    result: str, code: str, on_stop: str, told: str
) -> None:
    (command,) = re.findall("^ExecStopPost=(.*)$", UNIT, re.MULTILINE)
    words = shlex.split(command.replace("$$", "$").replace("/usr/bin/vsrtune", "echo"))
    environment = {"SERVICE_RESULT": result, "EXIT_CODE": code, "VSRTUNE_ON_STOP": on_stop}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == told


def test_restart_after_a_crash_adopts_and_restores(host: FakeHost, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal.open(path, samples.BOOT) as first:
        Reconciler(host, host, first, policies()).run()
    # No stop: the process is gone, its lock with it.
    with Journal.open(path, samples.BOOT) as second:
        daemon = Running(host, second)
        assert daemon.states[0].tuned == 1
        daemon.stop()
    assert host.snapshot == samples.snapshot()


def test_stop_that_cannot_restore_says_so(host: FakeHost, journal: Journal) -> None:
    daemon = Running(host, journal)
    host.fail["thread-sched"] = WriteError("not permitted")
    assert daemon.stop() == 1
    assert journal.entries()


@pytest.mark.parametrize("error", [ObserveError("no answer"), KeyError("machine-qemu")])
def test_stop_puts_back_what_the_journal_holds_whatever_observing_raises(
    host: FakeHost, journal: Journal, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    passes = Reconciler(host, host, journal, policies())
    passes.run()
    host.fail_observe = error
    assert passes.stop()
    assert host.snapshot == samples.snapshot()
    (told,) = [r.getMessage() for r in caplog.records if "not observed" in r.getMessage()]
    assert str(error) in told
    assert "`vsrtune undo`" in told


def test_a_stop_says_that_libvirt_was_not_asked(
    host: FakeHost, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows then which pins its guests have brought along."""
    passes = Reconciler(host, host, journal, policies())
    passes.run()
    silent = replace(host.snapshot.guests[0], unconfirmed=True)
    host.snapshot = replace(host.snapshot, guests=(silent,))
    passes.stop()
    (told,) = [r.getMessage() for r in caplog.records if "not observed" in r.getMessage()]
    assert "libvirt does not answer" in told and "`vsrtune undo`" in told


class Disk:
    """Fails each fsync from now on, so many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        self._real = os.fsync
        monkeypatch.setattr(os, "fsync", self._fsync)

    def _fsync(self, descriptor: int) -> None:
        if self.left:
            self.left -= 1
            raise OSError(errno.EIO, "Input/output error")
        self._real(descriptor)


@pytest.mark.parametrize("failures", [1, 2])
def test_a_journal_that_failed_once_is_written_anew_by_the_next_pass(
    host: FakeHost, journal: Journal, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    disk, clock = Disk(monkeypatch), Clock()
    passes = Reconciler(host, host, journal, policies(), clock=clock)
    disk.left = failures
    for left in reversed(range(failures)):
        assert not passes.run()
        assert (disk.left, host.writes) == (left, 0)
        assert passes.state.failure
        clock.now += 60
    assert passes.run()
    assert passes.state.failure == ""
    assert passes.stop()
    assert host.snapshot == samples.snapshot()


def test_guests_of_an_earlier_run_are_seen_though_the_journal_cannot_be_written(
    host: FakeHost, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard watches the guests of the state."""
    Reconciler(host, host, journal, policies()).run()
    host.set_queue(77)
    monkeypatch.setattr(journal, "reserve", lambda _actions: full_disk())
    passes = Reconciler(host, host, journal, policies())
    assert not passes.run()
    assert "No space left" in passes.state.failure
    assert passes.state.snapshot == host.snapshot
    (state,) = passes.state.guests
    assert (state.tuned, state.drift, bool(state.policy)) == (False, 1, True)


def full_disk() -> None:
    raise JournalError("No space left on device")


@pytest.mark.parametrize("before", ["well", "broken"])
def test_a_stop_writes_a_journal_that_fails_anew_and_puts_all_back(
    host: FakeHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal.open(path, samples.BOOT) as opened:
        passes = Reconciler(host, host, opened, policies())
        passes.run()
        disk = Disk(monkeypatch)
        disk.left = 1
        if before == "broken":
            with pytest.raises(JournalError):
                opened.intent(replace(undo_action(opened.entries()[0]), reason="x"))
        assert passes.stop()
        assert disk.left == 0
        assert host.snapshot == samples.snapshot()
    with Journal.open(path, samples.BOOT) as opened:
        assert opened.entries() == ()


def test_a_stop_that_cannot_write_the_journal_says_what_stays_and_the_next_undo_puts_it_back(
    host: FakeHost,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal.open(path, samples.BOOT) as opened:
        daemon = Running(host, opened)
        count = len(opened.entries())
        assert count
        disk = Disk(monkeypatch)
        disk.left = 1000
        assert daemon.stop() == ExitCode.FAILED
    assert f"the journal still holds {count} settings: once it can be written" in caplog.text
    assert "not everything could be put back; `vsrtune undo` tries again" in caplog.text
    disk.left = 0
    with Journal.open(path, samples.BOOT) as opened:
        assert not executor.undo(host, opened).failed
    assert host.snapshot == samples.snapshot()


class BrokenKeeper:
    """An AttachKeeper with a defect."""

    def update(self, policies: tuple[Policy, ...], *, anew: bool = False) -> None:
        """Nothing is asked for."""

    def stop(self) -> bool:
        raise KeyError("uuid")


def test_a_defect_in_switching_back_keeps_no_setting_from_coming_back(
    host: FakeHost, journal: Journal
) -> None:
    reconciler = Reconciler(host, host, journal, policies())
    keeper: Any = BrokenKeeper()
    daemon = Daemon(reconciler, policies, FakeNotifier(), attachments=keeper, timing=QUICK)
    reconciler.run()
    daemon.ask_stop()
    assert daemon.run() == ExitCode.FAILED
    assert host.snapshot == samples.snapshot()


class BlockedKeeper(BrokenKeeper):
    """An AttachKeeper that waits for a guest without end."""

    succeeded = 0

    def __init__(self) -> None:
        self.begun, self.answer = threading.Event(), threading.Event()

    def update(self, policies: tuple[Policy, ...], *, anew: bool = False) -> None:
        self.begun.set()
        self.answer.wait()

    def interrupt(self) -> None:
        """The guest does not hear it."""

    def forget(self) -> None:
        """Nothing was settled."""


@pytest.mark.parametrize(
    ("end", "keep", "code"),
    [
        ("ask_stop", False, ExitCode.FAILED),
        ("ask_stop", True, ExitCode.DONE),
        ("ask_handover", False, ExitCode.HANDED_OVER),
    ],
)
def test_a_guest_that_is_switched_keeps_no_other_from_being_tuned_and_no_end_from_coming(
    host: FakeHost,
    journal: Journal,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
    keep: bool,
    code: ExitCode,
) -> None:
    monkeypatch.setattr(attachments, "_PULSE", 0.01)
    monkeypatch.setattr(attachments, "END_SECONDS", 0.05)
    notifier, blocked = FakeNotifier(), BlockedKeeper()
    keeper: Any = blocked

    def publish(state: DaemonState) -> None:
        if state.tuned:
            blocked.begun.wait()
            getattr(daemon, end)()

    daemon = Daemon(
        Reconciler(host, host, journal, policies()),
        policies,
        notifier,
        attachments=attachments.AttachThread(keeper, notifier.ping),
        publish=publish,
        timing=QUICK,
        keep=keep,
    )
    assert daemon.run() == code
    assert (host.snapshot == samples.snapshot()) is (code is ExitCode.FAILED)
    states = notifier.heard
    assert "PING" in states[states.index("STOPPING") :]
    blocked.answer.set()


@pytest.mark.parametrize("when", ["told to stop", "first pass", "later"])
def test_a_defect_in_a_pass_ends_the_daemon_and_leaves_no_guest_without_a_guard(
    host: FakeHost, journal: Journal, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """systemd starts the daemon again unless it was told to stop; nobody would undo then. One that
    fails in its first pass guards nothing, and the next may fail there too."""
    reconciler = Reconciler(host, host, journal, policies())
    reconciler.run()
    tuned = host.snapshot
    if when == "first pass":
        reconciler = Reconciler(host, host, journal, policies())
    daemon = Daemon(reconciler, policies, FakeNotifier(), timing=QUICK)
    left = 1 if when == "later" else 0

    def run(_scope: Scope) -> bool:
        nonlocal left
        left -= 1
        if left >= 0:
            daemon.mark_dirty("an event")
            return False
        if when == "told to stop":
            daemon.ask_stop()
        raise KeyError("uuid")

    monkeypatch.setattr(reconciler, "run", run)
    if when == "told to stop":
        assert daemon.run() == ExitCode.DONE
    else:
        with pytest.raises(KeyError):
            daemon.run()
    assert host.snapshot == (tuned if when == "later" else samples.snapshot())
    assert bool(journal.entries()) is (when == "later")
