"""Whatever happens, the guest is tuned again afterwards, and because the daemon was told.

The interval is far away, and the daemon is idle when something happens. Where an event
changes nothing of the guest itself, the class of a vcpu is taken away first, of which no
event tells while the daemon has no kprobes: it only finds it when it looks for another reason.
"""

from __future__ import annotations

import json
import os
import signal
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import hoststate
import labhelp
import pytest
from labhelp import LabGuest

MAC = "52:54:00:ab:cd:07"
TOLD = Path("/mnt/share/events.jsonl")
Say = Callable[[str, float], None]
# How long the last `virsh start` took, in seconds.
_started: list[float] = []


def idle() -> None:
    """Wait until the daemon has nothing more to look at."""
    labhelp.wait_for(lambda: time.time() - labhelp.last_pass() > 2.5, "the daemon is idle")


def last_write(since: float) -> float | None:
    """When the daemon last wrote a setting, in seconds since the epoch."""
    done = labhelp.sh("journalctl", "-u", "vsrtune", "-o", "json", f"--since=@{int(since)}")
    times = [
        int(line["__REALTIME_TIMESTAMP"]) / 1e6
        for line in map(json.loads, done.stdout.splitlines())
        if " -> " in str(line.get("MESSAGE"))
    ]
    # Another test may have had a clock that was ahead.
    now = time.time()
    return max((t for t in times if since <= t <= now), default=None)


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Print how soon after an event the last write came, and keep it for `make events`; nothing
    is asserted of it."""

    def told(event: str, when: float) -> None:
        wrote = last_write(when)
        if wrote is None or not _started:
            return
        text = f"{wrote - when:.2f} s, {(wrote - when) / _started[-1]:.2f} of `virsh start`"
        with capsys.disabled():
            print(f"\n{labhelp.codename()}: {event}: last write after {text}", flush=True)
        if TOLD.parent.is_dir():
            line = {"event": event, "seconds": wrote - when, "start": _started[-1]}
            with TOLD.open("a") as file:
                file.write(json.dumps(line) + "\n")

    return told


@pytest.fixture
def listening(untuned: None, guests: list[LabGuest], irq_cpus: set[int]) -> set[int]:
    """The daemon is idle and will look only when it is told; the interrupts' CPUs."""
    labhelp.write_policies("auto")
    labhelp.set_environment(VSRTUNE_INTERVAL="3600", VSRTUNE_CHANGES="0")
    labhelp.start()
    idle()
    return irq_cpus


@contextmanager
def looked_at(tid: int, event: str, say: Say) -> Iterator[None]:
    """What happens inside makes the daemon look: it gives a thread its class back."""
    # What is changed again and again it puts back less and less often, until a reload.
    begin = time.time()
    labhelp.sh("systemctl", "reload", "vsrtune")
    labhelp.wait_for(lambda: labhelp.last_pass() > begin, "the daemon has looked at its policies")
    idle()
    labhelp.sh("chrt", "-o", "-p", "0", str(tid))
    when = time.time()
    yield
    labhelp.wait_for(
        lambda: hoststate.sched(tid).startswith(labhelp.realtime_start()), f"{event}: looked at"
    )
    say(event, when)


def domain_state(guest: LabGuest) -> str:
    return hoststate.virsh("domstate", guest.name).strip()


def start(guest: LabGuest) -> float:
    """Start a router; when libvirt said it runs. Remembers how long that took."""
    begin = time.time()
    labhelp.sh("virsh", "-q", "start", guest.name)
    _started.append(time.time() - begin)
    return time.time()


def tuned(guest: LabGuest, irq: set[int]) -> bool:
    return guest.runs and labhelp.untuned_lines(guest, irq) == []


@pytest.fixture(scope="module")
def growable(guests: list[LabGuest], libvirt_guest: LabGuest) -> Iterator[LabGuest]:
    """The libvirt router may be given a second vcpu from its next start on."""
    xml = hoststate.virsh("dumpxml", "--inactive", libvirt_guest.name)
    domain = ET.fromstring(xml)
    vcpu = domain.find("vcpu")
    assert vcpu is not None
    vcpu.set("current", vcpu.text or "1")
    vcpu.text = str(int(vcpu.text or "1") + 1)
    place = Path("/run/growable.xml")
    place.write_text(ET.tostring(domain, encoding="unicode"), "utf-8")
    labhelp.sh("virsh", "define", str(place))
    yield libvirt_guest
    place.write_text(xml, "utf-8")
    labhelp.sh("virsh", "define", str(place))
    labhelp.stop_guest(libvirt_guest)
    labhelp.start_guest(libvirt_guest)


def test_a_crashed_guest_that_starts_again(
    listening: set[int], growable: LabGuest, say: Say
) -> None:
    boot = labhelp.text("/proc/sys/kernel/random/boot_id")
    os.kill(growable.pid, signal.SIGKILL)
    labhelp.wait_for(lambda: domain_state(growable) == "shut off", "libvirt knows of the crash")
    labhelp.wait_for(
        lambda: not any(
            entry.target.guest == growable.name and entry.target.kind == "vcpu-pin"
            for entry in labhelp.read_entries(labhelp.JOURNAL, boot)
        ),
        "what was set on its threads is forgotten",
    )  # fmt: skip
    when = start(growable)
    labhelp.wait_for(lambda: tuned(growable, listening), "tuned after its start")
    say("crash and start", when)
    labhelp.sh("lab-wait-forward", growable.name)


def test_a_plugged_vcpu_is_found_by_the_rescan(
    untuned: None, irq_cpus: set[int], growable: LabGuest, say: Say
) -> None:
    """libvirt has no event for it."""
    if hoststate.virsh("vcpucount", growable.name, "--maximum", "--live").strip() == "1":
        labhelp.stop_guest(growable)
        labhelp.start_guest(growable)
    labhelp.write_policies("auto")
    labhelp.set_environment(VSRTUNE_INTERVAL="2")
    labhelp.start()
    before = set(growable.vcpus().values())
    when = time.time()
    labhelp.sh("virsh", "setvcpus", growable.name, str(len(before) + 1), "--live")
    labhelp.wait_for(
        lambda: set(growable.vcpus().values()) > before and tuned(growable, irq_cpus),
        "the new vcpu is tuned, the others still are",
    )
    say("vcpu plugged", when)
    # Two vcpus that share a CPU under fifo can stand still at the next reset.
    labhelp.stop_guest(growable)
    labhelp.start_guest(growable)


def test_events_of_a_running_guest(
    listening: set[int], libvirt_guest: LabGuest, tmp_path: Path, say: Say
) -> None:
    guest, daemon = libvirt_guest, labhelp.main_pid()
    tid = guest.vcpus()[0]
    with looked_at(tid, "libvirtd restarted", say):
        labhelp.sh("systemctl", "restart", "libvirtd")
    labhelp.libvirt_talks(guest)
    with looked_at(tid, "suspended", say):
        labhelp.sh("virsh", "suspend", guest.name)
    with looked_at(tid, "resumed", say):
        labhelp.sh("virsh", "resume", guest.name)
    with looked_at(tid, "tunable", say):
        every = f"0-{labhelp.lab_cpus() - 1}"
        labhelp.sh("virsh", "emulatorpin", guest.name, every, "--live")
    nic = ("direct", "--mac", MAC, "--live")
    with looked_at(tid, "device added", say):
        labhelp.sh("virsh", "attach-interface", guest.name, "direct", "p0", "--mac", MAC,
                   "--model", "virtio", "--live")  # fmt: skip
    new = next(e for e in Path("/sys/class/net").iterdir() if labhelp.text(f"{e}/address") == MAC)
    queue = f"{new}/tx_queue_len"
    labhelp.wait_for(lambda: labhelp.text(queue) == str(labhelp.QUEUE), "the new queue is set")
    workers = len(guest.workers())
    with looked_at(tid, "device removed", say):
        labhelp.sh("virsh", "detach-interface", guest.name, *nic)
    labhelp.wait_for(lambda: len(guest.workers()) < workers, "the NIC is unplugged", 120)
    with looked_at(tid, "reset", say):
        labhelp.sh("virsh", "reset", guest.name)
    labhelp.sh("lab-wait-forward", guest.name)
    saved = tmp_path / "saved"
    labhelp.sh("virsh", "save", guest.name, str(saved))
    when = time.time()
    labhelp.sh("virsh", "restore", str(saved))
    labhelp.wait_for(lambda: tuned(guest, listening), "tuned after it was restored")
    say("restored", when)
    labhelp.sh("lab-wait-forward", guest.name)
    assert labhelp.main_pid() == daemon


def test_network_devices_that_others_change(
    listening: set[int], libvirt_guest: LabGuest, say: Say
) -> None:
    guest = libvirt_guest
    tid = guest.vcpus()[0]
    queue = f"/sys/class/net/{guest.device(1)}/tx_queue_len"
    idle()
    when = time.time()
    labhelp.sh("ip", "link", "set", guest.device(1), "txqueuelen", "77")
    labhelp.wait_for(lambda: labhelp.text(queue) == str(labhelp.QUEUE), "the queue is put back")
    say("txqueuelen changed", when)
    length = labhelp.text("/sys/class/net/p0/tx_queue_len")
    with looked_at(tid, "lower device changed", say):
        labhelp.sh("ip", "link", "set", "p0", "txqueuelen", str(int(length) + 1))
    labhelp.sh("ip", "link", "set", "p0", "txqueuelen", length)
    make = "ip link add link p0 name mvx type macvtap mode bridge"
    try:
        with looked_at(tid, "macvtap made", say):
            labhelp.sh(*make.split())
    finally:
        labhelp.sh("ip", "link", "del", "mvx", check=False)


def test_threaded_napi_of_a_lower_device(
    listening: set[int], libvirt_guest: LabGuest, say: Say
) -> None:
    threaded = Path("/sys/class/net/p0/threaded")
    labhelp.sh("ethtool", "-K", "p0", "gro", "on")
    try:
        with looked_at(libvirt_guest.vcpus()[0], "threaded NAPI changed", say):
            threaded.write_text("1")
    finally:
        threaded.write_text("0")
        labhelp.sh("ethtool", "-K", "p0", "gro", "off")


def test_interrupt_affinity(listening: set[int], libvirt_guest: LabGuest, say: Say) -> None:
    irqs = Path("/sys/class/net/p0/device/msi_irqs")
    if not irqs.is_dir():
        pytest.skip("the NICs of this lab have no interrupts")
    if not _started:
        labhelp.stop_guest(libvirt_guest)
        start(libvirt_guest)
        labhelp.wait_for(lambda: tuned(libvirt_guest, listening), "tuned after its start")
    affinity = Path(f"/proc/irq/{max(int(e.name) for e in irqs.iterdir())}/smp_affinity_list")
    before = affinity.read_text()
    try:
        with looked_at(libvirt_guest.vcpus()[0], "interrupt affinity changed", say):
            affinity.write_text(f"0-{labhelp.lab_cpus() - 1}")
    finally:
        affinity.write_text(before)


def test_policy_files_that_change(listening: set[int], libvirt_guest: LabGuest, say: Say) -> None:
    first = labhelp.POLICIES / "test0.yaml"
    queue = f"/sys/class/net/{libvirt_guest.device(0)}/tx_queue_len"
    old = f"macvtap: {labhelp.QUEUE}"
    when = time.time()
    for length in (198, 199, 200):
        first.write_text(first.read_text().replace(old, f"macvtap: {length}"))
        old = f"macvtap: {length}"
    labhelp.wait_for(lambda: labhelp.text(queue) == "200", "the new length is set")
    say("policy written", when)
    log = labhelp.daemon_log(200)
    assert log.count("policy files have changed") == 1
    assert "-> 198" not in log
    first.write_text("guest: '*'\nqueues: 7\n")
    labhelp.wait_for(lambda: "older policies are kept" in labhelp.status_text(), "it is reported")
    assert "test0.yaml:2" in labhelp.daemon_log()
    assert labhelp.text(queue) == "200"
    first.unlink()
    labhelp.wait_for(lambda: labhelp.text(queue) == "500", "without policy: restored")
