"""events/libvirt.py with the libvirt library's own test driver: real events, no daemon."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest

from vsrtune.daemon.events import libvirt as events

libvirt = pytest.importorskip("libvirt")
URI = "test:///default"


class Heard:
    """What was made dirty, and whose."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.guests: list[str | None] = []

    def __call__(self, reason: str, guest: str | None = None) -> None:
        self.guests.append(guest)
        self.reasons.append(reason)


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


@contextlib.contextmanager
def listening(heard: Heard) -> Iterator[None]:
    events.register()
    listener = events.LibvirtEvents(URI, heard)
    listener.start()
    try:
        yield
    finally:
        listener.stop()
        listener.join(10)
    assert not listener.is_alive()


def test_guest_that_goes_and_comes_makes_dirty() -> None:
    heard = Heard()
    with listening(heard):
        until(
            lambda: heard.reasons == ["libvirt connected"],
            "the connection itself is a reason to look",
        )
        connection = libvirt.open(URI)
        domain = connection.lookupByName("test")
        domain.destroy()
        until(lambda: heard.reasons[1:] == ["lifecycle of test"], "destroyed")
        domain.create()
        until(lambda: "lifecycle of test" in heard.reasons[2:], "started")
        assert heard.guests[0] is None
        assert set(heard.guests[1:]) == {"test"}
        connection.close()


def test_libvirt_that_is_away_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "RETRY", 1.0)
    real, refused = libvirt.openReadOnly, [0]

    def first_refuse(uri: str) -> object:
        if refused[0] < 2:
            refused[0] += 1
            raise libvirt.libvirtError("connection refused")
        return real(uri)

    monkeypatch.setattr(libvirt, "openReadOnly", first_refuse)
    heard = Heard()
    with listening(heard):
        until(lambda: heard.reasons == ["libvirt connected"], "connected at the third try")
        assert refused == [2]


def test_a_connection_that_breaks_off_while_it_is_made_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever holds a callback holds the connection, and so its descriptors."""
    monkeypatch.setattr(events, "RETRY", 0.1)
    # libvirt knows no event of that number.
    monkeypatch.setattr(libvirt, "VIR_DOMAIN_EVENT_ID_NONE", 1000, raising=False)
    monkeypatch.setattr(events, "EVENTS", (*events.EVENTS, "VIR_DOMAIN_EVENT_ID_NONE"))
    real, made = libvirt.openReadOnly, []

    def kept(uri: str) -> object:
        made.append(real(uri))
        return made[-1]

    monkeypatch.setattr(libvirt, "openReadOnly", kept)
    with listening(Heard()):
        until(lambda: len(made) >= 2, "tried again")
    with pytest.raises(libvirt.libvirtError, match="invalid connection"):
        made[0].isAlive()
