"""What the shell completes: commands, guests, groups and files."""

from __future__ import annotations

from pathlib import Path

import pytest
import recorded_hosts
from click.shell_completion import ShellComplete

from vsrtune.cli import main
from vsrtune.host.qemu_cmdline import QemuArgs
from vsrtune.observe.qemu_processes import Processes, ProcessTable, QemuProcess
from vsrtune.observe.trust import Standing


def completed(*words: str) -> list[str]:
    """What may stand for the last of these words; a file is said by its type."""
    shell = ShellComplete(main.cli, {}, "vsrtune", "_VSRTUNE_COMPLETE")
    items = shell.get_completions(list(words[:-1]), words[-1])
    return [item.value if item.type == "plain" else item.type for item in items]


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VSRTUNE_ROOT", str(recorded_hosts.file("trixie-veth-multiqueue")))
    monkeypatch.setenv("VSRTUNE_GROUPS", str(tmp_path))
    for name in ("edge", "core"):
        (tmp_path / f"{name}.yaml").write_text("group: {}\n")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["pl"], ["plan"]),
        (["group", "st"], ["status"]),
        (["plan", "--detailed"], ["--detailed-exitcode"]),
        (["plan", "--policies", ""], ["dir"]),
        (["policy", "check", "p"], ["file"]),
        (["policy", "init", "v"], ["vr1"]),
        # In bash an item for files takes those before it away.
        (["group", "create", ""], ["file", "core", "edge"]),
        (["group", "create", "e"], ["file", "edge"]),
        *(([c, "--guest", "v"], ["vr1"]) for c in ("show", "status", "plan", "verify", "top")),
        (["show", "--guest", ""], ["qemu:pq1", "vr1"]),
    ],
)
def test_words(words: list[str], found: list[str]) -> None:
    assert completed(*words) == found


def test_a_host_that_cannot_be_read_completes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "h.json").write_text("{}")
    monkeypatch.setenv("VSRTUNE_ROOT", str(tmp_path / "h.json"))
    assert completed("show", "--guest", "") == []


def test_of_this_host_guests_and_policy_files_can_be_tried() -> None:
    assert completed("try", "no-such-guest") == ["file"]
    assert "no-such-guest" not in completed("attach", "no-such-guest")


def guest(
    name: str, *, libvirt: bool = True, vmid: int | None = None, machine: str = ""
) -> QemuProcess:
    args = QemuArgs(name, "", libvirt, guest=True, qmp=(), netdevs=())
    return QemuProcess(1, 1, 0, Standing.PLAIN, vmid=vmid, machine=machine, args=args)


@pytest.mark.parametrize(
    "words",
    ["attach", "try", "policy init", "bench run --guest", "group drain edge", "group rules edge",
     "group rules edge --without"],
)  # fmt: skip
def test_every_word_that_names_a_guest_is_completed_and_none_that_a_shell_would_read(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VSRTUNE_ROOT")
    names = ("vr1", "r-2.b", "$(reboot)", "`x`", "a b", "a\nplain,b", "~", "*", "")
    others = (
        guest("fw", libvirt=False), guest("x", libvirt=False, vmid=101), guest("y", machine="a/b")
    )  # fmt: skip
    found = Processes((*map(guest, names), *others), {}, ())
    monkeypatch.setattr(ProcessTable, "scan", lambda *_: found)
    plain = [word for word in completed(*words.split(), "") if word != "file"]
    assert plain == ["kubevirt:a/b", "proxmox:101", "qemu:fw", "r-2.b", "vr1"]
