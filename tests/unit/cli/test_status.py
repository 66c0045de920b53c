"""`vsrtune status`, and what other commands show without changing anything."""

from __future__ import annotations

import fcntl
import json
from dataclasses import replace
from pathlib import Path

import pytest
import shell_samples as samples
from attach_host import FakeAttachHost
from test_cli import GOOD, Cli, run  # noqa: F401 (a fixture)

from vsrtune.cli import attachments
from vsrtune.core.exit_codes import ExitCode
from vsrtune.execute.journal import last_change
from vsrtune.model.snapshot import Problem
from vsrtune.views import page_data


@pytest.fixture(autouse=True)
def sound(run: Cli) -> None:  # noqa: F811
    run.host.snapshot = replace(run.host.snapshot, problems=())


def rows(text: str, title: str) -> list[list[str]]:
    """The rows of the table with that title, without its heads."""
    return [line.split() for line in text.partition(title)[2].partition("\n\n")[0].splitlines()[1:]]


def test_an_untuned_host_then_a_tuned_one(run: Cli) -> None:  # noqa: F811
    run.policy(GOOD)
    assert run("status") == ExitCode.DIFFERS
    assert "does not run: systemctl start vsrtune" in run.out
    assert "vsrtune has set nothing here" in run.out
    assert rows(run.out, "Guests\n")[0][:2] == ["vr1", "degraded"]
    assert "more, see `vsrtune verify`" in run.out
    assert run("apply") == 0
    assert run("status") == ExitCode.DONE
    assert "1 tuned" in run.out
    assert "What is wrong" not in run.out
    at, what = last_change(run.journal, samples.BOOT) or (0, "")
    assert at == run.journal.stat().st_mtime
    assert what in run.out
    assert what.startswith("vr1: ")
    assert what.endswith(" set")
    assert run("undo") == 0
    assert last_change(run.journal, samples.BOOT) is None
    assert last_change(run.journal, "another boot") is None


def test_whoever_holds_the_journal_is_named(run: Cli) -> None:  # noqa: F811
    lock = run.journal.with_name(run.journal.name + ".lock")
    with lock.open("w+") as file:
        file.write("1")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run("status") == ExitCode.DONE
    assert "process 1 (" in run.out


def test_a_wrong_policy_file_says_nothing_of_tuned_guests(run: Cli) -> None:  # noqa: F811
    """The daemon keeps the older policies."""
    run.policy(GOOD)
    assert run("apply") == 0
    run.policy("guest: vr1\nwrong: 1\n")
    assert run("status") == 2
    assert "should be" not in run.out
    assert "no policy" not in run.out
    assert "1 of unknown state" in run.out
    assert run("status", "--json") == 2
    page = json.loads(run.out)
    assert (page["reload_success"], page["totals"]["guests"]) == (False, 1)
    assert (page["guests"], page["plan"]["skipped"]) == ([], [])


def test_what_is_wrong_comes_with_its_place(run: Cli) -> None:  # noqa: F811
    run.policy('guest: "*"\ncpus: {vcpu: 77}\nprofile: none\n')
    assert run("status") == ExitCode.DIFFERS
    assert rows(run.out, "What is wrong\n")[0][:2] == ["vr1", "refused:"]
    bad = run.policy("guest: vr1\nwrong: 1\n")
    assert run("status") == ExitCode.WRONG
    assert f"policies  {bad}:2" in run.out
    run.policy(GOOD)
    run("apply")
    gone = Problem("libvirt", "libvirt does not answer")
    run.host.snapshot = replace(run.host.snapshot, problems=(gone,))
    assert run("status") == ExitCode.UNREAD
    assert "libvirt  libvirt does not answer" in run.out


def test_a_host_that_needs_no_libvirt_is_fine_without(run: Cli) -> None:  # noqa: F811
    gone = Problem("libvirt", "libvirt does not answer")
    plain = samples.snapshot(samples.guest("pq1", 200, "qemu"))
    run.host.snapshot = replace(plain, problems=(gone,))
    run.policy('guest: "qemu:*"\ncpus: {vcpu: 1}\nprofile: none\n')
    assert run("apply") == 0
    assert run("status") == ExitCode.DONE
    assert "What is wrong" not in run.out
    run.policy(GOOD, "q.yaml")
    assert run("status") == ExitCode.UNREAD
    assert "libvirt  libvirt does not answer" in run.out


def test_json_has_the_fields_of_the_status_page(run: Cli) -> None:  # noqa: F811
    run.policy(GOOD)
    run.host.start(samples.guest("pq1", 200, "qemu"))
    assert run("status", "--json", "--guest", "vr1") == ExitCode.DIFFERS
    page = json.loads(run.out)
    assert [guest["name"] for guest in page["guests"]] == ["vr1"]
    assert page["totals"]["degraded"] == 1
    assert {change["guest"] for change in page["plan"]["changes"]} == {"vr1"}


def test_more_guests_than_fit_are_counted(run: Cli) -> None:  # noqa: F811
    for number in range(20):
        run.host.start(samples.guest(f"x{number}", 1000 + number))
    assert run("status") == ExitCode.DONE
    assert "Guests (12 more)" in run.out
    assert len(run.out.splitlines()) < 24


def test_a_problem_is_found_among_more_guests_than_a_page_lists(run: Cli) -> None:  # noqa: F811
    for number in range(page_data.GUESTS):
        run.host.start(samples.guest(f"x{number}", 1000 + number))
    run.policy(GOOD)
    odd = replace(samples.guest("z", 500), problems=("odd",))
    run.host.start(odd)
    assert run("apply") == 0
    assert run("status") == ExitCode.DIFFERS
    assert rows(run.out, "What is wrong\n") == [["z", "odd"]]
    run.policy(GOOD.replace('"*"', "x*"))
    assert run("apply") == 0
    assert run("status") == ExitCode.DIFFERS
    assert rows(run.out, "more)\n")[0][:3] == ["z", "no", "policy"]


def test_verify_as_json(run: Cli) -> None:  # noqa: F811
    assert run("verify", "--json") == ExitCode.UNREAD
    idle = run.policy("guest: vr9\nqueue: {macvtap: 9}\nprofile: none\n", "a.yaml")
    run.policy(GOOD)
    assert run("verify", "--json") == ExitCode.DIFFERS
    told = json.loads(run.out)
    assert told["as_the_policies_say"] is False
    assert any(line.startswith("vr1: vcpu 0 pin: is CPUs 0-3") for line in told["differs"])
    assert told["idle"] == [f"{idle}:1: no running guest matches 'vr9'"]
    run("apply")
    assert run("verify", "--json") == 0
    assert json.loads(run.out)["as_the_policies_say"] is True


def test_attachments_of_the_guests_asked_for(
    run: Cli,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = FakeAttachHost()
    for number, name in enumerate(("vr1", "vr2"), 1):
        host.add(name, (f"02:00:00:00:0{number}:00", "p0" if name == "vr1" else "p1"))
    monkeypatch.setattr(attachments, "LiveHost", lambda _uri: host)
    monkeypatch.setenv("VSRTUNE_ATTACH_LEDGER", str(tmp_path / "attach.jsonl"))
    run.host.start(samples.guest("vr2", 200))
    run.policy("guest: vr2\nattachment: napi-macvlan\nprofile: none\n")
    run.policy("guest: vr1\nqueue: {macvtap: 500}\nprofile: none\n", "q.yaml")
    assert run("verify", "--guest", "vr1") == 0
    assert run("verify", "--guest", "vr2") == ExitCode.DIFFERS
    assert run.out == "vr2: not on napi-macvlan\n"
    for words, code in (((), 3), (("--guest", "vr1"), 0), (("--guest", "vr2"), 3)):
        assert run("status", *words) == code
        assert ("vr2    not on napi-macvlan" in run.out) == (code == 3)
    host.away_until = 1
    assert run("status") == ExitCode.DIFFERS
    assert "libvirt does not answer" in run.out
    host.away_until = 0
    run.policy("guest: vr1\nwrong: 1\n", "z.yaml")
    assert run("status") == ExitCode.WRONG
    assert "not on" not in run.out
    (run.policies / "z.yaml").unlink()
    assert run("plan", "--guest", "vr1") == 0
    assert "Attachments" not in run.out
    assert run("plan") == 0
    assert "Attachments" in run.out


@pytest.mark.parametrize("words", [["apply", "--dry-run"], ["undo", "--dry-run"]])
def test_a_dry_run_changes_nothing(run: Cli, words: list[str]) -> None:  # noqa: F811
    run.policy(GOOD)
    if words[0] == "undo":
        run("apply")
    before = run.host.snapshot
    written = run.journal.read_bytes() if run.journal.exists() else b""
    assert run(*words) == 0
    assert run.host.snapshot == before
    assert (run.journal.read_bytes() if run.journal.exists() else b"") == written
    told = "would restore: vr1: macvtap100 txqueuelen: 300 -> 500" in run.out
    assert told == (words[0] == "undo")
    assert run(*words[:1]) == 0
    assert run.host.snapshot != before


def test_a_dry_run_of_undo_as_json(run: Cli) -> None:  # noqa: F811
    run.policy(GOOD)
    run("apply")
    assert run("undo", "--dry-run", "--json") == 0
    would = json.loads(run.out)
    assert would["would_switch"] == []
    assert len(would["would_restore"]) > 2


def test_a_plan_with_changes_has_an_exit_code_when_asked(run: Cli) -> None:  # noqa: F811
    run.policy(GOOD)
    assert run("plan") == 0
    assert run("plan", "--detailed-exitcode") == ExitCode.DIFFERS
    assert run("plan", "--json", "--detailed-exitcode") == ExitCode.DIFFERS
    run("apply")
    assert run("plan", "--detailed-exitcode") == 0
