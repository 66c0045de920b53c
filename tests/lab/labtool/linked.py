"""Two labs as two hosts of one network: what each is given besides what any lab has.

    lab 1   g0 -- p0        p1 -- s0        m0
             \\    |          |    /          |
             hub 0          hub 1     user-mode network, sshd behind a port of this
               |              |       machine's loopback
             hub 0          hub 1             |
             /    |          |    \\           |
    lab 2   g0 -- p0        p1 -- s0        m0

The NICs of each side are on one segment: a hub in each QEMU, and datagrams over sockets of
this machine between them. Routers are numbered on from one lab to the next. Besides what it
does in any lab, router i of either takes what comes to 10.41.0.i for 10.30.0.0/16 to the sink
of lab 2, and what comes to 10.42.0.i for 10.31.0.0/16 to the generator of lab 1; these two
spread their flows over all routers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HOSTS = 2
# An identity and a host key for both labs; the sockets of the segments lie beside them.
KEY = "key"
HOST_KEY = "hostkey"
_MANAGEMENT_MAC = "52:54:00:1a:c0:00"


@dataclass(frozen=True)
class Member:
    """One lab of a pair: 1 or 2, the directory of both, and its port of SSH."""

    number: int
    place: Path
    port: int


def devices(member: Member) -> list[str]:
    """QEMU's arguments for the segments and for management."""
    other = HOSTS + 1 - member.number
    arguments = []
    for segment in (0, 1):
        here, there = (member.place / f"{n}.segment{segment}" for n in (member.number, other))
        ends = f"local.type=unix,local.path={here},remote.type=unix,remote.path={there}"
        port = f"hubport,id=linkport{segment},hubid={segment},netdev=link{segment}"
        arguments += ["-netdev", f"dgram,id=link{segment},{ends}", "-netdev", port]
    # Closed but for the one port that is forwarded to it.
    user = f"user,id=management,restrict=on,ipv6=off,hostfwd=tcp:127.0.0.1:{member.port}-:22"
    nic = f"virtio-net-pci,netdev=management,mac={_MANAGEMENT_MAC},romfile="
    return [*arguments, "-netdev", user, "-device", nic]
