"""On a host as Debian boots it, where AppArmor confines the guests and audit is on, and with routers
that forward IPv6."""

from __future__ import annotations

from pathlib import Path

import hoststate
import labhelp
from labhelp import LabGuest

# A datagram from one end to the other, through the router.
RECEIVER = """
import socket, sys
sock = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
sock.bind((sys.argv[1], 7000))
sock.settimeout(60)
print("ready", flush=True)
print(sock.recv(16).decode())
"""
SENDER = """
import socket, sys, time
sock = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
for _ in range(30):
    sock.sendto(b"through", (sys.argv[1], 7000))
    time.sleep(0.2)
"""


def denied() -> list[str]:
    """What AppArmor has denied on this boot."""
    log = labhelp.sh("journalctl", "-b", "-o", "cat", "--no-pager", "-q", check=False).stdout
    return [line for line in log.splitlines() if 'apparmor="DENIED"' in line]


def through(guest: LabGuest) -> str:
    """What arrives of IPv6 datagrams through a router."""
    place = f"fd00:20:{guest.index}::2"
    program = (
        f"nsenter --net=/run/netns/sink python3 -c '{RECEIVER}' {place} & "
        f"nsenter --net=/run/netns/gen python3 -c '{SENDER}' {place}; wait"
    )
    return labhelp.sh("bash", "-c", program).stdout


def test_confined_guests_are_tuned_and_restored(
    restored: None, guests: list[LabGuest], irq_cpus: set[int]
) -> None:
    assert labhelp.text("/sys/module/apparmor/parameters/enabled") == "Y"
    assert "audit=1" in labhelp.text("/proc/cmdline").split()
    for guest in guests:
        profile = labhelp.text(f"/proc/{guest.pid}/attr/current")
        assert profile.startswith("libvirt-"), profile
        assert profile.endswith("(enforce)"), profile
    before = denied()
    labhelp.write_policies("auto")
    labhelp.start()
    for guest in guests:
        assert labhelp.untuned_lines(guest, irq_cpus) == []
    assert {g["name"] for g in labhelp.show()["guests"]} == {g.name for g in guests}
    labhelp.stop()
    assert denied() == before


def test_ipv6_is_forwarded_tuned_and_untuned(
    restored: None, libvirt_guest: LabGuest, irq_cpus: set[int]
) -> None:
    assert Path("/proc/sys/net/ipv6").is_dir()
    assert "through" in through(libvirt_guest)
    labhelp.write_policies("auto")
    labhelp.start()
    assert labhelp.untuned_lines(libvirt_guest, irq_cpus) == []
    used = {tid: labhelp.run_ns(tid) for tid in libvirt_guest.data_plane()}
    assert "through" in through(libvirt_guest)
    ran = [tid for tid, was in used.items() if labhelp.run_ns(tid) > was]
    assert ran
    assert [tid for tid in ran if hoststate.last_cpu(tid) in irq_cpus] == []
