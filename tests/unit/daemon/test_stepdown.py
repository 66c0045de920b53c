"""stepdown.py through the planner, the journal, the passes and the daemon's loop."""

from __future__ import annotations

import errno
import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
import recorded_state
import shell_samples as samples
from fake_host import FakeHost
from shell_samples import Clock, policies
from test_daemon import Running, thread

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import JournalError, Lasting, WriteError
from vsrtune.daemon import http
from vsrtune.daemon.reconciler import Reconciler
from vsrtune.execute import jsonl_log
from vsrtune.execute.journal import Journal, read_fold
from vsrtune.host.state_files import tell_others, told_by_daemon
from vsrtune.model.daemon_state import GroupGuest, Starved
from vsrtune.model.guest import CarriedPin, Role, SchedClass
from vsrtune.model.stepdown import Step, StepLevel
from vsrtune.model.targets import Target, ThreadSched
from vsrtune.plan import planner
from vsrtune.plan.full_plan import full_plan
from vsrtune.policy.model import Policy
from vsrtune.policy.parser import parse
from vsrtune.views import tables
from vsrtune.views.page_data import DEGRADED, status_page

FIFO = """\
guest: "*"
cpus: {vcpu: 1, vhost: 1}
scheduler:
  vcpu: {class: fifo, priority: 7}
  vhost: {class: fifo, priority: 9}
queue: {macvtap: 300}
standstill: accept
profile: none
"""
WHY = "vcpu 1 has waited"
ROLES = (Role.VCPU, Role.VHOST)


@pytest.fixture
def passes(host: FakeHost, journal: Journal) -> Reconciler:
    made = Reconciler(host, host, journal, policies(FIFO), clock=Clock())
    made.run()
    return made


def policy(text: str) -> Policy:
    return parse(text, "test.yaml")


def classes(host: FakeHost) -> list[str]:
    return [str(thread(host, role).sched) for role in ROLES]


def test_a_journal_that_failed_once_keeps_no_guest_from_being_stepped_down(
    host: FakeHost, journal: Journal, passes: Reconciler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(JournalError):
            journal.step("vr1", Step(StepLevel.RR, WHY, 0.0))
    passes.step_down("vr1", WHY, StepLevel.POLICY)
    assert {thread(host, role).sched.cls for role in ROLES} == {SchedClass.RR}
    assert journal.steps["vr1"].level is StepLevel.RR


@pytest.mark.parametrize("level", [StepLevel.RR, StepLevel.OTHER])
def test_vcpus_leave_first(host: FakeHost, passes: Reconciler, level: StepLevel) -> None:
    """They keep the workers from running, so the workers may not go below them first."""
    steps = {"vr1": Step(level, WHY)}
    made = planner.plan(host.snapshot, policies(FIFO), steps=steps)
    kinds = [a.target.label for a in made.actions if isinstance(a.target, ThreadSched)]
    assert kinds[0] == "vcpu 0"
    assert len(kinds) == 2


def test_each_step_takes_less_and_a_reload_gives_all_back(
    host: FakeHost, passes: Reconciler, journal: Journal
) -> None:
    asked = host.snapshot
    untuned = samples.snapshot()
    expected = [
        ["rr:7 reset-on-fork", "rr:9 reset-on-fork"],
        ["other", "other"],
    ]
    levels = [StepLevel.POLICY, StepLevel.RR]
    for number, (level, want) in enumerate(zip(levels, expected, strict=True), 1):
        passes.step_down("vr1", WHY, level)
        assert classes(host) == want, "at once, before the next pass"
        (state,) = passes.state.guests
        assert state.step is not None and state.step.level.number == number
        passes.run()
        assert classes(host) == want
        assert thread(host, Role.VCPU).affinity == thread(host, Role.VHOST).affinity
        (state,) = passes.state.guests
        assert (state.tuned, state.drift) == (False, 1)
        assert not passes.run(), "nothing is left to do"
    passes.step_down("vr1", WHY, StepLevel.OTHER)
    passes.run()
    passes.run()
    assert host.snapshot == untuned
    assert journal.entries() == ()
    passes.step_down("vr1", WHY, StepLevel.UNDONE)
    assert passes.state.totals.step_downs == 3, "there is no further level"
    passes.forget_steps()
    passes.reload(passes.policies)
    passes.run()
    assert host.snapshot == asked
    assert passes.state.guests[0].tuned
    assert passes.stop()
    assert host.snapshot == untuned


def test_a_guest_whose_new_policy_is_refused_gives_its_classes_back(
    host: FakeHost, passes: Reconciler
) -> None:
    """It keeps its tuning when a policy has a mistake; no step in between would change it."""
    tuned = classes(host)
    passes.reload(policies(FIFO.replace("vcpu: 1, vhost: 1", "vcpu: 77, vhost: 1")))
    passes.run()
    assert [r.guest for r in passes.state.plan.refusals] == ["vr1"]
    assert classes(host) == tuned
    passes.step_down("vr1", WHY, StepLevel.POLICY)
    passes.run()
    assert classes(host) == ["other", "other"]
    (state,) = passes.state.guests
    assert state.step is not None and state.step.level is StepLevel.UNDONE


@pytest.mark.parametrize("why", ["two policies", "two processes", "libvirt is silent"])
def test_a_guest_without_a_plan_is_guarded_and_gives_its_classes_back(
    host: FakeHost, passes: Reconciler, why: str
) -> None:
    """It keeps what it has; a second process of its name may be anybody's."""
    tuned = classes(host)
    if why == "two policies":
        passes.reload((*policies(FIFO), policy(FIFO.replace('"*"', '"vr*"'))))
    elif why == "two processes":
        host.start(samples.guest("vr1", pid=300))
    else:
        silent = replace(host.snapshot.guests[0], unconfirmed=True)
        host.snapshot = replace(host.snapshot, guests=(silent,))
    passes.run()
    assert classes(host) == tuned
    (state, *_) = passes.state.guests
    assert (state.tuned, bool(state.policy)) == (False, True), "the guard chooses by its policy"
    passes.step_down("vr1", WHY, StepLevel.POLICY)
    passes.run()
    assert classes(host) == ["other", "other"]
    (state, *_) = passes.state.guests
    assert state.step is not None and state.step.level is StepLevel.UNDONE
    assert not passes.run()


def test_a_sign_of_a_level_that_is_left_by_now_makes_no_second_step(passes: Reconciler) -> None:
    """The guard asks again while a slow step is under way."""
    passes.step_down("vr1", WHY, StepLevel.POLICY)
    passes.step_down("vr1", WHY, StepLevel.POLICY)
    (state,) = passes.state.guests
    assert state.step is not None and state.step.level is StepLevel.RR
    assert passes.state.totals.step_downs == 1


def test_one_line_tells_of_a_step(passes: Reconciler, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vsrtune"):
        passes.step_down("vr1", WHY, StepLevel.POLICY)
        passes.run()
    lines = [r for r in caplog.records if "stepped down to" in r.message]
    assert len(lines) == 1
    assert lines[0].levelname == "ERROR"
    assert WHY in lines[0].message and "systemctl reload" in lines[0].message
    told = vars(lines[0])
    assert (told["VSRTUNE_GUEST"], told["VSRTUNE_STEP"]) == ("vr1", "rr")


def test_a_guest_that_is_gone_or_has_no_policy_is_not_stepped_down(passes: Reconciler) -> None:
    passes.step_down("vr9", WHY, StepLevel.POLICY)
    assert passes.state.totals.step_downs == 0


def test_other_guests_keep_their_tuning(host: FakeHost, passes: Reconciler) -> None:
    host.start(samples.guest("vr2", pid=200))
    passes.run()
    passes.step_down("vr2", WHY, StepLevel.POLICY)
    passes.run()
    assert thread(host, Role.VCPU, 0).sched.cls is SchedClass.FIFO
    assert thread(host, Role.VCPU, 1).sched.cls is SchedClass.RR


def test_the_level_outlives_the_daemon_and_ends_with_an_undo(
    host: FakeHost, passes: Reconciler, journal: Journal, tmp_path: Path
) -> None:
    passes.step_down("vr1", WHY, StepLevel.POLICY)
    passes.run()
    journal.close()
    with Journal.open(journal.path, samples.BOOT) as again:
        second = Reconciler(host, host, again, policies(FIFO), clock=Clock())
        second.recover()
        assert not second.run()
        assert classes(host) == ["rr:7 reset-on-fork", "rr:9 reset-on-fork"]
        (state,) = second.state.guests
        assert state.step == Step(StepLevel.RR, WHY)
        second.step_down("vr1", WHY, StepLevel.RR)
        second.step_down("vr1", WHY, StepLevel.OTHER)
        second.run()
        assert again.entries() == ()
        again._log.rewrite(again._fold)
        assert again.steps["vr1"].level is StepLevel.UNDONE, "a compaction keeps it"
        assert read_fold(again.path, samples.BOOT).steps == again.steps
        assert second.stop()
        assert again.steps == {}
        assert read_fold(again.path, samples.BOOT).steps == {}


def test_of_another_boot_no_level_is_left(journal: Journal) -> None:
    journal.step("vr1", Step(StepLevel.OTHER, WHY))
    journal.close()
    with Journal.open(journal.path, "another boot") as later:
        assert later.steps == {}


def test_a_journal_that_cannot_be_written_stops_no_step(
    host: FakeHost, passes: Reconciler, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_record: object) -> None:
        raise WriteError("no space", lasting=Lasting.TRANSIENT)

    monkeypatch.setattr(journal, "_append", full)
    passes.step_down("vr1", WHY, StepLevel.POLICY)
    monkeypatch.undo()
    passes.run()
    assert classes(host) == ["rr:7 reset-on-fork", "rr:9 reset-on-fork"]


@pytest.mark.parametrize("carried", [(), (CarriedPin(0, CpuSet(range(4)), CpuSet([1])),)])
def test_a_full_disk_stops_no_step(
    host: FakeHost,
    passes: Reconciler,
    monkeypatch: pytest.MonkeyPatch,
    carried: tuple[CarriedPin, ...],
) -> None:
    """Another guest has come meanwhile, for which there is no room, nor for the pin that it has
    brought along."""
    newcomer = replace(samples.guest("vr2", pid=200), carried=carried)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jsonl_log, "claim", full)
    passes.step_down("vr1", WHY, StepLevel.POLICY)
    assert classes(host) == ["rr:7 reset-on-fork", "rr:9 reset-on-fork"], "at once"
    host.start(newcomer)
    passes.step_down("vr1", WHY, StepLevel.RR)
    passes.step_down("vr1", WHY, StepLevel.OTHER)
    passes.run()
    assert host.snapshot == samples.snapshot(samples.guest(), newcomer)
    assert passes.state.totals.write_errors == 1
    assert [g.ref for g in passes.state.guests] == ["vr1", "vr2"]
    assert bool(passes.state.failure) is bool(carried)


def test_a_step_that_the_journal_stops_is_not_told_as_done(
    host: FakeHost,
    passes: Reconciler,
    journal: Journal,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(_record: object) -> None:
        raise JournalError("an earlier write failed")

    tuned = classes(host)
    monkeypatch.setattr(journal, "_append", broken)
    with caplog.at_level(logging.INFO, "vsrtune"):
        passes.step_down("vr1", WHY, StepLevel.POLICY)
    assert classes(host) == tuned
    assert (
        "vr1: its classes are not lowered yet, the next pass tries again: an earlier" in caplog.text
    )


def test_a_disk_that_dies_between_intent_and_done_keeps_no_class(
    host: FakeHost, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Reconciler(host, host, journal, policies(FIFO), clock=Clock())
    done = journal.done

    def dead(target: Target) -> None:
        if isinstance(target, ThreadSched):
            monkeypatch.setattr(journal, "_append", broken)
        done(target)

    def broken(_record: object) -> None:
        raise JournalError("an earlier write failed")

    monkeypatch.setattr(journal, "done", dead)
    passes.run()
    assert "other" not in classes(host)[:1]
    assert passes.state.snapshot == host.snapshot, "what the guard has to watch"
    assert "an earlier write failed" in passes.state.failure
    assert not passes.stop()
    assert classes(host) == ["other", "other"]


@pytest.mark.parametrize("refused", [False, True])
def test_a_dead_disk_keeps_no_guest_from_its_original_class(
    host: FakeHost,
    passes: Reconciler,
    journal: Journal,
    monkeypatch: pytest.MonkeyPatch,
    refused: bool,
) -> None:
    """An original is written without a record; class rr would be taken for somebody else's."""
    if refused:
        passes.reload((*policies(FIFO), policy(FIFO.replace('"*"', '"vr*"'))))
        passes.run()

    def dead(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        for name in ("write", "ftruncate", "open"):
            patch.setattr(jsonl_log.os, name, dead)
        passes.step_down("vr1", WHY, StepLevel.POLICY)
        assert classes(host) == ["other", "other"]
        assert not passes.stop()
    assert passes.stop()
    assert host.snapshot == samples.snapshot()
    assert journal.entries() == ()


def test_budgets_end_with_the_next_pass(caplog: pytest.LogCaptureFixture) -> None:
    """A thread leaves class deadline within its root domain, which takes a whole plan."""
    source = (
        'guest: "{guest}"\ncpus: {{irq: auto, vcpu: auto, vhost: auto}}\nprofile: none\n'
        "scheduler: {{budget: {{cpu: 60%, period: 10ms}}}}\n"
    )
    with recorded_state.passes("trixie-napi", source=source) as (host, passes):
        for _ in range(3):
            passes.run()
        ref = host.snapshot.guests[0].ref

        def budgets() -> int:
            threads = host.snapshot.guests[0].threads
            return sum(t.sched.cls is SchedClass.DEADLINE for t in threads)

        assert budgets()
        passes.step_down(ref, WHY, StepLevel.POLICY)
        passes.run()
        assert "internal error" not in caplog.text
        assert not budgets()


@pytest.mark.parametrize("level", [StepLevel.RR, StepLevel.UNDONE])
def test_commands_see_what_the_daemon_runs(
    host: FakeHost, passes: Reconciler, journal: Journal, level: StepLevel
) -> None:
    steps = {"vr1": Step(level, WHY)}
    made = full_plan(host.snapshot, policies(FIFO), journal.entries(), steps=steps)
    assert made.actions, "the host is not yet as it is to be"
    lines = tables.drift_lines((), made.skipped)
    assert len(lines) == 1 and f"stepped down to {level.value}: {WHY}" in lines[0]
    assert tables.step_table(made.skipped).rows[0][0] == "vr1"


def test_only_a_new_policy_of_the_guest_itself_ends_it(host: FakeHost, passes: Reconciler) -> None:
    passes.step_down("vr1", WHY, StepLevel.POLICY)
    other = policy('guest: "vr2"\nqueue: {macvtap: 5}\nprofile: none\n')
    passes.reload((*policies(FIFO), other))
    passes.reload(passes.policies)
    passes.run()
    assert passes.state.guests[0].step is not None
    passes.reload(policies(FIFO.replace("7", "8")))
    passes.reload(passes.policies)
    passes.run()
    assert passes.state.guests[0].step is None
    assert classes(host)[0] == "fifo:8 reset-on-fork"


def test_another_policy_ends_it_while_the_guest_is_off(host: FakeHost, passes: Reconciler) -> None:
    passes.step_down("vr1", WHY, StepLevel.POLICY)
    passes.run()
    off = host.snapshot
    host.destroy("vr1")
    passes.run()
    passes.reload(passes.policies)
    passes.reload(policies(FIFO.replace("7", "8")))
    host.snapshot = replace(off, guests=samples.snapshot().guests)
    passes.run()
    assert passes.state.guests[0].step is None
    assert classes(host)[0] == "fifo:8 reset-on-fork"


def test_a_policy_that_takes_the_place_of_the_old_one_ends_it(
    host: FakeHost, passes: Reconciler
) -> None:
    """Its file is written before the old one is removed."""
    other = policy(FIFO.replace("7", "8"))
    passes.step_down("vr1", WHY, StepLevel.POLICY)
    passes.reload((*policies(FIFO), other))
    passes.run()
    passes.reload((other,))
    passes.run()
    assert passes.state.guests[0].step is None
    assert classes(host)[0] == "fifo:8 reset-on-fork"


def test_what_no_policy_names_while_libvirt_is_silent_keeps_no_class(
    host: FakeHost, passes: Reconciler
) -> None:
    """Nobody guards it."""
    silent = replace(host.snapshot.guests[0], unconfirmed=True)
    host.snapshot = replace(host.snapshot, guests=(silent,))
    passes.reload(())
    passes.run()
    assert classes(host) == ["other", "other"]


def test_a_stray_policy_that_goes_again_does_not_end_it(host: FakeHost, passes: Reconciler) -> None:
    passes.step_down("vr1", WHY, StepLevel.POLICY)
    passes.reload((*policies(FIFO), policy(FIFO.replace('"*"', '"vr*"'))))
    passes.run()
    passes.reload(policies(FIFO))
    passes.run()
    assert passes.state.guests[0].step is not None


def test_metrics_and_page_tell(passes: Reconciler) -> None:
    passes.step_down("vr1", WHY, StepLevel.POLICY)
    passes.run()
    state = replace(passes.state, starved=(Starved(17, "ksoftirqd/1", 1, "vr1", True),))
    lines = http.exposition(state).splitlines()
    assert 'vsrtune_guest_step_level{domain="vr1",source="libvirt"} 1.0' in lines
    assert "vsrtune_step_downs_total 1.0" in lines
    assert 'vsrtune_starved_threads{cpu="1",domain="vr1"} 1.0' in lines
    page = status_page(state)
    assert page["guests"][0]["state"] == DEGRADED
    assert page["guests"][0]["problems"][0] == f"stepped down to rr: {WHY}"
    assert "ksoftirqd/1 (tid 17)" in page["problems"][0]["what"]


def test_other_processes_hear_of_threads_that_starve_while_the_daemon_lives(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run" / "starved.json"
    told = (Starved(17, "kworker/1:2", 1, "vr 2.ü", True), Starved(18, "x", 1, ""))
    tell_others(path, told)
    assert told_by_daemon(path, Starved) == told
    text = path.read_text()
    path.write_text(text.replace('"start_time": ', '"start_time": 1'))
    assert told_by_daemon(path, Starved) == ()
    path.write_text(text.replace(f'"pid": {os.getpid()}', '"pid": 4194305'))
    assert told_by_daemon(path, Starved) == ()
    for damaged in ("", "[]", "{", text[:-9], "[" * 100_000):
        path.write_text(damaged)
        assert told_by_daemon(path, Starved) == ()
    tell_others(path, ())
    assert told_by_daemon(path, Starved) == () and not path.exists()


class TestLoop:
    def test_a_step_waits_for_no_pause(self, host: FakeHost, journal: Journal) -> None:
        running = Running(host, journal)
        try:
            running.daemon._timing = running.daemon._timing.__class__(600, 30, 30, 30)
            running.until(lambda: len(running.states) >= 1)
            running.daemon.step_down("vr1", WHY, StepLevel.POLICY)
            running.until(lambda: running.states[-1].guests[0].step is not None)
            assert thread(host, Role.VCPU).sched.cls is SchedClass.OTHER
            assert "1 stepped down" in [h for h in running.notifier.heard if "STATUS" in h][-1]
            running.daemon.ask_reload()
            running.until(lambda: running.states[-1].guests[0].step is None)
            assert thread(host, Role.VCPU).sched.cls is SchedClass.RR
        finally:
            running.stop()

    def test_who_starves_is_published_without_a_pass(
        self, host: FakeHost, journal: Journal
    ) -> None:
        running = Running(host, journal)
        try:
            running.until(lambda: len(running.states) == 2)  # the pass, and the look after it
            told = (Starved(17, "ksoftirqd/1", 1, "vr1", True),)
            running.daemon.starving(told)
            running.until(lambda: running.states[-1].starved == told)
            guests = (GroupGuest("edge", "vr2", "router", "stalled", 1.0, 3),)
            running.daemon.watched(guests)
            running.until(lambda: running.states[-1].groups == guests)
            assert running.states[-1].starved == told
            lines = http.exposition(running.states[-1]).splitlines()
            labels = '{domain="vr2",group="edge",role="router"}'
            assert f"vsrtune_group_guest_faulty{labels} 1.0" in lines
            assert f"vsrtune_group_guest_faults_total{labels} 3.0" in lines
            assert len(running.looks) == 2
        finally:
            running.stop()

    @pytest.mark.parametrize(("ask", "kept"), [("ask_handover", True), ("ask_stop", False)])
    def test_whoever_takes_over_keeps_the_level_and_the_operator_begins_anew(
        self, host: FakeHost, journal: Journal, ask: str, kept: bool
    ) -> None:
        running = Running(host, journal, keep=True)
        running.daemon.step_down("vr1", WHY, StepLevel.POLICY)
        running.until(lambda: running.states[-1].guests[0].step is not None)
        getattr(running.daemon, ask)()
        running.thread.join(20)
        assert bool(journal.steps) is kept


def test_a_record_is_one_json_object(journal: Journal) -> None:
    journal.step("vr1", Step(StepLevel.RR, WHY, 12.5))
    last = json.loads(journal.path.read_text().splitlines()[-1])
    assert last["r"] == "step" and last["guest"] == "vr1"
    assert journal.steps["vr1"].at == 12.5
