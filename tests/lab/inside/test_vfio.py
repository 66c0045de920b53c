"""A router that drives a virtual function of the NIC itself (SR-IOV, VFIO): the function's interrupts
follow its vcpus, and nobody else's device follows a pretender."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hoststate
import labhelp
import pytest
from labhelp import LabGuest

DRIVER = Path("/sys/bus/pci/drivers/vfio-pci")
# Where the interrupts are before vsrtune comes.
ELSEWHERE = "0"


def addresses() -> list[str]:
    """The functions that guests drive."""
    return sorted(path.name for path in DRIVER.glob("0000:*"))


def vectors(address: str) -> dict[int, list[int]]:
    """The interrupts of a function by their number, in the order of its vectors, each with its count
    on each CPU."""
    found = {}
    for line in Path("/proc/interrupts").read_text().splitlines():
        match = re.search(rf" vfio-msix?\[(\d+)\]\({re.escape(address)}\)$", line)
        if match is not None:
            number, *counts = line.split()[: labhelp.lab_cpus() + 1]
            found[int(match[1])] = int(number.rstrip(":")), [int(n) for n in counts]
    return dict(found[vector] for vector in sorted(found))


def affinities(address: str) -> list[str]:
    return [labhelp.text(f"/proc/irq/{n}/smp_affinity_list") for n in vectors(address)]


def expected(guest: LabGuest, address: str) -> list[str]:
    """The CPUs of the vcpus, in turn."""
    vcpus = guest.vcpus()
    cpus = [hoststate.status_field(vcpus[n], "Cpus_allowed_list") for n in sorted(vcpus)]
    return [cpus[n % len(cpus)] for n in range(len(vectors(address)))]


def are_with_vcpus(guest: LabGuest, address: str) -> bool:
    found = affinities(address)
    return len(found) > 0 and found == expected(guest, address)


@pytest.fixture
def function(untuned: None, libvirt_guest: LabGuest) -> str:
    """The address of the router's function, whose interrupts are on ELSEWHERE."""
    if not addresses():
        pytest.skip("no guest has a virtual function: run with --nic igb")
    (address,) = addresses()
    for number in vectors(address):
        Path(f"/proc/irq/{number}/smp_affinity_list").write_text(ELSEWHERE)
    return address


POLICY = f"""\
guest: {{guest}}
profile: none
cpus: {{{{irq: 0, vcpu: {{{{0: 1, 1: 2}}}}, vhost: 2, emulator: 0}}}}
scheduler:
  vcpu: {{{{class: rr, priority: {labhelp.PRIORITY}}}}}
  vhost: {{{{class: rr, priority: {labhelp.PRIORITY}}}}}
"""


def write_policy(guest: LabGuest) -> None:
    if len(guest.vcpus()) != 2 or labhelp.lab_cpus() < 3:
        pytest.skip("needs a router with two vcpus, and 3 CPUs")
    (labhelp.POLICIES / "vfio.yaml").write_text(POLICY.format(guest=guest.ref))


def traffic(guest: LabGuest) -> dict[str, Any]:
    words = ("--guest", guest.name, "--rate", "1000", "--seconds", "2")
    found: dict[str, Any] = json.loads(labhelp.sh("lab-traffic", *words).stdout)
    return found


def test_interrupts_follow_the_vcpus_and_come_back(
    function: str, libvirt_guest: LabGuest, restored: None
) -> None:
    guest = libvirt_guest
    numbers = list(vectors(function))
    assert numbers, "the router has enabled its function's interrupts"
    assert set(affinities(function)) == {ELSEWHERE}
    write_policy(guest)
    (shown,) = labhelp.show()["guests"]
    (device,) = shown["passed"]
    assert device["address"] == function
    assert [irq["number"] for irq in device["irqs"]] == numbers

    labhelp.start()
    wanted = expected(guest, function)
    assert affinities(function) == wanted
    assert not set(wanted) & {ELSEWHERE}
    traffic(guest)  # an interrupt moves when it next fires
    before = vectors(function)
    assert traffic(guest)["forwarded"] > 0
    cpus = labhelp.cpu_list(",".join(wanted))
    gained = [
        sum(now[cpu] - before[number][cpu] for number, now in vectors(function).items())
        for cpu in range(labhelp.lab_cpus())
    ]
    fired = {cpu for cpu, count in enumerate(gained) if count}
    assert fired
    assert fired <= cpus
    assert "\nno drift" in f"\n{labhelp.vsrtune('verify').stdout}"
    assert json.loads(labhelp.vsrtune("plan", "--json").stdout)["actions"] == []

    # Somebody else moves one: it is put back.
    Path(f"/proc/irq/{numbers[0]}/smp_affinity_list").write_text(ELSEWHERE)
    labhelp.wait_for(lambda: affinities(function) == wanted, "the interrupt is put back")

    labhelp.stop()
    assert set(affinities(function)) == {ELSEWHERE}


@pytest.mark.parametrize("writes", [1, 2, 3])
def test_killed_after_each_interrupt_then_undone(
    function: str, libvirt_guest: LabGuest, restored: None, writes: int
) -> None:
    write_policy(libvirt_guest)
    assert len(affinities(function)) == 3
    crashed = labhelp.vsrtune("apply", check=False, fault=f"crash:{writes}")
    assert crashed.returncode != 0
    assert affinities(function).count(ELSEWHERE) == 3 - writes
    labhelp.vsrtune("undo")


def test_a_router_that_boots_again_is_followed(function: str, libvirt_guest: LabGuest) -> None:
    guest = libvirt_guest
    write_policy(guest)
    labhelp.start()
    labhelp.stop_guest(guest)
    assert vectors(function) == {}
    labhelp.start_guest(guest)
    follows = "the new interrupts are with the new vcpus"
    labhelp.wait_for(lambda: are_with_vcpus(guest, function), follows)
    # The same QEMU, which opens them anew: the kernel gives them its default mask.
    hoststate.virsh("reset", guest.name)
    labhelp.wait_for(lambda: not are_with_vcpus(guest, function), "the router boots again")
    labhelp.sh("lab-wait-forward", guest.name)
    labhelp.wait_for(lambda: are_with_vcpus(guest, function), follows)
    labhelp.stop()
    node = labhelp.text(f"/sys/bus/pci/devices/{function}/numa_node")
    default = labhelp.text(f"/sys/devices/system/node/node{node}/cpulist")
    assert set(affinities(function)) == {default}


def test_doctor_compares_numa_nodes(function: str, libvirt_guest: LabGuest, restored: None) -> None:
    """The function and the last CPU are on node 1."""
    assert labhelp.text(f"/sys/bus/pci/devices/{function}/numa_node") == "1"
    last = labhelp.lab_cpus() - 1
    warns = f"{function} is on NUMA node 1, its vcpus are on 0"
    for cpus, told in ({*range(last)}, True), ({*range(last + 1)}, False):
        for tid in libvirt_guest.vcpus().values():
            os.sched_setaffinity(tid, cpus)
        assert (warns in labhelp.vsrtune("doctor", "--json", check=False).stdout) is told


QEMU = "qemu-system-x86_64 -machine pc,accel=tcg -S -nodefaults -display none -m 16"


@contextlib.contextmanager
def pretender(place: Path, name: str, before: str, user: str) -> Iterator[int]:
    """A QEMU outside libvirt that says what the router's says; ``before`` runs in a mount namespace
    of its own, and what it leaves open stays open. Its pid."""
    pid_file = place / f"{name}.pid"
    command = f"{QEMU} -name {name},debug-threads=on -pidfile {pid_file}"
    script = f"set -e; {before}; exec setpriv --reuid={user} --clear-groups {command}"
    unit = f"vfio-{name}"
    labhelp.sh("systemd-run", "--quiet", f"--unit={unit}", "unshare", "-m", "bash", "-c", script)
    try:
        labhelp.wait_for(lambda: pid_file.exists() and pid_file.read_text(), f"{name} runs")
        yield int(pid_file.read_text())
    finally:
        labhelp.sh("systemctl", "stop", unit, check=False)


def test_pretenders_gain_nothing(
    function: str, libvirt_guest: LabGuest, restored: None, tmp_path: Path
) -> None:
    """A QEMU of root's that has no device, and one of nobody's, to which a policy gives CPUs, that
    holds a file with the name of the router's group."""
    guest = libvirt_guest
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    group = os.path.basename(os.readlink(f"/sys/bus/pci/devices/{function}/iommu_group"))
    node = f"/dev/vfio/{group}"
    assert Path(node).is_char_device()
    false = tmp_path / "false"
    false.touch(mode=0o666)
    imitate = f"mount --bind {false} {node}; exec 20<>{node}"
    write_policy(guest)
    (labhelp.POLICIES / "his.yaml").write_text(
        "guest: qemu:his\nuser: nobody\nprofile: none\ncpus: {vcpu: 2}\n"
    )
    (labhelp.POLICIES / "ours.yaml").write_text(
        "guest: qemu:ours\nprofile: none\ncpus: {vcpu: 2}\n"
    )
    with (
        pretender(tmp_path, "ours", "true", "root") as ours,
        pretender(tmp_path, "his", imitate, "nobody") as his,
    ):
        assert os.readlink(f"/proc/{his}/fd/20") == node
        labhelp.start()
        found = {g["pid"]: g["passed"] for g in labhelp.show()["guests"]}
        assert (found[ours], found[his]) == ([], [])
        assert [d["address"] for d in found[guest.pid]] == [function]
        assert affinities(function) == expected(guest, function)
        labhelp.stop()
