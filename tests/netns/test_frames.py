"""What `vsrtune top` and `vsrtune try` count, on a real macvtap."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import shell_samples
from nethelp import ip
from test_writes import open_ring, send

from vsrtune.host.filesystem import LiveRoot
from vsrtune.model.load import DropPlace, HostSample
from vsrtune.model.snapshot import Snapshot
from vsrtune.observe.samples import take


def snapshot_of(device: str) -> Snapshot:
    """A guest whose one interface is this device."""
    guest = shell_samples.guest()
    (tap,) = guest.interfaces
    return shell_samples.snapshot(replace(guest, interfaces=(replace(tap, target=device),)))


def test_frames_that_came_that_found_the_ring_full_and_that_were_sent(macvtap: str) -> None:
    ip("link", "set", macvtap, "txqueuelen", "20")
    root, snapshot = LiveRoot(), snapshot_of(macvtap)
    place = DropPlace(macvtap, "ring", "vr1")
    ring = open_ring(macvtap)

    def arrived(sample: HostSample) -> int:
        return sample.frames[macvtap].arrived

    try:
        before = take(root, snapshot)
        send(50, "v1", macvtap)
        # A macvtap has a virtio header of ten bytes in front of each frame.
        for _ in range(7):
            os.write(ring, bytes(10) + b"\xff" * 6 + b"\x02\0\0\0\0\x02" + b"\x88\xb5" + bytes(46))
        end = time.monotonic() + 10
        while arrived(now := take(root, snapshot)) - arrived(before) < 50:
            assert time.monotonic() < end, now.frames
    finally:
        os.close(ring)
    after = take(root, snapshot)
    # 30 of 50 found no place, which `drops` tells where and `frames` tells of which guest's.
    was, now = before.frames[macvtap], after.frames[macvtap]
    assert (now.arrived - was.arrived, now.dropped - was.dropped, now.sent - was.sent) == (
        50,
        30,
        7,
    )
    assert after.drops[place] - before.drops[place] == 30
