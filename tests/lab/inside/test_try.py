"""Changes that undo themselves, and who does it when the command cannot."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator

import hoststate
import labhelp
import pytest
from labhelp import LabGuest


class OnTerminal:
    """A command with a terminal, session and process group of its own."""

    def __init__(self, *words: str) -> None:
        self.output = b""
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.execv("/usr/bin/vsrtune", ["vsrtune", *words])
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            # A read that waits would keep the terminal open after `hang_up`.
            if not select.select([self.terminal], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(self.terminal, 4096)
            except OSError:
                return
            if not data:
                return
            self.output += data

    def hang_up(self) -> None:
        """Close the terminal, as sshd does when the connection is lost."""
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, self.terminal)
        os.close(null)

    def says(self, text: bytes, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while text not in self.output:
            assert time.monotonic() < end, self.output.decode()
            time.sleep(0.1)

    def ended(self) -> int:
        """Its exit code, or the negative number of the signal that ended it."""
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        self._reader.join(5)
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self.ended()
        os.close(self.terminal)


ENDS: dict[str, Callable[[OnTerminal], None]] = {
    "kill": lambda command: os.kill(command.pid, signal.SIGKILL),
    "kill group": lambda command: os.killpg(command.pid, signal.SIGKILL),
    "terminate": lambda command: os.kill(command.pid, signal.SIGTERM),
    "hang up": lambda command: os.kill(command.pid, signal.SIGHUP),
    "interrupt": lambda command: os.kill(command.pid, signal.SIGINT),
    "terminal": lambda command: command.hang_up(),
}


@pytest.fixture
def original(restored: None, guests: list[LabGuest], irq_cpus: set[int]) -> dict[str, str]:
    """The host before the test, with a policy for every guest."""
    labhelp.write_policies("auto")
    return hoststate.capture()


@pytest.fixture
def overload(libvirt_guest: LabGuest) -> Iterator[None]:
    """More frames to the first router than it can forward, until the test ends."""
    with labhelp.traffic(libvirt_guest, 40000, 900):
        yield


def shown(name: str) -> str:
    """A property of the guardian's service."""
    return labhelp.sh("systemctl", "show", "-P", name, "vsrtune-trial").stdout.strip()


def is_over() -> None:
    """Wait until no guardian has anything to do."""
    labhelp.wait_for(lambda: shown("ActiveState") == "inactive", "the guardian is done", seconds=60)


def assert_back(original: dict[str, str]) -> None:
    is_over()
    assert hoststate.differences(original, hoststate.capture()) == []
    assert not labhelp.journal_is_live()


@labhelp.core("bookworm")
def test_unconfirmed_it_is_put_back(original: dict[str, str]) -> None:
    done = labhelp.vsrtune("apply", "--confirm", "3s", check=False)
    assert done.returncode == 1, done.stderr
    assert "changes done." in done.stdout
    assert done.stdout.endswith("Not confirmed.\nEverything is put back.\n")
    assert_back(original)


def test_confirmed_with_enter_it_stays(
    original: dict[str, str], guests: list[LabGuest], irq_cpus: set[int]
) -> None:
    command = OnTerminal("apply", "--confirm", "300s")
    try:
        command.says(b"Press Enter")
        os.write(command.terminal, b"\n")
        assert command.ended() == 0
    finally:
        command.close()
    is_over()
    for guest in guests:
        assert labhelp.untuned_lines(guest, irq_cpus) == []


def test_confirmed_by_another_session_it_stays(
    original: dict[str, str], guests: list[LabGuest], irq_cpus: set[int]
) -> None:
    command = OnTerminal("apply", "--confirm", "300s")
    try:
        command.says(b"Press Enter")
        labhelp.vsrtune("confirm")
        assert command.ended() == 0
    finally:
        command.close()
    for guest in guests:
        assert labhelp.untuned_lines(guest, irq_cpus) == []
    assert labhelp.vsrtune("confirm", check=False).returncode == 1
    is_over()


@pytest.mark.parametrize("end", labhelp.shared(["kill group", "terminal"]))
def test_however_an_unconfirmed_apply_ends(original: dict[str, str], end: str) -> None:
    command = OnTerminal("apply", "--confirm", "300s")
    try:
        command.says(b"Press Enter")
        assert labhelp.journal_is_live()
        ENDS[end](command)
        command.ended()
    finally:
        command.close()
    assert_back(original)


def test_a_ratio_from_the_routers_own_traffic(
    restored: None, libvirt_guest: LabGuest, irq_cpus: set[int], overload: None
) -> None:
    before = hoststate.capture()
    done = labhelp.vsrtune("try", libvirt_guest.name, "--for", "60s", "--json", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["guests"] == [libvirt_guest.ref]
    assert found["verdict"] in ("better", "not better")
    assert found["pairs"] >= 6
    for ratio in (found["share"], found["rate"]):
        assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
    assert len(found["turns"]) == 14
    arrived = sum(turn["received"] + turn["early"] for turn in found["turns"])
    assert 0 < sum(turn["forwarded"] for turn in found["turns"]) < arrived
    assert not found["kept"]
    print("\n".join(found["text"]), done.stderr, sep="\n")
    assert_back(before)


def test_without_traffic_nothing_is_decided(restored: None, libvirt_guest: LabGuest) -> None:
    done = labhelp.vsrtune("try", libvirt_guest.name, "--for", "50s", check=False)
    assert done.returncode == 6, done.stdout + done.stderr
    assert "12 of 12 turns left out: fewer than 100 frames arrived" in done.stdout
    assert "nothing decided" in done.stdout
    is_over()


@pytest.mark.parametrize("end", labhelp.shared(sorted(ENDS)))
def test_however_a_trial_ends(original: dict[str, str], libvirt_guest: LabGuest, end: str) -> None:
    command = OnTerminal("try", libvirt_guest.name, "--for", "300s")
    try:
        command.says(b"pair 1, ")
        labhelp.wait_for(labhelp.journal_is_live, "a tuned turn")
        ENDS[end](command)
        assert command.ended() != 0
    finally:
        command.close()
    assert_back(original)


@labhelp.core("trixie")
@labhelp.one_release("what systemd does", "trixie")
def test_a_killed_guardian_is_followed_by_another(original: dict[str, str]) -> None:
    command = OnTerminal("apply", "--confirm", "300s")
    try:
        command.says(b"Press Enter")
        waits = ("pgrep", "-f", "^/usr/bin/flock --timeout=300 ")
        flock = labhelp.wait_for(lambda: labhelp.sh(*waits, check=False).stdout, "it waits")
        os.kill(int(flock), signal.SIGKILL)
        undo = labhelp.wait_for(lambda: int(shown("MainPID")), "undo runs")
        os.kill(undo, signal.SIGKILL)
        labhelp.wait_for(lambda: shown("NRestarts") != "0", "it is started again")
        os.kill(command.pid, signal.SIGKILL)
        command.ended()
    finally:
        command.close()
    assert_back(original)


@labhelp.one_release("what systemd does", "trixie")
def test_what_changes_nothing_waits_for_nobody(restored: None) -> None:
    done = labhelp.vsrtune("apply", "--confirm", "300s")
    assert "put back" not in done.stdout
    is_over()


@labhelp.one_release("who holds the journal", "trixie")
def test_beside_the_daemon_nothing_is_begun(tuned: set[int]) -> None:
    done = labhelp.vsrtune("apply", "--confirm", "3s", check=False)
    assert done.returncode == 1
    assert "systemctl stop vsrtune" in done.stderr
    is_over()
