"""A tuned router forwards from its first frame on, whatever its vcpus do.

The lab has two CPUs, so all threads of the router share the one without interrupts.
LAB_BOOTS says how often each kind of router is started, 1 unless said otherwise.
"""

from __future__ import annotations

import json
import os
import platform
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import hoststate
import labhelp
import pytest
from labhelp import LabGuest

from vsrtune.model.host import release_of

SHIPPED = Path("/usr/share/vsrtune/policies/router.yaml")
# With the CPU that auto refuses to several vcpus of one guest.
FORCED = SHIPPED.read_text() + "cpus: {vcpu: 1}\n"
SLICE = Path("/proc/sys/kernel/sched_rr_timeslice_ms")
LIMIT = Path("/proc/sys/kernel/sched_rt_runtime_us")
BOOTS = int(os.environ.get("LAB_BOOTS") or 1)
LOADS = (300, 12000, 48000)
# Below so many frames a router stands still; its first second is among them.
ALIVE = 100
FIRST = ("daemon", "guest")
CLASS = "{class: fifo, priority: 10}"


@pytest.fixture
def domain(libvirt_guest: LabGuest) -> Iterator[ET.Element]:
    """The router's definition, which is put back afterwards."""
    if labhelp.lab_cpus() != 2:
        pytest.skip("needs a lab of two CPUs")
    text = hoststate.virsh("dumpxml", "--inactive", libvirt_guest.name)
    yield ET.fromstring(text)
    define(ET.fromstring(text))
    labhelp.stop()
    labhelp.stop_guest(libvirt_guest)
    labhelp.start_guest(libvirt_guest)


def define(domain: ET.Element) -> None:
    path = Path("/run/lab/standstill.xml")
    path.write_text(ET.tostring(domain, encoding="unicode"))
    labhelp.sh("virsh", "-q", "define", str(path))


def with_vcpus(domain: ET.Element, vcpus: int, busy: int) -> None:
    """Define it with so many vcpus and queues, and processes that never sleep."""
    count, line = domain.find("vcpu"), domain.find("os/cmdline")
    assert count is not None
    assert line is not None
    assert line.text is not None
    count.text = str(vcpus)
    words = [word for word in line.text.split() if not word.startswith("busy=")]
    line.text = " ".join([*words, f"busy={busy}"])
    for driver in domain.iterfind("devices/interface/driver"):
        driver.set("queues", str(vcpus))
    define(domain)


def forwarded(guest: LabGuest, rate: int) -> int:
    words = ("--rate", str(rate), "--seconds", "3", "--flows", "8")
    done = labhelp.sh("lab-traffic", "--guest", guest.name, *words)
    return int(json.loads(done.stdout)["forwarded"])


def forwards_at_all(guest: LabGuest, boot: str) -> None:
    """Wait until its kernel is up: the least load tells when. A failure tells whether its vcpus
    run, where they are, and whether it forwards once it is untuned."""
    try:
        labhelp.wait_for(lambda: forwarded(guest, 100), "it forwards")
    except AssertionError as error:
        told = []
        for tid in guest.data_plane():
            before = labhelp.run_ns(tid)
            time.sleep(1)
            ran = (labhelp.run_ns(tid) - before) / 1e9
            told.append(f"{hoststate.comm(tid)} ran {ran:.2f} s of one")
        ask = ("qemu-monitor-command", guest.name, "--hmp", "info registers")
        told += [line for line in hoststate.virsh(*ask).splitlines() if "IP=" in line]
        labhelp.stop()
        after = labhelp.sh("lab-wait-forward", guest.name, "60", check=False)
        told.append(f"untuned: {after.stderr or 'it forwards'}")
        raise AssertionError("\n".join([boot, *told, str(error)])) from error


CORE = (2, "guest", False)
CASES = [
    pytest.param(n, first, busy, marks=[labhelp.core()] if (n, first, busy) == CORE else [])
    for n in (1, 2, 4)
    for first in FIRST
    for busy in (False, True)
]


@pytest.mark.parametrize(("vcpus", "first", "busy"), CASES)
def test_tuned_before_its_first_frame(
    domain: ET.Element, libvirt_guest: LabGuest, vcpus: int, first: str, busy: bool
) -> None:
    """The daemon runs when the guest is started, or is started right after it."""
    with_vcpus(domain, vcpus, vcpus if busy else 0)
    (labhelp.POLICIES / "router.yaml").write_text(FORCED)
    for boot in range(BOOTS):
        labhelp.stop()
        labhelp.stop_guest(libvirt_guest)
        if first == "daemon":
            labhelp.start()
        hoststate.virsh("start", libvirt_guest.name)
        if first == "guest":
            labhelp.start()
        labhelp.wait_for(
            lambda: (
                len(libvirt_guest.vcpus()) == vcpus
                and all(labhelp.mask(tid) == {1} for tid in libvirt_guest.data_plane())
            ),
            "every thread of the router is tuned",
        )
        forwards_at_all(libvirt_guest, f"boot {boot + 1}")
        counts = {rate: forwarded(libvirt_guest, rate) for rate in LOADS}
        assert min(counts.values()) >= ALIVE, f"boot {boot + 1}: {counts}"


@labhelp.core()
def test_several_vcpus_do_not_share_a_cpu_unless_it_is_written(
    restored: None, libvirt_guest: LabGuest
) -> None:
    if labhelp.lab_cpus() != 2:
        pytest.skip("needs a lab of two CPUs")
    (labhelp.POLICIES / "router.yaml").write_text(SHIPPED.read_text())
    done = labhelp.vsrtune("apply", check=False)
    assert done.returncode == 5, done.stdout + done.stderr
    assert "2 vcpus would share CPUs 1" in done.stdout + done.stderr
    for tid in libvirt_guest.data_plane():
        assert hoststate.sched(tid).startswith("policy=0 ")
        assert labhelp.mask(tid) == {0, 1}
    (labhelp.POLICIES / "router.yaml").write_text(FORCED)
    labhelp.vsrtune("apply")
    for tid in libvirt_guest.data_plane():
        assert labhelp.mask(tid) == {1}


@labhelp.core()
def test_a_plan_that_can_stop_the_router_is_refused(
    restored: None, libvirt_guest: LabGuest
) -> None:
    if labhelp.lab_cpus() != 2:
        pytest.skip("needs a lab of two CPUs")
    text = f"{FORCED}scheduler: {{vcpu: {CLASS}, vhost: {CLASS}}}\n"
    (labhelp.POLICIES / "router.yaml").write_text(text)
    shown = labhelp.vsrtune("plan", check=False)
    assert "keep it from running" in shown.stdout + shown.stderr
    labhelp.vsrtune("apply", check=False)
    for tid in libvirt_guest.data_plane():
        assert hoststate.sched(tid).startswith("policy=0 ")
    (labhelp.POLICIES / "router.yaml").write_text(text + "standstill: accept\n")
    labhelp.vsrtune("apply")
    for tid in libvirt_guest.data_plane():
        assert hoststate.sched(tid).startswith("policy=1 ")


def test_the_values_for_realtime_threads_are_set_kept_and_given_back(restored: None) -> None:
    release = release_of(platform.release())
    # From 6.12 on the limit stops no thread, so it stays.
    ours = {SLICE: "8", LIMIT: "990000" if release < (6, 12) else "950000"}
    theirs = {SLICE: "50", LIMIT: "970000"} if release < (6, 12) else {SLICE: "50"}
    original = {file: file.read_text() for file in ours}
    (labhelp.POLICIES / "router.yaml").write_text(FORCED)

    def are_set() -> bool:
        return {file: file.read_text().strip() for file in ours} == ours

    labhelp.start()
    labhelp.wait_for(are_set, f"{ours}")
    for file, other in theirs.items():
        file.write_text(other)
        labhelp.wait_for(are_set, f"{ours} again", 30)
    labhelp.stop()
    assert {file: file.read_text() for file in ours} == original
