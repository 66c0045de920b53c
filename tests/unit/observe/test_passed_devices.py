"""Devices that a guest drives itself: who has which, their interrupts, and what a plan does with
them."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hosttree import HostTree

from vsrtune.core.cpuset import CpuSet
from vsrtune.daemon.events.changes import places
from vsrtune.daemon.events.kernel import settings
from vsrtune.doctor import guest_checks
from vsrtune.doctor.model import Case, Facts
from vsrtune.host.filesystem import FileStat
from vsrtune.model.guest import Guest, Irq, PassedDevice
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import IrqAffinity
from vsrtune.observe.observer import Observer
from vsrtune.plan.planner import plan
from vsrtune.plan.safety.projection import project_actions
from vsrtune.policy.parser import parse
from vsrtune.views.tables import guest_tables

VF = "0000:01:10.0"
OWN = f"/sys/bus/pci/devices/{VF}"
NODE = os.makedev(242, 3)
EVERY = CpuSet(range(4))
NAMES = {41: f"vfio-msix[1]({VF})", 42: f"vfio-msix[0]({VF})", 43: f"vfio-msix[2]({VF})"}


def interrupt(tree: HostTree, number: int, name: str, address: str = VF, cpus: str = "0-3") -> None:
    tree.file(f"/sys/bus/pci/devices/{address}/msi_irqs/{number}", "msix\n")
    tree.file(f"/sys/kernel/irq/{number}/actions", f"{name}\n")
    tree.file(f"/proc/irq/{number}/smp_affinity_list", f"{cpus}\n")
    tree.file(f"/proc/irq/{number}/effective_affinity_list", "0\n")


@pytest.fixture
def tree() -> HostTree:
    """A guest with two vcpus that holds group 7 open: a function, and the bridge above it."""
    tree = HostTree().host().qemu(50, "-name", "r", "-smp", "2")
    for number in (0, 1):
        tree.thread(50, 52 + number, f"CPU {number}/KVM", start=102 + number)
    tree.fd(50, 20, "/dev/vfio/vfio").fd(50, 21, "/dev/vfio/7")
    tree.stats["/proc/50/fd/21"] = FileStat(0, 0o020600, 1, 9, NODE)
    tree.file("/sys/class/vfio/7/dev", "242:3\n")
    for address, driver in ((VF, "vfio-pci"), ("0000:00:02.0", "pcieport")):
        tree.link(f"/sys/kernel/iommu_groups/7/devices/{address}", f"../{address}")
        tree.link(f"/sys/bus/pci/devices/{address}/driver", f"../../bus/pci/drivers/{driver}")
    tree.file(f"{OWN}/numa_node", "1\n")
    for number, name in NAMES.items():
        interrupt(tree, number, name)
    return tree


def observed(tree: HostTree) -> Guest:
    (guest,) = Observer(tree.root(), None).observe().guests
    return guest


def test_the_devices_of_an_open_group(tree: HostTree) -> None:
    irqs = tuple(Irq(n, NAMES[n], EVERY, CpuSet([0])) for n in (42, 41, 43))
    # However often it is open.
    tree.fd(50, 22, "/dev/vfio/7")
    tree.stats["/proc/50/fd/22"] = tree.stats["/proc/50/fd/21"]
    guest = observed(tree)
    assert guest.passed == (PassedDevice(VF, 1, irqs),)
    # O_PATH takes no right on the file.
    for number in (21, 22):
        tree.file(f"/proc/50/fdinfo/{number}", "pos:\t0\nflags:\t012000000\nmnt_id:\t1\n")
    assert observed(tree).passed == ()
    tree.file("/proc/50/fdinfo/22", "pos:\t0\nflags:\t02\nmnt_id:\t1\n")
    (table,) = [
        t for t in guest_tables(guest, ()) if t.title == "Devices that qemu:r drives itself"
    ]
    assert table.rows == [(VF, "1", "42 on 0, 41 on 0, 43 on 0")]


@pytest.mark.parametrize(
    "stat",
    [
        FileStat(65534, 0o100644, 1, 9),
        FileStat(0, 0o020600, 1, 9, os.makedev(242, 4)),
        FileStat(0, 0o020600, 1, 9, os.makedev(241, 3)),
    ],
)
def test_another_file_of_the_name_is_no_group(tree: HostTree, stat: FileStat) -> None:
    tree.stats["/proc/50/fd/21"] = stat
    assert observed(tree).passed == ()


@pytest.mark.parametrize("name", ["p0-rx-0", "vfio-msix[0](0000:01:10.2)", "", "vfio-msix[x]()"])
def test_what_is_not_the_devices_own_stays(tree: HostTree, name: str) -> None:
    """Numbers that the kernel has just given to another driver."""
    tree.file("/sys/kernel/irq/41/actions", f"{name}\n")
    (device,) = observed(tree).passed
    assert [irq.number for irq in device.irqs] == [42, 43]


@pytest.mark.parametrize("what", ["new", "gone", "moved"])
def test_a_later_pass_sees_what_the_guest_did(tree: HostTree, what: str) -> None:
    observer = Observer(tree.root(), None)
    observer.observe()
    if what == "new":
        interrupt(tree, 44, f"vfio-msix[3]({VF})")
    elif what == "gone":
        tree.remove(f"{OWN}/msi_irqs/41")
    else:
        tree.file("/proc/irq/41/smp_affinity_list", "2\n")
    (guest,) = observer.observe_unannounced().guests
    assert guest == observed(tree)


def policy(cpus: str) -> str:
    return f"guest: qemu:r\nprofile: none\ncpus: {{{cpus}}}\n"


def written(snapshot: Snapshot, text: str) -> dict[int, str]:
    """The CPUs that interrupts get by a plan, by number; planned again it changes nothing."""
    made = plan(snapshot, [parse(text, "p.yaml")])
    assert made.refusals == ()
    assert plan(project_actions(snapshot, made.actions), [parse(text, "p.yaml")]).actions == ()
    found = (a for a in made.actions if isinstance(a.target, IrqAffinity))
    return {a.target.irq: str(a.after) for a in found if isinstance(a.target, IrqAffinity)}


@pytest.mark.parametrize(
    ("cpus", "expected"),
    [
        ("vcpu: {0: 2, 1: 3}", {42: "2", 41: "3", 43: "2"}),
        ("vcpu: 2", {42: "2", 41: "2", 43: "2"}),
        # A vcpu without a key stays where it is, and so does what wakes it.
        ("vcpu: {1: 3}", {41: "3"}),
        ("emulator: 1", {}),
    ],
)
def test_vectors_go_with_vcpus(tree: HostTree, cpus: str, expected: dict[int, str]) -> None:
    snapshot = Observer(tree.root(), None).observe()
    assert written(snapshot, policy(cpus)) == expected


def test_a_plan_says_why_interrupts_stay(tree: HostTree) -> None:
    snapshot = Observer(tree.root(), None).observe()
    (said,) = [
        s for s in plan(snapshot, [parse(policy("emulator: 1"), "p")]).skipped if VF in s.subject
    ]
    assert said.reason == "the policy gives no CPUs to the vcpus that they wake"
    for number in NAMES:
        tree.remove(f"{OWN}/msi_irqs/{number}")
    snapshot = Observer(tree.root(), None).observe()
    (said,) = [
        s for s in plan(snapshot, [parse(policy("vcpu: 2"), "p")]).skipped if VF in s.subject
    ]
    assert said.reason == "the guest has not enabled any"


def test_the_daemon_watches_them(tree: HostTree) -> None:
    snapshot = Observer(tree.root(), None).observe()
    assert {f"/proc/irq/{n}/smp_affinity_list" for n in NAMES} <= {*settings(snapshot)}
    assert {("irq", n) for n in NAMES} <= places(snapshot).keys()


def test_doctor_compares_numa_nodes(tree: HostTree) -> None:
    """The function is on node 1, as CPUs 2 and 3 are."""
    snapshot = Observer(tree.root(), None).observe()
    nodes = tuple(replace(cpu, node=cpu.id // 2) for cpu in snapshot.host.cpus)
    snapshot = replace(snapshot, host=replace(snapshot.host, cpus=nodes))
    assert list(guest_checks.numa(Case(snapshot, Facts()))) == []
    (guest,) = snapshot.guests
    for cpus, expected in (("1", 1), ("2", 0), ("1-2", 0)):
        threads = tuple(replace(t, affinity=CpuSet.parse(cpus)) for t in guest.threads)
        case = Case(replace(snapshot, guests=(replace(guest, threads=threads),)), Facts())
        found = list(guest_checks.numa(case))
        assert len(found) == expected
        for one in found:
            assert f"{VF} is on NUMA node 1, its vcpus are on 0" in one.what
            assert "CPUs 2-3" in one.hint
