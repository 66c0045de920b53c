"""A guest that leaves for another libvirt and comes back: live migration, as between hosts.

The other host is a second libvirtd in this lab, with directories, a host name and a UUID of its
own, as libvirt refuses to migrate a guest to the host that it is on. The guest's devices there are
on NICs of its own: one NIC cannot carry a MAC twice.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import hoststate
import labhelp
import pytest
from labhelp import LabGuest
from test_events import Say, domain_state, idle, listening, say, tuned  # noqa: F401 (fixtures)

# Migration itself works here. The policy of the fixtures takes what the other libvirtd runs for a
# plain QEMU guest (qemu:*), and tunes it: this test still has to tell these two apart.
pytestmark = pytest.mark.skip(reason="unfinished: see the comment in test_migration.py")

OTHER = Path("/run/other-host")
UNIT = "other-libvirtd"
URI = f"qemu:///system?socket={OTHER}/run/libvirt-sock"
HOME = "qemu:///system"
# Its cgroups are its own as well: machined, behind D-Bus, would not take a second machine of
# the same name.
BEGIN = f"""
mount --make-rprivate /
hostname other-host
mount --bind {OTHER}/run /run/libvirt
mount --bind {OTHER}/lib /var/lib/libvirt
mount --bind {OTHER}/etc /etc/libvirt
mount --bind {OTHER}/dbus /run/dbus
exec libvirtd --pid-file /run/libvirt/libvirtd.pid
"""


NICS = {"p0": "other0", "p1": "other1"}


def migrate(guest: LabGuest, there: str, to: str, nics: dict[str, str]) -> None:
    """From one libvirtd to the other, while it runs; its interfaces go from NIC to NIC."""
    xml = labhelp.sh("virsh", "-c", there, "dumpxml", "--migratable", guest.name).stdout
    for name, other in nics.items():
        xml = xml.replace(f"dev='{name}'", f"dev='{other}'")
    path = OTHER / "domain.xml"
    path.write_text(xml, "utf-8")
    words = ("virsh", "-c", there, "migrate", "--live", "--unsafe", "--xml", str(path))
    labhelp.sh(*words, guest.name, to, "tcp:127.0.0.1")


@pytest.fixture
def other_host(libvirt_guest: LabGuest) -> Iterator[str]:
    """Its URI. In the end the guest runs here again."""
    for name in ("run", "lib", "dbus"):
        (OTHER / name).mkdir(parents=True)
    for name in NICS.values():
        labhelp.sh("ip", "link", "add", name, "type", "dummy")
        labhelp.sh("ip", "link", "set", name, "up")
    shutil.copytree("/etc/libvirt", OTHER / "etc")
    for path in (OTHER / "etc" / "qemu").glob("*.xml"):
        path.unlink()
    with (OTHER / "etc" / "libvirtd.conf").open("a") as file:
        file.write(f'\nhost_uuid = "{uuid.uuid4()}"\n')
    with (OTHER / "etc" / "qemu.conf").open("a") as file:
        file.write('\nstdio_handler = "file"\nnamespaces = []\n')
    words = ("systemd-run", "--quiet", "--collect", f"--unit={UNIT}", "--property=KillMode=process")
    labhelp.sh(*words, "unshare", "--mount", "--uts", "sh", "-ec", BEGIN)
    labhelp.wait_for(
        lambda: labhelp.sh("virsh", "-c", URI, "list", check=False).returncode == 0,
        "the other libvirtd answers",
    )
    yield URI
    labhelp.sh("virsh", "-c", URI, "destroy", libvirt_guest.name, check=False)
    labhelp.sh("systemctl", "stop", UNIT)
    shutil.rmtree(OTHER)
    for name in NICS.values():
        labhelp.sh("ip", "link", "delete", name)
    if not libvirt_guest.runs:
        labhelp.start_guest(libvirt_guest)


def set_on(guest: LabGuest) -> list[str]:
    """What the journal holds of a guest's threads."""
    boot = labhelp.text("/proc/sys/kernel/random/boot_id")
    entries = labhelp.read_entries(labhelp.JOURNAL, boot)
    return [e.target.kind for e in entries if e.target.guest == guest.name]


def test_a_guest_migrates_out_and_in(
    listening: set[int],  # noqa: F811
    libvirt_guest: LabGuest,
    other_host: str,
    say: Say,  # noqa: F811
) -> None:
    guest, daemon = libvirt_guest, labhelp.main_pid()
    assert tuned(guest, listening)
    assert set_on(guest)
    idle()
    migrate(guest, HOME, other_host, NICS)
    labhelp.wait_for(lambda: domain_state(guest) == "shut off", "libvirt let go of it")
    labhelp.wait_for(lambda: set_on(guest) == [], "what was set on it is forgotten")
    # What another libvirt manages is not ours.
    pid = int(labhelp.text(f"{OTHER}/run/qemu/{guest.name}.pid"))
    time.sleep(2)
    for task in Path(f"/proc/{pid}/task").iterdir():
        assert hoststate.sched(int(task.name)).startswith("policy=0 ")
    assert set_on(guest) == []
    idle()
    when = time.time()
    migrate(guest, other_host, HOME, {there: here for here, there in NICS.items()})
    labhelp.wait_for(lambda: tuned(guest, listening), "tuned after it has come")
    say("migrated in", when)
    labhelp.sh("lab-wait-forward", guest.name)
    assert labhelp.main_pid() == daemon
    labhelp.stop()
    assert set_on(guest) == []
