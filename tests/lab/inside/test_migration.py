"""A guest that leaves for another libvirt and comes back: live migration, as between hosts.

The other host is a second libvirtd in this lab, with directories, a host name and a UUID of its
own, as libvirt refuses to migrate a guest to the host that it is on. The guest's devices there are
on NICs of its own: one NIC cannot carry a MAC twice.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import hoststate
import labhelp
import pytest
from labhelp import LabGuest
from test_events import Say, domain_state, idle, listening, say, start, tuned  # noqa: F401
from test_travel import fresh, notes, shape

from vsrtune.model.targets import HOST_REF

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
BACK = {there: here for here, there in NICS.items()}


def migrate(
    guest: LabGuest, there: str, to: str, nics: dict[str, str], *more: str, check: bool = True
) -> None:
    """From one libvirtd to the other, while it runs; its interfaces go from NIC to NIC."""
    xml = labhelp.sh("virsh", "-c", there, "dumpxml", "--migratable", guest.name).stdout
    for name, other in nics.items():
        xml = xml.replace(f"dev='{name}'", f"dev='{other}'")
    path = OTHER / "domain.xml"
    path.write_text(xml, "utf-8")
    words = ("virsh", "-c", there, "migrate", "--live", "--unsafe", "--xml", str(path), *more)
    labhelp.sh(*words, guest.name, to, "tcp:127.0.0.1", check=check)


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


def journalled() -> set[str]:
    """Guests of which the journal holds anything."""
    boot = labhelp.text("/proc/sys/kernel/random/boot_id")
    return {e.target.guest for e in labhelp.read_entries(labhelp.JOURNAL, boot)} - {HOST_REF}


def state_there(guest: LabGuest) -> dict[str, str]:
    """What tuning may touch of a guest, as the kernel has it."""
    pid = int(labhelp.text(f"{OTHER}/run/qemu/{guest.name}.pid"))
    values = {}
    for tid in hoststate.threads(pid):
        with contextlib.suppress(OSError):
            # QEMU's helpers come and go, and so does what carried the migration.
            if hoststate.comm(tid).startswith(("CPU", "vhost", "qemu-system")):
                values[f"{tid} class"] = hoststate.sched(tid)
                values[f"{tid} CPUs"] = hoststate.status_field(tid, "Cpus_allowed_list")
                values[f"{tid} cgroup"] = hoststate.cgroup(tid)
    for nic in (0, 1):
        device = guest.device(nic)
        values[f"{device} queue"] = labhelp.text(f"/sys/class/net/{device}/tx_queue_len")
    return values


def pending(guest: LabGuest) -> float:
    """Settings that the daemon has put off."""
    return sum(labhelp.samples("vsrtune_guest_pending", domain=guest.ref))


def look() -> float:
    """Make the daemon look at everything; how long it took."""
    when = time.time()
    labhelp.sh("systemctl", "reload", "vsrtune")
    labhelp.wait_for(lambda: labhelp.last_pass() > when, "a pass")
    return time.time() - when


def test_a_guest_migrates_out_and_in(
    listening: set[int],  # noqa: F811
    libvirt_guest: LabGuest,
    guests: list[LabGuest],
    other_host: str,
    say: Say,  # noqa: F811
) -> None:
    guest, daemon = libvirt_guest, labhelp.main_pid()
    others = {g.ref for g in guests if g != guest}
    labhelp.stop_guest(guest)
    start(guest)  # what `say` compares with
    labhelp.wait_for(lambda: tuned(guest, listening), "tuned after its start")
    labhelp.sh("lab-wait-forward", guest.name)
    idle()
    migrate(guest, HOME, other_host, NICS)
    labhelp.wait_for(lambda: domain_state(guest) == "shut off", "libvirt let go of it")
    labhelp.wait_for(lambda: journalled() == others, "what was set on it is forgotten")
    # What another libvirt manages is not ours, whatever the policies name.
    before = state_there(guest)
    assert not any("policy=1" in value or "policy=2" in value for value in before.values())
    look()
    assert (state_there(guest), journalled()) == (before, others)
    shown = [g["source"] for g in labhelp.show()["guests"] if g["name"] == guest.name]
    assert shown == ["foreign"]
    when = time.time()
    migrate(guest, other_host, HOME, BACK)
    labhelp.wait_for(lambda: tuned(guest, listening), "tuned after it has come")
    say("migrated in", when)
    labhelp.sh("lab-wait-forward", guest.name)
    assert labhelp.main_pid() == daemon
    labhelp.stop()
    assert journalled() == set()


def test_the_daemon_does_not_wait_for_a_guest_that_is_coming(
    listening: set[int],  # noqa: F811
    libvirt_guest: LabGuest,
    other_host: str,
) -> None:
    """Until its memory is here libvirt takes no pin: it would let us wait for 30 s. Nothing is
    asked of it, and passes go on."""
    guest = libvirt_guest
    migrate(guest, HOME, other_host, NICS)
    idle()
    coming = threading.Thread(
        target=migrate, args=(guest, other_host, HOME, BACK, "--bandwidth", "1")
    )
    coming.start()
    try:
        labhelp.wait_for(lambda: domain_state(guest) == "paused", "it is coming")
        for _ in range(3):
            took = look()
            state = hoststate.virsh("domstate", "--reason", guest.name).strip()
            print(f"{state}: a pass of {took:.1f} s")
            assert state.startswith("paused")
            assert pending(guest) > 0
            assert guest.ref not in journalled()
        assert coming.is_alive(), "it has come already: nothing was tried"
    finally:
        labhelp.sh("virsh", "-c", other_host, "migrate-setspeed", guest.name, "1000", check=False)
        coming.join()
    labhelp.wait_for(lambda: tuned(guest, listening), "tuned after it has come")


def test_the_daemon_does_not_wait_for_a_guest_that_is_leaving(
    listening: set[int],  # noqa: F811
    libvirt_guest: LabGuest,
    other_host: str,
) -> None:
    """It runs until it has left, and libvirt takes no pin of it: that is said at once, and the
    pins are put back when it has not left after all."""
    guest = libvirt_guest
    # libvirt takes pins along: one that came back with them has none of ours to put back.
    labhelp.stop_guest(guest)
    start(guest)
    labhelp.wait_for(lambda: tuned(guest, listening), "it is tuned")
    idle()
    leaving = threading.Thread(
        target=migrate, args=(guest, HOME, other_host, NICS, "--bandwidth", "1"),
        kwargs={"check": False},
    )  # fmt: skip
    leaving.start()
    try:
        jobs = ("domjobinfo", guest.name)
        labhelp.wait_for(lambda: "Outgoing" in hoststate.virsh(*jobs), "it is leaving")
        shutil.rmtree(labhelp.POLICIES)
        labhelp.POLICIES.mkdir()
        print(f"a pass of {look():.1f} s")
        assert "Outgoing" in hoststate.virsh(*jobs), "it is no more: nothing was tried"
        assert domain_state(guest) == "running"
        assert "it migrates it away, and takes no pins until that is done" in labhelp.daemon_log()
        assert guest.ref in journalled()
    finally:
        labhelp.sh("virsh", "domjobabort", guest.name, check=False)
        leaving.join()
    labhelp.wait_for(lambda: guest.ref not in journalled(), "it is as it was before")


def shape_there(guest: LabGuest) -> list[str]:
    return shape(guest, int(labhelp.text(f"{OTHER}/run/qemu/{guest.name}.pid")))


@labhelp.one_release("a QEMU known by its systemd scope, which the other host cannot make")
def test_pins_that_went_along_are_restored_there_and_here(
    listening: set[int],  # noqa: F811
    libvirt_guest: LabGuest,
    other_host: str,
    tmp_path: Path,
) -> None:
    """Compared is with the guest that was never tuned and went the same way. At the target
    without vsrtune it keeps our pins; `vsrtune undo` there restores what it had."""
    guest = libvirt_guest
    (tmp_path / "journal").touch()  # the other host's own, in which nothing stands
    there = ("--journal", str(tmp_path / "journal"), "--attach-ledger", str(tmp_path / "ledger"))
    # Its pid files, by which a QEMU is known as libvirt's, are in its libvirtd's mount namespace.
    main = labhelp.sh("systemctl", "show", "-P", "MainPID", UNIT).stdout.strip()
    on_the_other_host = ("nsenter", "--mount", f"--target={main}")
    policies = tmp_path / "policies"
    shutil.move(labhelp.POLICIES, policies)
    labhelp.POLICIES.mkdir()
    labhelp.stop()
    fresh(guest)
    migrate(guest, HOME, other_host, NICS)
    never_there = shape_there(guest)
    migrate(guest, other_host, HOME, BACK)
    never_here = shape(guest)
    for restores in ("undo there", "the stop here"):
        fresh(guest)
        for path in policies.iterdir():
            shutil.copy(path, labhelp.POLICIES)
        labhelp.start()
        labhelp.wait_for(lambda: tuned(guest, listening), "it is tuned")
        migrate(guest, HOME, other_host, NICS)
        print(f"\n{restores}: came there with {notes(guest, other_host)}")
        assert shape_there(guest) != never_there, "nothing went along"
        if restores != "the stop here":
            labhelp.stop()
            labhelp.sh(*on_the_other_host, "vsrtune", "undo", *there)
            assert shape_there(guest) == never_there
            migrate(guest, other_host, HOME, BACK)
        else:
            migrate(guest, other_host, HOME, BACK)
            labhelp.wait_for(lambda: tuned(guest, listening), "tuned after it has come back")
            labhelp.stop()
            assert shape(guest) == never_here
        print(f"restored: {notes(guest)}")
