"""Counters of a router of several guests that share a device of the module, and which of
its guests take frames."""

from __future__ import annotations

from dataclasses import replace

import pytest
import recorded_hosts
from hosttree import HostTree

from vsrtune.bench.measure import counters
from vsrtune.bench.spec.model import Leg, Router
from vsrtune.core.errors import VsrtuneError
from vsrtune.host.recorded import load
from vsrtune.model.guest import Interface
from vsrtune.model.module_counters import QueueCounters
from vsrtune.model.snapshot import Snapshot

HOST = load(recorded_hosts.file("trixie-napi")).root()
RECORDED = recorded_hosts.shown(recorded_hosts.file("trixie-napi"))
LEG = Leg("02:00:00:00:00:01", "10.10.1.2", "10.20.1.100")
ROUTER = Router("a+b", LEG, members=("a", "b"))


def shared(*received: int) -> Snapshot:
    """Two guests on the devices of the recorded one, with so many frames by queue."""
    (guest,) = RECORDED.guests
    queues = tuple(QueueCounters(number, received=count) for number, count in enumerate(received))

    def on(interface: Interface) -> Interface:
        if interface.counters is None:
            return interface
        return replace(interface, counters=replace(interface.counters, queues=queues))

    own = tuple(on(interface) for interface in guest.interfaces)
    return replace(
        RECORDED, guests=tuple(replace(guest, name=n, interfaces=own) for n in ("a", "b"))
    )


def test_all_guests_of_a_router_are_found_or_missed_by_name() -> None:
    assert [g.ref for g in counters.guests_of(ROUTER, shared(1, 1))] == ["a", "b"]
    with pytest.raises(VsrtuneError, match="c: no such guest is running"):
        counters.guests_of(replace(ROUTER, members=("a", "c")), shared(1, 1))
    assert counters.guests_of(Router("host", LEG, native=True), shared(1)) == ()


def test_a_shared_device_is_counted_once() -> None:
    one = counters.places(HOST, shared(1, 1), [replace(ROUTER, members=("a",))])
    assert counters.places(HOST, shared(1, 1), [ROUTER]) == one


def test_what_ports_lose_is_counted_with_their_bond() -> None:
    tree = HostTree().device("p0", 2).device("p1", 3).device("p2", 6)
    tree.device("bond0", 4, devtype="bond", has="lower_p0 lower_p1")
    tree.device("v5", 5, devtype="vlan", has="lower_bond0")
    (guest, *_) = shared(1).guests
    below = (replace(guest.interfaces[0], lower=("v5", "bond0", "p0", "p1", "p2")),)
    seen = replace(RECORDED, guests=(replace(guest, interfaces=below),))
    found = counters.places(tree.root(), seen, [replace(ROUTER, members=("a",))])
    counted = {path.split("/")[4] for path in (*found["refused"], *found["missed"])}
    assert counted == {"v5", "bond0", "p2"}


def test_a_queue_that_received_nothing_is_seen() -> None:
    before, idle, both = (
        counters.queues(ROUTER, shared(*counts)) for counts in ((5, 5), (9, 5), (9, 6))
    )
    devices = {device for device, _ in before}
    assert len(before) == 2 * len(devices)
    assert not counters.all_took(before, idle, 1)
    assert counters.all_took(before, both, 1)


def test_a_queue_that_was_opened_meanwhile_counts_from_nothing() -> None:
    before = counters.queues(ROUTER, shared(5))
    assert counters.all_took(before, counters.queues(ROUTER, shared(9, 1)), 1)
    assert not counters.all_took(before, counters.queues(ROUTER, shared(9, 0)), 1)


def test_other_devices_tell_nothing() -> None:
    assert counters.all_took({}, {}, 2)
