"""The command line: exit codes, messages, and what start-up must not import."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shell_samples as samples
from fake_host import FakeHost

from vsrtune import cli, cli_common
from vsrtune.cpuset import CpuSet
from vsrtune.errors import VsrtuneError, WriteError
from vsrtune.journal import Journal
from vsrtune.model import Snapshot

GOOD = 'guest: "*"\ncpus: {vcpu: 1, vhost: 2}\nqueue: {macvtap: 300}\n'
REPO = Path(__file__).resolve().parents[2]


class Cli:
    """Runs commands against a host in memory, with policies and journal in tmp_path."""

    def __init__(self, host: FakeHost, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.host = host
        self.policies = directory / "policies"
        self.policies.mkdir()
        self.journal = directory / "journal.jsonl"
        self._capsys = capsys
        self.out = self.err = ""

    def policy(self, text: str, name: str = "p.yaml") -> Path:
        path = self.policies / name
        path.write_text(text)
        return path

    def __call__(self, *words: str) -> int:
        code = cli.run(words)
        captured = self._capsys.readouterr()
        self.out, self.err = captured.out, captured.err
        assert "Traceback" not in self.err
        return code


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    host = FakeHost()
    run = Cli(host, tmp_path, capsys)

    def observe(root: Path | None, uri: str, trace_seconds: float, *_named: object) -> Snapshot:
        return host.snapshot

    for module in ("cli_show", "cli_plan", "cli_apply"):
        monkeypatch.setattr(f"vsrtune.{module}.observe", observe)
    monkeypatch.setattr("vsrtune.rootfs.boot_id", lambda: samples.BOOT)
    monkeypatch.setattr("vsrtune.sysops.LiveSysOps", lambda **_: host)
    monkeypatch.setenv("VSRTUNE_POLICIES", str(run.policies))
    monkeypatch.setenv("VSRTUNE_JOURNAL", str(run.journal))
    return run


class TestShow:
    def test_json_is_the_snapshot(self, run: Cli) -> None:
        assert run("show", "--json") == 0
        assert Snapshot.from_json(run.out) == run.host.snapshot

    def test_table_names_the_guest(self, run: Cli) -> None:
        assert run("show") == 0
        assert "Guest vr1 (pid 100)" in run.out

    def test_what_others_changed_is_shown_with_who_and_which_rule(self, run: Cli) -> None:
        run.policy(GOOD + "drift: {cpus.vhost: report}\n")
        assert run("apply") == 0
        assert run("show") == 0
        assert "Changed since" not in run.out
        run.host.change("vhost", affinity=samples.ALL)
        run.host.change("vcpu", affinity=CpuSet([3]), pin=CpuSet([3]))
        assert run("show", "vr1") == 0
        lines = run.out.partition("Changed since")[2].splitlines()
        (vcpu,) = [line.split() for line in lines if "vcpu 0" in line]
        (vhost,) = [line.split() for line in lines if "tid 102" in line]
        assert vcpu[-3:] == ["libvirt", "cpus.vcpu", "report"]
        assert vhost[-3:] == ["unknown", "cpus.vhost", "report"]
        assert run("plan") == 0
        assert "Changed since" in run.out

    def test_only_the_guests_asked_for(self, run: Cli) -> None:
        run.host.start(samples.guest("pq1", 200, "qemu"))
        assert run("show", "--json", "qemu:pq1") == 0
        assert [g["name"] for g in json.loads(run.out)["guests"]] == ["pq1"]
        assert run("show", "nobody") == 1
        assert run.err.startswith("vsrtune: error: nobody: no such guest is running\n")


class TestPlanAndApply:
    def test_plan_changes_nothing_and_apply_does_what_it_showed(self, run: Cli) -> None:
        run.policy(GOOD)
        before = run.host.snapshot
        assert run("plan") == 0
        shown = run.out
        assert "CPUs 0-3" in shown
        assert run.host.snapshot == before
        assert run("apply") == 0
        assert run.out.startswith(shown)
        assert run.host.snapshot != before

    def test_second_plan_says_why_nothing_is_left_to_do(self, run: Cli) -> None:
        run.policy(GOOD)
        run("apply")
        assert run("plan") == 0
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

    def test_refusal_is_exit_code_2(self, run: Cli) -> None:
        run.policy('guest: "*"\ncpus: {vcpu: 77}\n')
        assert run("plan") == 2
        assert "Refused" in run.out
        assert run("apply") == 2
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
        assert "is as it was" in run.err
        assert run.host.snapshot == before

    def test_what_a_changed_policy_drops_is_planned_and_put_back(self, run: Cli) -> None:
        run.policy(GOOD)
        before = run.host.snapshot
        run("apply")
        run.policy('guest: "*"\ncpus: {vcpu: 1, vhost: 2}\n')
        assert run("verify") == 1
        assert "no policy asks for it any more" in run.out
        run("plan")
        shown = run.out
        assert "no policy asks for it any more" in shown
        assert run("apply") == 0
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
        assert run("verify") == 1
        (line,) = run.out.splitlines()
        assert "tid 102" in line
        assert "should be CPUs 2" in line

    def test_verify_counts_a_held_pin_as_a_difference(self, run: Cli) -> None:
        run.policy(GOOD)
        run("apply")
        run.host.change("vcpu", affinity=CpuSet([3]), pin=CpuSet([3]))
        assert run("verify") == 1
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

    def test_undo_as_json(self, run: Cli) -> None:
        assert run("undo", "--json") == 0
        assert json.loads(run.out)["restored"] == []
        run.policy(GOOD)
        run("apply")
        assert run("undo", "--json") == 0
        assert json.loads(run.out)["restored"]


class TestPolicy:
    def test_check_names_errors_and_good_files(self, run: Cli) -> None:
        good, bad = run.policy(GOOD, "a.yaml"), run.policy("guest: x\nwrong: 1\n", "b.yaml")
        assert run("policy", "check", str(good)) == 0
        assert run.out == f"{good}: good\n"
        assert run("policy", "check", str(good), str(bad)) == 2
        assert run.out == f"{good}: good\n"
        assert f"vsrtune: error: {bad}:2" in run.err
        assert run("policy", "check") == 2

    def test_check_of_what_is_no_text(self, run: Cli, tmp_path: Path) -> None:
        path = tmp_path / "binary.yaml"
        path.write_bytes(b"guest: \xff\xfe\n")
        assert run("policy", "check", str(path)) == 2

    def test_schema_is_json(self, run: Cli) -> None:
        assert run("policy", "schema") == 0
        assert "guest" in json.loads(run.out)["properties"]


class TestErrors:
    @pytest.mark.parametrize(
        "words",
        [["nonsense"], ["show", "--nonsense"], ["daemon", "--metrics", "nowhere"], ["apply", "x"]],
    )
    def test_wrong_usage_is_exit_code_2(self, run: Cli, words: list[str]) -> None:
        assert run(*words) == 2
        assert "Usage:" in run.err

    def test_error_and_hint_stand_on_lines_of_their_own(
        self, run: Cli, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> Snapshot:
            raise VsrtuneError("it broke", where="here", hint="mend it")

        monkeypatch.setattr("vsrtune.cli_show.observe", fail)
        assert run("show") == 1
        assert run.err == "vsrtune: error: here: it broke\nvsrtune: hint: mend it\n"

    def test_interrupt_is_exit_code_130(self, run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*_: Any) -> Snapshot:
            raise KeyboardInterrupt

        monkeypatch.setattr("vsrtune.cli_show.observe", interrupt)
        assert run("show") == 130

    def test_system_error_names_the_file(self, run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        def denied(*_: Any) -> Snapshot:
            raise PermissionError(13, "Permission denied", "/proc/1/fd")

        monkeypatch.setattr("vsrtune.cli_show.observe", denied)
        assert run("show") == 1
        assert run.err == "vsrtune: error: /proc/1/fd: Permission denied\n"

    def test_reader_that_goes_away_is_no_error(self) -> None:
        shell = f"{sys.executable} -m vsrtune policy schema | head -c 1; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(
            ["bash", "-c", shell], cwd=REPO, capture_output=True, text=True, check=False
        )
        assert done.stderr == ""
        assert done.returncode in (0, 141)

    def test_every_command_has_help(self, run: Cli) -> None:
        assert run("--help") == 0
        for command in cli.COMMANDS:
            assert f"\n  {command}" in run.out
        for command in cli.COMMANDS:
            assert run(command, "--help") == 0
            assert run.out.startswith(f"Usage: vsrtune {command}")


@pytest.mark.parametrize(
    ("words", "forbidden"),
    [
        (["--version"], ("libvirt", "rich", "prometheus_client", "ruamel.yaml", "jsonschema")),
        (
            ["undo"],
            ("libvirt", "rich", "prometheus_client", "ruamel.yaml", "jsonschema", "pyroute2"),
        ),
        (["policy", "schema"], ("libvirt", "rich", "prometheus_client", "pyroute2")),
    ],
)
def test_start_up_does_not_load_what_is_not_needed(
    words: list[str], forbidden: tuple[str, ...], tmp_path: Path
) -> None:
    program = (
        "import sys\nfrom vsrtune.cli import run\ncode = run(sys.argv[1:])\n"
        "print(*sys.modules, file=sys.stderr)\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
        env={"VSRTUNE_JOURNAL": str(tmp_path / "none"), "PATH": "/usr/bin"},
    )
    assert set(done.stderr.split()).isdisjoint(forbidden)


def test_recorded_host_is_nobodys_journal(tmp_path: Path) -> None:
    assert cli_common.entries(tmp_path / "missing", tmp_path) == ()


def test_a_guest_with_an_awkward_name_is_shown(run: Cli) -> None:
    guest = replace(samples.guest("vr [x] 1.ü\udcff"))
    run.host.start(guest)
    assert run("show") == 0
    assert "Guest vr [x] 1.ü\\udcff (" in run.out


def test_check_without_files_is_as_careful_as_the_daemon(run: Cli, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("guest: vr1\n")
    path.chmod(0o666)
    assert run("policy", "check", str(path)) == 0
    assert run("policy", "check", "--policies", str(tmp_path)) == 2
    assert f"chmod go-w {path}" in run.err
    assert run.out == ""
