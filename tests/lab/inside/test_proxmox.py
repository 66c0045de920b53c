"""A router as `qm start` of Proxmox VE runs it: a QEMU of root's in a scope of qemu.slice, with taps
behind firewall bridges. Proxmox VE itself is not there, nor the option -id, which its QEMU alone
has."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hoststate
import labhelp
import pytest
from labhelp import LabGuest

VMID = 101
REF = f"proxmox:{VMID}"
RUN = Path("/run/qemu-server")
SCOPES = Path("/sys/fs/cgroup/qemu.slice")
POLICY = f"""\
guest: "proxmox:*"
profile: none
cpus: {{irq: "0", vcpu: auto, vhost: auto, emulator: auto}}
scheduler:
  vcpu: {{class: rr, priority: {labhelp.PRIORITY}}}
  vhost: {{class: rr, priority: {labhelp.PRIORITY}}}
"""
# The work of qm's script for a tap whose NIC has the firewall on.
SCRIPT = """#!/bin/sh -e
id=${1#tap} nic=${1##*i}
vmid=${id%%i*}
ip link add "fwbr$id" type bridge forward_delay 0
ip link add "fwln$id" type veth peer name "fwpr${vmid}p$nic"
ip link set "$1" master "fwbr$id"
ip link set "fwln$id" master "fwbr$id"
ip link set "fwpr${vmid}p$nic" master "vmbr$nic"
for device in "$1" "fwln$id" "fwpr${vmid}p$nic" "fwbr$id"; do ip link set "$device" up; done
"""
IDLE = ("-S", "-nodefaults", "-display", "none", "-m", "16", "-daemonize")
QEMU = ("/usr/bin/qemu-system-x86_64", "-machine", "type=pc,accel=tcg")


def qm_start(vmid: int, *words: str) -> int:
    """Start a QEMU with a command line like that of qm, in the scope that systemd makes for root;
    its pid."""
    pid_file = RUN / f"{vmid}.pid"
    labhelp.sh(
        "systemd-run", "--quiet", "--scope", "--slice=qemu", f"--unit={vmid}",
        *QEMU, "-chardev", f"socket,id=qmp,path=/var{RUN}/{vmid}.qmp,server=on,wait=off",
        "-mon", "chardev=qmp,mode=control", "-pidfile", f"/var{pid_file}", *words,
    )  # fmt: skip
    return int(pid_file.read_text())


def of_the_router(guest: LabGuest) -> list[str]:
    """The arguments that make it this router."""
    script = f"script={RUN}/bridge,downscript=no"
    taps = [f"ifname=tap{VMID}i{nic},{script}" for nic in (0, 1)]
    console = Path("/run/lab/log") / str(VMID)
    name = f"{guest.name},debug-threads=on"
    return [*labhelp.router_words(guest, name, console, taps), "-daemonize"]


@pytest.fixture(scope="module")
def router(guests: list[LabGuest]) -> Iterator[LabGuest]:
    """The lab's only router, which no libvirt runs now."""
    if len(guests) != 1 or guests[0].kind != "libvirt":
        pytest.skip("other routers keep their macvtaps on the lower devices")
    (guest,) = guests
    labhelp.stop_guest(guest)
    RUN.mkdir(exist_ok=True)
    (RUN / "bridge").write_text(SCRIPT)
    (RUN / "bridge").chmod(0o755)
    try:
        for nic in (0, 1):
            labhelp.sh(
                "ip", "link", "add", f"vmbr{nic}", "up", "type", "bridge", "forward_delay", "0"
            )
            labhelp.sh("ip", "link", "set", f"p{nic}", "master", f"vmbr{nic}")
        qm_start(VMID, *of_the_router(guest))
        labhelp.sh("lab-wait-forward", guest.name)
        yield guest
    finally:
        labhelp.sh("systemctl", "kill", "-s", "KILL", f"{VMID}.scope", check=False)
        labhelp.wait_for(lambda: not guest.runs, "the router is gone")
        for nic in (0, 1):
            for device in (f"fwln{VMID}i{nic}", f"fwbr{VMID}i{nic}", f"vmbr{nic}"):
                labhelp.sh("ip", "link", "del", device, check=False)
        labhelp.start_guest(guest)


def write_policy() -> None:
    (labhelp.POLICIES / "proxmox.yaml").write_text(POLICY)


def shown() -> dict[str, Any]:
    """The guests that `vsrtune show` lists, by the name of a policy."""
    return {f"{g['source']}:{g['name']}": g for g in labhelp.show()["guests"]}


def tids(guest: dict[str, Any], role: str) -> list[int]:
    return [t["key"]["tid"] for t in guest["threads"] if t["role"] == role]


def vcpus(vmid: int) -> list[int]:
    """As QEMU itself says."""
    answer = labhelp.qmp(str(RUN / f"{vmid}.qmp"), "query-cpus-fast")
    return [cpu["thread-id"] for cpu in answer["return"]]


def data_plane(guest: LabGuest) -> list[int]:
    return [*vcpus(VMID), *guest.workers()]


def untuned(guest: LabGuest, irq: set[int]) -> list[str]:
    """What is not as POLICY says."""
    return [
        f"{tid}: {labhelp.mask(tid)} {hoststate.sched(tid)}"
        for tid in data_plane(guest)
        if labhelp.mask(tid) & irq
        or len(labhelp.mask(tid)) != 1
        or not hoststate.sched(tid).startswith(labhelp.realtime_start())
    ]


def test_found_planned_tuned_under_traffic_and_undone(
    router: LabGuest, restored: None, irq_cpus: set[int]
) -> None:
    write_policy()
    (ref, found), *others = shown().items()
    assert (ref, found["pid"], found["problems"], others) == (REF, router.pid, [], [])
    assert tids(found, "vcpu") == vcpus(VMID)
    assert sorted(tids(found, "vhost")) == router.workers()
    assert len(router.workers()) == 2
    for nic, interface in enumerate(found["interfaces"]):
        names = (
            f"fwbr{VMID}i{nic}",
            f"fwln{VMID}i{nic}",
            f"fwpr{VMID}p{nic}",
            f"vmbr{nic}",
            f"p{nic}",
        )
        assert (interface["target"], interface["kind"]) == (f"tap{VMID}i{nic}", "tap")
        assert interface["lower"] == list(names)
        assert interface["vhost"]
    planned = json.loads(labhelp.vsrtune("plan", "--json").stdout)
    assert planned["refusals"] == []
    assert len(planned["actions"]) >= 2 * len(data_plane(router))

    labhelp.start()
    assert untuned(router, irq_cpus) == []
    labhelp.forwards(router, data_plane(router), irq_cpus)
    assert "\nno drift" in f"\n{labhelp.vsrtune('verify').stdout}"
    told = labhelp.vsrtune("doctor", check=False).stdout
    assert "p0 has no interrupts of its own" in told
    assert "fwbr" not in told
    labhelp.stop()
    for tid in data_plane(router):
        assert hoststate.sched(tid).startswith("policy=0 flags=0 nice=0 priority=0 ")


@labhelp.one_release("the journal", "trixie")
def test_killed_after_each_write_then_undone(
    router: LabGuest, restored: None, irq_cpus: set[int]
) -> None:
    write_policy()
    labhelp.killed_after_each_write_then_undone()


@contextlib.contextmanager
def running(pid: int) -> Iterator[int]:
    try:
        yield pid
    finally:
        os.kill(pid, 9)
        labhelp.wait_for(lambda: not Path(f"/proc/{pid}").exists(), f"process {pid} is gone")


def pretender(tmp_path: Path, name: str, *options: str) -> int:
    """A QEMU outside Proxmox VE's scopes that says what its guest's says; its pid."""
    pid_file = tmp_path / f"{name}.pid"
    labhelp.sh(
        "systemd-run", "--quiet", *options, *QEMU, *IDLE, "-name", f"{name},debug-threads=on",
        "-pidfile", str(pid_file),
    )  # fmt: skip
    labhelp.wait_for(pid_file.exists, f"{name} runs")
    return int(pid_file.read_text())


@labhelp.one_release("who is believed, whatever the kernel", "trixie")
def test_pretenders_beside_it(
    router: LabGuest, restored: None, irq_cpus: set[int], tmp_path: Path
) -> None:
    write_policy()
    labhelp.start()
    before = {tid: hoststate.sched(tid) for tid in data_plane(router)}
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    scope = ("--scope", "--slice=qemu", "--uid=nobody", "--unit=103")
    with contextlib.ExitStack() as stack:
        # Of another user, in a scope as Proxmox VE's; of root, in another cgroup.
        his = stack.enter_context(running(pretender(tmp_path, "his", *scope)))
        ours = stack.enter_context(running(pretender(tmp_path, "ours", "--scope", "--unit=104")))
        found = labhelp.show()
        assert {(g["source"], g["name"], g["pid"]) for g in found["guests"]} == {
            ("proxmox", str(VMID), router.pid),
            ("qemu", "ours", ours),
        }
        (stranger,) = found["strangers"]
        assert stranger["pid"] == his
        assert "the scope of Proxmox VE's guest 103, and is user" in stranger["why"]
        done = labhelp.last_pass()
        labhelp.wait_for(lambda: labhelp.last_pass() > done, "one more pass")
        for tid in [int(t) for p in (his, ours) for t in os.listdir(f"/proc/{p}/task")]:
            assert hoststate.sched(tid).startswith("policy=0 ")
            assert len(labhelp.mask(tid)) == labhelp.lab_cpus()
        assert {tid: hoststate.sched(tid) for tid in before} == before
    labhelp.stop()

    # Two in one scope, which root alone can bring about.
    with running(pretender(tmp_path, "twin", "--scope", "--unit=105")) as twin:
        (SCOPES / f"{VMID}.scope" / "cgroup.procs").write_text(str(twin))
        (refusal, *_) = json.loads(labhelp.vsrtune("plan", "--json", check=False).stdout)[
            "refusals"
        ]
        assert f"2 processes run in /qemu.slice/{VMID}.scope" in refusal["reason"]
        assert refusal["guest"] == REF
    assert json.loads(labhelp.vsrtune("plan", "--json").stdout)["refusals"] == []
