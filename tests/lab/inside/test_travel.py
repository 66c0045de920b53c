"""Pins go along when libvirt saves or reverts a guest; what it had before goes along as well.

Compared is with the same guest, saved and started by the same commands, that was never tuned.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import hoststate
import labhelp
import pytest
from labhelp import LabGuest

SNAPSHOT = Path("/run/travel-memory")


def shape(guest: LabGuest, pid: int = 0) -> list[str]:
    """What tuning may touch of a guest, without the numbers that each start gives anew."""
    pid = pid or guest.pid
    lines, homes = [], set()
    for tid in hoststate.threads(pid):
        with contextlib.suppress(OSError):  # QEMU's helpers come and go
            name = hoststate.comm(tid).replace(str(pid), "PID")
            if name.startswith(("CPU", "vhost", "qemu-system")):
                home = hoststate.cgroup(tid)
                mask = hoststate.status_field(tid, "Cpus_allowed_list")
                lines.append(f"{name}: CPUs {mask}, {hoststate.sched(tid)}, in {beneath(home)}")
                homes.add(hoststate.CGROUP / home.lstrip("/"))
    for home in {path.parent for path in homes}:
        for path in (home, *(p for p in home.iterdir() if p.is_dir())):
            for file in ("cpuset.cpus", "cpuset.cpus.effective", "cpuset.cpus.partition"):
                with contextlib.suppress(OSError):
                    text = (path / file).read_text().strip()
                    lines.append(f"{beneath(str(path))} {file}: {text}")
    lines += [f"queue: {labhelp.text(f'/sys/class/net/{guest.device(n)}/tx_queue_len')}"
              for n in (0, 1)]  # fmt: skip
    # The workers of QEMU that come and go are as its main thread is, and have its name.
    return sorted(set(lines))


def beneath(path: str) -> str:
    """A cgroup's path without the numbered scope of the domain."""
    return re.sub(r".*(\.scope|\.libvirt-qemu)", "", path)


def pins(guest: LabGuest) -> list[str]:
    """What virsh says of its pins."""
    return [hoststate.virsh(verb, guest.name) for verb in ("vcpupin", "emulatorpin")]


def notes(guest: LabGuest, uri: str = "qemu:///system") -> str:
    """What of our pins stands in the domain itself."""
    xml = labhelp.sh("virsh", "-c", uri, "dumpxml", guest.name).stdout
    found = re.findall(r"<(?:vcpupin|emulatorpin) .*?/>|<vsrtune:(?:vcpu|emulator) .*?/>", xml)
    return " ".join(found)


def fresh(guest: LabGuest) -> None:
    """Start it from nothing."""
    if guest.runs:
        labhelp.stop_guest(guest)
    labhelp.sh("virsh", "managedsave-remove", guest.name, check=False)
    labhelp.sh("virsh", "-q", "start", guest.name)
    labhelp.sh("lab-wait-forward", guest.name)


def save(guest: LabGuest) -> None:
    """As libvirt-guests does when the host goes down."""
    labhelp.sh("virsh", "managedsave", guest.name)
    labhelp.wait_for(lambda: not guest.runs, "it is saved")


def start(guest: LabGuest) -> None:
    """As libvirt-guests does when the host comes up."""
    labhelp.sh("virsh", "-q", "start", guest.name)


@pytest.fixture(scope="module")
def never_tuned(libvirt_guest: LabGuest) -> Iterator[list[str]]:
    """The guest as it is when it was saved and started, and never tuned."""
    labhelp.reset()
    fresh(libvirt_guest)
    save(libvirt_guest)
    start(libvirt_guest)
    yield [*shape(libvirt_guest), *pins(libvirt_guest)]
    labhelp.reset()
    fresh(libvirt_guest)


@pytest.fixture
def travelling(never_tuned: list[str], libvirt_guest: LabGuest, irq_cpus: set[int]) -> LabGuest:
    """A guest that the daemon has tuned since it was started from nothing."""
    fresh(libvirt_guest)
    labhelp.write_policies("auto")
    labhelp.start()
    labhelp.wait_for(lambda: labhelp.untuned_lines(libvirt_guest, irq_cpus) == [], "it is tuned")
    print(f"\ntuned: {notes(libvirt_guest)}")
    return libvirt_guest


def same(guest: LabGuest, never_tuned: list[str]) -> bool:
    return [*shape(guest), *pins(guest)] == never_tuned


def check(guest: LabGuest, never_tuned: list[str]) -> None:
    """It is as it would be without us."""
    print(f"restored: {notes(guest)}")
    assert [*shape(guest), *pins(guest)] == never_tuned
    labhelp.sh("lab-wait-forward", guest.name)


@labhelp.one_release("what the daemon does with a note")
def test_saved_and_started_while_the_daemon_runs(
    travelling: LabGuest, never_tuned: list[str], irq_cpus: set[int]
) -> None:
    daemon = labhelp.main_pid()
    for _ in range(2):
        save(travelling)
        start(travelling)
        labhelp.wait_for(lambda: labhelp.untuned_lines(travelling, irq_cpus) == [], "tuned again")
    assert labhelp.main_pid() == daemon
    labhelp.stop()
    check(travelling, never_tuned)


def test_saved_started_and_tuned_by_the_next_daemon(
    travelling: LabGuest, never_tuned: list[str], irq_cpus: set[int]
) -> None:
    """A reboot of the host: libvirt-guests saves, starts, and the daemon comes after it."""
    save(travelling)
    labhelp.stop()
    start(travelling)
    came = {tid: labhelp.mask(tid) for tid in travelling.workers()}
    print(f"came: {notes(travelling)}, workers on {came}")
    assert [*shape(travelling), *pins(travelling)] != never_tuned, "nothing came along"
    labhelp.start()
    labhelp.wait_for(lambda: labhelp.untuned_lines(travelling, irq_cpus) == [], "tuned again")
    labhelp.stop()
    check(travelling, never_tuned)


@labhelp.one_release("what undo does with a note")
def test_undo_restores_what_came_along(travelling: LabGuest, never_tuned: list[str]) -> None:
    save(travelling)
    labhelp.stop()
    start(travelling)
    assert not same(travelling, never_tuned)
    assert "the guest has brought it along" in labhelp.vsrtune("plan", "--json").stdout
    labhelp.vsrtune("undo")
    check(travelling, never_tuned)
    assert "Nothing to undo" in labhelp.vsrtune("undo").stdout


@labhelp.one_release("what the daemon does with a note")
def test_a_guest_that_no_policy_names_any_more(
    travelling: LabGuest, never_tuned: list[str]
) -> None:
    save(travelling)
    labhelp.clear_policies()
    labhelp.wait_for(lambda: "no policy" in labhelp.status_text(), "the policies are gone")
    start(travelling)
    labhelp.wait_for(lambda: same(travelling, never_tuned), "it is as it was")
    labhelp.stop()
    check(travelling, never_tuned)


def test_what_was_undone_before_a_save_is_undone_after_it(
    travelling: LabGuest, never_tuned: list[str]
) -> None:
    """libvirt cannot take a pin away: where there was none, undo pins to all CPUs, and that
    goes along as well. The next start of the daemon takes it for ours."""
    labhelp.clear_policies()
    labhelp.stop()
    save(travelling)
    start(travelling)
    print(f"came: {notes(travelling)}")
    labhelp.start()
    labhelp.stop()
    check(travelling, never_tuned)


def test_reverted_to_a_snapshot(
    travelling: LabGuest, never_tuned: list[str], irq_cpus: set[int]
) -> None:
    name = travelling.name
    made = labhelp.sh(
        "virsh", "snapshot-create-as", name, "tuned", "--memspec", f"file={SNAPSHOT},snapshot=external",
        "--live", check=False,
    )  # fmt: skip
    if made.returncode != 0:
        pytest.skip(f"this libvirt takes no snapshot of a guest without disks: {made.stderr}")
    labhelp.stop()
    try:
        back = labhelp.sh("virsh", "snapshot-revert", name, "tuned", "--running", check=False)
        if back.returncode != 0:
            pytest.skip(f"this libvirt cannot revert to it: {back.stderr}")
        print(f"came: {notes(travelling)}")
        assert not same(travelling, never_tuned)
        labhelp.start()
        labhelp.wait_for(lambda: labhelp.untuned_lines(travelling, irq_cpus) == [], "tuned")
        labhelp.stop()
        check(travelling, never_tuned)
    finally:
        labhelp.sh("virsh", "snapshot-delete", name, "tuned", "--metadata", check=False)
        SNAPSHOT.unlink(missing_ok=True)
