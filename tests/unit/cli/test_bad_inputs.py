"""What an operator can get wrong: each is answered with a message and an exit code that the
command's help lists, and nothing is changed."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import click
import pytest
import recorded_hosts

from vsrtune.cli import main, render
from vsrtune.cli.options import ATTACH_LEDGER, JOURNAL, Duration
from vsrtune.core.exit_codes import ExitCode
from vsrtune.daemon.systemd import LOGGER

HOST = str(recorded_hosts.file("trixie-e1000e"))
PLAIN = recorded_hosts.file("bookworm-veth-plain")
GOOD = "guest: vr1\ncpus: {irq: 0, vcpu: 1, vhost: 2}\nprofile: none\n"


@dataclass(frozen=True)
class Bad:
    """``words`` are of the command line, in which ``@`` is the test's directory, with ``files`` in
    it, and what ``makes`` adds. ``said`` are parts of what stands on standard error."""

    words: str
    code: int
    said: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    makes: Callable[[Path], object] = lambda _place: None

    @property
    def name(self) -> str:
        return f"{self.words} {next(iter(self.files.values()), '')!r}"[:70]


def policy(text: str, *said: str) -> Bad:
    """A policy file that is wrong."""
    return Bad("policy check @/p.yaml", 2, ("@/p.yaml", *said), {"p.yaml": text})


def special(name: str, kind: str) -> Callable[[Path], object]:
    """What makes a file, below a directory, that is none to read."""

    def make(place: Path) -> None:
        path = place / name
        path.parent.mkdir(exist_ok=True)
        match kind:
            case "fifo":
                os.mkfifo(path)
            case "directory":
                path.mkdir()
            case "ring":
                path.symlink_to(path.name)
            case "dangling":
                path.symlink_to("nowhere")
            case _:
                path.write_bytes(kind.encode("latin-1"))

    return make


def host(command: str, code: int, *said: str, text: str = GOOD) -> Bad:
    """A command on a recorded host with one policy."""
    return Bad(f"{command} --policies @/d --root {HOST}", code, said, {"d/p.yaml": text})


# Of a run of the bench without a file.
SHORT = "--guest x --right b --source 1.2.3.4 --destination 1.2.4.4"
CASES = (
    # Policies.
    policy("guest: vr1\ncpu: {vcpu: 1}\n", "cpu: unknown key", "did you mean cpus?"),
    Bad("policy check --policies @/d", 2, ("guest: 'vr1' is the guest of", "keep one policy"),
        {"d/a.yaml": GOOD, "d/b.yaml": GOOD}),
    Bad(
        "policy check --policies @/d", 2,
        ("@/d/a.yaml:2: user: this host has no user nosuch", "getent passwd"),
        {"d/a.yaml": "guest: qemu:a\nuser: nosuch\n"},
    ),
    Bad("policy check @/none.yaml", 2, ("@/none.yaml", "does not exist")),
    Bad("policy check --policies @/none", 4, ("the directory does not exist",)),
    # YAML that means something else than it seems to, or that other programs take.
    policy("\ufeffguest: vr1\nwrong: 1\n", "p.yaml:2: wrong: unknown key"),
    policy("guest: vr1\r\nwrong: 1\r\n", "p.yaml:2: wrong: unknown key"),
    policy("guest: vr1\rwrong: 1\r", "p.yaml:2: wrong: unknown key"),
    policy("guest: vr1\0\n", "p.yaml:1: the text holds a control character"),
    policy("guest: vr1\u2028cpus: {vcpu: 1}\n", "p.yaml:1: the text cannot be read as YAML"),
    policy("guest:\u00a0vr1\n", "'guest:\\xa0vr1', not a mapping"),
    policy("Guest: vr1\n", "the key 'guest' is missing", "did you mean guest?"),
    policy("guest: \"\\x1b[31m\"\n", "guest: a [ has no closing ]"),
    policy("guest: vr1\ncpus: {vcpu: 0o1}\n", "'0o1' is not a CPU list"),
    policy("guest: vr1\ncpus: {vcpu: \u0661}\n", "is not a CPU list"),
    policy("guest: vr1\nqueue: {macvtap: 1_000}\n", "'1_000' stands where a whole number"),
    policy("guest: vr1\nqueue: {macvtap: .inf}\n", "'.inf' stands where a whole number"),
    # Files that are none.
    *(
        Bad(f"{command} --policies @/d", 2, ("@/d/p.yaml:1: ", said), makes=special("d/p.yaml", kind))
        for kind, said in (
            ("fifo", "this is no regular file"), ("directory", "this is no regular file"),
            ("ring", "cannot be read: Too many levels of symbolic links"),
            ("dangling", "cannot be read: No such file"), ("guest: \xe9\n", "the text is not UTF-8"),
            ("\xff\xfeg\0u\0", "the text is not UTF-8"), ("\x7fELF\2\1\1\0", "a control character"),
        )
        for command in ("policy check", "plan", "apply", "daemon", f"policy init vr1 --root {HOST}")
    ),
    Bad(f"status --policies @/d --root {HOST}", 2, (), makes=special("d/p.yaml", "ring")),
    Bad("try @/p.yaml", 2, ("Too many levels",), makes=special("p.yaml", "ring")),
    Bad("group check @/g.yaml", 2, ("this is no regular file",), makes=special("g.yaml", "fifo")),
    Bad("group create g --groups @/d", 2, ("Too many levels",), makes=special("d/g.yaml", "ring")),
    Bad("bench run @/b.yaml", 2, ("this is no regular file",), makes=special("b.yaml", "fifo")),
    Bad("bench report @/r.json", 2, ("the file is not JSON",), makes=special("r.json", "\xd0\0")),
    Bad("bench report @/r.json", 2, ("@/r.json: the file is not a bench result",), {"r.json": "{}"}),
    Bad("bench report @/r.json --html @/no/r.html", 2, ("@/no: the directory does not exist",), {"r.json": ""}),
    Bad("bench run @/b.yaml", 2, ("@/b.yaml:1: colour: unknown key",), {"b.yaml": "colour: red\n"}),
    Bad("show --root @/h.json", 4, ("no host is recorded here",), makes=special("h.json", "\xd0\0")),
    Bad("apply --plan @/plan.json", 2, ("not JSON",), makes=special("plan.json", "\xd0\0")),
    Bad("apply --plan @/plan.json", 2, ("not JSON: nested deeper",), {"plan.json": "[" * 100_000}),
    *(
        Bad(f"{command} @/f", 1, ("@/f: cannot be read: ", "no regular file"), makes=special("f", "fifo"))
        for command in ("undo --journal", "undo --dry-run --journal", "apply --policies @ --journal",
                        "daemon --policies @ --journal", "attach --recover --attach-ledger")
    ),
    Bad("verify --policies @ --journal @/f", 1, ("Too many levels", "name the file"), makes=special("f", "ring")),
    Bad("undo --journal @/f", 1, ("line 1 is corrupt",), makes=special("f", "\xd0\n")),
    # Words of the command line.
    Bad("daemon --metrics [::1", 2, ("'[::1' is not HOST:PORT or off",)),
    Bad("daemon --metrics 127.0.0.1:99999", 2, ("is not HOST:PORT or off",)),
    Bad("daemon --metrics ::", 2, ("is not HOST:PORT or off",)),
    Bad("top --interval nan", 2, ("'nan' is not a time",)),
    Bad("top --interval 1e3s", 2, ("'1e3s' is not a time",)),
    Bad("show --trace -1s", 2, ("'-1s' is not a time",)),
    Bad("show --trace \u0665s", 2, ("is not a time",)),
    Bad(f"bench run {SHORT} --left a --rates 1e3", 2,
        ("method.rates.0: '1e3' stands where a whole number is expected",)),
    Bad("bench run --native --left a --right b --source 1 --destination 2", 2, ("--mac must be given",)),
    Bad(f"bench run {SHORT} --left a:b:c", 2, ("--left a:b:c: write [HOST:]DEVICE[",)),
    Bad("shwo", 2, ("No such command 'shwo'. Did you mean show?",)),
    Bad("group stauts", 2, ("No such command 'stauts'. Did you mean status?",)),
    Bad("policy chek", 2, ("Did you mean check?",)),
    Bad("plan --polices @", 2, ("No such option: --polices", "--policies")),
    Bad("top --interval 5h", 2, ("'5h' is not a time", "a number and its unit")),
    Bad("top --interval 0s", 2, ("0s is not between 0.1s and 3600s",)),
    Bad("top --count 0", 2, ("--count",)),
    Bad("show --trace 99s", 2, ("99s is not between 0s and 60s",)),
    Bad("show --connect qemu+ssh://other/system", 2, ("leads to another host",)),
    Bad("show --root @/none.json", 2, ("does not exist",)),
    Bad("apply --plan @/none.json", 2, ("@/none.json",)),
    Bad("daemon --metrics nowhere", 2, ("'nowhere' is not HOST:PORT or off",)),
    Bad("daemon --interval 500ms", 2, ("500ms is not between 1s",)),
    Bad("daemon --on-stop maybe", 2, ("'maybe'",)),
    Bad("attach vr1", 2, ("one of --to, --recover and --devices is needed",)),
    Bad("attach --to macvtap", 2, ("name a guest",)),
    Bad("attach --to macvtap --recover vr1", 2, ("one of --to",)),
    Bad("attach --recover --dry-run", 2, ("are for all guests",)),
    Bad("attach --devices vr1", 2, ("are for all guests",)),
    Bad("attach vr1 --to bridge", 2, ("'bridge'",)),
    Bad("bench run", 2, ("without SPEC.yaml", "--guest")),
    Bad("bench run --guest vr1", 2, ("without SPEC.yaml, --left, --right,",)),
    Bad("bench paper --guest vr1 --left a --right b", 2, ("name a file for the result", "--json")),
    Bad("bench run @/b.yaml --rates 1", 2, ("--rates: write this in",), {"b.yaml": "name: x\n"}),
    Bad("bench compare @/b.yaml", 2, ("at least two files",), {"b.yaml": "name: x\n"}),
    Bad("group scale edge 0", 2, ("0 is not in the range",)),
    # Files and places.
    Bad("plan --policies @/p.yaml", 2, ("is a file",), {"p.yaml": GOOD}),
    *(Bad(f"{command}=", 2, ("the name is empty; name a directory",))
      for command in ("apply --policies", "policy check --policies", "plan --policies", "group create g --groups")),
    *(Bad(f"{command} --policies @/none", 4, ("@/none: the directory does not exist",))
      for command in ("plan", "apply", "verify")),
    *(
        Bad(f"{command} @/typo.jsonl", 4, ("@/typo.jsonl: the file does not exist, so it is not known", default))
        for command, default in (
            ("undo --journal", str(JOURNAL)), ("undo --dry-run --journal", str(JOURNAL)),
            ("attach --recover --attach-ledger", str(ATTACH_LEDGER)),
            ("group status --attach-ledger", str(ATTACH_LEDGER)),
        )
    ),
    *(
        Bad(f"{command} --root @/h.json", 4, ("@/h.json: no host is recorded here", "`vsrtune record` has made"),
            {"h.json": text})
        for command in ("show", "show --json", "status", "plan", "verify", "doctor", "top --once", "policy init vr1")
        for text in ("{}", '{"host": {"te', '{"host": {"texts": []}}', "")
    ),
    Bad(f"policy init vr1 --root {HOST} -o @/none/p.yaml", 2, ("@/none: the directory does not",)),
    Bad(f"policy init vr1 --root {HOST} -o @/p.yaml", 1, ("is left as it is",), {"p.yaml": GOOD}),
    Bad("record @/none/h.json", 2, ("@/none: the directory does not exist",)),
    Bad("apply --plan @/plan.json", 2, ("not JSON",), {"plan.json": "12 changes\n"}),
    Bad("apply --plan @/plan.json", 2, ("not a plan of version 1",), {"plan.json": "{}"}),
    Bad("apply --plan @/plan.json", 1, ("made on another host, or before this one was booted",),
        {"plan.json": '{"version": 1, "boot_id": "recorded", "actions": []}'}),
    Bad("bench report @/r.json", 2, ("the file is not JSON", "bench wrote"), {"r.json": "pps\n"}),
    Bad("group check @/g.yaml", 2, ("g.yaml:1",), {"g.yaml": "group: {kind: pvr}\n"}),
    Bad("confirm --journal @/journal.jsonl", 1, ("nothing waits for a confirmation",)),
    # What fits no guest of the host.
    *(
        host(f"{command} --guest nobody", 1, "nobody: no such guest is running", "vr1, vr2")
        for command in ("show", "plan", "verify", "status", "top --once --interval 100ms")
    ),
    host("policy init nobody", 1, "nobody: no such guest is running"),
    # Nor an empty name the guest without a UUID.
    Bad(f"verify --guest= --policies @ --root {PLAIN}", 1, ("no such guest is running",), {"p.yaml": GOOD}),
    host("plan --json --guest vr1", 2, "--json stores the plan, which is of all guests"),
    host("plan --detailed-exitcode", 3),
    host("verify", 5, "vr1: refused", text="guest: vr1\ncpus: {vcpu: 77}\nprofile: none\n"),
    host("verify", 4, "nothing was compared: no policy sets", text="guest: vr9\nqueue: {macvtap: 9}\nprofile: none\n"),
    host("verify", 4, "nothing was compared: no policy sets", text="guest: vr1\nprofile: none\n"),
    host("status", 2, text="guest: vr1\nwrong: 1\n"),
    Bad(f"verify --policies @ --root {HOST}", 4,
        ("nothing was compared: there is no policy", "vsrtune policy init GUEST")),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_told_and_nothing_is_changed(
    case: Bad, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("JOURNAL", "ATTACH_LEDGER"):
        monkeypatch.setenv(f"VSRTUNE_{name}", str(tmp_path / f"{name}.jsonl"))
    monkeypatch.setenv("VSRTUNE_POLICIES", str(tmp_path))
    # What the daemon sets up writes to this test's output, and not in the next ones.
    monkeypatch.setattr(LOGGER, "handlers", [])
    monkeypatch.setattr(LOGGER, "propagate", True)
    for name, text in case.files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    case.makes(tmp_path)
    before = contents(tmp_path)
    words = [word.replace("@", str(tmp_path)) for word in case.words.split()]
    assert main.run(words) == case.code
    told = capsys.readouterr().err
    for text in case.said:
        assert text.replace("@", str(tmp_path)) in told
    assert "Traceback" not in told
    assert told.count("vsrtune: error: ") == len(set(re.findall("vsrtune: error: .*", told)))
    # Not even a journal is made, without which nothing can be written.
    assert contents(tmp_path) == before
    usage = told.startswith("Usage: ")
    assert case.code in ((2,) if usage else exit_codes(*case.words.split()))


@pytest.mark.parametrize(
    "words",
    ["attach vr1 --to macvtap", "attach vr1 --to macvtap --dry-run", "group status", "group status x",
     "group create @/g.yaml", "group delete x", "group drain x y", "group scale x 1", "group rules x"],
)  # fmt: skip
def test_a_libvirt_that_is_away_is_a_host_that_cannot_be_read(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "g.yaml").write_text(
        "group: {name: g, kind: pvr, members: [r1, r2], lower: {in: p0, out: p1}}\n"
    )
    ledger, socket = tmp_path / "attach.jsonl", tmp_path / "none"
    more = f"--attach-ledger {ledger} --connect qemu+unix:///system?socket={socket}"
    ledger.touch()
    assert main.run(f"{words} {more}".replace("@", str(tmp_path)).split()) == ExitCode.UNREAD
    assert "libvirt does not answer" in capsys.readouterr().err
    assert ledger.read_bytes() == b""
    assert ExitCode.UNREAD in exit_codes(*words.split())


@pytest.mark.parametrize(
    ("several", "code"), [("@:", 0), (":@", 0), ("@::@/more", 0), (":", ExitCode.WRONG)]
)
def test_an_empty_name_among_several_is_no_directory(
    several: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "p.yaml").write_text(GOOD)
    (tmp_path / "more/q.yaml").write_text(GOOD.replace("vr1", "vr2"))
    monkeypatch.setenv("VSRTUNE_POLICIES", several.replace("@", str(tmp_path)))
    assert main.run(["policy", "check"]) == code


def contents(place: Path) -> dict[str, bytes | int]:
    """Every file below the directory; of what is none to read its kind."""
    return {
        str(f): f.read_bytes() if f.is_file() else f.lstat().st_mode for f in place.rglob("*")
        if f.name != "f.lock"  # of a log that is none to read, which is seen behind its lock
    }  # fmt: skip


def exit_codes(*words: str) -> set[int]:
    """The exit codes that the help of a command lists."""
    command: click.Command | None = main.cli
    for word in words:
        if isinstance(command, click.Group):
            command = command.get_command(click.Context(command), word)
    assert command is not None
    listed = re.search(r"Exit codes:(.*)", command.help or "", re.DOTALL)
    return {int(n) for n in re.findall(r"(?:^|, )\s*(\d+) ", listed[1])} if listed else {0}


def commands(group: click.Group, *above: str) -> list[tuple[str, ...]]:
    """Every command, by its words."""
    found: list[tuple[str, ...]] = []
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        inner = isinstance(command, click.Group)
        found += commands(command, *above, name) if inner else [(*above, name)]  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("words", commands(main.cli), ids=" ".join)
def test_every_command_lists_its_exit_codes(words: tuple[str, ...]) -> None:
    listed = exit_codes(*words)
    assert 0 in listed
    assert listed <= {int(code) for code in ExitCode}
    assert len(listed) > 1 or words == ("policy", "schema")


def test_without_the_library_libvirt_it_is_said_which_package_it_is_in(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "libvirt", None)
    monkeypatch.setenv("VSRTUNE_POLICIES", str(tmp_path))
    (tmp_path / "p.yaml").write_text(GOOD)
    assert main.run(["verify", "--journal", str(tmp_path / "j.jsonl")]) == ExitCode.UNREAD
    assert "install python3-libvirt" in capsys.readouterr().err


def options(words: tuple[str, ...]) -> dict[str, click.Option]:
    """The options of a command, by their long names."""
    command: click.Command = main.cli
    for word in words:
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), word) or command
    return {param.opts[-1]: param for param in command.params if isinstance(param, click.Option)}


COMMANDS = {words: options(words) for words in commands(main.cli)}
LOOK = ("status", "show", "top", "plan", "verify")
CHANGE = {
    ("apply",), ("undo",), ("attach",), ("group", "create"), ("group", "delete"), ("group", "drain"),
    ("group", "scale"),
}  # fmt: skip
# Of one guest instead of a file; a file for hours of work; a trace of every pass; a log.
OTHERWISE = {
    "--guest": {("bench", "run"), ("bench", "paper")},
    "--json": {("bench", "run"), ("bench", "compare"), ("bench", "paper")},
    "--trace": {("daemon",)}, "--verbose": {("daemon",)},
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["--guest", "--json", "--wide", "--dry-run", "--policies", "--root", "--journal", "--connect",
     "--attach-ledger", "--trace", "--verbose"],
)  # fmt: skip
def test_an_option_means_the_same_everywhere(name: str) -> None:
    told = {
        (option.help, option.metavar, str(option.default), option.envvar, type(option.type))
        for words, known in COMMANDS.items()
        if words not in OTHERWISE.get(name, ()) and (option := known.get(name)) is not None
    }
    assert len(told) == 1


def test_who_looks_takes_the_same_options_and_who_changes_shows_it_first() -> None:
    for command in LOOK:
        wanted = {"--guest", "--json", "--wide", "--policies", "--root", "--connect"}
        assert wanted <= set(COMMANDS[command,]), command
        assert ("--journal" in COMMANDS[command,]) is (command != "top")
    assert {words for words, known in COMMANDS.items() if "--dry-run" in known} == CHANGE
    # What prints tables as wide as the terminal can print them whole.
    tables = {(command,) for command in (*LOOK, "apply", "doctor")} | {("group", "status")}
    assert {words for words, known in COMMANDS.items() if "--wide" in known} == tables


def test_every_time_is_written_with_its_unit() -> None:
    times = [o for known in COMMANDS.values() for o in known.values() if o.metavar == "TIME"]
    assert len(times) > 8
    for option in times:
        assert isinstance(option.type, Duration)
        assert option.default is None or str(option.default).endswith("s")
    unitless = re.compile(r"seconds|interval|timeout|wait", re.IGNORECASE)
    named = [
        o for known in COMMANDS.values() for o in known.values() if unitless.search(o.opts[-1])
    ]
    assert all(option in times for option in named)


def test_what_takes_long_is_told_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(render, "_PATIENCE", 0.01)
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal, raising=False)
        with render.patience("looking at the host"):
            time.sleep(0.3)
        with render.patience("and at nothing"):
            pass
        time.sleep(0.05)
        told = "vsrtune: looking at the host ...\n"
        assert capsys.readouterr().err == (told if terminal else "")
