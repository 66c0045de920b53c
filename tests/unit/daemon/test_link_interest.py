"""events/kernel.py: which devices and files matter, and what news of a device mean."""

from __future__ import annotations

from dataclasses import replace

import shell_samples as samples

from vsrtune.daemon.events.kernel import concerned, devices, settings, unclaimed
from vsrtune.daemon.scope import FULL, NOTHING, Scope
from vsrtune.model.host import Link
from vsrtune.model.snapshot import Snapshot


def snapshot() -> Snapshot:
    """vr1 of libvirt, and a plain QEMU with a device of its own."""
    first = samples.snapshot()
    (own,) = first.guests[0].interfaces
    plain = replace(
        samples.guest("pq1", pid=300),
        source="qemu",
        interfaces=(replace(own, target="mv9", ifindex=99),),
    )
    return replace(first, guests=(*first.guests, plain))


def test_changes_of_a_guests_device_are_the_guests() -> None:
    known = devices(snapshot())
    (own,) = samples.snapshot().guests[0].interfaces
    link = Link(own.ifindex, own.target, "macvtap", queue=500)
    assert concerned(known, link, replace(link, queue=9)) == Scope(frozenset({"vr1"}))
    assert concerned(known, link, None) == Scope(frozenset({"vr1"}))
    assert concerned(known, link, link) == NOTHING, "news that say nothing new"
    plain = Link(99, "mv9", "macvtap", queue=500)
    assert concerned(known, plain, replace(plain, up=True)) == FULL, "found by looking everywhere"


def test_a_lower_device_is_everybodys_also_when_it_is_made_anew() -> None:
    known = devices(snapshot())
    lower = samples.snapshot().guests[0].interfaces[0].lower[0]
    link = Link(3, lower, up=True)
    assert concerned(known, link, replace(link, up=False)) == FULL
    assert concerned(known, None, Link(77, lower)) == FULL
    assert concerned(known, replace(link, name="old"), link) == FULL, "renamed"


def test_strangers_are_nobodys() -> None:
    known = devices(snapshot())
    stranger = Link(1234, "docker0", "bridge")
    assert concerned(known, None, stranger) == NOTHING
    assert concerned(known, stranger, None) == NOTHING
    assert not unclaimed(known, stranger)


def test_a_tap_that_no_guest_claims_may_be_one_that_was_not_seen() -> None:
    known = devices(snapshot())
    assert unclaimed(known, Link(1234, "macvtap7", "macvtap"))
    assert not unclaimed(known, Link(99, "mv9", "macvtap"))


def test_settings_are_those_below_guests_only() -> None:
    files = settings(snapshot())
    lower = samples.snapshot().guests[0].interfaces[0].lower[0]
    assert f"/sys/class/net/{lower}/threaded" in files
    host = replace(snapshot(), guests=())
    assert settings(host) == ()
    assert settings(None) == ()
    assert devices(None).owners == {}
