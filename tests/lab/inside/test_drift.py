"""Settings that others change on a running router: left, adopted, or put back, as the policy
says; and what happens when somebody does not stop."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import hoststate
import labhelp
import pytest
from labhelp import LabGuest


def write_policy(drift: str) -> None:
    """A policy for every guest, with rules of drift."""
    labhelp.write_policies("auto")
    for path in labhelp.POLICIES.glob("test*.yaml"):
        path.write_text(path.read_text() + f"drift: {drift}\n")


@pytest.fixture
def by_virsh(untuned: None, libvirt_guest: LabGuest) -> Iterator[None]:
    """A test may ask libvirt for pins: the guest is started anew in the end, because libvirt keeps
    a pin to all CPUs, and beside it vsrtune's note of what was before."""
    yield
    labhelp.reset()
    labhelp.stop_guest(libvirt_guest)
    labhelp.start_guest(libvirt_guest)


@contextmanager
def again_and_again(command: str) -> Iterator[None]:
    """A shell that does not stop running a command."""
    loop = subprocess.Popen(
        ["sh", "-c", f"while :; do {command}; sleep 0.3; done"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        loop.kill()
        loop.wait()


@labhelp.one_release("what operators do")
def test_reported_is_left_and_adopted_is_right_until_a_reload(
    untuned: None, libvirt_guest: LabGuest, irq_cpus: set[int]
) -> None:
    guest = libvirt_guest
    before = hoststate.capture()
    write_policy("{queue: adopt, scheduler.vhost: report}")
    labhelp.start()
    device, tid = guest.device(0), guest.workers()[0]
    queue = f"/sys/class/net/{device}/tx_queue_len"
    labhelp.sh("ip", "link", "set", device, "txqueuelen", "77")
    labhelp.wait_for(lambda: labhelp.samples("vsrtune_drift", rule="adopt"), "it is adopted")
    assert labhelp.text(queue) == "77"
    assert labhelp.vsrtune("verify").returncode == 0, "what is adopted is right"
    page = labhelp.wait_for(
        lambda: (now := labhelp.status_page())["intervals"] and now, "the page tells of traffic"
    )
    (drift,) = page["drift"]
    assert (drift["guest"], drift["rule"], drift["found"]) == (guest.ref, "adopt", "77")
    assert all(0 <= c["softirq"] <= c["busy"] <= 1 for c in page["cpus"])
    labhelp.sh("chrt", "-o", "-p", "0", str(tid))
    labhelp.wait_for(lambda: labhelp.samples("vsrtune_drift", rule="report"), "it is reported")
    assert hoststate.sched(tid).startswith("policy=0 ")
    assert labhelp.status_text().endswith(" 1 drift")
    shown = labhelp.vsrtune("show", "--guest", guest.name).stdout
    assert "Changed since" in shown
    assert "report" in shown
    # Out of its class the worker shares a CPU with a real-time vcpu.
    done = labhelp.vsrtune("verify", check=False)
    assert (done.returncode, "could stand still" in done.stderr) == (5, True)
    labhelp.sh("systemctl", "reload", "vsrtune")
    labhelp.wait_for(lambda: not labhelp.untuned_lines(guest, irq_cpus), "a reload takes all back")
    labhelp.sh("ip", "link", "set", device, "txqueuelen", "88")
    labhelp.wait_for(lambda: labhelp.samples("vsrtune_drift", rule="adopt"), "it is adopted again")
    labhelp.stop()
    assert labhelp.text(queue) == "88", "what is not ours stays"
    labhelp.sh("ip", "link", "set", device, "txqueuelen", "500")
    assert hoststate.differences(before, hoststate.capture()) == []


def test_whoever_changes_it_back_is_named_and_not_fought_every_second(
    by_virsh: None, libvirt_guest: LabGuest, irq_cpus: set[int]
) -> None:
    guest = libvirt_guest
    write_policy("enforce")
    labhelp.start()
    worker = guest.workers()[0]
    every = f"0-{labhelp.lab_cpus() - 1}"

    def told(what: str) -> bool:
        lines = labhelp.daemon_log(400).splitlines()
        return any("less and less often" in line and what in line for line in lines)

    with again_and_again(
        f"taskset -pc {every} {worker}; virsh vcpupin '{guest.name}' 0 {every} --live"
    ):
        labhelp.wait_for(lambda: told("libvirt"), "libvirt is named")
        labhelp.wait_for(lambda: told("each time taskset (pid "), "taskset is named")
        labhelp.wait_for(
            lambda: not labhelp.status_text().endswith(" 0 drift"), "what waits is counted"
        )
    labhelp.wait_for(lambda: not labhelp.untuned_lines(guest, irq_cpus), "in peace, all is set")
    labhelp.wait_for(lambda: labhelp.status_text().endswith(" 0 drift"), "no drift is left")
