"""systemd.py against a real notification socket."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from vsrtune.core.errors import VsrtuneError
from vsrtune.daemon import systemd


@pytest.fixture
def listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(str(tmp_path / "notify"))
    sock.settimeout(5)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    return sock


@pytest.fixture
def notifier(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> systemd.Notifier:
    """One that the watchdog watches, and the listener hears."""
    pytest.importorskip("systemd.daemon")
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    return systemd.Notifier()


def test_systemd_receives_every_state(listener: socket.socket, notifier: systemd.Notifier) -> None:
    assert notifier.watchdog_seconds == 60
    heard = []
    for call in (notifier.ready, notifier.ping, notifier.reloading, notifier.stopping):
        call()
        heard.append(listener.recv(4096).decode())
    notifier.status("2 guests tuned,\n 1 drift")
    heard.append(listener.recv(4096).decode())
    assert heard[:2] == ["READY=1", "WATCHDOG=1"]
    assert heard[2].startswith("RELOADING=1\nMONOTONIC_USEC=")
    assert heard[3:] == ["STOPPING=1", "STATUS=2 guests tuned, 1 drift"]


def test_a_ping_asks_for_time_while_the_daemon_starts_or_stops(
    listener: socket.socket, notifier: systemd.Notifier
) -> None:
    heard = []
    for before in (None, notifier.ready, notifier.reloading, notifier.stopping):
        if before is not None:
            before()
            listener.recv(4096)
        notifier.ping()
        heard.append(listener.recv(4096).decode())
    more = "WATCHDOG=1\nEXTEND_TIMEOUT_USEC=60000000"
    assert heard == [more, "WATCHDOG=1", "WATCHDOG=1", more]


def test_without_the_binding_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "systemd", None)
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/notify")
    with pytest.raises(VsrtuneError) as caught:
        systemd.Notifier()
    assert "python3-systemd" in caught.value.hint


@pytest.mark.parametrize("binding", [True, False])
def test_without_a_listener_nothing_happens(monkeypatch: pytest.MonkeyPatch, binding: bool) -> None:
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC"):
        monkeypatch.delenv(name, raising=False)
    if not binding:
        monkeypatch.setitem(sys.modules, "systemd", None)
    notifier = systemd.Notifier()
    for call in (notifier.ready, notifier.ping, notifier.reloading, notifier.stopping):
        call()
    notifier.status("x")
    assert notifier.watchdog_seconds is None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "500000"}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "42"}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "41"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
    ],
)
def test_watchdog_time_is_ours_only_when_meant_for_us(
    environ: dict[str, str], expected: float | None
) -> None:
    assert systemd.watchdog_from(environ, 42) == expected
