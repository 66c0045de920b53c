"""The supported hosts: which packages make up the image of each release."""

from __future__ import annotations

from dataclasses import dataclass

MIRROR = "http://deb.debian.org/debian"

_PACKAGES = (
    # A KVM host.
    "apparmor dbus ethtool iproute2 kmod libvirt-clients libvirt-daemon-system procps"
    " qemu-system-x86 qemu-utils systemd-container systemd-sysv udev util-linux"
    # What the vsrtune package depends on, so that it installs without a network.
    " python3 python3-click python3-jinja2 python3-jsonschema python3-libvirt"
    " python3-prometheus-client python3-psutil python3-pyroute2 python3-rich"
    " python3-ruamel.yaml python3-systemd"
    # What vsrtune bench counts with, attaches to and is compared with.
    " openvswitch-switch python3-nftables tuned"
    # What moves interrupts on other hosts; here only while a test lets it.
    " irqbalance"
    # Building, checking and loading modules.
    " dkms gcc make linux-headers-amd64 linux-image-amd64 sparse"
    # The lab's own means, and those of tests.
    " busybox-static curl jq less linux-perf nftables psmisc python3-pytest strace tcpdump"
)


@dataclass(frozen=True)
class Release:
    """One kind of host.

    The newest kernel installed runs the lab; its routers run the oldest. The two
    differ only where the newest cannot boot as a nested guest.
    """

    name: str
    suite: str
    packages: tuple[str, ...] = tuple(_PACKAGES.split())
    # Installed over the suite's own version of the same packages.
    backports: tuple[str, ...] = ()

    @property
    def backports_suite(self) -> str:
        return f"{self.suite}-backports"

    @property
    def sources(self) -> tuple[str, ...]:
        suites = (self.suite, self.backports_suite) if self.backports else (self.suite,)
        return tuple(f"deb {MIRROR} {suite} main" for suite in suites)


RELEASES = {
    release.name: release
    for release in (
        Release("bookworm", "bookworm"),
        Release("trixie", "trixie"),
        Release("backports", "trixie", backports=("linux-image-amd64", "linux-headers-amd64")),
    )
}
