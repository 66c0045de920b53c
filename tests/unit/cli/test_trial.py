"""Trials: which turns count, what pairs show, and a host that is as it was afterwards."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import memory_cli
import pytest
import shell_samples as samples
from attach_host import FakeAttachHost
from fake_host import FakeHost
from memory_cli import Cli
from switch_faults import do

from vsrtune.attach.plan.model import SwitchRequest
from vsrtune.attach.plan.planner import plan
from vsrtune.attach.signals import HeldSignal, Interrupted
from vsrtune.cli import apply, attachments, main
from vsrtune.cli.trial import rule
from vsrtune.cli.trial import run as trial_run
from vsrtune.cli.trial.rule import TrialCounts, TrialTurn
from vsrtune.core.cpuset import CpuSet
from vsrtune.core.exit_codes import ExitCode
from vsrtune.execute.journal import Journal
from vsrtune.model.guest import Attachment, SchedClass
from vsrtune.model.load import DropPlace, GuestFrames, HostSample
from vsrtune.model.snapshot import Snapshot
from vsrtune.policy.matching import QemuFilter

GOOD = "guest: vr1\ncpus: {vcpu: 1, vhost: 2}\nprofile: none\n"
SECOND = 10**9


def made(pair: int, tuned: bool, forwarded: int, received: int = 1000, **more: Any) -> TrialTurn:
    base = TrialTurn(pair, tuned, 1.0, received, forwarded, 0)
    return replace(base, **more)


def turns(tuned: Sequence[int], untuned: Sequence[int], **more: Any) -> list[TrialTurn]:
    """Pairs that forwarded so many frames; ``more`` is of the tuned turns."""
    return [
        turn
        for number, (ours, theirs) in enumerate(zip(tuned, untuned, strict=True), 1)
        for turn in (made(number, True, ours, **more), made(number, False, theirs))
    ]


class TestVerdict:
    def test_better_when_the_whole_interval_is_above_1(self) -> None:
        found = rule.judge(turns([600, 700, 800, 610, 620, 630], [500] * 6), "p.yaml")
        assert found.better is True
        assert found.share is not None
        assert (found.share["low"], found.share["high"]) == (1.2, 1.6)
        assert found.text[0].startswith("p.yaml: higher forwarded share than untuned (ratio 1.25")
        assert found.text[-1] == "p.yaml: better than untuned"

    @pytest.mark.parametrize("ours", [[500] * 6, [600] * 5 + [499], [400] * 6])
    def test_not_better_when_the_interval_reaches_1(self, ours: list[int]) -> None:
        found = rule.judge(turns(ours, [500] * 6), "p.yaml")
        assert found.better is False
        assert found.text[-1] == "p.yaml: not shown to be better than untuned"

    def test_who_starves_the_nic_is_not_better_for_forwarding_the_rest(self) -> None:
        assert rule.judge(turns([400] * 6, [500] * 6, received=400, early=600), "p").better is False

    def test_a_higher_share_of_a_lower_rate_is_not_better(self) -> None:
        found = rule.judge(turns([100] * 6, [500] * 6, received=100), "p")
        assert found.share is not None
        assert found.share["verdict"] == "higher"
        assert found.better is False

    def test_something_is_better_than_nothing(self) -> None:
        assert rule.judge(turns([500] * 6, [0] * 6), "p").better is True

    def test_too_few_pairs_decide_nothing_and_say_why(self) -> None:
        made_ = turns([600] * 6, [500] * 6)
        made_[3] = replace(made_[3], left_out="a setting changed")
        found = rule.judge(made_, "p")
        assert found.better is None
        assert found.share is None
        assert found.text == (
            "1 of 12 turns left out: a setting changed",
            "nothing decided: 5 pairs of turns count, 6 are needed",
        )

    def test_a_pair_with_one_turn_left_out_is_not_counted(self) -> None:
        made_ = turns([600] * 7, [500] * 7)
        made_[0] = replace(made_[0], forwarded=0, left_out="a setting changed")
        found = rule.judge(made_, "p")
        assert (found.better, found.pairs) == (True, 6)

    def test_table_of_medians(self) -> None:
        rows = rule.table(turns([600] * 6, [500] * 6)).rows
        assert ("forwarded/s", "500", "600") in rows
        assert ("forwarded %", "50.0", "60.0") in rows


class TestTurn:
    def counts(self, at: int, received: int, forwarded: int, **more: Any) -> TrialCounts:
        return replace(TrialCounts(at, received, forwarded, 0), **more)

    def test_what_changed_between_two_moments(self) -> None:
        before, after = self.counts(0, 5, 3), self.counts(2 * SECOND, 1005, 803, early=200)
        found = rule.turn(before, after, 4, tuned=True)
        assert (found.pair, found.tuned, found.left_out) == (4, True, "")
        assert (found.arrived, found.share, found.rate) == (1200, 800 / 1200, 400.0)

    @pytest.mark.parametrize(
        ("received", "forwarded", "why"),
        [(104, 5, "fewer than 100 frames arrived"), (400, 2, "a counter began anew")],
    )
    def test_left_out(self, received: int, forwarded: int, why: str) -> None:
        after = self.counts(SECOND, received, forwarded)
        assert rule.turn(self.counts(0, 5, 3), after, 1, tuned=False).left_out == why

    def test_what_never_reached_the_guest(self) -> None:
        sample = HostSample(
            samples.snapshot(),
            SECOND,
            drops={
                DropPlace("CPU 0", "backlog"): 1, DropPlace("p0", "rx_dropped"): 2,
                DropPlace("p1", "rx_missed_errors"): 4, DropPlace("p1", "tx_dropped"): 8,
                DropPlace("p1", "rx_fifo_errors"): 64,
                DropPlace("macvtap0", "ring", "vr1"): 16, DropPlace("macvtap1", "ring", "vr1"): 32,
            },
            frames={"macvtap0": GuestFrames(69, 48, 60), "macvtap1": GuestFrames(1)},
        )  # fmt: skip
        found = rule.counts(sample)
        assert (found.received, found.forwarded, found.early) == (70, 60, 70)

    def test_settings_are_what_can_be_set(self) -> None:
        host = FakeHost()
        before = rule.settings(host.snapshot)
        guest = host.snapshot.guests[0]
        ran = tuple(replace(t, last_cpu=3, cpu_ns=99) for t in guest.threads)
        host.snapshot = replace(host.snapshot, guests=(replace(guest, threads=ran),))
        assert rule.settings(host.snapshot) == before
        host.change("vhost", affinity=CpuSet([3]))
        assert rule.settings(host.snapshot) != before


class Ground(trial_run.HostGround):
    """A router that forwards 300 frames of 1,000 untuned and 600 tuned, in no time."""

    def __init__(self) -> None:
        self.host = FakeHost()
        self.tuned = False
        self.switches = 0
        self.now = self.received = self.forwarded = 0
        self.upset_at = -1

    def switch(self, tuned: bool) -> None:
        assert tuned is not self.tuned
        self.tuned = tuned
        self.switches += 1

    def settle(self) -> bool:
        return True

    def update(self) -> Snapshot:
        return self.host.snapshot

    def count(self, snapshot: Snapshot) -> TrialCounts:
        return TrialCounts(self.now * SECOND, self.received, self.forwarded, 0)

    def wait(self, seconds: float) -> None:
        self.now += 1
        self.received += 1000
        self.forwarded += 600 if self.tuned else 300
        if self.now == self.upset_at:
            self.host.change("vhost", affinity=CpuSet([3]))


class Refreshed(Ground):
    """Its NIC loses a frame every 10 ms untuned, and its driver reads how many every 2 s."""

    def __init__(self) -> None:
        super().__init__()
        self.ticks = self.lost = self.shown = 0

    def wait(self, seconds: float) -> None:
        super().wait(seconds)
        for _ in range(round(seconds * 100)):
            self.ticks += 1
            self.lost += not self.tuned
            if self.ticks % 200 == 100:
                self.shown = self.lost

    def count(self, snapshot: Snapshot) -> TrialCounts:
        return replace(super().count(snapshot), early=self.shown)


class TestRun:
    def test_losses_that_a_driver_reads_late_count_in_their_own_turn(self) -> None:
        ground = Refreshed()
        found = list(trial_run.run(ground, 10, 1, ground.wait))
        assert {t.early for t in found if t.tuned} == {0}
        assert all(t.early >= 200 for t in found if not t.tuned)

    def test_pairs_with_each_first_equally_often(self) -> None:
        ground = Ground()
        found = list(trial_run.run(ground, 10, 1, ground.wait))
        pairs = [tuple(g) for _, g in itertools.groupby(found, lambda t: t.pair)]
        assert [{t.tuned for t in pair} for pair in pairs] == [{True, False}] * 10
        assert sum(pair[0].tuned for pair in pairs) == 5
        assert {t.share for t in found if t.tuned} == {0.6}
        assert {t.share for t in found if not t.tuned} == {0.3}
        assert rule.judge(found, "p").better is True

    def test_a_turn_in_which_a_setting_changed_is_left_out(self) -> None:
        ground = Ground()
        ground.upset_at = 4  # of two waits in each turn
        found = list(trial_run.run(ground, 6, 1, ground.wait))
        assert [t.left_out for t in found] == ["", "a setting changed", *[""] * 10]


class Trials(Cli):
    """`vsrtune try` on a host in memory, of which ``forwards`` are the frames that it forwards in
    a turn untuned and tuned."""

    def __init__(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        super().__init__(directory, monkeypatch, capsys)
        self.file = directory / "draft.yaml"
        self.file.write_text(GOOD)
        self.forwards = (300, 600)
        self._counts = itertools.count(1)
        self._forwarded = 0

    def count(self) -> TrialCounts:
        at = next(self._counts)
        vhost = self.host.snapshot.guests[0].threads[2]
        self._forwarded += self.forwards[vhost.affinity == CpuSet([2])]
        return TrialCounts(at * SECOND, at * 1000, self._forwarded, 0)

    def __call__(self, *words: str) -> int:
        return super().__call__("try", *words)


@pytest.fixture
def tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Trials]:
    found = Trials(tmp_path, monkeypatch, capsys)
    monkeypatch.setattr(trial_run, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(trial_run, "COUNT_SECONDS", 0.0)
    monkeypatch.setattr(trial_run.HostGround, "count", lambda *_: found.count())
    for module in ("cli.trial.command", "cli.apply"):
        monkeypatch.setattr(f"vsrtune.{module}.observe", lambda *_: found.host.snapshot)
    for module in ("cli.trial.run", "bench.setup.tuning"):
        monkeypatch.setattr(f"vsrtune.{module}.live_observer", lambda *_: found.host)
    for module in ("cli.apply", "bench.setup.tuning"):
        monkeypatch.setattr(f"vsrtune.{module}.LiveSysOps", lambda *_a, **_k: found.host)
    for module in ("host.filesystem", "cli.apply", "cli.trial.command"):
        monkeypatch.setattr(f"vsrtune.{module}.boot_id", lambda: samples.BOOT)
    with memory_cli.guarded(monkeypatch):
        yield found


class TestCommand:
    def test_better_and_all_is_back(self, tried: Trials) -> None:
        before = tried.host.snapshot
        assert tried(str(tried.file), "--for", "50s") == 0
        assert "draft.yaml: better than untuned\nEverything is put back.\n" in tried.out
        assert tried.host.writes > 0
        assert tried.host.snapshot == before

    def test_kept_as_apply_leaves_it(self, tried: Trials) -> None:
        before = tried.host.snapshot
        assert tried(str(tried.file), "--for", "50s", "--keep-if-better") == 0
        assert "It stays applied. To make it permanent: cp" in tried.out
        tuned = tried.host.snapshot
        assert main.run(["undo"]) == 0
        assert tried.host.snapshot == before
        tried.policy(GOOD)
        assert main.run(["apply"]) == 0
        assert tried.host.snapshot == tuned

    def test_what_is_kept_replaces_the_policy_of_its_guest(self, tried: Trials) -> None:
        """Two files for one guest are an error, with which no daemon starts."""
        beside = tried.policy(GOOD.replace("vhost: 2", "vhost: 3"), "vr1.yaml")
        assert tried(str(tried.file), "--for", "50s", "--keep-if-better") == 0
        assert f"cp {tried.file} {beside} && systemctl" in tried.out
        assert main.run(["undo"]) == 0
        tried.policy(GOOD, "vr1.yaml")
        assert tried(str(beside), "--for", "50s", "--keep-if-better") == 0
        assert "To make it permanent: systemctl enable" in tried.out

    def test_not_kept_when_it_is_no_better(self, tried: Trials) -> None:
        tried.forwards = (300, 300)
        before = tried.host.snapshot
        assert tried(str(tried.file), "--for", "50s", "--keep-if-better", "--json") == 0
        found = json.loads(tried.out)
        assert (found["verdict"], found["kept"], found["pairs"]) == ("not better", False, 6)
        assert len(found["turns"]) == 12
        assert tried.host.snapshot == before

    def test_without_traffic_nothing_is_decided(
        self, tried: Trials, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        idle = TrialCounts(0, 0, 0, 0)
        clock = itertools.count(1)
        monkeypatch.setattr(
            trial_run.HostGround, "count", lambda *_: replace(idle, at_ns=next(clock))
        )
        before = tried.host.snapshot
        assert tried(str(tried.file), "--for", "50s", "--keep-if-better") == ExitCode.UNDECIDED
        assert "12 of 12 turns left out: fewer than 100 frames arrived" in tried.out
        assert "nothing decided" in tried.out
        assert tried.host.snapshot == before

    def test_a_guest_has_the_policy_that_names_it_on_itself_alone(self, tried: Trials) -> None:
        other = samples.guest("vr2", 200)
        tried.host.start(other)
        tried.policy(GOOD.replace("vr1", "'*'"), "all.yaml")
        assert tried("vr1", "--for", "50s", "--keep-if-better") == 0
        assert "systemctl enable --now vsrtune" in tried.out
        assert tried.host.snapshot.guests[0].threads[2].affinity == CpuSet([2])
        assert tried.host.snapshot.guests[1] == other

    @pytest.mark.parametrize("groups", [None, "/boot/config"])
    def test_a_guest_without_a_policy_has_the_one_of_policy_init(
        self, tried: Trials, groups: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("vsrtune.doctor.facts.host.rt_groups", lambda *_: groups)
        tried("vr1", "--for", "50s", "--json", "--keep-if-better")
        assert json.loads(tried.out)["policy"] == "policy init vr1"
        assert tried.host.writes > 0
        classes = {t.sched.cls for t in tried.host.snapshot.guests[0].threads}
        assert (SchedClass.RR in classes) is (groups is None)

    def test_a_guest_of_another_user_is_looked_at_as_his(
        self, tried: Trials, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whose plain QEMUs are guests is said by the policies of the trial alone."""
        guest = replace(samples.guest("vr1", 100, "qemu"), uid=1000)
        tried.host.snapshot = replace(tried.host.snapshot, guests=(guest,))
        tried.file.write_text(GOOD.replace("vr1", "qemu:vr1\nuser: 1000"))

        class Seeing:
            """The host, with the guests whose user is asked for."""

            def __init__(self, _uri: str, wanted: Callable[[], QemuFilter] = QemuFilter) -> None:
                self._wanted = wanted

            def observe(self, *words: Any) -> Snapshot:
                seen = tried.host.observe(*words)
                ours = tuple(g for g in seen.guests if g.uid in self._wanted().users)
                return replace(seen, guests=ours)

        monkeypatch.setattr("vsrtune.bench.setup.tuning.live_observer", Seeing)
        tried(str(tried.file), "--for", "50s")
        assert tried.host.writes > 0

    def test_only_a_guest_that_runs_must_be_switched_before(
        self, tried: Trials, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        host = FakeAttachHost()
        host.add("vr1", ("02:00:00:00:0a:00", "p0"))
        vr9 = host.add("vr9", ("02:00:00:00:0b:00", "p0"), running=False)
        monkeypatch.setattr(attachments, "LiveHost", lambda _uri: host)
        tried.file.write_text("guest: vr*\nattachment: napi-macvlan\n" + GOOD.split("\n", 1)[1])
        assert tried(str(tried.file), "--for", "50s") == ExitCode.FAILED
        assert "vr1: not on napi-macvlan yet" in tried.err
        # What is off is no part of a trial, and one that cannot be switched keeps nobody from it.
        vr9.config = vr9.config.replace("virtio", "e1000")
        request = SwitchRequest(Attachment.NAPI_MACVLAN, ("vr1",))
        do(host, tmp_path / "attach.jsonl", partial(plan, request))
        assert tried(str(tried.file), "--for", "50s") == 0

    def test_an_interrupted_trial_is_taken_back(
        self, tried: Trials, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = tried.host.snapshot

        def check(_held: HeldSignal) -> None:
            if tried.host.writes > 0:
                raise Interrupted("interrupted (SIGTERM)")

        monkeypatch.setattr(HeldSignal, "check", check)
        assert tried(str(tried.file), "--for", "50s") == 130
        assert tried.host.writes > 0
        assert "Everything is put back." in tried.out
        assert tried.host.snapshot == before

    @pytest.mark.parametrize(
        ("text", "code", "said"),
        [
            ("guest: nobody\n", 1, "no running guest matches"),
            ("guest: vr1\nqueues: 1\n", 2, "draft.yaml:2"),
            ("guest: vr1\nprofile: none\n", ExitCode.UNDECIDED, "Nothing to try"),
            ("guest: vr1\ncpus: {vcpu: 99}\nprofile: none\n", ExitCode.REFUSED, ""),
        ],
    )
    def test_what_cannot_be_tried(self, tried: Trials, text: str, code: int, said: str) -> None:
        tried.file.write_text(text)
        assert tried(str(tried.file)) == code
        assert said in tried.err
        assert tried.host.writes == 0

    def test_a_tuned_host_and_a_daemon_are_refused(self, tried: Trials) -> None:
        with Journal.open(tried.journal, samples.BOOT):
            assert tried(str(tried.file)) == 1
        assert "systemctl stop vsrtune" in tried.err
        tried.policy(GOOD)
        assert main.run(["apply"]) == 0
        assert tried(str(tried.file)) == 1
        assert "tuned already" in tried.err
        assert tried("nobody") == 1
        assert "no such guest is running" in tried.err

    def test_a_guest_that_came_tuned_is_refused(
        self, tried: Trials, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not the one of the trial: what a guest has brought is put back for good."""
        tried.host.start(samples.travelled("vr2", 200))
        before = tried.host.snapshot
        assert tried(str(tried.file)) == 1
        assert "vr2: vcpu 0 pin: the guest has brought this pin of vsrtune's along" in tried.err
        assert tried.host.snapshot == before
        monkeypatch.setattr(apply, "_with_libvirt_guests", lambda _: tried.host.observe())
        assert main.run(["undo"]) == 0
        assert tried(str(tried.file)) == 0
