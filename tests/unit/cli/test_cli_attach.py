"""``vsrtune attach`` and ``doctor`` as commands, on libvirt's imitated host."""

from __future__ import annotations

import json
from pathlib import Path

import clone_group
import pytest
from attach_host import FakeAttachHost

from vsrtune.attach.ledger import STEP, AttachLedger
from vsrtune.attach.plan.model import AttachHostState, SwitchRequest
from vsrtune.attach.plan.planner import plan
from vsrtune.attach.plan.steps import NAPI_KIND, MadeDevice, MakeDevice
from vsrtune.attach.signals import Interrupted
from vsrtune.attach.transaction import Switcher
from vsrtune.cli import attachments
from vsrtune.cli.main import run
from vsrtune.cli.options import StatePlaces
from vsrtune.core.codec import encode
from vsrtune.doctor.facts import module
from vsrtune.execute.journal import Journal
from vsrtune.execute.ledger import read_pending
from vsrtune.host.filesystem import boot_id
from vsrtune.model.guest import Attachment
from vsrtune.policy.model import Policy

pytest.importorskip("libvirt")
URI = "test:///default"
PLUG = "plug 02:00:00:00:0a:00"


def attach(tmp_path: Path, *words: str) -> int:
    ledger = str(tmp_path / "attach.jsonl")
    journal = str(tmp_path / "journal.jsonl")
    return run(
        ["attach", "--connect", URI, "--attach-ledger", ledger, "--journal", journal, *words]
    )


def test_a_guest_without_such_an_interface(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert attach(tmp_path, "--to", "napi-macvlan", "test") == 1
    err = capsys.readouterr().err
    assert "test: it has no interface on macvtap or NAPI-macvlan" in err
    assert "hint:" in err
    assert attach(tmp_path, "--to", "napi-macvlan", "nobody") == 1
    assert "virsh list" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("times", "left"),
    [(1, "no switch is left unfinished"), (2, "not everything could be put back; .*--recover")],
)
def test_a_second_interruption_says_what_is_left(tmp_path: Path, times: int, left: str) -> None:
    """At the plug, and once more when that is taken back."""
    host = FakeAttachHost()
    host.add("a", ("02:00:00:00:0a:00", "p0"))
    request = SwitchRequest(Attachment.NAPI_MACVLAN, ("a",))
    switch = plan(request, AttachHostState(host.guests(), host.links().values(), ()))

    def interrupt(_number: int) -> None:
        if host.log[-1] == PLUG and host.log.count(PLUG) <= times:
            raise KeyboardInterrupt

    host.before = interrupt
    with (
        AttachLedger.open(tmp_path / "attach.jsonl") as ledger,
        pytest.raises(Interrupted, match=left),
    ):
        attachments.carry(Switcher(host, ledger, "boot-1"), switch)


@pytest.mark.parametrize("by_policy", [False, True])
def test_a_late_release_does_not_keep_a_guest_from_the_next_switch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    by_policy: bool,
) -> None:
    """The device of its neighbour would keep the macvtap that it gets back away."""
    host = FakeAttachHost()
    host.add("a", ("02:00:00:00:0a:00", "p0"))
    host.add("b", ("02:00:00:00:0b:00", "p0"))
    monkeypatch.setattr(attachments, "LiveHost", lambda _uri: host)
    host.hung = {"uuid-a"}
    assert attach(tmp_path, "--to", "napi-macvlan", "a", "b") == 1
    host.hung = set()
    host.sleep(1)
    assert host.fakes["uuid-a"].live == []
    if by_policy:
        places = StatePlaces(tmp_path / "journal.jsonl", tmp_path / "attach.jsonl", URI)
        policies = (Policy("p.yaml", "*", attachment=Attachment.NAPI_MACVLAN),)
        monkeypatch.setattr(module, "boot_unit_enabled", lambda: False)
        assert [error for _, error in attachments.carry_out(policies, places)] == [None]
        assert capsys.readouterr().out.count("systemctl enable vsrtune-devices") == 1
    else:
        assert attach(tmp_path, "--to", "napi-macvlan", "a", "b") == 0
    assert host.problems() == []
    assert {link.kind for link in host.table.values() if link.lower} == {NAPI_KIND}


def test_what_a_policy_had_switched_stays_once_an_operator_asks_for_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = FakeAttachHost()
    host.add("a", ("02:00:00:00:0a:00", "p0"))
    host.add("b", ("02:00:00:00:0b:00", "p1"))
    monkeypatch.setattr(attachments, "LiveHost", lambda _uri: host)
    places = StatePlaces(tmp_path / "journal.jsonl", tmp_path / "attach.jsonl", URI)
    policies = (Policy("p.yaml", "*", attachment=Attachment.NAPI_MACVLAN),)
    assert all(error is None for _, error in attachments.carry_out(policies, places))
    assert attach(tmp_path, "--to", "napi-macvlan", "--dry-run", "a", "b") == 0
    capsys.readouterr()
    for told in ("a: a policy had switched it", ""):
        assert attach(tmp_path, "--to", "napi-macvlan", "a") == 0
        output = capsys.readouterr().out
        assert told in output
        assert bool(told) is ("policy" in output)
    (back,) = attachments.carry_out((), places)
    assert back[0].guests == ("b",)
    assert {link.lower: link.kind for link in host.table.values() if link.lower} == {
        2: NAPI_KIND,
        3: "macvtap",
    }
    assert host.problems() == []
    assert attach(tmp_path, "--to", "macvtap", "a") == 0
    assert read_pending(places.ledger) == []


def test_nothing_to_recover(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    AttachLedger.open(tmp_path / "attach.jsonl").close()
    assert attach(tmp_path, "--recover") == 0
    assert "No switch was interrupted" in capsys.readouterr().out
    assert attach(tmp_path, "--devices") == 0


def test_undo_takes_an_interrupted_switch_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next daemon follows the policies anew."""
    settled = tmp_path / "settled.json"
    settled.write_text("{}")
    monkeypatch.setattr("vsrtune.daemon.attachments.SETTLED_PATH", settled)
    path = tmp_path / "attach.jsonl"
    device = MadeDevice("nosuch-in", "lo", "02:00:00:00:0a:00", 4, 1500, 500, every_queue=True)
    with AttachLedger.open(path) as ledger:
        ledger.add(STEP, {"boot": "another", "step": encode(MakeDevice(device))})
    journal = tmp_path / "journal.jsonl"
    Journal.open(journal, boot_id()).close()
    options = ("--attach-ledger", str(path), "--journal", str(journal))
    run(["undo", "--dry-run", "--connect", URI, *options])
    assert "would switch: devices" in capsys.readouterr().out
    policies = tmp_path / "policies"
    policies.mkdir()
    run(["plan", "--policies", str(policies), "--connect", URI, *options])
    told = capsys.readouterr().out
    assert "take back what was done" in told
    assert "on the host itself only" not in told
    assert run(["undo", "--connect", URI, *options]) == 0
    with AttachLedger.open(path) as ledger:
        assert ledger.pending() == []
    assert not settled.exists()


def test_recover_names_what_is_left_of_a_clone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That is no part of a switch, and does not stop what comes after it."""
    file = tmp_path / "directory"
    (file / "file").mkdir(parents=True)
    clone_group.ended(tmp_path / "attach.jsonl", file)
    assert attach(tmp_path, "--recover") == 0
    said = capsys.readouterr()
    assert "No switch was interrupted" in said.out
    assert str(file) in said.err


def test_doctor_speaks_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["doctor", "--json", "--attach-ledger", str(tmp_path / "attach.jsonl")])
    data = json.loads(capsys.readouterr().out)
    levels = [f["level"] for f in data["findings"]]
    assert code == (1 if "error" in levels else 3 if "warning" in levels else 0)
    assert data["worst"] == levels[0]
    assert {"module", "switches", "kernel"} <= {f["check"] for f in data["findings"]}
