"""Guests of Proxmox VE: plain QEMUs that a scope of root's identifies, and pretenders beside them."""

from __future__ import annotations

import pytest
import recorded_hosts
from hosttree import HostTree

from vsrtune.doctor import host_checks
from vsrtune.doctor.model import Case, Facts
from vsrtune.host.filesystem import FileStat
from vsrtune.model.guest import Guest, NicKind, Role
from vsrtune.model.snapshot import Snapshot
from vsrtune.observe.observer import Observer
from vsrtune.observe.trust import MONITORS
from vsrtune.plan.planner import plan
from vsrtune.plan.starter_policy import policy_name
from vsrtune.policy.matching import qemu_filter
from vsrtune.policy.model import Policy
from vsrtune.policy.parser import parse

SCOPE = "/qemu.slice/101.scope"
SOCKET = f"{MONITORS}/101.qmp"
NOBODY = 65534
PCI = "pci0000:00/0000:00:05.0"
POLICY = parse("guest: proxmox:101\ncpus: {vcpu: auto, vhost: auto}\nprofile: none\n", "p.yaml")


def started(
    tree: HostTree, pid: int, scope: str, *more: str, uid: int = 0, names: str = ",debug-threads=on"
) -> None:
    """A QEMU with the command line that qm gives it, one NIC, and its threads."""
    tree.homes[pid] = scope
    tree.qemu(
        pid, "-id", "101", "-name", f"fw{names}",
        "-chardev", "socket,id=qmp,path=/var/run/qemu-server/101.qmp,server=on,wait=off",
        "-mon", "chardev=qmp,mode=control", "-smp", "1,sockets=1,cores=1,maxcpus=1",
        "-netdev", "type=tap,id=net0,ifname=tap101i0,script=no,downscript=no,vhost=on",
        "-device", "virtio-net-pci,mac=BC:24:11:00:00:01,netdev=net0,bus=pci.0,id=net0", *more,
        uid=uid,
    )  # fmt: skip
    tree.thread(pid, pid + 1, f"vhost-{pid}", start=101, uid=uid)
    vcpu = "CPU 0/KVM" if names else "kvm"
    tree.thread(pid, pid + 2, vcpu, start=102, uid=uid)
    tree.fd(pid, 12, "/dev/net/tun", "pos:\t0\niff:\ttap101i0\n").fd(pid, 13, "/dev/vhost-net")


def port(tree: HostTree, name: str, index: int, bridge: str, has: str = "", pci: str = "") -> None:
    tree.device(name, index, has=f"brport {has}", pci=pci)
    tree.link(f"/sys/devices/{pci or 'virtual'}/net/{name}/master", f"../{bridge}")


def linked(tree: HostTree, one: str, other: str, indexes: tuple[int, int]) -> None:
    for name, peer in ((one, indexes[1]), (other, indexes[0])):
        tree.file(f"/sys/devices/virtual/net/{name}/iflink", f"{peer}\n")


def firewalled(tree: HostTree, vmid: int, first: int) -> None:
    """The bridge of one tap, and its link to vmbr0."""
    port(tree, f"tap{vmid}i0", first, f"fwbr{vmid}i0", "tun_flags")
    port(tree, f"fwln{vmid}i0", first + 1, f"fwbr{vmid}i0")
    port(tree, f"fwpr{vmid}p0", first + 2, "vmbr0")
    linked(tree, f"fwln{vmid}i0", f"fwpr{vmid}p0", (first + 1, first + 2))
    ports = f"lower_fwln{vmid}i0 lower_tap{vmid}i0"
    tree.device(f"fwbr{vmid}i0", first + 3, devtype="bridge", has=f"bridge {ports}")


@pytest.fixture
def tree() -> HostTree:
    """A node with a guest, and a second one's bridge beside its own."""
    tree = HostTree().host()
    firewalled(tree, 101, 10)
    firewalled(tree, 102, 20)
    ports = "lower_eno1 lower_fwpr101p0 lower_fwpr102p0"
    tree.device("vmbr0", 5, devtype="bridge", has=f"bridge {ports}")
    port(tree, "eno1", 2, "vmbr0", pci=PCI)
    started(tree, 50, SCOPE)
    return tree


def observed(tree: HostTree, *policies: Policy) -> Snapshot:
    return Observer(tree.root(), None, qemu_filter=lambda: qemu_filter(policies)).observe()


def only(snapshot: Snapshot) -> Guest:
    (guest,) = snapshot.guests
    return guest


def test_a_guest_behind_the_firewall(tree: HostTree) -> None:
    snapshot = observed(tree, POLICY)
    guest = only(snapshot)
    assert (guest.ref, guest.name, guest.pid, guest.problems) == ("proxmox:101", "101", 50, ())
    (tap,) = guest.interfaces
    assert (tap.target, tap.kind, tap.vhost) == ("tap101i0", NicKind.TAP, True)
    # Not what stands on the other guest's side.
    assert tap.lower == ("fwbr101i0", "fwln101i0", "fwpr101p0", "vmbr0", "eno1")
    assert [t.key.tid for t in guest.by_role(Role.VCPU)] == [52]
    (worker,) = guest.by_role(Role.VHOST)
    assert (worker.key.tid, worker.interface) == (51, "tap101i0")
    made = plan(snapshot, [POLICY])
    assert not made.refusals
    assert {a.target.guest for a in made.actions} == {"proxmox:101"}
    assert policy_name(guest) == '"proxmox:101"'


def test_doctor_judges_the_nics_and_not_the_bridges_above_them() -> None:
    recorded = recorded_hosts.shown(recorded_hosts.file("trixie-proxmox"))
    told = [f.what.split(";")[0] for f in host_checks.interrupts(Case(recorded, Facts()))]
    assert told == [f"{nic} has no interrupts of its own" for nic in ("p0", "p1")]


def test_a_bridge_without_a_way_out(tree: HostTree) -> None:
    tree.remove("/sys/devices/virtual/net/vmbr0/lower_eno1")
    (tap,) = only(observed(tree)).interfaces
    assert tap.lower == ("fwbr101i0", "fwln101i0", "fwpr101p0", "vmbr0")


def test_two_bridges_of_the_host_that_are_linked(tree: HostTree) -> None:
    """The second has an address of the host's and no taps: it is no guest's."""
    port(tree, "va", 30, "vmbr0")
    port(tree, "vb", 31, "vmbr9")
    linked(tree, "va", "vb", (30, 31))
    tree.device("vmbr9", 32, devtype="bridge", has="bridge lower_vb")
    tree.file("/sys/devices/virtual/net/vmbr0/lower_va", "")
    (tap,) = only(observed(tree)).interfaces
    assert tap.lower[3:] == ("vmbr0", "eno1", "va", "vb", "vmbr9")


@pytest.mark.parametrize(
    "place",
    [
        "/user.slice/user-1000.slice/qemu.slice/101.scope", "/qemu.slice/101.scope/x",
        "/qemu.slice/99.scope", "/qemu.slice/101.service", "/lxc/103/ns/qemu.slice/101.scope",
        "/system.slice/x.service", "/qemu.slice/0101.scope",
    ],
)  # fmt: skip
def test_a_process_elsewhere_is_not_the_guest_that_it_says(tree: HostTree, place: str) -> None:
    started(tree, 70, place)
    refs = [(g.ref, g.pid) for g in observed(tree, POLICY).guests]
    assert refs == [("proxmox:101", 50), ("qemu:fw", 70)]


def test_a_scope_that_is_not_roots(tree: HostTree) -> None:
    tree.stats[f"/sys/fs/cgroup{SCOPE}"] = FileStat(NOBODY, 0o040755, 1, 9)
    snapshot = observed(tree, POLICY)
    assert only(snapshot).ref == "qemu:fw"
    (note,) = plan(snapshot, [POLICY]).notes
    assert note == (
        "p.yaml:1: no running guest matches 'proxmox:101': no QEMU of root runs in such a scope, "
        "/qemu.slice/VMID.scope (`vsrtune show` lists processes that are not believed)"
    )


@pytest.mark.parametrize("user", ["", "user: 65534\n"])
def test_another_user_in_a_scope(tree: HostTree, user: str) -> None:
    """Even one whose plain QEMUs may be guests."""
    started(tree, 70, "/qemu.slice/102.scope", uid=NOBODY)
    snapshot = observed(tree, POLICY, parse(f"guest: 'qemu:*'\n{user}", "q.yaml"))
    assert only(snapshot).pid == 50
    (stranger,) = snapshot.strangers
    assert stranger.why == "it runs in the scope of Proxmox VE's guest 102, and is user 65534's"


def test_two_in_one_scope(tree: HostTree) -> None:
    started(tree, 70, SCOPE)
    made = plan(observed(tree, POLICY), [POLICY])
    assert made.actions == ()
    assert {(r.reason, r.hint) for r in made.refusals} == {
        (
            "2 processes run in /qemu.slice/101.scope: 50 and 70; none of them is tuned",
            "end the one that Proxmox VE did not start (qm list)",
        )
    }


def test_what_libvirt_leaves_in_a_command_line_changes_nothing(tree: HostTree) -> None:
    started(tree, 50, SCOPE, "-chardev", "socket,id=charmonitor")
    assert only(observed(tree)).ref == "proxmox:101"


SOCKETS = [
    (None, f"{SOCKET}: there is no such file on this host: not asked"),
    (FileStat(NOBODY, 0o140755, 1, 9), f"{SOCKET} belongs to user 65534: not asked"),
    (FileStat(0, 0o140777, 1, 9), f"others than root may write {SOCKET} (mode 0777): not asked"),
    (FileStat(0, 0o100644, 1, 9), f"{SOCKET} is no socket: not asked"),
    (FileStat(0, 0o120777, 1, 9), f"{SOCKET} is no socket: not asked"),
]


@pytest.mark.parametrize(("found", "why"), SOCKETS, ids=[why for _, why in SOCKETS])
def test_a_monitor_that_is_not_asked(tree: HostTree, found: FileStat | None, why: str) -> None:
    started(tree, 50, SCOPE, names="")
    tree.qmp(50, {"0": 52})
    if found is None:
        tree.errors[SOCKET] = "ENOENT"
    else:
        tree.stats[SOCKET] = found
    assert only(observed(tree, POLICY)).problems == (f"vcpu threads are not known: {why}",)


def test_a_monitor_in_a_directory_of_others(tree: HostTree) -> None:
    started(tree, 50, SCOPE, names="")
    tree.stats[SOCKET] = FileStat(0, 0o140755, 1, 9)
    tree.stats[MONITORS] = FileStat(0, 0o040777, 1, 8)
    (problem,) = only(observed(tree, POLICY)).problems
    assert problem.endswith(f"others than root may write {MONITORS} (mode 0777): not asked")


def test_a_monitor_that_is_asked(tree: HostTree) -> None:
    """At its own path, whatever the command line says; only of a guest that a policy names."""
    started(tree, 50, SCOPE, "-qmp", "unix:/tmp/other,server=on", names="")
    tree.stats[SOCKET] = FileStat(0, 0o140755, 1, 9)
    tree.qmp(50, {"0": 52})
    asked = []
    root = tree.root()
    answer = root.qmp_vcpus

    def qmp_vcpus(pid: int, socket: str, timeout: float) -> dict[int, int]:
        asked.append((pid, socket))
        return answer(pid, socket, timeout)

    root.qmp_vcpus = qmp_vcpus  # type: ignore[method-assign]
    for policy in (parse("guest: 'qemu:*'\n", "q.yaml"), POLICY):
        observer = Observer(root, None, qemu_filter=lambda policy=policy: qemu_filter([policy]))
        guest = only(observer.observe())
    assert asked == [(50, SOCKET)]
    assert [t.key.tid for t in guest.by_role(Role.VCPU)] == [52]
