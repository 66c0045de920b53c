"""Journals of every format ever written, of formats to come, and such as are torn.

``journals/`` holds one small journal for each format, written by the vsrtune of that time on
the host of ``fake_kernel``: ``first``, then what was added: ``partitions`` (cgroup lists and
partitions), ``lag`` (bandwidth that stays booked), ``napi``, ``lower-devices`` (interrupts,
RPS and XPS), ``named-original`` (an intent that says what undo restores). A new kind of
record or target adds a file here; none is ever changed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_host import FakeHost
from fake_kernel import BOOT, make_host, make_plan
from shell_samples import POLICY

from vsrtune.cli import main
from vsrtune.core.errors import JournalError
from vsrtune.daemon.loop import Daemon
from vsrtune.daemon.reconciler import Reconciler
from vsrtune.daemon.systemd import Notifier
from vsrtune.execute.executor import recover, undo
from vsrtune.execute.journal import Journal, read_entries
from vsrtune.policy.parser import parse

STORED = Path(__file__).with_name("journals")
LATER = STORED / "later-version.jsonl"
LATER_KIND = STORED / "later-kind.jsonl"
FORMATS = sorted(p.stem for p in STORED.glob("*.jsonl") if not p.stem.startswith("later-"))
OTHER_BOOT = "another-boot"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def stored(path: Path, name: str) -> bytes:
    data = (STORED / f"{name}.jsonl").read_bytes()
    path.write_bytes(data)
    return data


@pytest.mark.parametrize("name", FORMATS)
def test_a_start_and_undo_deal_with_every_format(path: Path, name: str) -> None:
    stored(path, name)
    host = make_host("6.12")
    before, ops = host.visible(), host.ops()
    with Journal.open(path, BOOT) as journal:
        assert journal.entries()
        for entry in journal.entries():
            # As it was written, but for what a crash kept from being written.
            committed = entry if entry.state == "done" else entry.committed
            if committed is not None:
                ops.write(entry.target, committed.written)
        assert len(journal.entries()) == 1 or host.visible() != before
        assert recover(ops, journal).failed == ()
    with Journal.open(path, BOOT) as journal:
        result = undo(ops, journal)
        assert (result.failed, result.left) == ((), ())
        assert journal.entries() == ()
    assert host.visible() == before


@pytest.mark.parametrize("name", [*FORMATS, LATER_KIND.stem])
def test_of_another_boot_every_format_is_forgotten(path: Path, name: str) -> None:
    stored(path, name)
    assert read_entries(path, OTHER_BOOT) == ()
    with Journal.open(path, OTHER_BOOT) as journal:
        assert journal.discarded > 0
        assert (journal.entries(), journal.set_aside, journal.foreign) == ((), None, None)


@pytest.mark.parametrize("version", ["2", '"2.1/x"', "null"])
def test_another_version_of_another_boot_is_set_aside(path: Path, version: str) -> None:
    data = LATER.read_bytes().replace(b'"version":2', b'"version":' + version.encode())
    path.write_bytes(data)
    assert read_entries(path, OTHER_BOOT) == ()
    with Journal.open(path, OTHER_BOOT) as journal:
        assert journal.set_aside is not None
        assert journal.set_aside.parent == path.parent
        assert journal.set_aside.name.startswith("journal.jsonl.version-")
        assert journal.set_aside.read_bytes() == data
        assert journal.foreign is None
        journal.reserve(())
    with Journal.open(path, OTHER_BOOT) as journal:
        assert journal.set_aside is None
        journal.intent(make_plan(make_host("6.12")).actions[0])
    assert json.loads(path.read_text().splitlines()[0])["boot_id"] == OTHER_BOOT


class TestOfThisBoot:
    """What another version has set is on the host, and nobody here can say what was there
    before: it must not become an original."""

    @pytest.fixture(params=[LATER, LATER_KIND], ids=lambda file: str(file.stem))
    def data(self, path: Path, request: pytest.FixtureRequest) -> bytes:
        text = request.param.read_text().replace(BOOT, FakeHost().snapshot.host.boot_id)
        path.write_text(text)
        return path.read_bytes()

    def test_the_daemon_starts_and_changes_nothing(
        self, path: Path, data: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        host = FakeHost()
        before = host.snapshot
        policies = (parse(POLICY, "test.yaml"),)
        caplog.set_level("INFO", "vsrtune")
        with Journal.open(path, before.host.boot_id) as journal:
            passes = Reconciler(host, host, journal, policies)
            daemon = Daemon(passes, lambda: policies, Notifier())
            daemon.ask_stop()
            assert daemon.run() == 1, "what the other version has set is still there"
        assert (host.snapshot, host.writes) == (before, 0)
        assert path.read_bytes() == data, "the version that wrote it finds it in its place"
        assert list(path.parent.glob("*version*")) == []
        told = [r.getMessage() for r in caplog.records if "another vsrtune" in r.getMessage()]
        assert told
        for word in (str(path), "`vsrtune undo`", "reboot", "changes nothing on the host"):
            assert word in told[0]

    def test_a_journal_without_a_boot_is_taken_for_one_of_this_boot(self, path: Path) -> None:
        path.write_bytes(b'{"version":99}\n')
        with Journal.open(path, BOOT) as journal:
            assert journal.foreign is not None

    def test_it_takes_no_records(self, path: Path, data: bytes) -> None:
        action = make_plan(make_host("6.12")).actions[0]
        with Journal.open(path, FakeHost().snapshot.host.boot_id) as journal:
            for attempt in (lambda: journal.intent(action), lambda: journal.reserve([action])):
                with pytest.raises(JournalError, match=r"version 2|unknown kind 'vcpu-weight'"):
                    attempt()
        assert path.read_bytes() == data

    def test_undo_says_what_it_cannot_do(
        self,
        path: Path,
        data: bytes,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        boot = FakeHost().snapshot.host.boot_id
        monkeypatch.setattr("vsrtune.cli.apply.boot_id", lambda: boot)
        words = ["undo", "--journal", str(path), "--attach-ledger", f"{path}.none"]
        assert main.run(words) == 1
        assert "has what another vsrtune set" in capsys.readouterr().err
        assert path.read_bytes() == data


def test_a_torn_header_is_a_new_journal(path: Path) -> None:
    """Records come after a whole header, and the host is written after its record."""
    action = make_plan(make_host("6.12")).actions[0]
    with Journal.open(path, BOOT) as journal:
        journal.intent(action)
    whole = path.read_bytes()
    for cut in range(whole.index(b"\n") + 1):
        path.write_bytes(whole[:cut])
        assert read_entries(path, BOOT) == (), cut
        with Journal.open(path, BOOT) as journal:
            assert (journal.entries(), journal.discarded, journal.foreign) == ((), 0, None), cut
            journal.intent(action)
        assert path.read_bytes() == whole, cut
