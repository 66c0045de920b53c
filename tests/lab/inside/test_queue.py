"""An adaptive queue under overload: within its bounds, changed seldom, put back exactly."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import labhelp
import pytest
from labhelp import LabGuest

pytestmark = labhelp.living("queues that adapt")

LOW, HIGH = 16, 400
# Several times what a router of the lab forwards.
RATE = 60000
LONGEST = 150
# Seconds to look on, once a shorter queue was seen.
MORE = 5

POLICY = f"""\
guest: "{{guest}}"
cpus: {{{{irq: auto, vcpu: {{cpu}}, vhost: {{cpu}}}}}}
scheduler:
  vcpu: {{{{class: rr, priority: {labhelp.PRIORITY}}}}}
  vhost: {{{{class: rr, priority: {labhelp.PRIORITY}}}}}
queue: {{{{macvtap: adaptive, min: {LOW}, max: {HIGH}}}}}
"""


def lengths(guest: LabGuest) -> list[int]:
    """txqueuelen of both devices."""
    return [int(labhelp.text(f"/sys/class/net/{guest.device(n)}/tx_queue_len")) for n in (0, 1)]


@pytest.fixture
def adaptive(
    restored: None, libvirt_guest: LabGuest, irq_cpus: set[int]
) -> tuple[LabGuest, list[int]]:
    """The daemon runs with an adaptive queue for the first router; the lengths before."""
    before = lengths(libvirt_guest)
    labhelp.POLICIES.mkdir(parents=True, exist_ok=True)
    cpu = min(set(range(labhelp.lab_cpus())) - irq_cpus)
    text = POLICY.format(guest=libvirt_guest.name, cpu=cpu)
    (labhelp.POLICIES / "adaptive.yaml").write_text(text)
    labhelp.start()
    assert lengths(libvirt_guest) == [HIGH, HIGH]
    return libvirt_guest, before


@contextlib.contextmanager
def overload(guest: LabGuest) -> Iterator[subprocess.Popen[str]]:
    """Traffic until the end of the block."""
    words = ["lab-traffic", "--guest", guest.name, "--rate", str(RATE), "--seconds", str(LONGEST)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, text=True) as traffic:
        try:
            yield traffic
        finally:
            traffic.terminate()


def shorter(guest: LabGuest, traffic: subprocess.Popen[str]) -> bool:
    """Whether a shorter queue is on trial or stays."""
    assert traffic.poll() is None, "the traffic has ended"
    found = lengths(guest)
    assert all(LOW <= length <= HIGH for length in found), found
    return min(found) < HIGH


def changes(guest: LabGuest) -> int:
    """Lengths of its first device that the daemon logged."""
    log = labhelp.daemon_log(1000)
    return sum("txqueuelen" in line and guest.device(0) in line for line in log.splitlines())


def test_overload_is_met_within_the_bounds_and_undone(
    adaptive: tuple[LabGuest, list[int]],
) -> None:
    guest, before = adaptive
    logged = changes(guest)
    began = time.monotonic()
    with overload(guest) as traffic:
        labhelp.wait_for(lambda: shorter(guest, traffic), "a shorter queue")
        shown = labhelp.vsrtune("show", guest.name).stdout
        end = time.monotonic() + MORE
        while time.monotonic() < end:
            shorter(guest, traffic)
            time.sleep(0.1)
    took = time.monotonic() - began
    dropped = labhelp.text(f"/sys/class/net/{guest.device(0)}/statistics/rx_dropped")
    assert int(dropped) > 0, "this was no overload"
    assert "Adaptive queues" in shown, shown
    labhelp.wait_for(lambda: lengths(guest) == [HIGH, HIGH], "long again after overload")
    # A second apart, and the way back.
    assert 0 < changes(guest) - logged <= took + 2
    labhelp.stop()
    assert lengths(guest) == before
    assert not Path("/run/vsrtune/queues.json").exists()


@labhelp.one_release("the journal and systemd", "trixie")
def test_killed_under_overload_then_recovered_and_undone(
    adaptive: tuple[LabGuest, list[int]],
) -> None:
    guest, before = adaptive
    first = labhelp.main_pid()
    with overload(guest) as traffic:
        labhelp.wait_for(lambda: shorter(guest, traffic), "a shorter queue")
        os.kill(first, signal.SIGKILL)
    labhelp.started_again(first)
    labhelp.wait_for(lambda: lengths(guest) == [HIGH, HIGH], "long again after the restart")
    labhelp.stop()
    assert lengths(guest) == before
