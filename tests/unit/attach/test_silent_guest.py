"""A guest's QEMU that does not answer, and an operator who plugs an interface in meanwhile."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from vsrtune.attach import libvirt_hotplug
from vsrtune.attach.libvirt_hotplug import AwayError, LiveDomains, RefusedError, SilentError
from vsrtune.host import libvirt as host_libvirt
from vsrtune.host.libvirt import Patience
from vsrtune.model.domain_xml import DomainNic, nic

MAC = "02:00:00:00:0a:00"


class FakeError(Exception):
    def get_error_code(self) -> int:
        return 1

    def get_error_message(self) -> str:
        return str(self)


class FakeLibvirt(ModuleType):
    """libvirt with guests by their UUIDs."""

    libvirtError = FakeError
    VIR_DOMAIN_AFFECT_LIVE = 1
    VIR_ERR_NO_DOMAIN = 42
    VIR_ERR_OPERATION_INVALID = 55
    VIR_ERR_DEVICE_MISSING = 99

    def __init__(self) -> None:
        super().__init__("libvirt")
        # Not set while libvirt, or the QEMU of a guest "silent", does not answer.
        self.awake, self.answers = threading.Event(), threading.Event()
        self.awake.set()
        self.waiting = threading.Event()
        self.asked: list[tuple[str, int]] = []
        self.opened = 0

    def registerErrorHandler(self, _handler: Any, _context: Any) -> None:
        pass

    def open(self, _uri: str) -> FakeConnection:
        self.opened += 1
        return FakeConnection(self, self.opened)


class FakeConnection:
    def __init__(self, libvirt: FakeLibvirt, number: int) -> None:
        self.libvirt, self.number = libvirt, number

    def isAlive(self) -> int:
        return 1

    def close(self) -> None:
        pass

    def getLibVersion(self) -> int:
        self.libvirt.awake.wait()
        return 1

    def lookupByUUIDString(self, uuid: str) -> FakeDomain:
        return FakeDomain(self, uuid)


class FakeDomain:
    def __init__(self, connection: FakeConnection, uuid: str) -> None:
        self.connection, self.uuid = connection, uuid

    def detachDeviceFlags(self, _xml: str, _flags: int) -> int:
        libvirt = self.connection.libvirt
        if self.uuid == "silent":
            libvirt.waiting.set()
            libvirt.answers.wait()
        libvirt.asked.append((self.uuid, self.connection.number))
        return 0


@pytest.fixture
def libvirt(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLibvirt]:
    fake = FakeLibvirt()
    monkeypatch.setitem(sys.modules, "libvirt", fake)
    monkeypatch.setattr(libvirt_hotplug, "GUEST_SECONDS", 0.05)
    yield fake
    fake.answers.set()
    fake.awake.set()


CARD = nic(f"<interface type='direct'><mac address='{MAC}'/></interface>")


def test_a_silent_guest_is_told_and_keeps_no_other_waiting(libvirt: FakeLibvirt) -> None:
    """Its request goes on alone, with the connection that it is made on."""
    live = LiveDomains("fake")
    with pytest.raises(SilentError, match="QEMU is silent"):
        live.request_unplug("silent", CARD)
    live._seconds = 60.0
    live.request_unplug("well", CARD)
    assert libvirt.asked == [("well", 2)]
    libvirt.answers.set()
    live.request_unplug("silent", CARD)
    live.request_unplug("well", CARD)
    ends = time.monotonic() + 10
    while len(libvirt.asked) < 4 and time.monotonic() < ends:  # that thread gives no sign
        time.sleep(0.01)
    assert sorted(libvirt.asked) == [("silent", 1), ("silent", 2), ("well", 2), ("well", 2)]
    assert libvirt.opened == 2


def test_an_operator_who_does_not_wait_for_it_can_take_the_switch_back(
    libvirt: FakeLibvirt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends the wait, and keeps nothing from the other guests."""
    monkeypatch.setattr(libvirt_hotplug, "GUEST_SECONDS", 60.0)
    live = LiveDomains("fake")

    def interrupt() -> None:
        libvirt.waiting.wait()
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            live.request_unplug("silent", CARD)
    finally:
        signal.signal(signal.SIGINT, before)
    live.request_unplug("well", CARD)
    assert libvirt.asked == [("well", 2)]


def test_a_libvirt_that_falls_silent_meanwhile_is_away(
    libvirt: FakeLibvirt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No guest is to blame for it."""
    live = LiveDomains("fake")
    made = [Patience(), Patience(0.05)]
    live._kept._patience = made.pop(0)
    monkeypatch.setattr(host_libvirt, "Patience", lambda: made.pop(0))
    silent = FakeDomain.detachDeviceFlags

    def stopped(self: FakeDomain, xml: str, flags: int) -> int:
        libvirt.awake.clear()
        return silent(self, xml, flags)

    monkeypatch.setattr(FakeDomain, "detachDeviceFlags", stopped)
    for _ in range(2):
        with pytest.raises(AwayError, match="does not answer"):
            live.request_unplug("silent", CARD)


class Busy(LiveDomains):
    """QEMU has an interface and a back end that libvirt knows once its own request is done, which
    the next command waits for."""

    def __init__(self) -> None:
        super().__init__("fake")
        self.known: list[DomainNic] = []
        self.sent: list[str] = []
        self.plugging: str = ""

    def nics(self, uuid: str) -> tuple[DomainNic, ...]:
        return tuple(self.known)

    def _monitor(self, uuid: str, command: str, arguments: dict[str, str]) -> Any:
        self.sent.append(command)
        if command == self.plugging:
            alias = "<alias name='net5'/>"
            text = f"<interface type='direct'><mac address='{MAC}'/>{alias}</interface>"
            self.known.append(nic(text))
        if command == "qom-get":
            return "hostnet5"
        if not self.known:
            return None
        return [{"name": "net5"}] if command == "qom-list" else "hostnet5: index=0,type=tap"


@pytest.mark.parametrize("plugging", ["qom-list", "human-monitor-command"])
def test_an_interface_that_is_just_plugged_in_is_no_orphan(plugging: str) -> None:
    live = Busy()
    live.plugging = plugging
    assert live.drop_orphans("uuid") == ()
    assert not {"device_del", "netdev_del"} & set(live.sent)


def test_an_interface_that_nobody_knows_is_one() -> None:
    """One of <qemu:commandline> may have such a name too; its back end has another one."""
    live = Busy()
    there = {"net5": "hostnet5", "net9": "mgmt"}

    def monitor(_uuid: str, command: str, arguments: dict[str, str]) -> Any:
        live.sent.append(command)
        if command == "qom-get":
            return there.get(arguments["path"].rpartition("/")[2])
        if command == "device_del":
            del there[arguments["id"]]
        return [{"name": n} for n in there] if command == "qom-list" else "hostnet5: index=0"

    live._monitor = monitor  # type: ignore[method-assign]
    assert live.drop_orphans("uuid") == ("net5",)
    assert live.sent[-1] == "netdev_del"
    assert there == {"net9": "mgmt"}


def test_what_is_refused_is_no_silence(
    libvirt: FakeLibvirt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_domain: FakeDomain, _xml: str, _flags: int) -> int:
        raise FakeError("cannot acquire state change lock")

    monkeypatch.setattr(FakeDomain, "detachDeviceFlags", refuse)
    with pytest.raises(RefusedError, match="state change lock"):
        LiveDomains("fake").request_unplug("well", CARD)
    assert libvirt.opened == 1
