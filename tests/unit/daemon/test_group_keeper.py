"""The daemon watches a multistage router, and gives its balancers other rules."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msr_group
import pytest
from switch_faults import do

from vsrtune.attach.ledger import GROUP, ORIGIN, STEP, AttachLedger
from vsrtune.core.codec import encode
from vsrtune.core.errors import VsrtuneError
from vsrtune.daemon import group_health
from vsrtune.daemon.group_health import GroupKeeper
from vsrtune.group import msr_rules
from vsrtune.model.daemon_state import GroupGuest
from vsrtune.model.guest import NicKind

HEALTH = "  health: {leave: 2s, return: 10s}\n"
ROUTERS = {"a": ("edge-1r1", "edge-2r1"), "b": ("edge-1r2", "edge-2r2")}


class Devices:
    """The counters of the group's devices, below a root as the keeper reads them."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, int]] = {}
        self.files: dict[str, str] = {}
        for name in ("edge-1b", "edge-2b", *ROUTERS["a"], *ROUTERS["b"]):
            self.found[name] = {
                "rx_received": 0, "rx_dropped_queue_full": 0, "tx_to_sibling": 0,
                "tapq0_received": 0, "tapq0_stalled": 0,
            }  # fmt: skip

    def ethtool_statistics(self, device: str) -> dict[str, int]:
        if device not in self.found:
            raise OSError(19, "No such device")
        return self.found[device]

    def read(self, path: str) -> str:
        return self.files[path]

    def forward(self, *names: str) -> None:
        for name in names:
            for device in ROUTERS[name]:
                self.found[device]["rx_received"] += 50
                self.found[device]["tx_to_sibling"] += 50

    def unplug(self, *devices: str) -> None:
        for device in devices:
            found = self.found[device].items()
            self.found[device] = {k: v for k, v in found if not k.startswith("tapq")}

    def plug(self, *devices: str) -> None:
        for device in devices:
            self.found[device] |= {"tapq0_received": 0, "tapq0_stalled": 0}


class Balancers:
    """What each balancer was to load, in order. ``block`` keeps those of one waiting."""

    def __init__(self) -> None:
        self.loads: dict[str, list[tuple[str, ...]]] = {"lb1": [], "lb2": []}
        self.errors: dict[str, Exception] = {}
        self.block: dict[str, threading.Event] = {}

    def __call__(self, group: str, balancer: str, routers: tuple[str, ...]) -> None:
        assert group == "edge"
        self.loads[balancer].append(routers)
        if balancer in self.block:
            self.block[balancer].wait(30)
        if balancer in self.errors:
            raise self.errors[balancer]


class Scene:
    keeper: GroupKeeper

    def __init__(self) -> None:
        self.devices = Devices()
        self.balancers = Balancers()
        self.told: tuple[GroupGuest, ...] = ()
        self.now = 5000.0
        self.forwarding = ["a", "b"]

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / group_health.EVERY)):
            self.now += group_health.EVERY
            self.devices.forward(*self.forwarding)
            self.keeper.update()
            # Threads that load rules end between two samples, but for those that are kept.
            for thread in threading.enumerate():
                if thread.name == "rules" and not self.balancers.block:
                    thread.join(10)

    def tell(self, told: tuple[GroupGuest, ...]) -> None:
        self.told = told

    def clock(self) -> float:
        return self.now

    def fault(self, guest: str) -> str:
        return next(g.fault for g in self.told if g.guest == guest)

    def last(self) -> dict[str, tuple[str, ...]]:
        return {name: of[-1] for name, of in self.balancers.loads.items()}

    def many(self) -> int:
        return sum(map(len, self.balancers.loads.values()))


@pytest.fixture
def group_file(tmp_path: Path) -> Path:
    directory = tmp_path / "groups"
    directory.mkdir()
    path = directory / "edge.yaml"
    path.write_text(msr_group.FILE + HEALTH)
    return path


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "attach.jsonl"
    do(msr_group.fresh(), path, msr_group.create)
    return path


@pytest.fixture
def scene(ledger: Path, group_file: Path) -> Iterator[Scene]:
    found = Scene()
    root: Any = found.devices
    found.keeper = GroupKeeper(
        root, ledger, group_file.parent, found.balancers, lambda: None, found.tell, found.clock
    )
    found.run(3)
    yield found
    for event in found.balancers.block.values():
        event.set()


def test_at_first_the_balancers_load_the_rules_for_all_that_are_plugged_in(scene: Scene) -> None:
    assert scene.balancers.loads == {"lb1": [("a", "b")], "lb2": [("a", "b")]}
    assert [(g.guest, g.role, g.fault) for g in scene.told] == [
        ("a", "router", ""), ("b", "router", ""), ("lb1", "balancer", ""), ("lb2", "balancer", ""),
    ]  # fmt: skip


def test_the_first_rules_are_without_a_router_that_hangs(
    ledger: Path, group_file: Path, scene: Scene
) -> None:
    """A daemon that starts does not give it frames for as long as it takes to judge it."""
    scene.devices.found["edge-1r2"]["tapq0_stalled"] = 1
    scene.forwarding = ["a"]
    root: Any = scene.devices
    scene.keeper = GroupKeeper(
        root, ledger, group_file.parent, scene.balancers, lambda: None, scene.tell, scene.clock
    )
    scene.run(3)
    assert scene.balancers.loads == {"lb1": [("a", "b"), ("a",)], "lb2": [("a", "b"), ("a",)]}


def test_a_group_is_watched_when_its_create_is_complete(scene: Scene, ledger: Path) -> None:
    """Until then its guests are not plugged in, and nothing is wrong with them. A switch that is
    unfinished later, maybe of other guests, takes the watch from none."""
    with AttachLedger.open(ledger) as opened:
        (group,) = (entry.id for entry, _ in opened.groups())
        opened.done(group)
        scene.run(6)
        assert scene.told == ()
        step = opened.add(STEP, {})
        opened.add(GROUP, {"name": "edge"})  # the last line but the one that retires the steps
        scene.run(6)
        assert scene.told == ()
        opened.done(step)
        scene.run(6)
        assert len(scene.told) == 4
        opened.add(STEP, {})
        scene.run(6)
        assert len(scene.told) == 4


def test_no_rules_are_due_before_a_router_is_plugged_in(
    ledger: Path, group_file: Path, scene: Scene
) -> None:
    """As when the host has booted."""
    scene.devices.unplug(*ROUTERS["a"], *ROUTERS["b"])
    root: Any = scene.devices
    scene.keeper = GroupKeeper(
        root, ledger, group_file.parent, scene.balancers, lambda: None, scene.tell, scene.clock
    )
    scene.run(10)
    assert scene.many() == 2
    assert [scene.fault(name) for name in ("a", "lb1", "lb2")] == ["unplugged", "", ""]
    scene.devices.plug(*ROUTERS["a"])
    scene.run(1)
    assert scene.last() == {"lb1": ("a",), "lb2": ("a",)}


@pytest.mark.parametrize("hangs", [False, True])
def test_a_router_that_dies_leaves_the_rules_and_returns(scene: Scene, hangs: bool) -> None:
    scene.forwarding = ["a"]
    if hangs:
        scene.devices.found["edge-1r2"]["tapq0_stalled"] = 1
    else:
        scene.devices.unplug(*ROUTERS["b"])
    scene.run(2)
    assert scene.fault("b") == ("stalled" if hangs else "unplugged")
    assert scene.last() == {"lb1": ("a",), "lb2": ("a",)}
    scene.devices.plug(*ROUTERS["b"])
    scene.forwarding = ["a", "b"]
    scene.run(9)
    assert scene.last() == {"lb1": ("a",), "lb2": ("a",)}
    scene.run(3)
    assert scene.last() == {"lb1": ("a", "b"), "lb2": ("a", "b")}
    assert scene.fault("b") == ""
    scene.run(120)
    assert scene.many() == 6
    assert [g.faults for g in scene.told] == [0, 1, 0, 0]


def test_an_agent_that_hangs_keeps_nobody_waiting(scene: Scene) -> None:
    scene.balancers.block["lb1"] = threading.Event()
    scene.forwarding = ["a"]
    scene.devices.unplug(*ROUTERS["b"])
    begin = time.monotonic()
    scene.run(20)
    assert time.monotonic() - begin < 10
    assert scene.balancers.loads["lb2"] == [("a", "b"), ("a",)]
    assert (scene.fault("lb1"), scene.fault("lb2")) == ("rules due", "")
    # Meanwhile what is wanted has changed: one attempt at a time, and the last wish counts.
    assert scene.balancers.loads["lb1"] == [("a", "b"), ("a",)]
    scene.devices.plug(*ROUTERS["b"])
    scene.forwarding = ["a", "b"]
    scene.run(20)
    assert len(scene.balancers.loads["lb1"]) == 2
    scene.balancers.block.pop("lb1").set()
    scene.run(2)
    assert scene.last() == {"lb1": ("a", "b"), "lb2": ("a", "b")}
    assert scene.fault("lb1") == ""


@pytest.mark.parametrize("error", [VsrtuneError("no agent"), ValueError("surprise")])
def test_without_an_agent_the_log_says_what_to_load(
    scene: Scene, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    scene.balancers.errors["lb2"] = error
    scene.forwarding = ["a"]
    scene.devices.unplug(*ROUTERS["b"])
    scene.run(120)
    what = "load in it what this prints: vsrtune group rules edge lb2 --without b"
    said = [r.getMessage() for r in caplog.records if what in r.getMessage()]
    assert len(said) == 1, "once, although it is tried again"
    text = str(error) if isinstance(error, VsrtuneError) else repr(error)
    assert said[0] == f"group edge: lb2 has not loaded its rules; {text}; {what}"
    assert next(g for g in scene.told if g.guest == "lb2").hint == f"{text}; {what}"
    assert scene.fault("lb2") == "rules due"
    # 1, 2, 4, ... 60 s
    assert 6 <= len(scene.balancers.loads["lb2"]) <= 9
    del scene.balancers.errors["lb2"]
    scene.run(61)
    assert (scene.last()["lb2"], scene.fault("lb2")) == (("a",), "")


def test_a_balancer_that_starts_anew_gets_its_rules(scene: Scene) -> None:
    scene.devices.unplug("edge-1b")
    scene.run(5)
    assert scene.fault("lb1") == "unplugged"
    assert next(g for g in scene.told if g.guest == "lb1").hint == "virsh start lb1"
    assert scene.many() == 2
    scene.devices.plug("edge-1b")
    scene.run(2)
    assert scene.balancers.loads["lb1"] == [("a", "b"), ("a", "b")]
    assert scene.fault("lb1") == ""


def test_one_that_hangs_is_told(scene: Scene) -> None:
    scene.devices.found["edge-2b"]["tapq0_stalled"] = 1
    scene.run(2)
    assert (scene.fault("lb1"), scene.fault("lb2")) == ("", "stalled")
    scene.devices.found["edge-2b"]["tapq0_stalled"] = 0
    scene.run(1)
    assert scene.fault("lb2") == ""
    assert scene.many() == 2


def test_one_that_was_booted_from_inside_gets_them_too(scene: Scene) -> None:
    """Nothing but its silence tells; it is asked for no more than that every half a minute."""
    nic: Any = type("Nic", (), {"kind": NicKind.MACVTAP, "target": "mv0", "lower": ("p0",)})
    guest: Any = type("Guest", (), {"uuid": "uuid-lb1", "interfaces": (nic,)})
    snapshot: Any = type("Snapshot", (), {"guests": (guest,)})
    scene.keeper._latest = lambda: snapshot
    for number in range(400):
        scene.devices.files["/sys/class/net/mv0/statistics/rx_packets"] = str(10 * number)
        scene.run(group_health.EVERY)
    assert scene.fault("lb1") == "silent"
    assert 3 <= len(scene.balancers.loads["lb1"]) <= 5
    assert len(scene.balancers.loads["lb2"]) == 1


def test_what_cannot_be_read_at_a_moment_is_no_sign(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue is opened while the statistics are read."""
    told = scene.told

    def read(_device: str) -> dict[str, int]:
        raise OSError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(scene.devices, "ethtool_statistics", read)
        scene.run(30)
    scene.run(5)
    assert scene.told == told
    assert scene.many() == 2


def test_a_file_is_followed_and_without_health_nothing_is_done(
    scene: Scene, group_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group_file.write_text(msr_group.FILE + "  health: {leave: 2m}\n")
    scene.run(30)
    wrong = [r.getMessage() for r in caplog.records if "watched as before" in r.getMessage()]
    assert len(wrong) == 1 and f"{group_file}:7: group.health.leave: " in wrong[0]
    assert scene.told
    group_file.write_text(msr_group.FILE)
    scene.run(6)
    assert scene.told == ()
    scene.devices.unplug(*ROUTERS["b"])
    scene.run(30)
    assert scene.many() == 2
    group_file.write_text(msr_group.FILE + HEALTH)
    scene.run(6)
    assert scene.last() == {"lb1": ("a",), "lb2": ("a",)}


def test_a_wrong_file_of_one_group_takes_the_watch_from_no_other(
    scene: Scene,
    group_file: Path,
    ledger: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also at a start, when no group was watched before."""
    with AttachLedger.open(ledger) as opened:
        for _, origin in list(opened.origins()):
            opened.add(ORIGIN, encode(replace(origin, group="core")))
        opened.add(GROUP, {"name": "core"})
    group_file.with_name("core.yaml").write_text("group: nonsense\n")
    before = scene.told
    root: Any = scene.devices
    scene.keeper = GroupKeeper(
        root, ledger, group_file.parent, scene.balancers, lambda: None, scene.tell, scene.clock
    )
    scene.told = ()
    scene.run(3)
    assert [(g.guest, g.fault) for g in scene.told] == [(g.guest, g.fault) for g in before]
    assert len([m for m in caplog.messages if "group core is watched not" in m]) == 1


def test_a_file_of_another_name_is_told_and_gives_no_other_group_its_health(
    scene: Scene, group_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = group_file.with_name("rest.yaml")
    group_file.rename(other)
    scene.run(30)
    told = [m for m in caplog.messages if "edge is not watched" in m]
    assert scene.told == () and len(told) == 1
    assert f"{other}: its file has another name" in told[0] and "edge.yaml" in told[0]
    other.write_text(other.read_text().replace("edge", "core"))
    other.rename(group_file)
    scene.run(6)
    assert scene.told == ()


def test_a_group_that_is_deleted_is_watched_no_more(scene: Scene, ledger: Path) -> None:
    ledger.write_text("")
    scene.run(6)
    assert scene.told == ()
    assert scene.many() == 2


def test_the_thread_survives_whatever_it_reads(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_health, "EVERY", 0.01)
    failed = threading.Event()

    def read(_device: str) -> dict[str, int]:
        if failed.is_set():
            raise OSError(19, "No such device")
        failed.set()
        raise RuntimeError("surprise")

    monkeypatch.setattr(scene.devices, "ethtool_statistics", read)
    scene.keeper.start()
    until(lambda: scene.fault("a") == "unplugged")
    scene.keeper.stop()
    scene.keeper.join(10)
    assert failed.is_set()


class Guest:
    """A balancer as its agent shows it: the names of its interfaces, and its rules."""

    def __init__(self) -> None:
        self.called: dict[str, str] = {}
        self.rules = ""
        self.lists = ""

    def interfaces(self) -> dict[str, str]:
        return self.called

    def run(self, words: tuple[str, ...], text: str = "") -> str:
        if words == ("nft", "-f", "-"):
            self.rules = self.lists = text
        assert words in (("nft", "-f", "-"), ("nft", "list", "table", "netdev", "vsrtune_edge"))
        return self.lists


def test_a_balancer_loads_the_rules_for_those_that_are_left(
    ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest, host = Guest(), msr_group.fresh()
    do(host, tmp_path / "other.jsonl", msr_group.create)

    def agent(_connection: object, uuid: str, name: str) -> Guest:
        assert (uuid, name) == ("uuid-lb1", "lb1")
        return guest

    monkeypatch.setattr(group_health, "GuestAgent", agent)
    load = group_health.RuleLoader("test:///default", ledger, tmp_path / "journal")
    monkeypatch.setattr(load, "_host", host)
    with pytest.raises(VsrtuneError, match="p0: the balancer has no interface with the MAC"):
        load("edge", "lb1", ("a", "b"))
    guest.called = {msr_group.L0: "ens3", host.links()["edge-1b"].mac: "ens9"}
    for routers, chains in ((("a", "b"), {"to_in_1", "to_in_2"}), (("b",), {"to_in_2"})):
        load("edge", "lb1", routers)
        assert msr_rules.choosers(guest.rules) == chains
        assert "define ext_in = ens3 " in guest.rules
        assert "define int_in = ens9 " in guest.rules
    with pytest.raises(VsrtuneError, match="no router would be left"):
        load("edge", "lb1", ())
    guest.run = lambda *_: "chain to_in_1 {"  # type: ignore[method-assign,assignment]
    with pytest.raises(VsrtuneError, match="lb1: it lists other rules than it was given"):
        load("edge", "lb1", ("b",))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
