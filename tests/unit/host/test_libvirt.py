"""libvirt's side: XML, connections that come and go, recorded domains."""

from __future__ import annotations

import json
import sys
import threading
import time
import types
from typing import Any

import pytest

from vsrtune.core.codec import decode, encode
from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import Lasting, ObserveError
from vsrtune.host.libvirt import DomainText, LibvirtSource, Patience, vanished
from vsrtune.host.recorded import RecordedVirt, Recording, Told
from vsrtune.model.domain_xml import nics

XML = """\
<domain type='kvm' id='3'>
  <name>vr 1</name>
  <devices>
    <interface type='direct'>
      <mac address='02:00:00:00:00:0A'/>
      <source dev='p0' mode='bridge'/>
      <target dev='macvtap0'/>
      <model type='virtio'/>
      <driver name='vhost' queues='2'/>
      <alias name='net0'/>
    </interface>
    <interface type='bridge'>
      <mac address='52:54:00:00:00:02'/>
      <target dev='vnet1'/>
      <model type='virtio'/>
      <driver name='qemu'/>
      <alias name='net1'/>
    </interface>
    <interface type='network'>
      <target dev='vnet2'/>
      <model type='e1000'/>
      <alias name='ua-mine'/>
    </interface>
    <interface type='ethernet'><target dev='pv0' managed='no'/><model type='virtio-non-transitional'/></interface>
    <interface type='hostdev' managed='yes'><mac address='02:00:00:00:00:03'/></interface>
    <interface type='user'><model type='virtio'/></interface>
    <interface type='vhostuser'><target dev='vhu0'/><model type='virtio'/></interface>
  </devices>
</domain>
"""


def test_interfaces() -> None:
    found = [n for n in nics(XML) if n.on_host]
    assert [(n.device, n.mac, n.model, n.alias, n.vhost) for n in found] == [
        ("macvtap0", "02:00:00:00:00:0a", "virtio", "net0", True),
        ("vnet1", "52:54:00:00:00:02", "virtio", "net1", False),
        ("vnet2", "", "e1000", "ua-mine", False),
        ("pv0", "", "virtio-non-transitional", "", True),
    ]
    assert found[0].netdev == "hostnet0"


def test_xml_that_is_none() -> None:
    with pytest.raises(ObserveError, match="cannot be read"):
        nics("<domain>")


class FakeError(Exception):
    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    def get_error_message(self) -> str:
        return str(self)

    def get_error_code(self) -> int:
        return self.code


class FakeDomain:
    def __init__(self, name: str, gone: bool = False, state: tuple[int, int] = (1, 1)) -> None:
        self._name = name
        self._gone = gone
        self._state = state

    def name(self) -> str:
        return self._name

    def UUIDString(self) -> str:
        return "C0FFEE00-0000-4000-8000-000000000001"

    def XMLDesc(self, _flags: int) -> str:
        if self._gone:
            raise FakeError("Domain not found", 42)
        return f"<domain><name>{self._name}</name></domain>"

    def state(self) -> list[int]:
        return list(self._state)

    def vcpuPinInfo(self, _flags: int) -> list[tuple[bool, ...]]:
        return [(True, False, True), (False, True, False)]

    def emulatorPinInfo(self, _flags: int) -> tuple[bool, ...]:
        return (True, True, True)


class FakeLibvirt(types.ModuleType):
    """A libvirt whose daemon can be restarted or away."""

    libvirtError = FakeError
    VIR_CONNECT_LIST_DOMAINS_ACTIVE = 1
    VIR_DOMAIN_AFFECT_LIVE = 1
    VIR_DOMAIN_RUNNING = 1
    VIR_DOMAIN_RUNNING_POSTCOPY = 10
    VIR_DOMAIN_PAUSED = 3
    VIR_DOMAIN_PAUSED_MIGRATION = 2
    VIR_DOMAIN_PAUSED_SAVE = 3
    VIR_DOMAIN_PAUSED_DUMP = 4
    VIR_DOMAIN_PAUSED_STARTING_UP = 11
    VIR_DOMAIN_PAUSED_POSTCOPY = 12
    VIR_ERR_NO_DOMAIN = 42
    VIR_ERR_OPERATION_INVALID = 55

    def __init__(self) -> None:
        super().__init__("libvirt")
        self.running = True
        self.generation = 1
        self.served: list[FakeDomain] = []
        # Not set while the daemon is stopped (SIGSTOP): it takes the question.
        self.awake = threading.Event()
        self.awake.set()

    def registerErrorHandler(self, _handler: Any, _context: Any) -> None:
        pass

    def openReadOnly(self, _uri: str) -> FakeConnection:
        if not self.running:
            raise FakeError("Failed to connect socket", 38)
        return FakeConnection(self)


class FakeConnection:
    def __init__(self, libvirt: FakeLibvirt) -> None:
        self.libvirt = libvirt
        self.generation = libvirt.generation

    def isAlive(self) -> int:
        return 1

    def close(self) -> None:
        if self.generation != self.libvirt.generation:
            raise FakeError("client socket is closed", 38)

    def listAllDomains(self, _flags: int) -> list[FakeDomain]:
        self.libvirt.awake.wait()
        if not self.libvirt.running or self.generation != self.libvirt.generation:
            raise FakeError("client socket is closed", 38)
        return self.libvirt.served


@pytest.fixture
def libvirt(monkeypatch: pytest.MonkeyPatch) -> FakeLibvirt:
    fake = FakeLibvirt()
    fake.served = [FakeDomain("vr1")]
    monkeypatch.setitem(sys.modules, "libvirt", fake)
    return fake


def test_domains(libvirt: FakeLibvirt) -> None:
    libvirt.served.append(FakeDomain("ending", gone=True))
    (domain,) = LibvirtSource().domains()
    assert domain == DomainText(
        "vr1",
        "c0ffee00-0000-4000-8000-000000000001",
        "<domain><name>vr1</name></domain>",
        (CpuSet([0, 2]), CpuSet([1])),
        CpuSet([0, 1, 2]),
    )


@pytest.mark.parametrize(
    ("state", "busy"),
    [
        ((1, 1), False),
        ((1, 2), False),
        ((1, 10), True),
        ((3, 1), False),
        ((3, 2), True),
        ((3, 11), True),
    ],
    ids=["booted", "migrated", "postcopy", "by an operator", "migrating", "starting up"],
)
def test_a_domain_that_libvirt_is_busy_with(
    libvirt: FakeLibvirt, state: tuple[int, int], busy: bool
) -> None:
    libvirt.served = [FakeDomain("vr1", state=state)]
    assert LibvirtSource().domains()[0].busy is busy


def test_a_restarted_libvirt_is_connected_to_again(libvirt: FakeLibvirt) -> None:
    source = LibvirtSource()
    assert len(source.domains()) == 1
    libvirt.generation += 1
    assert len(source.domains()) == 1


def test_a_libvirt_that_is_away_is_reported_and_found_again(libvirt: FakeLibvirt) -> None:
    source = LibvirtSource()
    source.domains()
    libvirt.running = False
    libvirt.generation += 1
    with pytest.raises(ObserveError, match="Failed to connect") as caught:
        source.domains()
    assert caught.value.lasting is Lasting.TRANSIENT
    libvirt.running = True
    assert len(source.domains()) == 1


def test_a_libvirt_that_says_nothing_holds_nobody_up(
    libvirt: FakeLibvirt, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = LibvirtSource()
    monkeypatch.setattr(source._kept, "_patience", Patience(0.1))
    assert len(source.domains()) == 1
    libvirt.awake.clear()
    begin = time.monotonic()
    for _ in range(3):
        with pytest.raises(ObserveError, match="does not answer") as caught:
            source.domains()
        assert caught.value.lasting is Lasting.TRANSIENT
    assert time.monotonic() - begin < 1
    libvirt.awake.set()
    while source._kept._patience.silent:
        time.sleep(0.01)
    assert len(source.domains()) == 1


@pytest.mark.parametrize(
    ("code", "text", "active", "expected"),
    [
        (42, "Domain not found", 42, True),
        (55, "Requested operation is not valid: domain is not running", 1, True),
        (55, "Domain läuft nicht", 0, True),
        (55, "Domain läuft nicht", 42, True),
        (55, "Domain läuft nicht", None, False),
        (55, "cannot modify the persistent configuration of it", 1, False),
        (55, "cannot modify the persistent configuration of it", 38, False),
        (38, "domain is not running", 0, False),
    ],
)
@pytest.mark.usefixtures("libvirt")
def test_what_says_that_a_domain_is_gone(
    code: int, text: str, active: int | None, expected: bool
) -> None:
    """``active``: its state, the code of an error, or None for an operation without a domain."""

    class Domain:
        def isActive(self) -> int:
            if active not in (0, 1):
                raise FakeError("", active or 0)
            return active

    domain = None if active is None else Domain()
    assert vanished(FakeError(text, code), domain) is expected


def test_recorded_domains() -> None:
    told = DomainText("vr1", "u", "<domain/>", (CpuSet([1]),), CpuSet([0, 1]))
    recorded: Told = (told,)
    again = decode(Told, json.loads(json.dumps(encode(recorded))))
    assert RecordedVirt(again).domains() == (told,)
    assert RecordedVirt(again).domain("vr1") == told
    assert RecordedVirt(again).domain("vr2") is None


def test_a_recorded_failure_fails_again() -> None:
    with pytest.raises(ObserveError, match="does not answer"):
        RecordedVirt("libvirt does not answer").domains()


def test_a_host_recorded_without_libvirt() -> None:
    assert Recording().virt().domains() == ()


def test_answers_and_errors_come_back() -> None:
    patience = Patience(10)
    assert patience.ask(lambda: 7) == 7

    def broken() -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        patience.ask(broken)
    assert patience.ask(lambda: 8) == 8


def test_one_question_waits_at_most() -> None:
    patience = Patience(0.05)
    end, asked = threading.Event(), []

    def silent() -> int:
        asked.append(1)
        end.wait()
        return 1

    with pytest.raises(TimeoutError, match=r"no answer in 0\.05 s"):
        patience.ask(silent)
    begin = time.monotonic()
    for _ in range(100):
        with pytest.raises(TimeoutError, match="an earlier question"):
            patience.ask(silent)
    assert time.monotonic() - begin < 1
    assert len(asked) == 1
    end.set()
    while patience.silent:
        time.sleep(0.01)
    assert patience.ask(lambda: 2) == 2
