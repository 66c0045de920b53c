"""Guests move between macvtap and NAPI-macvlan and back: exactly, and whatever fails.

LAB_SWITCHES is how many times the guest goes there and back under traffic (2).
Something fails or is killed at every step, one way on each release.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import hoststate
import labhelp
import pytest
from labhelp import LabGuest
from test_travel import save, start

NET = Path("/sys/class/net")
LEDGER = Path("/var/lib/vsrtune/attach.jsonl")
SWITCHES = int(os.environ.get("LAB_SWITCHES") or "2")
RATE = 1000
SENDER = """
import socket, sys, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
address, burst = (sys.argv[1], 9), int(sys.argv[2]) // 100
while True:
    for _ in range(burst):
        sock.sendto(bytes(18), address)
    time.sleep(0.01)
"""
FORTH, BACK = "napi-macvlan", "macvtap"
# Changes of the host in a switch of a guest with two interfaces: two devices, two unplugs,
# two ups, two plugs, two definitions; back it is two unplugs, downs, plugs, definitions.
CHANGES = {FORTH: 10, BACK: 8}
# When libvirtd dies, as seen from the request it is about to get.
DEATHS = {
    "before": "{kill}; sleep 0.3",
    "at once": "(sleep 0.05; {kill}) &",
    "later": "(sleep 0.2; {kill}) &",
}


def attach(to: str, guest: LabGuest, *more: str, check: bool = True, fault: str = "") -> str:
    """Run it; what it printed. With ``check`` it must succeed, else it must fail."""
    done = labhelp.vsrtune("attach", "--to", to, guest.name, *more, check=False, fault=fault)
    text = done.stdout + done.stderr
    assert (done.returncode == 0) == check, f"exit {done.returncode}\n{text}"
    return text


def recover() -> str:
    return labhelp.vsrtune("attach", "--recover").stdout


def xml(guest: LabGuest, *which: str) -> str:
    """Its interfaces; libvirt gives a macvtap a new number each time."""
    text = hoststate.virsh("dumpxml", *which, guest.name)
    found = "\n".join(re.findall(r"<interface.*?</interface>", text, re.DOTALL))
    # libvirt numbers both as they come; one that is plugged beside another gets the next
    # number on bookworm, and there is no way to ask for a number.
    found = re.sub(r"<alias name='net\d+'/>", "<alias/>", found)
    return re.sub(r"'macvtap\d+'", "'macvtap'", found)


def picture(guest: LabGuest) -> str:
    """Definition, running interfaces, and the host devices with their queues."""
    links = sorted(
        f"{kind(name)} {labhelp.text(f'{NET}/{name}/address')} "
        f"{labhelp.text(f'{NET}/{name}/tx_queue_len')} {labhelp.text(f'{NET}/{name}/mtu')}"
        for name in devices()
    )
    return "\n".join([xml(guest), xml(guest, "--inactive"), *links])


def devices() -> list[str]:
    """Host devices of the guests' interfaces."""
    return sorted(e.name for e in NET.iterdir() if kind(e.name))


def kind(name: str) -> str:
    if (NET / name / "napi_macvtap").exists():
        return "napi_macvtap"
    return "macvtap" if (NET / name / "macvtap").exists() else ""


def kinds() -> set[str]:
    return {kind(name) for name in devices()}


def forwards(guest: LabGuest) -> None:
    labhelp.sh("lab-wait-forward", guest.name, "40")


def guest_addresses(guest: LabGuest) -> list[str]:
    return re.findall(r"<address type='pci'[^>]*>", xml(guest))


@pytest.fixture
def guest(libvirt_guest: LabGuest, guests: list[LabGuest]) -> Iterator[LabGuest]:
    """The router; the test fails when it is not what it was before."""
    if any(g.kind == "qemu" for g in guests):
        pytest.skip("a plain QEMU guest keeps its macvtaps on the lower devices")
    if labhelp.sh("modprobe", "-n", "napi_macvlan", check=False).returncode != 0:
        pytest.skip("this lab has no module napi_macvlan")
    before = picture(libvirt_guest)
    yield libvirt_guest
    if LEDGER.exists() and LEDGER.stat().st_size:
        labhelp.vsrtune("attach", "--recover", check=False)
    if "napi_macvtap" in kinds() or "nvt" in xml(libvirt_guest, "--inactive"):
        labhelp.vsrtune("attach", "--to", BACK, libvirt_guest.name, check=False)
    after = picture(libvirt_guest)
    forwards(libvirt_guest)
    assert after == before


def test_there_and_back_under_traffic(guest: LabGuest) -> None:
    before = picture(guest)
    addresses = guest_addresses(guest)
    outages: dict[str, list[float]] = {FORTH: [], BACK: []}
    for number in range(SWITCHES):
        for to in (FORTH, BACK):
            with traffic(guest):
                labhelp.wait_for(lambda: sends(guest), f"{guest.name} forwards traffic", 30)
                with longest_silence() as seconds:
                    attach(to, guest)
                    forwards(guest)
            outages[to].append(seconds[-1])
            assert guest_addresses(guest) == addresses
            assert kinds() == ({"napi_macvtap"} if to == FORTH else {"macvtap"}), number
            if to == BACK:
                assert picture(guest) == before
    for to, seconds in outages.items():
        print(
            f"{to}: {len(seconds)} switches, outage median {statistics.median(seconds):.2f} s, "
            f"worst {max(seconds):.2f} s"
        )


@contextlib.contextmanager
def traffic(guest: LabGuest) -> Iterator[None]:
    """Frames for the guest to forward, for as long as the block takes."""
    sender = subprocess.Popen(
        ["nsenter", "--net=/run/netns/gen", "python3", "-c", SENDER,
         f"10.20.{guest.index}.100", str(RATE)]
    )  # fmt: skip
    try:
        yield
    finally:
        sender.kill()
        sender.wait()


@contextlib.contextmanager
def longest_silence() -> Iterator[list[float]]:
    """Ever longer times, in seconds, in which the guests have sent less than half of the traffic
    that they get."""
    found = [0.0]
    known: dict[str, int] = {}
    last = time.monotonic()

    def sample() -> None:
        nonlocal last
        now, sent = time.monotonic(), 0
        for name in devices():
            with contextlib.suppress(OSError):
                count = int((NET / name / "statistics" / "tx_packets").read_text())
                sent += max(0, count - known.get(name, 0))
                known[name] = count
        if sent > RATE * 0.02 / 2:
            found.append(max(found[-1], now - last))
            last = now

    with labhelp.repeating(sample, 0.02):
        yield found


def sends(guest: LabGuest) -> bool:
    """Whether the guest sends frames on its second NIC."""
    path = NET / guest.device(1) / "statistics" / "tx_packets"
    first = int(path.read_text())
    time.sleep(0.5)
    return int(path.read_text()) > first + RATE * 0.1


@labhelp.one_release("what the steps of a switch are", "trixie")
def test_queues_and_queue_length_are_kept(guest: LabGuest) -> None:
    device = guest.device(0)
    before = labhelp.text(f"{NET}/{device}/tx_queue_len")
    labhelp.sh("ip", "link", "set", device, "txqueuelen", "321")
    workers = len(guest.workers())
    attach(FORTH, guest)
    assert labhelp.text(f"{NET}/{guest.device(0)}/tx_queue_len") == "321"
    assert len(guest.workers()) == workers
    attach(BACK, guest)
    assert labhelp.text(f"{NET}/{guest.device(0)}/tx_queue_len") == "321"
    labhelp.sh("ip", "link", "set", guest.device(0), "txqueuelen", before)


@labhelp.one_release("what the steps of a switch are", "trixie")
def test_a_dry_run_changes_nothing(guest: LabGuest) -> None:
    before = picture(guest)
    told = attach(FORTH, guest, "--dry-run")
    assert "unplug" in told
    assert picture(guest) == before
    assert not LEDGER.exists() or not LEDGER.stat().st_size


@labhelp.one_release("devices made at the start of a host")
def test_a_guest_started_anew_finds_its_devices(guest: LabGuest) -> None:
    """Also when the host has lost them, as at its start."""
    attach(FORTH, guest)
    labhelp.stop_guest(guest)
    assert kinds() == {"napi_macvtap"}
    for name in devices():
        labhelp.sh("ip", "link", "delete", name)
    # In its sandbox, with no module loaded yet.
    labhelp.sh("modprobe", "-r", "napi_macvlan", check=False)
    labhelp.sh("systemctl", "restart", "vsrtune-devices")
    log = labhelp.sh("journalctl", "-u", "vsrtune-devices", "-o", "cat", "-n", "20").stdout
    assert "made nvt" in log
    labhelp.start_guest(guest)
    forwards(guest)
    attach(BACK, guest)


@labhelp.one_release("devices made at the start of a host")
def test_a_saved_guest_comes_back_on_its_devices(guest: LabGuest) -> None:
    """As at a reboot, before which libvirt-guests has saved it: its memory names the devices."""
    attach(FORTH, guest)
    before = picture(guest)
    save(guest)
    try:
        assert f"virsh start {guest.name}" in attach(BACK, guest, check=False)
        for name in devices():
            labhelp.sh("ip", "link", "delete", name)
        labhelp.sh("systemctl", "restart", "vsrtune-devices")
    finally:
        start(guest)
    forwards(guest)
    assert picture(guest) == before
    attach(BACK, guest)


@pytest.mark.parametrize("to", labhelp.shared([FORTH, BACK]))
def test_a_failure_is_taken_back(guest: LabGuest, to: str) -> None:
    if to == BACK:
        attach(FORTH, guest)
    before = picture(guest)
    for n in range(1, CHANGES[to] + 1):
        told = attach(to, guest, check=False, fault=f"fail:{n}")
        assert "everything is as it was before" in told, f"{n}: {told}"
        assert picture(guest) == before, n
        forwards(guest)


@labhelp.one_release("what the steps of a switch are")
def test_an_interruption_is_taken_back_at_once(guest: LabGuest) -> None:
    """Ctrl-C before a device is made, while the guest lets go, and before it gets a new one."""
    before = picture(guest)
    for n in (2, 4, 7):
        told = attach(FORTH, guest, check=False, fault=f"command:{n}:kill -INT $PPID")
        assert "interrupted (SIGINT); everything is as it was before" in told, f"{n}: {told}"
        assert picture(guest) == before, n
        forwards(guest)


@labhelp.one_release("what QEMU and the guest make of a request", "trixie")
def test_what_is_released_late_comes_back(guest: LabGuest) -> None:
    """A guest that stands still releases nothing in time. QEMU keeps the request, and the guest
    follows it when it runs again."""
    before = picture(guest)
    labhelp.sh("virsh", "suspend", guest.name)
    try:
        told = attach(FORTH, guest, check=False)
        assert picture(guest) == before
    finally:
        labhelp.sh("virsh", "resume", guest.name)
    assert f"{guest.name} may still release" in told
    labhelp.wait_for(lambda: not devices(), "the guest has released both interfaces", 60)
    assert recover().count("was released late") == 2
    assert picture(guest) == before
    assert not LEDGER.read_text()


@pytest.mark.parametrize("to", labhelp.shared([BACK, FORTH]))
def test_a_kill_is_recovered(guest: LabGuest, to: str) -> None:
    if to == BACK:
        attach(FORTH, guest)
    before = picture(guest)
    for n in range(1, CHANGES[to] + 1):
        attach(to, guest, check=False, fault=f"kill:{n}")
        assert "was taken back" in recover(), n
        assert picture(guest) == before, n
        forwards(guest)


@pytest.mark.parametrize(
    ("to", "when"),
    labhelp.shared(
        [
            (FORTH, "at once"), (FORTH, "before"), (FORTH, "later"),
            (BACK, "later"), (BACK, "before"), (BACK, "at once"),
        ]
    ),
)  # fmt: skip
def test_libvirtd_dies_in_between(guest: LabGuest, to: str, when: str) -> None:
    """Killed right before it is asked to unplug, to plug, and to define, or while it does
    so; it comes again, and the switch goes on, or is taken back."""
    if to == BACK:
        attach(FORTH, guest)
    kill = "systemctl kill -s KILL libvirtd; systemctl reset-failed libvirtd"
    moments = {FORTH: (7, 3, 9, 8, 4), BACK: (5, 1, 7, 6, 2)}[to]
    for n in moments:
        before = picture(guest)
        fault = f"command:{n}:{DEATHS[when].format(kill=kill)}"
        done = labhelp.vsrtune("attach", "--to", to, guest.name, check=False, fault=fault)
        print(n, done.returncode, done.stderr)
        if done.returncode:
            assert "everything is as it was before" in done.stderr
            if "started anew" in done.stderr:  # libvirt ends a guest that it cannot take over
                labhelp.sh("lab-wait-forward", guest.name, "120")
            assert picture(guest) == before
        else:
            assert kinds() == {"napi_macvtap" if to == FORTH else "macvtap"}
            forwards(guest)
            attach(BACK if to == FORTH else FORTH, guest)
        forwards(guest)


# What a libvirtd leaves that dies before netdev_add, or between that and device_add: a macvtap, up,
# that QEMU holds open and that no domain names. Lower device, MAC and guest are its words.
GIVE = """
ip link add link "$1" name lost0 address "$2" type macvtap mode bridge
ip link set lost0 up
tap=/dev/tap$(cat /sys/class/net/lost0/ifindex)
udevadm settle
exec 9<>"$tap"
virsh qemu-monitor-command "$3" --pass-fds 9 '{"execute":"getfd","arguments":{"fdname":"lost"}}'
"""
ADD = """
virsh qemu-monitor-command "$3" \
    '{"execute":"netdev_add","arguments":{"type":"tap","id":"hostnet7","fd":"lost"}}'
"""


@pytest.mark.parametrize("commands", [GIVE, GIVE + ADD], ids=["descriptor", "back end"])
@labhelp.one_release("what libvirt forgets", "trixie")
def test_what_a_dead_libvirtd_forgot_is_cleared_away(
    guest: LabGuest, tmp_path: Path, commands: str
) -> None:
    before = picture(guest)
    attach(FORTH, guest)
    script, log = tmp_path / "forget", tmp_path / "log"
    script.write_text(commands)
    words = f"p0 {guest.macs[0]} {guest.name}"
    # Right before the first plug.
    attach(BACK, guest, fault=f"command:5:sh -ex {script} {words} > {log} 2>&1")
    assert log.read_text().count('"return":{}') == commands.count("virsh"), log.read_text()
    assert not (NET / "lost0").exists()
    assert picture(guest) == before
    forwards(guest)


@labhelp.one_release("workers after a switch, kernel threads here")
def test_the_daemon_tunes_the_new_workers(
    guest: LabGuest, irq_cpus: set[int], guests: list[LabGuest]
) -> None:
    labhelp.write_policies("auto")
    labhelp.start()
    for to in (FORTH, BACK):
        told = attach(to, guest)
        assert "daemon tunes" in told
        labhelp.wait_for(
            lambda: labhelp.untuned_lines(guest, irq_cpus) == [], f"{guest.name} is tuned", 60
        )
        forwards(guest)
    labhelp.stop()


@labhelp.one_release("what the steps of a switch are", "trixie")
def test_the_daemon_recovers_at_its_start(guest: LabGuest) -> None:
    before = picture(guest)
    attach(FORTH, guest, check=False, fault="kill:7")
    assert picture(guest) != before
    labhelp.start()
    labhelp.wait_for(lambda: picture(guest) == before, "the daemon took the switch back", 60)
    labhelp.stop()
    forwards(guest)


@labhelp.one_release("what the steps of a switch are", "trixie")
def test_a_policy_switches_and_a_stop_switches_back(guest: LabGuest) -> None:
    before = picture(guest)
    text = 'guest: "*"\nprofile: none\nattachment: napi-macvlan\n'
    (labhelp.POLICIES / "attach.yaml").write_text(text)
    assert "unplug" in labhelp.vsrtune("plan", "-v").stdout
    assert labhelp.vsrtune("verify", check=False).returncode == 3
    labhelp.start()
    labhelp.wait_for(lambda: kinds() == {"napi_macvtap"}, "the policy is followed", 60)
    forwards(guest)
    assert labhelp.vsrtune("verify", check=False).returncode == 0
    # Shut down it is asked for as before, and starts on what it had.
    labhelp.stop_guest(guest)
    defined = xml(guest, "--inactive")
    stopped = time.time()
    labhelp.sh("systemctl", "reload", "vsrtune")
    labhelp.wait_for(lambda: labhelp.last_pass() > stopped, "the daemon has looked since", 30)
    labhelp.start_guest(guest)
    forwards(guest)
    assert xml(guest, "--inactive") == defined
    assert kinds() == {"napi_macvtap"}
    labhelp.stop()
    assert picture(guest) == before


def doctor() -> tuple[int, set[tuple[str, str]], list[dict[str, str]]]:
    """The exit code, (check, level) of the findings, and these."""
    done = labhelp.vsrtune("doctor", "--json", check=False)
    found = json.loads(done.stdout)["findings"]
    return done.returncode, {(f["check"], f["level"]) for f in found}, found


@labhelp.one_release("what the steps of a switch are", "trixie")
def test_doctor_knows_the_module_and_what_is_wrong(guest: LabGuest) -> None:
    attach(FORTH, guest)
    code, levels, _ = doctor()
    assert ("module", "ok") in levels
    assert ("version", "ok") in levels
    assert {level for check, level in levels if check == "lower devices"} == {"ok"}
    # Nothing makes the devices again after a reboot here.
    assert ("switches", "error") in levels
    assert code == 1
    attach(BACK, guest)
    code, levels, found = doctor()
    assert [f for f in found if f["level"] == "error"] == []
    # Every value of a live host that only the doctor reads is one it could read.
    assert {"backlog", "realtime groups", "qdisc", "isolated cpus"} <= {c for c, _ in levels}
    assert ("stray opens", "ok") in levels
    # A ring that takes nothing, seen on a device of the running guest.
    device = guest.device(0)
    labhelp.sh("ip", "link", "set", device, "txqueuelen", "0")
    try:
        code, levels, found = doctor()
    finally:
        labhelp.sh("ip", "link", "set", device, "txqueuelen", "500")
    assert code == 1
    (queue,) = [f for f in found if f["check"] == "queue length"]
    assert queue["evidence"] == f"/sys/class/net/{device}/tx_queue_len: 0"
    assert "txqueuelen 500" in queue["hint"]
    # Somebody else opens the guest's tap.
    index = labhelp.text(f"/sys/class/net/{device}/ifindex")
    with open(f"/dev/tap{index}", "r+b", buffering=0):
        _, _, found = doctor()
    (stray,) = [f for f in found if f["check"] == "stray opens"]
    assert (stray["level"], f"process {os.getpid()} " in stray["what"]) == ("warning", True)
