"""Pins through libvirt: virsh shows them, an operator's own pins win until reload."""

from __future__ import annotations

import hoststate
import labhelp
from labhelp import LabGuest


def virsh_vcpu_pin(guest: LabGuest, vcpu: int) -> set[int]:
    """What `virsh vcpupin` says of one vcpu."""
    for line in hoststate.virsh("vcpupin", guest.name).splitlines():
        number, cpus = line.split()
        if int(number) == vcpu:
            return labhelp.cpu_list(cpus)
    raise AssertionError(f"virsh vcpupin does not list vcpu {vcpu}")


@labhelp.one_release("what operators ask of libvirt")
def test_virsh_shows_the_pins_in_force(tuned: set[int], libvirt_guest: LabGuest) -> None:
    for vcpu, tid in libvirt_guest.vcpus().items():
        assert virsh_vcpu_pin(libvirt_guest, vcpu) == labhelp.mask(tid)


def but_for_virsh(before: dict[str, str]) -> list[str]:
    """What differs from ``before``, without the raw cpuset text: pinning to all CPUs
    with virsh leaves the list there where there was none, and that is not ours."""
    changed = hoststate.differences(before, hoststate.capture())
    return [line for line in changed if "cpuset.cpus:" not in line]


def pinned_by_hand(guest: LabGuest, irq_cpus: set[int]) -> tuple[int, int]:
    """Pin vcpu 0 to the first of these CPUs and wait until that is seen; its thread and CPU."""
    irq = min(irq_cpus)
    labhelp.sh("virsh", "vcpupin", guest.name, "0", str(irq), "--live")
    labhelp.wait_for(
        lambda: not labhelp.status_text().endswith(" 0 drift"), "the pin is counted as drift"
    )
    return guest.vcpus()[0], irq


@labhelp.one_release("what operators ask of libvirt", "trixie")
def test_emulatorpin_does_not_reach_the_workers(
    untuned: None, libvirt_guest: LabGuest, irq_cpus: set[int]
) -> None:
    before = hoststate.capture()
    labhelp.write_policies("auto")
    labhelp.start()
    masks = {tid: labhelp.mask(tid) for tid in libvirt_guest.workers()}
    labhelp.sh("virsh", "emulatorpin", libvirt_guest.name, "0", "--live")
    assert labhelp.mask(libvirt_guest.pid) == {0}
    assert {tid: labhelp.mask(tid) for tid in libvirt_guest.workers()} == masks
    labhelp.sh("virsh", "emulatorpin", libvirt_guest.name, f"0-{labhelp.lab_cpus() - 1}", "--live")
    labhelp.stop()
    assert but_for_virsh(before) == []


@labhelp.core("bookworm")
@labhelp.one_release("what operators ask of libvirt")
def test_an_operators_pin_is_held_then_reasserted(
    untuned: None, libvirt_guest: LabGuest, irq_cpus: set[int]
) -> None:
    before = hoststate.capture()
    labhelp.write_policies("auto")
    labhelp.start()
    ours = labhelp.mask(libvirt_guest.vcpus()[0])
    tid, irq = pinned_by_hand(libvirt_guest, irq_cpus)
    assert labhelp.mask(tid) == {irq}
    assert labhelp.vsrtune("verify", check=False).returncode == 3
    labhelp.sh("systemctl", "reload", "vsrtune")
    labhelp.wait_for(lambda: labhelp.mask(tid) == ours, "the reload put the pin back")
    labhelp.wait_for(lambda: labhelp.status_text().endswith(" 0 drift"), "no drift is left")
    labhelp.stop()
    # What the operator set in between is what there is to go back to.
    assert labhelp.mask(tid) == {irq}
    every = f"0-{labhelp.lab_cpus() - 1}"
    labhelp.sh("virsh", "vcpupin", libvirt_guest.name, "0", every, "--live")
    assert but_for_virsh(before) == []


@labhelp.one_release("what operators ask of libvirt", "trixie")
def test_an_operators_pin_survives_stop(
    untuned: None, libvirt_guest: LabGuest, irq_cpus: set[int]
) -> None:
    before = hoststate.capture()
    labhelp.write_policies("auto")
    labhelp.start()
    tid, irq = pinned_by_hand(libvirt_guest, irq_cpus)
    labhelp.stop()
    assert labhelp.mask(tid) == {irq}
    assert "left alone" in labhelp.daemon_log()
    every = f"0-{labhelp.lab_cpus() - 1}"
    labhelp.sh("virsh", "vcpupin", libvirt_guest.name, "0", every, "--live")
    assert but_for_virsh(before) == []


@labhelp.one_release("what operators ask of libvirt", "trixie")
def test_a_pin_to_all_cpus_is_restored_with_its_list(
    untuned: None, libvirt_guest: LabGuest, irq_cpus: set[int]
) -> None:
    """libvirt shows no difference between the operator's pin and the one with which an undo put a
    thread back that had none; the cpuset of the cgroup does."""
    labhelp.stop_guest(libvirt_guest)
    labhelp.start_guest(libvirt_guest)
    (labhelp.POLICIES / "test0.yaml").write_text(
        f'guest: "{libvirt_guest.name}"\nprofile: none\n'
        "cpus: {irq: 0, vcpu: 2, vhost: 2, emulator: 0}\n"
    )
    labhelp.start()
    labhelp.stop()
    every = f"0-{labhelp.lab_cpus() - 1}"
    hoststate.virsh("vcpupin", libvirt_guest.name, "0", every, "--live")
    hoststate.virsh("emulatorpin", libvirt_guest.name, every, "--live")
    threads = {libvirt_guest.vcpus()[0]: {2}, libvirt_guest.pid: {0}}
    for tid in threads:
        listed = f"{hoststate.CGROUP}{hoststate.cgroup(tid)}/cpuset.cpus"
        assert labhelp.text(listed) == every
    before = hoststate.capture()
    labhelp.start()
    assert {tid: labhelp.mask(tid) for tid in threads} == threads
    labhelp.stop()
    assert hoststate.differences(before, hoststate.capture()) == []


@labhelp.core("trixie")
@labhelp.one_release("what operators do", "trixie")
def test_drift_by_hand_is_found_and_corrected(tuned: set[int], guests: list[LabGuest]) -> None:
    guest = guests[-1]
    tid = guest.workers()[0]
    ours = labhelp.mask(tid)
    labhelp.sh("taskset", "-pc", f"0-{labhelp.lab_cpus() - 1}", str(tid))
    labhelp.wait_for(lambda: labhelp.mask(tid) == ours, "the daemon corrected the affinity")
    labhelp.sh("chrt", "-o", "-p", "0", str(tid))
    labhelp.wait_for(
        lambda: hoststate.sched(tid).startswith(labhelp.realtime_start()), "the class is corrected"
    )


def test_an_iothread_keeps_off_the_routers_cpu(
    untuned: None, libvirt_guest: LabGuest, irq_cpus: set[int]
) -> None:
    hoststate.virsh("iothreadadd", libvirt_guest.name, "1", "--live")
    try:
        threads = hoststate.threads(libvirt_guest.pid)
        (iothread,) = [tid for tid in threads if hoststate.comm(tid) == "IO iothread1"]
        before = hoststate.capture()
        (labhelp.POLICIES / "test0.yaml").write_text(
            f'guest: "{libvirt_guest.name}"\nprofile: none\n'
            "cpus: {irq: 0, vcpu: 2, vhost: 2, iothread: auto}\n"
        )
        labhelp.start()
        mask = labhelp.mask(iothread)
        assert mask
        assert 2 not in mask
        labhelp.sh("lab-wait-forward", libvirt_guest.name)
        labhelp.stop()
        assert hoststate.differences(before, hoststate.capture()) == []
    finally:
        hoststate.virsh("iothreaddel", libvirt_guest.name, "1", "--live")
