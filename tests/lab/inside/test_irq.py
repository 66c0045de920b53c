"""Interrupts of real NICs: moved to the interrupt CPU and back, shared, kept by the kernel."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import hoststate
import labhelp
import pytest
from labhelp import LabGuest

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import FixedError
from vsrtune.execute.host_writer import LiveSysOps
from vsrtune.model.targets import HOST_REF, IrqAffinity

NICS = ("p0", "p1")
NET = Path("/sys/class/net")
# Where the interrupts are before vsrtune comes.
ELSEWHERE = "1-2"


def irqs(*nics: str) -> list[int]:
    """Interrupts of these NICs, of both when none is named."""
    found = [d for nic in nics or NICS for d in (NET / nic / "device" / "msi_irqs").glob("*")]
    return sorted(int(d.name) for d in found)


def affinities(*nics: str) -> set[str]:
    return {labhelp.text(f"/proc/irq/{irq}/smp_affinity_list") for irq in irqs(*nics)}


def served_on(nic: str) -> set[str]:
    """The CPUs on which a NIC's interrupts are served."""
    return {labhelp.text(f"/proc/irq/{irq}/effective_affinity_list") for irq in irqs(nic)}


def received_on() -> set[str]:
    """The CPUs on which the interrupts for received frames are served."""
    lines = Path("/proc/interrupts").read_text().splitlines()
    found = [line.split(":")[0].strip() for line in lines if re.search(r"p[01]-rx-0$", line)]
    return {labhelp.text(f"/proc/irq/{n}/effective_affinity_list") for n in found}


def napi_thread(nic: str) -> int:
    names = hoststate.comms().items()
    (tid,) = [tid for tid, name in names if re.fullmatch(rf"napi/{nic}-\d+", name)]
    return tid


def traffic(guests: list[LabGuest]) -> None:
    """Frames through every guest, so that both NICs' queues interrupt."""
    for guest in guests:
        labhelp.sh("lab-traffic", "--guest", guest.name, "--rate", "1000", "--seconds", "1")


def toggle(nic: str) -> None:
    for action in ("down", "up"):
        labhelp.sh("ip", "link", "set", nic, action)


@pytest.fixture
def elsewhere(irq_cpus: set[int], untuned: None, guests: list[LabGuest]) -> Iterator[None]:
    """Interrupts on CPUs 1 and 2, p0 with RPS and threaded NAPI; as before afterwards."""
    if not irqs():
        pytest.skip("p0 and p1 are veths, which have no interrupts: run with --nic e1000e")
    settings = {
        NET / "p0/queues/rx-0/rps_cpus": ("6", "0"),
        NET / "p0/threaded": ("1", "0"),
        **{Path(f"/proc/irq/{n}/smp_affinity_list"): (ELSEWHERE, "0") for n in irqs()},
    }
    for path, (ours, _) in settings.items():
        path.write_text(ours)
    yield
    labhelp.reset()
    for path, (_, before) in settings.items():
        path.write_text(before)
    # An interrupt moves when it next fires, and the next test reads where it is served. The one
    # for trouble may not fire for long, but is set up anew where it belongs with the link.
    traffic(guests)
    for nic in NICS:
        if served_on(nic) != {"0"}:
            toggle(nic)
        labhelp.wait_for(lambda nic=nic: served_on(nic) == {"0"}, f"{nic} is back on CPU 0", 30)


def policy(guest: LabGuest, irq: str = "0") -> Path:
    path = labhelp.POLICIES / f"{guest.index}.yaml"
    path.write_text(labhelp.tuned_policy(guest.ref, irq) + "irq: {set: true}\n")
    return path


def test_interrupts_move_and_come_back_to_the_letter(
    elsewhere: None, guests: list[LabGuest]
) -> None:
    before = hoststate.capture()
    assert affinities() == {ELSEWHERE}
    files = [policy(guest) for guest in guests]
    labhelp.start()
    assert affinities() == {"0"}
    assert labhelp.text("/sys/class/net/p0/queues/rx-0/rps_cpus") == "1"
    assert labhelp.text("/sys/class/net/p1/queues/rx-0/rps_cpus") == "0", "off stays off"
    assert labhelp.mask(napi_thread("p0")) == {0}
    for guest in guests:
        assert labhelp.untuned_lines(guest, {0}) == []
    traffic(guests)
    labhelp.wait_for(lambda: received_on() == {"0"}, "frames are received on CPU 0", 30)
    plan = json.loads(labhelp.vsrtune("plan", "--json").stdout)
    assert plan["actions"] == []
    told = [s["reason"] for s in plan["skipped"] if "p0 XPS" in s["subject"]]
    assert told == ["the kernel has none for this device"]

    # The driver requests its interrupts anew, and all are set up where they belong.
    toggle("p1")
    labhelp.wait_for(lambda: served_on("p1") == {"0"}, "p1's interrupts are set up on CPU 0", 30)
    assert affinities() == {"0"}
    assert labhelp.vsrtune("verify").returncode == 0

    # As long as one guest asks for it.
    files.pop().unlink()
    labhelp.sh("systemctl", "reload", "vsrtune")
    assert affinities() == {"0"}
    labhelp.stop()
    assert hoststate.differences(before, hoststate.capture()) == []
    assert labhelp.text("/sys/class/net/p0/queues/rx-0/rps_cpus") == "6"
    assert affinities() == {ELSEWHERE}


def test_each_nic_goes_to_the_cpus_of_its_own_key(elsewhere: None, guests: list[LabGuest]) -> None:
    before = hoststate.capture()
    policy(guests[0], "{p0: 0, p1: 1}")
    labhelp.start()
    assert (affinities("p0"), affinities("p1")) == ({"0"}, {"1"})
    assert labhelp.text("/sys/class/net/p0/queues/rx-0/rps_cpus") == "1"
    assert labhelp.mask(napi_thread("p0")) == {0}
    assert labhelp.untuned_lines(guests[0], {0, 1}) == []

    policy(guests[0], "{p0: 1, p1: 0}")
    labhelp.sh("systemctl", "reload", "vsrtune")
    assert (affinities("p0"), affinities("p1")) == ({"1"}, {"0"})
    assert labhelp.vsrtune("verify").returncode == 0
    labhelp.stop()
    assert hoststate.differences(before, hoststate.capture()) == []


@pytest.fixture
def irqbalance() -> Iterator[Callable[[str], None]]:
    """Starts irqbalance with these arguments; it is stopped, and forgets them, afterwards."""
    defaults = Path("/etc/default/irqbalance")
    before = defaults.read_text()

    def start(arguments: str) -> None:
        defaults.write_text(f'IRQBALANCE_ARGS="{arguments}"\n')
        labhelp.sh("systemctl", "restart", "irqbalance")

    yield start
    labhelp.sh("systemctl", "stop", "irqbalance")
    defaults.write_text(before)


def about_irqbalance() -> list[str]:
    """The warnings of plan that name it."""
    plan = json.loads(labhelp.vsrtune("plan", "--json").stdout)
    return [text for text in plan["warnings"] if "irqbalance" in text]


@labhelp.one_release("a program that both releases have", "trixie")
def test_irqbalance_is_named_until_it_leaves_the_interrupts_alone(
    elsewhere: None, guests: list[LabGuest], irqbalance: Callable[[str], None]
) -> None:
    policy(guests[0])
    labhelp.start()
    irqbalance("--interval=1")
    (told,) = about_irqbalance()
    for number in irqs():
        assert f"--banirq={number}" in told
    # What it moves is put back; it may find nothing worth a move in so small a host.
    for number in irqs():
        Path(f"/proc/irq/{number}/smp_affinity_list").write_text(ELSEWHERE)
    labhelp.wait_for(lambda: affinities() == {"0"}, "interrupts are on CPU 0 again", 120)

    # As the warning tells the operator to.
    words = re.search(r'IRQBALANCE_ARGS="([^"]*)"', told)
    assert words is not None
    irqbalance(words[1])
    assert about_irqbalance() == []


def test_an_interrupt_that_the_kernel_manages_is_told_apart() -> None:
    """That of the lab's disk: virtio-blk leaves it to the kernel."""
    lines = Path("/proc/interrupts").read_text().splitlines()
    name = re.compile(r"(\d+):.*\s(virtio\d+-req\.0)$")
    found = [m for m in map(name.search, lines) if m is not None]
    assert found, "the disk has no interrupt of its own"
    target = IrqAffinity(HOST_REF, int(found[0][1]), found[0][2])
    ops = LiveSysOps()
    now = ops.read(target)
    assert isinstance(now, CpuSet)
    with pytest.raises(FixedError, match="kernel-managed"):
        ops.write(target, CpuSet([now.first()]))
    assert ops.read(target) == now
