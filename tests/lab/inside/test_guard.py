"""The daemon ends a standstill that its own tuning made, and leaves alone what is none.

Two vcpus of one router and its vhost workers share CPU 1 under FIFO. When its first frames
come, the vcpus spin for each other and nobody else there runs: not one frame is forwarded.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hoststate
import labhelp
import pytest
from labhelp import LabGuest

CPU = 1
FIFO, RR = 1, 2
# Seconds from the detection, of which a line of the log tells, to forwarding.
SOON = 2.0


def policy(guest: LabGuest, cls: str) -> str:
    """Every vcpu and worker on one CPU, in one class."""
    return f"""\
guest: "{guest.name}"
profile: none
standstill: accept
cpus: {{irq: 0, vcpu: {CPU}, vhost: {CPU}}}
scheduler:
  vcpu: {{class: {cls}, priority: {labhelp.PRIORITY}}}
  vhost: {{class: {cls}, priority: {labhelp.PRIORITY}}}
"""


def tune(guest: LabGuest, cls: str) -> None:
    """Start the daemon with the policy."""
    (labhelp.POLICIES / "guard.yaml").write_text(policy(guest, cls))
    labhelp.start()


def boot(guest: LabGuest) -> None:
    """Start a router that is off; returns when it is up and has seen no frame."""
    console = labhelp.console(guest.index)
    labhelp.sh("virsh", "-q", "start", "--", guest.name)
    labhelp.wait_for(
        lambda: console.read_text(errors="replace").count("router: eth") >= 2, "it has booted"
    )


@pytest.fixture
def fresh(untuned: None, libvirt_guest: LabGuest) -> LabGuest:
    """A router that has booted on an untuned host and has seen no frame."""
    if labhelp.lab_cpus() != 2 or len(libvirt_guest.vcpus()) != 2:
        pytest.skip("needs 2 CPUs and a guest of 2 vcpus")
    labhelp.stop_guest(libvirt_guest)
    boot(libvirt_guest)
    return libvirt_guest


@pytest.fixture
def busy(fresh: LabGuest) -> Iterator[LabGuest]:
    """Such a router, whose two vcpus never sleep."""
    path = Path("/run/lab/guard.xml")
    text = hoststate.virsh("dumpxml", "--inactive", fresh.name)
    assert "busy=0" in text

    def define(definition: str) -> None:
        path.write_text(definition)
        labhelp.sh("virsh", "-q", "define", str(path))

    define(text.replace("busy=0", "busy=2"))
    labhelp.stop_guest(fresh)
    boot(fresh)
    yield fresh
    labhelp.stop()
    define(text)
    labhelp.stop_guest(fresh)
    labhelp.start_guest(fresh)


def frames(guest: LabGuest) -> tuple[int, int]:
    """Frames that came for a router on its first NIC, and that it sent on its second."""
    return tuple(
        int(labhelp.text(f"/sys/class/net/{guest.device(nic)}/statistics/{name}"))
        for nic, name in ((0, "rx_packets"), (1, "tx_packets"))
    )  # type: ignore[return-value]


def until_forwarding(guest: LabGuest, sending: subprocess.Popen[str]) -> float:
    """Seconds from the first frames of the traffic until the router forwards some."""
    came, went = frames(guest)
    began = None
    while True:
        assert sending.poll() is None, "the traffic ended, and nothing was forwarded"
        now_came, now_went = frames(guest)
        now = time.monotonic()
        if began is None and now_came > came:
            began = now
        if began is not None and now_went >= went + 20:
            return now - began
        time.sleep(0.02)


@contextmanager
def sampled(guest: LabGuest) -> Iterator[list[tuple[float, int]]]:
    """How many frames the router has sent, by time (seconds since the epoch)."""
    found: list[tuple[float, int]] = []
    path = Path(f"/sys/class/net/{guest.device(1)}/statistics/tx_packets")

    def look() -> None:
        found.append((time.time(), int(path.read_text())))

    with labhelp.repeating(look, 0.02):
        yield found


def classes(guest: LabGuest) -> set[int]:
    """The scheduling policies of its vcpus and workers."""
    found = [hoststate.sched(tid) for tid in guest.data_plane()]
    return {int(text.split()[0].removeprefix("policy=")) for text in found}


def metric(name: str) -> float:
    """The sum of a metric's samples."""
    return sum(labhelp.samples(name))


def told(guest: LabGuest) -> str:
    """What the log says of steps."""
    return labhelp.sh(
        "journalctl", "-u", "vsrtune", "--no-pager", "-o", "cat", f"VSRTUNE_GUEST={guest.name}",
        "VSRTUNE_STEP=rr", "+", f"VSRTUNE_GUEST={guest.name}", "VSRTUNE_STEP=other",
        check=False,
    ).stdout  # fmt: skip


def told_at(guest: LabGuest, since: float) -> float | None:
    """When the log first told of a step after ``since``, both seconds since the epoch."""
    text = labhelp.sh(
        "journalctl", "-u", "vsrtune", "-o", "json", "--since", f"@{since:.0f}",
        f"VSRTUNE_GUEST={guest.name}", "PRIORITY=3",
    ).stdout  # fmt: skip
    records = [json.loads(line) for line in text.splitlines()]
    times = [int(r["__REALTIME_TIMESTAMP"]) / 1e6 for r in records if "VSRTUNE_STEP" in r]
    return min((at for at in times if at >= since), default=None)


def test_a_standstill_ends_by_itself_and_stays_ended(busy: LabGuest, restored: None) -> None:
    """The vcpus of a busy router never sleep, so under fifo its workers never run."""
    guest = busy
    before = told(guest)
    with labhelp.traffic(guest, 3000, 300, "--flows", "8") as sending:
        until_forwarding(guest, sending)
        begin = time.time()
        with sampled(guest) as sent:
            tune(guest, "fifo")
            at = labhelp.wait_for(lambda: told_at(guest, begin), "the log tells of a step", 60)
            until_forwarding(guest, sending)
        then = max(count for when, count in sent if when <= at)
        ended = min(when for when, count in sent if when > at and count >= then + 20) - at
        print(f"{guest.name}: forwards {ended:.2f} s after the detection")
        labhelp.wait_for(lambda: metric("vsrtune_guest_step_level") >= 1, "the level is told")
    assert ended < SOON
    assert FIFO not in classes(guest)
    assert len(told(guest)) > len(before)
    assert metric("vsrtune_step_downs_total") >= 1
    check_told(guest)
    first = labhelp.main_pid()
    os.kill(first, signal.SIGKILL)
    labhelp.started_again(first)
    labhelp.wait_for(lambda: metric("vsrtune_reconcile_last_timestamp_seconds"), "a pass")
    assert metric("vsrtune_guest_step_level") >= 1
    assert FIFO not in classes(guest)
    check_told(guest)
    assert metric("vsrtune_step_downs_total") == 0
    labhelp.sh("systemctl", "reload", "vsrtune")
    labhelp.wait_for(
        lambda: metric("vsrtune_step_downs_total") >= 1,
        "tuned by its policy, and stepped down again",
    )


def check_told(guest: LabGuest) -> None:
    """verify and show say that the guest is stepped down."""
    verified = labhelp.vsrtune("verify", check=False)
    assert verified.returncode == 3, verified.stdout + verified.stderr
    # On a slow host it may have come further down by now, to "all settings".
    assert verified.stdout.startswith(f"{guest.name}: ")
    assert ": stepped down to " in verified.stdout
    assert "Stepped down" in labhelp.vsrtune("show", "--guest", guest.name).stdout
    assert "stepped down to" in labhelp.vsrtune("plan", "--json").stdout


def test_it_steps_down_again_after_a_reload(busy: LabGuest) -> None:
    """The router is started under the daemon: whether its vcpus spin while it boots or with
    its first frames, it comes to forward."""
    guest = busy
    tune(guest, "fifo")
    for _ in range(2):
        # A slow host steps it down again before the reload returns.
        begin = time.time()
        labhelp.sh("systemctl", "reload", "vsrtune")
        labhelp.stop_guest(guest)
        boot(guest)
        labhelp.wait_for(
            lambda: metric("vsrtune_guest_tuned") == 1 or metric("vsrtune_guest_step_level") >= 1,
            "it is tuned",
        )
        with labhelp.traffic(guest, 300, 30, "--flows", "8") as sending:
            print(f"forwards after {until_forwarding(guest, sending):.2f} s")
        labhelp.wait_for(lambda: metric("vsrtune_guest_step_level") >= 1, "the level is told")
        assert told_at(guest, begin)


def test_a_paused_router_keeps_its_tuning(fresh: LabGuest) -> None:
    guest = fresh
    tune(guest, "rr")
    with labhelp.traffic(guest, 3000, 60, "--flows", "8") as sending:
        until_forwarding(guest, sending)
        labhelp.sh("virsh", "-q", "suspend", "--", guest.name)
        time.sleep(4)
        labhelp.sh("virsh", "-q", "resume", "--", guest.name)
        until_forwarding(guest, sending)
        os.kill(guest.pid, signal.SIGSTOP)
        time.sleep(4)
        os.kill(guest.pid, signal.SIGCONT)
        until_forwarding(guest, sending)
    print(labhelp.daemon_log(15))
    assert metric("vsrtune_step_downs_total") == 0
    assert classes(guest) == {RR}
