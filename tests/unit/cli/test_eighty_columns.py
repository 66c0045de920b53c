"""What commands print on a terminal of 80 columns: no line is longer, and no word is broken."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest
import recorded_hosts

from vsrtune.cli import main
from vsrtune.views import layout
from vsrtune.views.tables import Table

POLICIES = {
    "router": 'guest: "vr*"\ncpus: {irq: auto, vcpu: auto, vhost: auto, emulator: auto}\n'
    "scheduler:\n  vcpu: {class: rr, priority: 10, slice: 8ms}\n"
    "  vhost: {class: rr, priority: 10, slice: 8ms}\n  softirq: {class: fifo, priority: 10}\n",
    "refused": 'guest: "*"\ncpus: {vcpu: 77}\nprofile: none\n',
    "moved": 'guest: "*"\ncpus: {irq: "0"}\nirq: {set: true}\nattachment: napi-macvlan\nprofile: none\n',
}
COMMANDS = (
    "show", "status", "plan", "plan -v", "verify", "doctor", "top --once --interval 100ms",
)  # fmt: skip
ELLIPSIS = layout.ELLIPSIS


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("recorded", recorded_hosts.FILES, ids=lambda path: path.stem)
def test_no_line_is_longer_and_no_word_is_broken(
    recorded: Path, policy: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "p.yaml").write_text(POLICIES[policy])
    monkeypatch.setenv("VSRTUNE_POLICIES", str(tmp_path))
    monkeypatch.setenv("VSRTUNE_ROOT", str(recorded))
    monkeypatch.setenv("COLUMNS", "80")
    words = command.split()
    code = main.run(words)
    whole = capsys.readouterr()
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    assert main.run(words) == code
    narrow = capsys.readouterr()
    assert main.run([*words, "--wide"]) == code
    wide = click.unstyle(capsys.readouterr().out)
    told = click.unstyle(narrow.out + narrow.err)
    assert max(map(layout.cells, told.splitlines())) <= 80
    if "top" not in words:  # its loads are those of the moment
        assert wide == whole.out
        known = {*(whole.out + whole.err).split()}
        broken = [w for w in told.split() if w not in known and ELLIPSIS not in w]
        assert broken == []


WIDE = "\N{CJK UNIFIED IDEOGRAPH-5B57}"
NAMES = (
    "r" * 200,
    WIDE * 60,
    WIDE * 26,
    "e\N{COMBINING ACUTE ACCENT}" * 60,
    "a router of words " * 9 + "x",
)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES, ids=lambda name: name[:9])
def test_a_long_name_is_cut_and_what_is_said_of_it_is_not(
    name: str, policy: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    recorded = recorded_hosts.file("trixie-veth-multiqueue").read_text().replace("vr1", name)
    (tmp_path / "h.json").write_text(recorded)
    (tmp_path / "p.yaml").write_text(POLICIES[policy].replace("vr*", "*"))
    monkeypatch.setenv("VSRTUNE_POLICIES", str(tmp_path))
    monkeypatch.setenv("VSRTUNE_ROOT", str(tmp_path / "h.json"))
    monkeypatch.setenv("COLUMNS", "80")
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    main.run(command.split())
    narrow = capsys.readouterr()
    told = click.unstyle(narrow.out + narrow.err)
    assert max(map(layout.cells, told.splitlines())) <= 80
    if (command, policy) == ("verify", "moved"):
        assert (
            f"{name if layout.cells(name) < 60 else layout.elide(name, 26)}: not on napi-macvlan\n"
            in told
        )
    if (command, policy) == ("plan", "moved"):
        assert f"{layout.pad(name, 32)}        0  on another attachment\n" in told
    assert main.run([*command.split(), "--wide"]) >= 0
    whole = capsys.readouterr()
    assert name in whole.out + whole.err


@pytest.mark.parametrize("text", ["a " + f"{WIDE * 4} " * 30, f"  in {WIDE * 12}, b c" * 5])
def test_wide_characters_are_wrapped_and_not_lost(text: str) -> None:
    lines = layout.wrap(text, 40, "  ")
    assert " ".join(lines).split() == text.split()
    assert max(map(layout.cells, lines)) <= 40
    assert len(text) - len(text.lstrip()) == len(lines[0]) - len(lines[0].lstrip())


def test_a_line_for_each_guest_by_default_and_details_with_v(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.yaml").write_text(POLICIES["router"].replace("vr*", "vr1"))
    host = str(recorded_hosts.file("trixie-veth-multiqueue"))
    words = ["plan", "--root", host, "--policies", str(tmp_path)]
    assert main.run(words) == 0
    brief = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert brief[0] == "20 changes"
    assert [line.split()[:2] for line in brief[2:]] == [["vr1", "18"], ["host/", "2"]]
    assert "vcpu: CPUs 1-2, rr:10" in brief[2]
    assert main.run([*words, "-v"]) == 0
    details = capsys.readouterr().out
    assert sum("so that the emulator" in line for line in details.splitlines()) == 4
    # Nobody asked for this guest, and nobody asked for its queues.
    assert "qemu:pq1" not in "".join(brief)
    assert "txqueuelen" not in details
    assert main.run([*words, "--guest", "qemu:pq1"]) == 0
    assert "vr1" not in capsys.readouterr().out


@pytest.mark.parametrize("width", range(1, 60))
@pytest.mark.parametrize("wraps", [True, False])
def test_a_table_fits_every_width(width: int, wraps: bool) -> None:
    rows = [("1", "vhost macvtap0/0", WIDE * 9, "a long sentence of some words " * 3, "spare")]
    table = Table(
        "A title of its own", ("n", "thread", "name", "because", "more"), rows,
        spare=("more",), text=("because",), right=("n",), wraps=wraps,
    )  # fmt: skip
    grid = layout.fit(table, width)
    assert len(grid.places) == 4
    lines = layout.lines(table, width + 2)
    room = max(width + 2, 2 + len(grid.places) + 2 * (len(grid.places) - 1))
    assert max(map(layout.cells, lines)) <= room


@pytest.mark.parametrize(
    ("text", "width", "cut"),
    [
        ("scheduling", 10, "scheduling"), ("scheduling", 6, "sched" + ELLIPSIS),
        ("two words", 5, "two" + ELLIPSIS), (WIDE * 3, 5, WIDE * 2 + ELLIPSIS),
        (WIDE * 3, 4, WIDE + ELLIPSIS), ("x", 0, ""), ("e\N{COMBINING ACUTE ACCENT}", 1, None),
    ],
)  # fmt: skip
def test_cut_texts_end_in_an_ellipsis(text: str, width: int, cut: str | None) -> None:
    assert layout.elide(text, width) == (text if cut is None else cut)
