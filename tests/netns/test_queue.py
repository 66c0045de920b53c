"""An adaptive queue on a real macvtap: its counters, its length, and what is told of it."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from nethelp import ip

from vsrtune.host.filesystem import LiveRoot
from vsrtune.observe.samples import SampledGuests, Sampler

NET = Path("/sys/class/net")


def test_samples_tell_what_came_what_found_the_ring_full_and_what_was_sent(
    macvtap: str, tmp_path: Path
) -> None:
    number = int((NET / macvtap / "ifindex").read_text())
    major, minor = (NET / macvtap / f"tap{number}" / "dev").read_text().split(":")
    node = tmp_path / "tap"
    os.mknod(node, stat.S_IFCHR | 0o600, os.makedev(int(major), int(minor)))
    ip("link", "set", macvtap, "txqueuelen", "20")
    here = (os.getpid(), os.getpid())
    where = SampledGuests((macvtap,), (here,), ())
    sampler = Sampler(LiveRoot())
    tap = os.open(node, os.O_RDWR | os.O_NONBLOCK)
    try:
        before = sampler.sample(where, 1.0)
        to = bytes.fromhex((NET / macvtap / "address").read_text().strip().replace(":", ""))
        frame = to + bytes.fromhex("020000000001") + b"\x88\xb5" + bytes(46)
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
            sock.bind(("v1", 0))
            for _ in range(50):
                sock.send(frame)
        # A macvtap has a virtio header of ten bytes in front of each frame.
        back = bytes(10) + frame[6:12] + frame[:6] + frame[12:]
        for _ in range(7):
            os.write(tap, back)
        end = time.monotonic() + 10
        while (after := sampler.sample(where, 2.0)).received - before.received < 50:
            assert time.monotonic() < end, after
    finally:
        os.close(tap)
    assert after.received - before.received == 50
    assert after.dropped - before.dropped == sampler.drops(where) - before.dropped == 30
    assert after.sent - before.sent == 7
    assert dict(after.ran_ns)[here[1]] > dict(before.ran_ns)[here[1]]


OWN = textwrap.dedent(
    """
    import subprocess, time
    from vsrtune.daemon.events import kernel
    from vsrtune.host import netlink
    from vsrtune.daemon.events.kernel import LinkEvents
    from vsrtune.daemon.scope import Scope

    def ip(*words):
        subprocess.run(["ip", *words], check=True)

    (index,) = (link.index for link in netlink.links() if link.name == "mv0")
    kernel.devices = lambda snapshot: kernel.LinkInterest({index: Scope.of("vr1")}, frozenset())
    own, told = {}, []
    events = LinkEvents(lambda: None, lambda why, guest=None: told.append(why), own_queue=own.get)
    events.start()
    assert events.listening.wait(10)
    own[index] = 125
    ip("link", "set", "mv0", "txqueuelen", "125")
    end = time.monotonic() + 10
    while events._links[index].queue != 125:
        assert time.monotonic() < end
        time.sleep(0.02)
    own[index] = 250
    ip("link", "set", "mv0", "txqueuelen", "77")
    end = time.monotonic() + 10
    while not told:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert told == ["mv0 is changed"], told
    print("told of the other one alone")
    """
)


def test_its_own_changes_are_no_news(macvtap: str) -> None:
    done = subprocess.run([sys.executable, "-c", OWN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == "told of the other one alone"
