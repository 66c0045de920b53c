"""Every row of DEVICE_SETTINGS from the policy to the host and back."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import shell_samples as samples
from fake_kernel import make_host
from hosttree import HostTree

from vsrtune.core.codec import encode
from vsrtune.daemon.events import kernel
from vsrtune.execute.host_writer import NicWrites
from vsrtune.host.netdev import NetReader
from vsrtune.model.guest import Interface
from vsrtune.model.plan import Action, DriftRule
from vsrtune.model.present import PresentValues
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import (
    DEVICE_SETTINGS,
    DeviceNumber,
    NapiThreaded,
    TxQueueLen,
    decode_target,
)
from vsrtune.plan.drift import drifts
from vsrtune.plan.safety.projection import project_actions
from vsrtune.policy.model import Policy
from vsrtune.policy.parser import parse
from vsrtune.policy.schema import SCHEMA, SETTINGS

Row = type[DeviceNumber]


rows = pytest.mark.parametrize("row", DEVICE_SETTINGS, ids=lambda row: row.kind)


def target_of(row: Row, past: int = 0) -> Any:
    """The row's target on the host of ``snapshot``; ``past`` is added to its ifindex."""
    return row("vr1", "renamed", samples.napi_guest().interfaces[0].ifindex + past)


@pytest.fixture
def snapshot() -> Snapshot:
    return samples.snapshot(samples.napi_guest())


@rows
def test_policies_have_its_key_and_its_drift(row: Row) -> None:
    section, key = row.key.split(".")
    kind = SCHEMA["properties"][section]["properties"][key]["type"]
    text, value = {"boolean": ("true", True), "integer": ("3", 3)}[kind]
    policy = parse(f"guest: vr1\n{section}: {{{key}: {text}}}\nprofile: none\n", "p")
    assert policy.desired(row) is not None
    assert policy.devices == {row.key: value}
    assert row.key in SETTINGS


@rows
def test_the_snapshot_has_its_field(row: Row) -> None:
    assert row.field in {field.name for field in fields(Interface)}
    assert len({other.kind for other in DEVICE_SETTINGS}) == len(DEVICE_SETTINGS)


@rows
def test_it_is_stored_under_its_kind(row: Row) -> None:
    target = target_of(row)
    data = encode(target)
    assert data["kind"] == row.kind
    assert decode_target(data) == target


@rows
def test_its_present_value_follows_a_change(row: Row, snapshot: Snapshot) -> None:
    target, gone = target_of(row), target_of(row, past=50)
    changed = project_actions(snapshot, [Action(target, 0, 7, "why")])
    assert PresentValues(changed).value(target) == 7
    assert PresentValues(snapshot).value(target) != 7
    assert PresentValues(snapshot).shows(target)
    assert not PresentValues(snapshot).shows(gone)
    assert PresentValues(snapshot).value(gone) is None
    assert project_actions(snapshot, [Action(gone, 0, 7, "why")]) == snapshot


def test_a_shared_device_is_as_its_own_guest_shows_it() -> None:
    """A pass over one guest observes it alone: the other still shows the older value."""
    first, second = samples.guest("vr1", 100), samples.guest("vr2", 200)
    device = replace(first.interfaces[0], txqueuelen=300)
    shared = replace(second, interfaces=(replace(device, txqueuelen=500),))
    alone = replace(first, interfaces=(device,))
    for guests in ((alone, shared), (shared, alone)):
        present = PresentValues(samples.snapshot(*guests))
        assert present.value(TxQueueLen("vr1", device.target, device.ifindex)) == 300
        assert present.value(TxQueueLen("vr2", device.target, device.ifindex)) == 500
        assert present.shows(TxQueueLen("vr3", device.target, device.ifindex))


@rows
def test_a_change_by_others_is_drift_of_its_key(row: Row, snapshot: Snapshot) -> None:
    rule = {row.key: DriftRule.ADOPT}
    policy = Policy("p", "vr1", devices={row.key: 500}, drift=rule)
    target = target_of(row)
    changed = project_actions(snapshot, [Action(target, 0, 7, "why")])
    (found,) = drifts(changed, [(snapshot.guests[0], policy)], {target: 500}).values()
    assert (found.setting, found.desired, found.found) == (row.key, "500", "7")
    assert (found.rule, found.by) == (DriftRule.ADOPT, "")


@rows
def test_it_is_written_to_its_file_and_read_back(row: Row) -> None:
    host = make_host("6.12")
    host.state["devices"]["macvtap0"].setdefault(row.path, 0)
    target: Any = row("vr1", "was-macvtap0", 7)
    writes = NicWrites(host, host)
    writes.write(target, 1)
    assert host.log == [f"write /sys/class/net/macvtap0/{row.path} 1"]
    assert writes.read(target) == 1


def test_only_what_the_kernel_does_not_announce_is_polled(snapshot: Snapshot) -> None:
    device = snapshot.guests[0].interfaces[0].target
    files = kernel.settings(snapshot)
    assert f"/sys/class/net/{device}/{NapiThreaded.path}" in files
    assert f"/sys/class/net/{device}/{TxQueueLen.path}" not in files


def test_a_device_is_observed_as_the_rows_say() -> None:
    tree = HostTree()
    tree.device("tap0", 8, has="tun_flags")
    tree.napi_macvtap("nvt0", 9, "eth0", threaded=1)
    net = NetReader(tree.root())
    tap, ours = net.device("tap0"), net.device("nvt0")
    assert tap is not None
    assert ours is not None
    of_tap, of_ours = net.numbers(tap), net.numbers(ours)
    assert (of_tap["txqueuelen"], "threaded" in of_tap) == (500, False)
    assert (of_ours["txqueuelen"], of_ours["threaded"]) == (500, 1)
