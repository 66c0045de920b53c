"""``vsrtune group`` as a command, on libvirt's imitated host."""

from __future__ import annotations

from pathlib import Path

import clone_group
import pvr_group
import pytest

from vsrtune.attach.ledger import AttachLedger
from vsrtune.cli import attachments
from vsrtune.cli.main import run
from vsrtune.doctor.facts import module

pytest.importorskip("libvirt")

FILE = "group: {name: edge, kind: pvr, members: [test], lower: {in: lo}}\n"

STAGED = (
    "group: {name: edge, kind: msr, lower: {in: lo}, balancers: {test: [in]}, routers: [vr1]}\n"
)


def group(tmp_path: Path, *words: str) -> int:
    places = ("--attach-ledger", str(tmp_path / "attach.jsonl"), "--journal", str(tmp_path / "j"))
    return run(["group", *words, "--connect", "test:///default", *places])


def test_what_is_wrong_is_named_and_nothing_is_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "edge.yaml"
    file.write_text(FILE.replace("pvr", "msr"))
    for command in ("create", "rules"):
        assert group(tmp_path, command, str(file)) == 2
        assert f"{file}:1: group: the key 'balancers' is missing" in capsys.readouterr().err
    file.write_text(STAGED)
    for command in ("create", "rules"):
        assert group(tmp_path, command, str(file)) == 1
        assert f"{file}:1: there is no libvirt guest vr1" in capsys.readouterr().err
    file.write_text(FILE)
    assert group(tmp_path, "rules", str(file)) == 1
    assert "a group of this kind has no balancers" in capsys.readouterr().err
    for words in (
        ("create", str(file), "--dry-run"),
        ("create", "edge", "--groups", str(tmp_path)),
    ):
        assert group(tmp_path, *words) == 1
        assert "test: lo: it has no interface on this device" in capsys.readouterr().err
    assert group(tmp_path, "create", "core", "--groups", str(tmp_path)) == 1
    assert f"there is no file {tmp_path}/core.yaml" in capsys.readouterr().err
    for words in (("scale", "edge", "1"), ("drain", "edge", "test"), ("delete", str(file))):
        assert group(tmp_path, *words) == 1
        assert "edge: there is no such group on this host" in capsys.readouterr().err
    assert group(tmp_path, "status", "edge") == 1
    assert (tmp_path / "attach.jsonl").read_text() == ""


def test_files_are_checked_without_a_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "edge.yaml", tmp_path / "copy of edge"
    good.write_text(FILE)
    bad.write_text(FILE.replace("edge", "Edge"))
    assert run(["group", "check", str(good)]) == 0
    assert capsys.readouterr().out == f"{good}: good\n"
    assert run(["group", "check", str(bad), str(good)]) == 2
    said = capsys.readouterr()
    assert f"{bad}:1: group.name: 'Edge' is not a name" in said.err
    assert said.out == f"{good}: good\n"
    assert run(["group", "check"]) == 2


def test_what_an_earlier_delete_left_goes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger, nvram = tmp_path / "attach.jsonl", tmp_path / "vr1_VARS.fd"
    nvram.touch()
    clone_group.ended(ledger, nvram)
    assert group(tmp_path, "delete", "core", "--dry-run") == 1
    assert nvram.exists()
    assert group(tmp_path, "delete", "core") == 1
    said = capsys.readouterr()
    assert f"removed {nvram}" in said.out
    assert "there is no such group" in said.err
    assert not nvram.exists()
    with AttachLedger.open(ledger) as opened:
        assert opened.pending() == []


def test_what_cannot_be_kept_is_no_obstacle_to_a_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is wrong with a device of ours may be what this command does away with."""
    nvram = tmp_path / "directory"
    (nvram / "file").mkdir(parents=True)
    clone_group.ended(tmp_path / "attach.jsonl", nvram)
    assert group(tmp_path, "delete", "core") == 1
    said = capsys.readouterr().err
    assert str(nvram) in said
    assert "there is no such group" in said


def test_no_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    AttachLedger.open(tmp_path / "attach.jsonl").close()
    assert group(tmp_path, "status") == 0
    assert "No group was created" in capsys.readouterr().out
    assert group(tmp_path, "status", "--json") == 0
    assert capsys.readouterr().out == "[]\n"


def test_a_group_of_another_libvirt_is_told_from_one_of_which_nobody_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its members do not run there, so that there was nothing to do."""
    host = pvr_group.fresh()
    monkeypatch.setattr(attachments, "LiveHost", lambda _uri: host)
    monkeypatch.setattr(module, "boot_unit_enabled", lambda: True)
    file = tmp_path / "edge.yaml"
    file.write_text(FILE.replace("[test]", "[a, b]").replace("{in: lo}", "{in: p0, out: p1}"))
    assert group(tmp_path, "create", str(file)) == 0
    host.fakes.clear()
    host.uri = "qemu+unix:///system?socket=/run/other"
    for words in (("scale", "edge", "1"), ("drain", "edge", "a"), ("delete", "edge")):
        for more in ((), ("--dry-run",)):
            capsys.readouterr()
            assert group(tmp_path, *words, *more) == 1
            said = capsys.readouterr()
            assert "the group are those of another libvirt" in said.err and not said.out
            assert "--connect qemu:///system" in said.err
    assert group(tmp_path, "rules", "edge") == 1
    assert "the group are those of another libvirt" in capsys.readouterr().err


def test_create_says_what_makes_the_devices_at_a_boot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that is not arranged, and where definitions name the devices from now on."""
    host = pvr_group.fresh()
    monkeypatch.setattr(attachments, "LiveHost", lambda _uri: host)
    file = tmp_path / "edge.yaml"
    file.write_text(FILE.replace("[test]", "[a, b]").replace("{in: lo}", "{in: p0, out: p1}"))
    said = {}
    for enabled in (False, True, None):
        monkeypatch.setattr(module, "boot_unit_enabled", lambda enabled=enabled: enabled)
        for words in (
            ("create", str(file), "--dry-run"),
            ("create", str(file)),
            ("delete", "edge"),
        ):
            assert group(tmp_path, *words) == 0
            out = capsys.readouterr().out
            said[enabled, *words[::2]] = "systemctl enable vsrtune-devices" in out
    assert [key for key, told in said.items() if told] == [(False, "create")]
