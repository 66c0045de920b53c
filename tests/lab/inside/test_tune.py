"""The main job: tuned after start, byte for byte restored after stop."""

from __future__ import annotations

import json
from pathlib import Path

import hoststate
import labhelp
from labhelp import LabGuest


@labhelp.core()
def test_start_tunes_every_guest_and_stop_restores_every_value(
    tuned: set[int], guests: list[LabGuest]
) -> None:
    for guest in guests:
        assert labhelp.untuned_lines(guest, tuned) == []
    assert f"{len(guests)} guest" in labhelp.status_text()
    assert labhelp.JOURNAL.exists()
    labhelp.stop()
    for guest in guests:
        for tid in guest.data_plane():
            assert hoststate.sched(tid).startswith("policy=0 flags=0 nice=0 priority=0 ")


@labhelp.one_release("a class as any other")
def test_ksoftirqd_stands_beside_the_guests_threads(
    tuned: set[int], guests: list[LabGuest]
) -> None:
    busy = {cpu for guest in guests for tid in guest.data_plane() for cpu in labhelp.mask(tid)}
    for cpu in range(labhelp.lab_cpus()):
        sched = hoststate.sched(labhelp.softirq_thread(cpu))
        wanted = f"policy=1 flags=1 nice=0 priority={labhelp.PRIORITY} "
        assert sched.startswith(wanted if cpu in busy else "policy=0 flags=0 "), f"CPU {cpu}"


def test_packets_leave_the_interrupt_cpu_to_the_nic(
    tuned: set[int], guests: list[LabGuest]
) -> None:
    for guest in guests:
        used = {tid: labhelp.run_ns(tid) for tid in guest.data_plane()}
        traffic = ("--rate", "2000", "--seconds", "1", "--flows", "8")
        done = labhelp.sh("lab-traffic", "--guest", guest.name, *traffic)
        assert json.loads(done.stdout)["forwarded"] > 0
        ran = [tid for tid, before in used.items() if labhelp.run_ns(tid) > before]
        # The vcpu and a worker on each side; the worker of a queue without a flow
        # sleeps on, and its last CPU is from before.
        assert len(ran) >= 3
        for tid in ran:
            assert hoststate.last_cpu(tid) not in tuned, f"{guest.name} {hoststate.comm(tid)}"


@labhelp.core("bookworm")
def test_apply_does_what_plan_showed_and_undo_takes_it_back(
    restored: None, guests: list[LabGuest], irq_cpus: set[int], tmp_path: Path
) -> None:
    labhelp.write_policies("auto")
    stored = tmp_path / "plan.json"
    stored.write_text(labhelp.vsrtune("plan", "--json").stdout)
    labhelp.vsrtune("apply", "--plan", str(stored))
    for guest in guests:
        assert labhelp.untuned_lines(guest, irq_cpus) == []
    assert "\nno drift" in f"\n{labhelp.vsrtune('verify').stdout}"
    again = json.loads(labhelp.vsrtune("plan", "--json").stdout)
    assert again["actions"] == []
    assert again["skipped"], "doing nothing needs its reasons"

    stale = labhelp.vsrtune("apply", "--plan", str(stored), check=False)
    assert stale.returncode == 1
    assert "vsrtune: error:" in stale.stderr
    assert "Traceback" not in stale.stderr

    labhelp.vsrtune("undo")
    assert "othing to undo" in labhelp.vsrtune("undo").stdout


@labhelp.one_release("what the daemon keeps in its journal")
def test_a_daemon_adopts_what_apply_did(
    restored: None, guests: list[LabGuest], irq_cpus: set[int]
) -> None:
    labhelp.write_policies("auto")
    labhelp.vsrtune("apply")
    labhelp.start()
    refused = labhelp.vsrtune("apply", check=False)
    assert refused.returncode == 1
    assert "systemctl reload vsrtune" in refused.stderr
    for guest in guests:
        assert labhelp.untuned_lines(guest, irq_cpus) == []


@labhelp.one_release("what the daemon keeps in its journal")
def test_without_a_policy_nothing_is_touched(guests: list[LabGuest]) -> None:
    before = hoststate.capture()
    labhelp.start()
    assert "0 guests tuned" in labhelp.status_text()
    changed = hoststate.differences(before, hoststate.capture())
    # The daemon itself runs in a cgroup beside that of a plain QEMU's service.
    assert [line for line in changed if "/system.slice:" not in line] == []
    assert "/usr/share/vsrtune/policies" in labhelp.daemon_log()


@labhelp.one_release("what the daemon keeps in its journal")
def test_keep_leaves_the_host_tuned_until_undo(
    restored: None, guests: list[LabGuest], irq_cpus: set[int]
) -> None:
    labhelp.write_policies("auto")
    labhelp.set_environment(VSRTUNE_ON_STOP="keep")
    labhelp.start()
    labhelp.stop()
    for guest in guests:
        assert labhelp.untuned_lines(guest, irq_cpus) == []
    labhelp.vsrtune("undo")
