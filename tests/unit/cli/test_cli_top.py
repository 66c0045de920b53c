"""`vsrtune top` on recorded hosts: once, several times, as JSON, on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import sys
import time
from pathlib import Path

import pytest
from recorded_hosts import shown

from vsrtune.cli import main
from vsrtune.cli.top import Keys

REPO = Path(__file__).resolve().parents[3]
HOST = REPO / "tests/hosts/trixie-e1000e.json"
FAST = ("top", "--interval", "0.1", "--root", str(HOST))


def test_once_names_every_thread(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*FAST, "--once"]) == 0
    out = capsys.readouterr().out
    assert re.match(r"vsrtune top: 2 guests, over [0-9.]+ s, 0 frames/s dropped", out)
    assert sum(" vhost macvtap" in line for line in out.splitlines() if "irq" not in line) >= 8


UUID = next(g.uuid for g in shown(HOST).guests if g.ref == "vr2")


@pytest.mark.parametrize("name", ["vr2", UUID])
def test_a_frame_of_one_guest(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main.run([*FAST, "--json", "--guest", name]) == 0
    frame = json.loads(capsys.readouterr().out)
    assert frame["guests"] == ["vr2"]
    assert {t["guest"] for t in frame["threads"]} == {"vr2"}


def test_frames_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*FAST, "--count", "3"]) == 0
    assert capsys.readouterr().out.count("vsrtune top: 2 guests") == 3


class Terminal:
    """`vsrtune top` on a terminal of its own."""

    def __init__(self, *words: str, program: tuple[str, ...] = ("-m", "vsrtune")) -> None:
        self.shown = b""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.update(TERM="xterm", COLUMNS="80", LINES="24")
            os.chdir(REPO)
            os.execv(sys.executable, [sys.executable, *program, "top", *words])

    def until(self, text: bytes) -> None:
        """Read until it has shown ``text``; "" reads to its end."""
        end = time.monotonic() + 60
        while not text or text not in self.shown:
            ready, _, _ = select.select([self.fd], [], [], end - time.monotonic())
            assert ready, self.shown[-500:]
            try:
                self.shown += os.read(self.fd, 65536)
            except OSError:  # EIO: it has gone
                assert not text, self.shown[-500:]
                return

    def close(self) -> int:
        os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def terminal() -> Terminal:
    return Terminal("--interval", "600", "--root", str(HOST))


@pytest.mark.parametrize("key", [b"q", b"Q", b"\x03"])
def test_a_key_ends_it_and_the_terminal_is_as_it_was(terminal: Terminal, key: bytes) -> None:
    """The first frame is there at once, not after an interval."""
    terminal.until(b"vcpu 0")
    os.write(terminal.fd, b"x" + key)
    terminal.until(b"")
    assert b"\x1b[?1049h" in terminal.shown
    assert terminal.shown.rstrip().endswith(b"\x1b[?1049l")
    assert terminal.close() == 0


def test_when_it_is_terminated_the_terminal_is_as_it_was(terminal: Terminal) -> None:
    terminal.until(b"vcpu 0")
    os.kill(terminal.pid, signal.SIGTERM)
    terminal.until(b"")
    assert terminal.shown.rstrip().endswith(b"\x1b[?1049l")
    assert terminal.close() == 128 + signal.SIGTERM


# SIGTERM comes within select(), before it waits: libc sends it when select() asks the first source
# for its descriptor, which is 0 because kill() returns that. No instruction of Python follows.
LATE = """
import ctypes, functools, os, select, signal, types
from vsrtune.cli.main import main
kill = functools.partial(ctypes.CDLL(None).kill, os.getpid(), signal.SIGTERM)
waiting = select.select
def late(sources, *others):
    return waiting([types.SimpleNamespace(fileno=kill), *sources], *others)
select.select = late
main()
"""


def test_a_signal_just_before_it_waits_ends_it() -> None:
    words = ("--interval", "600", "--root", str(HOST))
    terminal = Terminal(*words, program=("-c", LATE))
    terminal.until(b"")
    assert terminal.shown.rstrip().endswith(b"\x1b[?1049l")
    assert terminal.close() == 128 + signal.SIGTERM


def test_a_key_counts_where_a_frame_takes_longer_than_the_interval() -> None:
    reading, writing = os.pipe()
    keys = Keys(reading)
    assert not keys.wait(-1)
    os.write(writing, b"x")
    assert not keys.wait(-1)
    os.write(writing, b"q")
    assert keys.wait(-1)
    os.close(reading)
    os.close(writing)


def test_a_number_of_frames_ends_it() -> None:
    terminal = Terminal("--interval", "0.1", "--count", "2", "--root", str(HOST))
    terminal.until(b"")
    assert terminal.close() == 0
