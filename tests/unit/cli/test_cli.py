"""The command line: exit codes, messages, and what start-up must not import."""

from __future__ import annotations

import json
import os
import pty
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import memory_cli
import pytest
import shell_samples as samples
from attach_host import FakeAttachHost
from memory_cli import Cli

from vsrtune.cli import attachments, main, options
from vsrtune.core.codec import decode
from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import ObserveError, VsrtuneError, WriteError
from vsrtune.core.exit_codes import ExitCode
from vsrtune.daemon.systemd import LOGGER
from vsrtune.execute.journal import Journal, read_entries
from vsrtune.host.filesystem import LiveRoot, boot_id
from vsrtune.host.procfs import parse_stat
from vsrtune.model.guest import OtherNic, Sched, SchedClass, ThreadKey
from vsrtune.model.journal_records import Entry
from vsrtune.model.snapshot import Problem, Snapshot
from vsrtune.model.targets import Target, ThreadSched, Value

GOOD = 'guest: "*"\ncpus: {vcpu: 1, vhost: 2}\nqueue: {macvtap: 300}\nprofile: none\n'
REPO = Path(__file__).resolve().parents[3]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    run = Cli(tmp_path, monkeypatch, capsys)
    for module in ("cli.show", "cli.plan", "cli.apply"):
        monkeypatch.setattr(f"vsrtune.{module}.observe", lambda *_: run.host.snapshot)
    for module in ("host.filesystem", "cli.apply", "cli.show"):
        monkeypatch.setattr(f"vsrtune.{module}.boot_id", lambda: samples.BOOT)
    monkeypatch.setattr("vsrtune.cli.apply.LiveSysOps", lambda **_: run.host)
    monkeypatch.setattr("vsrtune.cli.show._SECONDS", 0.0)
    return run


class TestShow:
    def test_json_is_the_snapshot(self, run: Cli) -> None:
        assert run("show", "--json") == 0
        assert decode(Snapshot, json.loads(run.out)) == run.host.snapshot

    def test_what_others_changed_is_shown_with_who_and_which_rule(self, run: Cli) -> None:
        run.policy(GOOD + "drift: {cpus.vhost: report}\n")
        assert run("apply") == 0
        assert run("show") == 0
        assert "Changed since" not in run.out
        run.host.change("vhost", affinity=samples.ALL)
        run.host.change("vcpu", affinity=CpuSet([3]), pin=CpuSet([3]))
        assert run("show", "--guest", "vr1") == 0
        lines = run.out.partition("Changed since")[2].splitlines()
        (vcpu,) = [line.split() for line in lines if "vcpu 0" in line]
        (vhost,) = [line.split() for line in lines if "tid 102" in line]
        assert vcpu[-3:] == ["libvirt", "cpus.vcpu", "report"]
        assert vhost[-3:] == ["unknown", "cpus.vhost", "report"]
        assert run("plan") == 0
        assert "Changed since" in run.out

    def test_what_was_changed_is_shown_where_it_makes_the_plan_refuse(self, run: Cli) -> None:
        turns = "{class: rr, priority: 10}"
        one_cpu = f"cpus: {{vcpu: 2, vhost: 2}}\nscheduler: {{vcpu: {turns}, vhost: {turns}}}\n"
        run.policy(f'guest: "*"\n{one_cpu}drift: {{scheduler.vhost: report}}\nprofile: none\n')
        assert run("apply") == 0
        run.host.change("vhost", sched=Sched(SchedClass.OTHER))
        assert run("verify") != 0
        assert "would share CPU 2" in run.err
        assert run("show") == 0
        assert "Changed since" in run.out

    def test_only_the_guests_asked_for(self, run: Cli) -> None:
        run.host.start(samples.guest("pq1", 200, "qemu"))
        assert run("show", "--json", "--guest", "qemu:pq1") == 0
        assert [g["name"] for g in json.loads(run.out)["guests"]] == ["pq1"]
        assert run("show", "--guest", "nobody") == 1
        assert run.err.startswith("vsrtune: error: nobody: no such guest is running\n")


class TestPlanAndApply:
    def test_plan_changes_nothing_and_apply_does_what_it_showed(self, run: Cli) -> None:
        run.policy(GOOD)
        before = run.host.snapshot
        assert run("plan") == 0
        shown = run.out
        assert "vhost: CPUs 2" in shown
        assert run.host.snapshot == before
        assert run("apply") == 0
        assert run.out.startswith(shown)
        assert run.host.snapshot != before

    def test_second_plan_says_why_nothing_is_left_to_do(self, run: Cli) -> None:
        run.policy(GOOD)
        run("apply")
        assert run("plan", "-v") == 0
        assert run.out.startswith("Nothing to change")
        assert "Left as it is" in run.out

    def test_stored_plan_is_executed_and_refused_when_stale(self, run: Cli, tmp_path: Path) -> None:
        run.policy(GOOD)
        assert run("plan", "--json") == 0
        stored = tmp_path / "plan.json"
        stored.write_text(run.out)
        before = run.host.snapshot
        run.host.change("vhost", affinity=CpuSet([3]))
        assert run("apply", "--plan", str(stored)) == 1
        assert "plan again" in run.err
        assert run("undo") == 0
        run.host.snapshot = before
        assert run("apply", "--plan", str(stored)) == 0
        assert run("verify") == 0

    def test_broken_policy_means_nothing_is_applied(self, run: Cli) -> None:
        run.policy(GOOD, "good.yaml")
        bad = run.policy("guest: vr1\nqueue: {macvtap: 0}\nqueues: 1\n", "zz.yaml")
        for command in ("plan", "apply", "verify", "daemon"):
            assert run(command) == 2
            assert f"vsrtune: error: {bad}:2" in run.err
            assert f"vsrtune: error: {bad}:3" in run.err
        assert run.host.writes == 0
        assert not run.journal.exists()

    def test_refusal_has_an_exit_code_of_its_own(self, run: Cli) -> None:
        run.policy('guest: "*"\ncpus: {vcpu: 77}\nprofile: none\n')
        assert run("plan") == run("plan", "--json") == ExitCode.REFUSED
        assert run("plan") == ExitCode.REFUSED
        assert "Refused" in run.out
        assert run("verify") == ExitCode.REFUSED
        assert run("apply") == ExitCode.REFUSED
        assert run.host.writes == 0

    def test_no_policy_says_how_to_write_one(self, run: Cli) -> None:
        assert run("plan") == 0
        assert "/usr/share/vsrtune/policies" in run.err
        assert "vsrtune policy init GUEST" in run.err

    def test_daemon_holding_the_journal_is_named(self, run: Cli) -> None:
        run.policy(GOOD)
        with Journal.open(run.journal, samples.BOOT):
            assert run("apply") == 1
        assert "systemctl reload vsrtune" in run.err
        assert run.host.writes == 0

    def test_failure_puts_the_guest_back_and_exits_1(self, run: Cli) -> None:
        run.policy(GOOD)
        before = run.host.snapshot
        run.host.fail["txqueuelen"] = WriteError("not permitted")
        assert run("apply") == 1
        assert "macvtap100 txqueuelen: not permitted" in run.err
        assert "vsrtune: failed for vr1: each is as it was" in run.err
        assert run.host.snapshot == before

    def test_what_a_changed_policy_drops_is_planned_and_put_back(self, run: Cli) -> None:
        run.policy(GOOD)
        before = run.host.snapshot
        run("apply")
        run.policy('guest: "*"\ncpus: {vcpu: 1, vhost: 2}\nprofile: none\n')
        assert run("verify") == ExitCode.DIFFERS
        assert "no policy asks for it any more" in run.out
        run("plan", "-v")
        shown = run.out
        assert "no policy asks for it any more" in shown
        assert run("apply", "-v") == 0
        assert run.out.startswith(shown)
        assert run.host.snapshot.guests[0].interfaces == before.guests[0].interfaces
        assert run("verify") == 0
        run.policies.joinpath("p.yaml").unlink()
        assert run("apply") == 0
        assert run.host.snapshot == before
        assert run("undo") == 0
        assert run.out.startswith("Nothing to undo")

    def test_dropped_setting_that_others_changed_is_left_alone(self, run: Cli) -> None:
        run.policy(GOOD)
        run("apply")
        run.host.change("vhost", affinity=CpuSet([3]))
        run.policies.joinpath("p.yaml").unlink()
        assert run("apply") == 0
        assert "somebody else has changed it" in run.out
        assert run.host.snapshot.guests[0].threads[2].affinity == CpuSet([3])


class TestVerifyAndUndo:
    def test_verify_names_every_difference(self, run: Cli) -> None:
        run.policy(GOOD)
        assert run("apply") == 0
        assert run("verify") == 0
        assert run.out == "no drift: the host is as the policies say\n"
        run.host.change("vhost", affinity=samples.ALL)
        assert run("verify") == ExitCode.DIFFERS
        (line,) = run.out.splitlines()
        assert "tid 102" in line
        assert "should be CPUs 2" in line

    def test_verify_counts_a_held_pin_as_a_difference(self, run: Cli) -> None:
        run.policy(GOOD)
        run("apply")
        run.host.change("vcpu", affinity=CpuSet([3]), pin=CpuSet([3]))
        assert run("verify") == ExitCode.DIFFERS
        assert "vcpu 0" in run.out

    def test_undo_restores_and_tells(self, run: Cli) -> None:
        run.policy(GOOD)
        before = run.host.snapshot
        run("apply")
        assert run("undo") == 0
        assert run.host.snapshot == before
        assert "restored: vr1: macvtap100 txqueuelen: 300 -> 500" in run.out
        assert run("undo") == 0
        assert run.out.startswith("Nothing to undo")

    def test_undo_leaves_foreign_values_and_names_them(self, run: Cli) -> None:
        run.policy(GOOD)
        run("apply")
        run.host.change("vhost", affinity=CpuSet([3]))
        assert run("undo") == 0
        assert "left alone" in run.out

    def test_undo_that_fails_exits_1_and_can_be_repeated(self, run: Cli) -> None:
        run.policy(GOOD)
        before = run.host.snapshot
        run("apply")
        run.host.fail["txqueuelen"] = WriteError("not permitted")
        assert run("undo") == 1
        assert "not permitted" in run.err
        run.host.fail.clear()
        assert run("undo") == 0
        assert run.host.snapshot == before

    @pytest.mark.parametrize("file_is_there", [True, False])
    def test_undo_beside_the_daemon_touches_nothing(
        self, run: Cli, monkeypatch: pytest.MonkeyPatch, file_is_there: bool
    ) -> None:
        """Guests would be switched away from where the daemon keeps them."""
        run.policy(GOOD)
        run("apply")
        tuned = run.host.snapshot
        switched: list[object] = []

        def carry_out(*asked: object) -> Iterator[object]:
            switched.append(asked)
            return iter(())

        monkeypatch.setattr("vsrtune.cli.apply.attachments.carry_out", carry_out)
        with Journal.open(run.journal, samples.BOOT):
            if not file_is_there:
                run.journal.rename(run.journal.with_name("moved away"))
                monkeypatch.setattr("vsrtune.cli.apply.check_written", lambda *_: None)
            assert run("undo") == 1
        assert "systemctl stop vsrtune" in run.err
        assert (switched, run.host.snapshot) == ([], tuned)
        if file_is_there:
            assert run("undo") == 0
            assert len(switched) == 1

    @pytest.mark.parametrize(
        ("error", "code"),
        [(ObserveError("no CPU could be read"), ExitCode.UNREAD), (KeyError("uuid"), 1)],
    )
    @pytest.mark.parametrize("where", ["_with_libvirt_guests", "_switch"])
    def test_undo_goes_on_whatever_reading_the_host_raises(
        self, run: Cli, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception, code: int
    ) -> None:
        run.policy(GOOD)
        before = run.host.snapshot
        run("apply")

        def fail(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(f"vsrtune.cli.apply.{where}", fail)
        assert run("undo") == code
        assert run.host.snapshot == before
        assert "settings restored." in run.out
        assert str(error) in run.err
        assert "run `vsrtune undo` again" in run.err

    def test_an_interrupt_says_what_stays(self, run: Cli) -> None:
        """A pin for which libvirt keeps the command waiting invites one."""
        run.policy(GOOD)
        before, write = run.host.snapshot, run.host.write
        left = 3

        def interrupted(target: Target, value: Value) -> None:
            nonlocal left
            write(target, value)
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

        run.host.write = interrupted  # type: ignore[method-assign]
        assert run("apply") == ExitCode.INTERRUPTED
        assert "interrupted: 3 settings are vsrtune's; `vsrtune undo` puts them back" in run.err
        left = 2
        assert run("undo") == ExitCode.INTERRUPTED
        live = len(read_entries(run.journal, samples.BOOT))
        assert f"interrupted: {live} settings are vsrtune's; `vsrtune undo` again" in run.err
        assert run("undo") == 0
        assert run.host.snapshot == before

    def test_undo_as_json(self, run: Cli) -> None:
        Journal.open(run.journal, samples.BOOT).close()
        assert run("undo", "--json") == 0
        assert json.loads(run.out)["restored"] == []
        run.policy(GOOD)
        run("apply")
        assert run("undo", "--json") == 0
        assert json.loads(run.out)["restored"]


class TestDaemonThatDoesNotRun:
    """One that finds wrong policies, or a wrong option, on a host that an earlier one left tuned:
    systemd starts no other."""

    WRONG = "guest: vr1\nwrong: 1\n"

    @pytest.fixture
    def tuned(self, run: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Snapshot:
        """The host before it was tuned."""
        monkeypatch.setattr("vsrtune.cli.daemon.boot_id", lambda: samples.BOOT)
        monkeypatch.setattr("vsrtune.cli.daemon.LiveSysOps", lambda **_: run.host)
        monkeypatch.setattr("vsrtune.cli.daemon.live_observer", self._observer(run))
        monkeypatch.setattr("vsrtune.cli.daemon.remove_stale", lambda: None)
        monkeypatch.setattr("vsrtune.cli.daemon.systemd.setup", lambda _verbose: None)
        # Others have set it up, for an output that they have closed.
        monkeypatch.setattr(LOGGER, "handlers", [])
        monkeypatch.setattr(LOGGER, "propagate", True)
        monkeypatch.setattr("vsrtune.cli.daemon.gc.set_threshold", lambda *_: None)
        monkeypatch.setattr("vsrtune.cli.daemon.Daemon.install_signals", lambda _self: None)
        monkeypatch.setenv("VSRTUNE_ATTACH_LEDGER", str(tmp_path / "attach.jsonl"))
        before = run.host.snapshot
        run.policy(GOOD)
        assert run("apply") == 0
        return before

    @staticmethod
    def _observer(run: Cli) -> Any:
        def made(*_: object) -> Any:
            run.host.remember_fixed = lambda _irqs: None  # type: ignore[attr-defined]
            return run.host

        return made

    def test_it_puts_back_what_nobody_would_guard(
        self, run: Cli, tuned: Snapshot, caplog: pytest.LogCaptureFixture
    ) -> None:
        run.policy(self.WRONG)
        assert run("daemon") == 2
        assert run.host.snapshot == tuned
        told = caplog.text
        assert "p.yaml:2: wrong: unknown key" in told
        assert "with wrong policies no daemon runs" in told
        run.host.written.clear()
        assert run("daemon") == 2
        assert run.host.writes == 0
        assert "p.yaml:2: wrong: unknown key" in run.err

    def test_what_it_cannot_put_back_it_tries_again(self, run: Cli, tuned: Snapshot) -> None:
        """systemd restarts it for status 1."""
        run.policy(self.WRONG)
        run.host.fail["txqueuelen"] = WriteError("not permitted")
        assert run("daemon") == 1
        run.host.fail.clear()
        assert run("daemon") == 2
        assert run.host.snapshot == tuned

    def test_what_is_to_stay_it_names(self, run: Cli, tuned: Snapshot) -> None:
        run.policy(self.WRONG)
        after = run.host.snapshot
        assert run("daemon", "--on-stop", "keep") == 2
        assert run.host.snapshot == after != tuned
        assert "settings of an earlier run stay, and no daemon guards" in run.err
        assert "`vsrtune undo`" in run.err

    def test_what_another_process_answers_for_it_leaves(self, run: Cli, tuned: Snapshot) -> None:
        run.policy(self.WRONG)
        after = run.host.snapshot
        with Journal.open(run.journal, samples.BOOT):
            assert run("daemon") == 2
        assert run.host.snapshot == after
        assert "earlier run" not in run.err

    def test_a_wrong_option_hides_nothing(self, run: Cli, tuned: Snapshot) -> None:
        after = run.host.snapshot
        assert run("daemon", "--interval", "never") == 2
        assert run.host.snapshot == after
        assert "settings of an earlier run stay, and no daemon guards" in run.err


class TestConfirm:
    """`apply --confirm`."""

    @pytest.fixture
    def guarded(self, run: Cli, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
        with memory_cli.guarded(monkeypatch):
            yield run

    @pytest.mark.parametrize("closed", [False, True])
    def test_unconfirmed_everything_is_back(
        self, guarded: Cli, monkeypatch: pytest.MonkeyPatch, closed: bool
    ) -> None:
        guarded.policy(GOOD)
        if closed:
            monkeypatch.setattr(sys, "stdin", None)
        before = guarded.host.snapshot
        assert guarded("apply", "--confirm", "1s") == 1
        assert "Run `vsrtune confirm` within 1 s to keep this." in guarded.out
        assert "Not confirmed.\n" in guarded.out
        assert guarded.out.endswith("Everything is put back.\n")
        assert guarded.host.writes > 0
        assert guarded.host.snapshot == before

    def test_confirmed_by_another_session_it_stays(self, guarded: Cli) -> None:
        guarded.policy(GOOD)

        def confirm() -> None:
            while main.run(["confirm"]) != 0:
                time.sleep(0.01)

        other = threading.Thread(target=confirm)
        other.start()
        assert guarded("apply", "--confirm", "60s") == 0
        other.join()
        assert guarded("verify") == 0
        assert guarded("confirm") == 1
        assert "nothing waits for a confirmation" in guarded.err

    def test_no_apply_sets_what_would_be_put_back_as_well(
        self, guarded: Cli, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        guarded.policy(GOOD)
        codes = []

        def ask(*_: Any) -> None:
            guarded.policy(GOOD.replace("300", "400"))
            words = (["apply"], ["apply", "--dry-run"], ["plan"], ["verify"], ["confirm"])
            codes.extend(main.run(each) for each in words)

        monkeypatch.setattr("vsrtune.cli.apply._ask", ask)
        assert guarded("apply", "--confirm", "60s") == 0
        assert codes == [ExitCode.FAILED, 0, 0, ExitCode.DIFFERS, 0]
        assert "another guarded change is not over yet" in guarded.err
        assert guarded("apply") == 0
        assert guarded("verify") == 0

    def test_what_changes_nothing_waits_for_nobody(self, guarded: Cli) -> None:
        assert guarded("apply", "--confirm", "60s") == 0
        assert guarded("apply", "--confirm", "1h") == 2
        assert "'1h' is not a time" in guarded.err
        assert guarded("apply", "--confirm", "601s") == 2

    @pytest.mark.parametrize(("before", "after"), [(b"\n\n", b""), (b"", b"\n")])
    def test_only_an_enter_after_the_question_confirms(
        self, guarded: Cli, monkeypatch: pytest.MonkeyPatch, before: bytes, after: bytes
    ) -> None:
        guarded.policy(GOOD)
        master, slave = pty.openpty()
        os.write(master, before)

        def say(text: str, **_: Any) -> None:
            if text.startswith("Press Enter"):
                os.write(master, after)

        monkeypatch.setattr("vsrtune.cli.apply.say", say)
        with open(slave) as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            assert guarded("apply", "--confirm", "1s") == (0 if after else 1)
        os.close(master)

    def test_a_foreign_journal_is_said_before_anything_is_guarded(self, guarded: Cli) -> None:
        guarded.policy(GOOD)
        head = {"r": "head", "version": 99, "boot": samples.BOOT}
        guarded.journal.write_text(json.dumps(head) + "\n" + json.dumps({"r": "new"}) + "\n")
        assert guarded("apply", "--confirm", "60s") != 0
        assert "99" in guarded.err and "not everything could be put back" not in guarded.err

    def test_a_switch_is_made_before(
        self, guarded: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Neither a reboot nor, of a switch to macvtap, an undo takes it back."""
        host = FakeAttachHost()
        host.add("vr1", ("02:00:00:00:0a:00", "p0"))
        monkeypatch.setattr(attachments, "LiveHost", lambda _uri: host)
        monkeypatch.setenv("VSRTUNE_ATTACH_LEDGER", str(tmp_path / "attach.jsonl"))
        for to in ("napi-macvlan", "macvtap"):
            path = guarded.policy(GOOD + f"attachment: {to}\n")
            before, steps = guarded.host.snapshot, len(host.log)
            assert guarded("apply", "--confirm", "1s") == ExitCode.FAILED
            assert f"{path}:5: vr1: not on {to} yet, and a switch does not undo" in guarded.err
            assert "`vsrtune attach` first, or apply without --confirm" in guarded.err
            assert (guarded.out, guarded.host.snapshot, len(host.log)) == ("", before, steps)
            assert guarded("attach", "--to", to, "vr1") == 0
            assert guarded("apply", "--confirm", "1s") == ExitCode.FAILED
            assert "Not confirmed." in guarded.out

    def test_an_apply_that_dies_is_taken_back(
        self, guarded: Cli, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        guarded.policy(GOOD)
        before = guarded.host.snapshot

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("vsrtune.cli.apply._ask", interrupt)
        assert guarded("apply", "--confirm", "60s") == 130
        assert guarded.host.writes > 0
        assert guarded.host.snapshot == before


LIBVIRT = Problem("libvirt", "libvirt does not answer: no such socket")


class TestNothingRead:
    """Success is never told where nothing could be looked at."""

    def test_verify_where_no_guest_runs_that_a_policy_names(self, run: Cli) -> None:
        path = run.policy("guest: vr9\ncpus: {vcpu: 1}\nprofile: none\n")
        assert run("verify") == ExitCode.UNREAD
        assert run.out == f"{path}:1: no running guest matches 'vr9'\n"
        assert "nothing was compared" in run.err
        run.policy(GOOD, "q.yaml")
        run("apply")
        assert run("verify") == 0, "guests that are off are no reason to fail for the others"
        assert run.out.startswith(f"{path}:1: no running guest matches 'vr9'\nno drift")

    @pytest.mark.parametrize(
        ("problem", "guest"),
        [
            (LIBVIRT, "*"),
            (LIBVIRT, "vr9"),
            (Problem("guest vr2", "vr2: Permission denied"), "*"),
            (Problem("proc", "/proc: Permission denied"), "qemu:*"),
            (Problem("net", "/sys/class/net: Too many open files"), "*"),
        ],
    )
    def test_guests_that_could_not_be_looked_at(
        self, run: Cli, problem: Problem, guest: str
    ) -> None:
        run.policy(f'guest: "{guest}"\ncpus: {{vcpu: 1}}\nprofile: none\n')
        run("apply")
        run.host.snapshot = replace(run.host.snapshot, problems=(problem,))
        for command in ("plan", "apply", "verify"):
            assert run(command) == ExitCode.UNREAD
            assert "no drift" not in run.out
            assert f"error: {problem.reader}: guests that the policies name" in run.err
            assert problem.what in run.err

    def test_undo_does_not_say_that_nothing_is_to_be_done(
        self, run: Cli, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Guests may have brought pins along, which only libvirt shows."""
        process = SimpleNamespace(by_libvirt=True)
        table = SimpleNamespace(scan=lambda _root: SimpleNamespace(qemus=[process]))
        monkeypatch.setattr("vsrtune.cli.apply.ProcessTable", lambda: table)
        silent = tuple(replace(g, unconfirmed=True) for g in run.host.snapshot.guests)
        run.host.snapshot = replace(run.host.snapshot, guests=silent, problems=(LIBVIRT,))
        Journal.open(run.journal, samples.BOOT).close()
        for words in (("undo",), ("undo", "--dry-run")):
            assert run(*words) == ExitCode.UNREAD
            assert "Nothing to undo" not in run.out
            assert "may stay: qemu:///system: libvirt does not answer for vr1" in run.err
        odd = Problem("domain", "vr9 runs according to libvirt, but its process is not believed")
        run.host.snapshot = replace(samples.snapshot(), problems=(odd,))
        for words in (("undo",), ("undo", "--dry-run")):
            assert run(*words) == ExitCode.UNREAD
            assert odd.what in run.err

    def test_verify_names_what_cannot_be_made(self, run: Cli) -> None:
        """And not what nobody asked for: a device that the guest drives itself."""
        host, guest = run.host.snapshot.host, run.host.snapshot.guests[0]
        (nic,) = [n for n in host.nics if n.irqs]
        irqs = tuple(replace(irq, managed=True) for irq in nic.irqs)
        nics = tuple(replace(n, irqs=irqs) if n is nic else n for n in host.nics)
        passed = replace(guest, other_nics=(OtherNic("hostdev", "", "02:00:00:00:00:99", ""),))
        run.host.snapshot = replace(
            run.host.snapshot, host=replace(host, nics=nics), guests=(passed,), problems=()
        )
        run.policy("guest: vr1\ncpus: {irq: 3, vcpu: 1}\nirq: {set: true}\nprofile: none\n")
        run("apply")
        assert run("verify") == 0
        assert "left alone: host/: p0 irq 24 (p0-rx-0): kernel-managed" in run.out
        assert "no drift: the host is as the policies say, but for 1 setting" in run.out
        assert run("verify", "--json") == 0
        assert len(json.loads(run.out)["cannot_be_made"]) == 1

    def test_plain_qemu_needs_no_libvirt(self, run: Cli) -> None:
        run.host.start(samples.guest("pq1", 200, "qemu"))
        run.host.snapshot = replace(run.host.snapshot, problems=(LIBVIRT,))
        run.policy('guest: "qemu:*"\ncpus: {vcpu: 1}\nprofile: none\n')
        assert run("plan") == run("apply") == run("verify") == 0

    def test_a_difference_is_told_though_not_all_could_be_read(self, run: Cli) -> None:
        run.policy(GOOD)
        run.host.snapshot = replace(run.host.snapshot, problems=(LIBVIRT,))
        assert run("verify") == ExitCode.DIFFERS
        assert "could not be observed" in run.err

    def test_check_of_no_file_says_so(self, run: Cli) -> None:
        assert run("policy", "check") == 0, "systemctl reload after the last policy was removed"
        assert "no policy in" in run.err


def test_exit_codes_are_told_apart() -> None:
    assert sorted(ExitCode) == [0, 1, 2, 3, 4, 5, 6, 75, 130, 141]
    assert all(code.meaning.endswith(".") for code in ExitCode)


class TestPolicy:
    def test_check_names_errors_and_good_files(self, run: Cli) -> None:
        good, bad = run.policy(GOOD, "a.yaml"), run.policy("guest: x\nwrong: 1\n", "b.yaml")
        assert run("policy", "check", str(good)) == 0
        assert run.out == f"{good}: good\n"
        assert run("policy", "check", str(good), str(bad)) == 2
        assert run.out == f"{good}: good\n"
        assert f"vsrtune: error: {bad}:2" in run.err
        assert run("policy", "check") == 2

    def test_schema_is_json(self, run: Cli) -> None:
        assert run("policy", "schema") == 0
        assert "guest" in json.loads(run.out)["properties"]


class TestErrors:
    def test_error_and_hint_stand_on_lines_of_their_own(
        self, run: Cli, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> Snapshot:
            raise VsrtuneError("it broke", where="here", hint="mend it")

        monkeypatch.setattr("vsrtune.cli.show.observe", fail)
        assert run("show") == 1
        assert run.err == "vsrtune: error: here: it broke\nvsrtune: hint: mend it\n"

    def test_system_error_names_the_file(self, run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        def denied(*_: Any) -> Snapshot:
            raise PermissionError(13, "Permission denied", "/proc/1/fd")

        monkeypatch.setattr("vsrtune.cli.show.observe", denied)
        assert run("show") == 1
        assert run.err == "vsrtune: error: /proc/1/fd: Permission denied\n"

    def test_reader_that_goes_away_is_no_error(self) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        words = [sys.executable, "-m", "vsrtune", "policy", "schema"]
        with os.fdopen(writer, "w") as out:
            done = subprocess.run(
                words, cwd=REPO, stdout=out, stderr=subprocess.PIPE, text=True, check=False
            )
        assert (done.returncode, done.stderr) == (141, "")
        shell = f"exec {shlex.join(words)} >&-"
        done = subprocess.run(["sh", "-c", shell], cwd=REPO, stderr=subprocess.PIPE, check=False)
        assert (done.returncode, done.stderr) == (0, b"")

    def test_every_command_has_help(self, run: Cli) -> None:
        assert run("--help") == 0
        for command in main.COMMANDS:
            assert f"\n  {command}" in run.out
        for command in main.COMMANDS:
            assert run(command, "--help") == 0
            assert run.out.startswith(f"Usage: vsrtune {command}")


# What observes and plans, about half of the time that a short command takes.
_OF_A_PASS = ("vsrtune.observe.observer", "vsrtune.plan.planner")


@pytest.mark.parametrize(
    ("words", "forbidden"),
    [
        (["--version"], ("libvirt", "rich", "prometheus_client", "ruamel.yaml", "jsonschema")),
        (
            ["undo"],
            ("libvirt", "rich", "prometheus_client", "ruamel.yaml", "jsonschema", "pyroute2"),
        ),
        (
            ["policy", "schema"],
            ("libvirt", "rich", "prometheus_client", "pyroute2", *_OF_A_PASS),
        ),
        (["bench", "--help"], ("libvirt", "rich", "prometheus_client", "pyroute2", *_OF_A_PASS)),
    ],
)
def test_start_up_does_not_load_what_is_not_needed(
    words: list[str], forbidden: tuple[str, ...], tmp_path: Path
) -> None:
    journal = tmp_path / "journal.jsonl"
    Journal.open(journal, boot_id()).close()
    program = (
        "import sys\nfrom vsrtune.cli.main import run\ncode = run(sys.argv[1:])\n"
        "print(*sys.modules, file=sys.stderr)\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
        env={"VSRTUNE_JOURNAL": str(journal), "PATH": "/usr/bin"},
    )
    assert set(done.stderr.split()).isdisjoint(forbidden)


def test_recorded_host_is_nobodys_journal(tmp_path: Path) -> None:
    assert options.journalled(tmp_path / "missing", tmp_path) == ((), {})


def test_classes_of_threads_that_have_ended_are_planned_for_nobody() -> None:
    """Those of threads that run and that no guest shows are."""
    pid, root, sched = os.getpid(), LiveRoot(), Sched(SchedClass.RR, 7)
    start = parse_stat(root.read(f"/proc/{pid}/stat")).start_time
    # Its own thread, one of an earlier process of this pid, and a thread that is no more.
    keys = [ThreadKey(pid, pid, start), ThreadKey(pid, pid, start - 1), ThreadKey(pid, 1, start)]
    entries = [Entry(ThreadSched("vr1", key, ""), sched, sched, "done") for key in keys]
    shown = samples.snapshot(samples.guest("vr1"))
    (thread, *_) = shown.guests[0].threads
    entries.append(Entry(ThreadSched("vr1", thread.key, ""), sched, sched, "done"))
    kept = options.lasting(entries, shown)
    assert [e.target for e in kept] == [entries[0].target, entries[3].target]


def test_a_guest_with_an_awkward_name_is_shown(run: Cli) -> None:
    guest = replace(samples.guest("vr [x] 1.ü\udcff"))
    run.host.start(guest)
    assert run("show") == 0
    assert "Guest vr [x] 1.ü\\udcff (pid 100)" in run.out


def test_check_tells_of_a_policy_that_asks_for_nothing(run: Cli, tmp_path: Path) -> None:
    one, none = tmp_path / "one.yaml", tmp_path / "none.yaml"
    one.write_text("guest: vr1\n")
    none.write_text("guest: vr2\nprofile: none\n")
    assert run("policy", "check", str(one), str(none)) == 0
    assert run.out == (
        f"{one}: good\n"
        f"{none}: good, but it asks for nothing: remove profile: none, or write settings\n"
    )


def test_check_without_files_is_as_careful_as_the_daemon(run: Cli, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("guest: vr1\n")
    path.chmod(0o666)
    assert run("policy", "check", str(path)) == 0
    assert run("policy", "check", "--policies", str(tmp_path)) == 2
    assert f"chmod go-w {path}" in run.err
    assert run.out == ""
