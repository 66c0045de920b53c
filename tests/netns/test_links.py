"""Links made, changed, read and removed over route netlink, in a namespace of our own."""

from __future__ import annotations

import errno
import subprocess
import sys
import textwrap

SCRIPT = textwrap.dedent(
    """
    import subprocess
    from vsrtune.attach import link_writes
    from vsrtune.host import netlink

    def links():
        return {link.name: link for link in netlink.links()}

    subprocess.run(["ip", "link", "add", "v0", "mtu", "2000", "type", "veth", "peer", "v1"], check=True)
    lower = links()["v0"]
    link_writes.make("macvlan", "m0", lower.index, "02:00:00:00:00:05", 2, 1400, 123)
    made = links()["m0"]
    assert (made.kind, made.lower, made.mode, made.mac, made.mtu, made.queue, made.up) == (
        "macvlan", lower.index, 2, "02:00:00:00:00:05", 1400, 123, False), made
    link_writes.set_up(made.index, True)
    link_writes.set_queue(made.index, 77)
    changed = links()["m0"]
    assert changed.up and changed.queue == 77, changed
    link_writes.set_up(made.index, False)
    assert not links()["m0"].up
    link_writes.remove(made.index)
    assert "m0" not in links()
    for work in (
        lambda: link_writes.remove(made.index),
        lambda: link_writes.make("no_such_kind", "x", lower.index, "02:00:00:00:00:06", 4, 1500, 1),
    ):
        try:
            work()
        except OSError as error:
            print(error.errno, error.strerror)
    """
)


def test_links(namespace: None) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    gone, unknown = done.stdout.splitlines()
    assert gone.startswith(f"{errno.ENODEV} ")
    assert unknown.startswith(f"{errno.EOPNOTSUPP} ")
