"""What one run of the lab is asked to be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .linked import Member

# What p0 and p1 are. With igb, p0 is one, of which each libvirt router has a virtual function.
NICS = ("veth", "e1000e", "igb")


@dataclass(frozen=True)
class Options:
    release: str
    cpus: int = 3
    guests: int = 1
    guest_names: tuple[str, ...] = ()
    vcpus: int = 1
    queues: int = 1
    busy: int = 0
    nic: str = "veth"
    plain_qemu: bool = False
    # The routers have FRR, a firewall, SSH and SNMP, and peers outside.
    frr: bool = False
    # Balancers have the QEMU guest agent.
    agent: bool = False
    # The image of vsrtune's container, what runs it, and the manifests of its DaemonSet.
    container: bool = False
    # As Debian boots: AppArmor and audit are on.
    apparmor: bool = False
    # The routers and both ends have IPv6, too.
    ipv6: bool = False
    install: bool = True
    # The command may ask for one reboot of the lab; it runs again after it.
    reboots: bool = False
    kmod: bool = True
    # A kernel of debugkernel.KINDS in the place of Debian's.
    kernel: str = ""
    share: Path | None = None
    timeout: int = 900
    quiet_failure: bool = False
    command: tuple[str, ...] = ()
    member: Member | None = None
    # run: the command; shell: a console; bake: part of building an image.
    mode: str = "run"

    @property
    def host(self) -> int:
        """Which host of its network the lab is."""
        return 1 if self.member is None else self.member.number
