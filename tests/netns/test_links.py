"""Links made, changed, read and removed over route netlink, in a namespace of our own."""

from __future__ import annotations

import errno
import subprocess
import sys
import textwrap

SCRIPT = textwrap.dedent(
    """
    import subprocess, time
    from vsrtune.attach.host import LiveHost
    from vsrtune.attach.plan.steps import MadeDevice
    from vsrtune.host import netlink
    from vsrtune.model.host import MODES

    def ip(*words):
        return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout

    def links():
        return {link.name: link for link in netlink.links()}

    host = LiveHost()

    def make(kind, name, lower, mac, mode, mtu, queue):
        host.make(MadeDevice(name, "", mac, mode, mtu, queue, kind), lower)

    ip("link", "add", "v0", "mtu", "2000", "type", "veth", "peer", "v1")
    lower = links()["v0"]
    make("macvlan", "m0", lower.index, "02:00:00:00:00:05", 2, 1400, 123)
    made = links()["m0"]
    assert (made.kind, made.lower, made.mode, made.mac, made.mtu, made.queue, made.up) == (
        "macvlan", lower.index, 2, "02:00:00:00:00:05", 1400, 123, False), made
    assert netlink.link("m0") == made
    host.set_up(made.index, True)
    host.set_queue(made.index, 77)
    host.set_mtu(made.index, 1900)
    changed = links()["m0"]
    assert changed.up and (changed.queue, changed.mtu) == (77, 1900), changed
    host.set_up(made.index, False)
    assert not links()["m0"].up
    host.remove(made.index)
    assert "m0" not in links() and netlink.link("m0") is None
    for name, mode in MODES.items():
        make("macvtap", "t0", lower.index, "02:00:00:00:00:07", mode, 1400, 5)
        made = links()["t0"]
        assert (made.kind, made.mode) == ("macvtap", mode), made
        assert f"macvtap mode {name.replace('rough', 'ru')} " in ip("-d", "link", "show", "t0")
        host.remove(made.index)
    ip("link", "property", "add", "dev", "v1", "altname", "other")
    assert netlink.link("other") is None and netlink.link("v1") == links()["v1"]
    ip("link", "add", "br0", "type", "bridge")
    ip("link", "set", "v1", "master", "br0")
    port = links()["v1"]
    assert port.master == links()["br0"].index
    start = time.monotonic()
    for work in (
        lambda: host.remove(made.index),
        lambda: make("no_such_kind", "x", lower.index, "02:00:00:00:00:09", 0, 1500, 1),
        lambda: make("macvlan", "x", lower.index, "02:00:00:00:00:09", 3, 1500, 1),
        lambda: make("macvlan", "x", lower.index, "02:00:00:00:00:09", 4, 67, 1),
        lambda: make("macvlan", "x", port.index, "02:00:00:00:00:09", 4, 1400, 1),
    ):
        try:
            work()
        except OSError as error:
            print(error.errno, error.strerror)
        else:
            print("no error")
    assert time.monotonic() - start < 2
    """
)


def _run(script: str, *words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_links(namespace: None) -> None:
    gone, kind, mode, mtu, busy = _run(SCRIPT)
    assert gone.startswith(f"{errno.ENODEV} ")
    assert kind == f"{errno.EOPNOTSUPP} Operation not supported (Unknown device type)"
    assert mode.startswith(f"{errno.EINVAL} ")
    assert mtu.startswith(f"{errno.EINVAL} ")
    assert busy == f"{errno.EBUSY} Device or resource busy"


# The kernel writes 32 KiB of a list at a time; devices come while it is read.
INTERRUPTED = textwrap.dedent(
    """
    import json, socket, subprocess, sys
    from pyroute2 import config
    from vsrtune.host import netlink

    batch = "".join(f"link add a{n} type veth peer b{n}\\n" for n in range(60))
    subprocess.run(["ip", "-batch", "-"], input=batch, text=True, check=True)
    dumps = 0

    class Changing(socket.socket):
        parts = 0

        def __init__(self, *words):
            global dumps
            super().__init__(*words)
            dumps += 1

        def recv(self, *words):
            self.parts += 1
            if self.parts == 2 and dumps <= int(sys.argv[1]):
                words_ = ["link", "add", f"c{dumps}", "type", "veth", "peer", f"d{dumps}"]
                subprocess.run(["ip", *words_], check=True)
            return super().recv(*words)

    config.SocketBase = Changing
    try:
        found = {link.name for link in netlink.links()}
    except OSError as error:
        print(dumps, error.errno)
    else:
        listed = subprocess.run(["ip", "-j", "link"], capture_output=True, check=True).stdout
        assert found == {one["ifname"] for one in json.loads(listed)}, found
        print(dumps, len(found) > 120)
    """
)


def test_a_dump_during_which_devices_come_is_repeated(namespace: None) -> None:
    assert _run(INTERRUPTED, "2") == ["3 True"]


def test_a_dump_is_never_complete_while_devices_come(namespace: None) -> None:
    assert _run(INTERRUPTED, "99") == [f"8 {errno.EAGAIN}"]
