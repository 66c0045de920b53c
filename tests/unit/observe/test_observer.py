"""Observing whole hosts: composed by hand, and the recorded ones in tests/hosts.

A recording's snapshot is what observing it gives; after a change that is meant,
VSRTUNE_UPDATE_GOLDEN=1 writes it anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import recorded_hosts
from hosttree import HostTree

from vsrtune.core.codec import decode, encode
from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import ObserveError
from vsrtune.host.libvirt import DomainText
from vsrtune.host.recorded import Answers, RecordedRoot, dumps, load
from vsrtune.model.guest import Confidence, NicKind, Role
from vsrtune.model.snapshot import Snapshot
from vsrtune.observe.guests import FOREIGN, NOT_LISTED
from vsrtune.observe.observer import Observer
from vsrtune.observe.recording import replay
from vsrtune.observe.tracing import Counts, SeenNic, TracedDevices, TraceMemory, Tracer

UUID = "c0ffee00-0000-4000-8000-000000000001"
SCOPE = "/machine.slice/machine-qemu\\x2d1\\x2dvr1.scope"


@pytest.mark.parametrize("host", recorded_hosts.FILES, ids=lambda p: p.stem)
def test_recorded_host(host: Path) -> None:
    found = load(host)
    found.snapshot = encode(replay(host))
    if os.environ.get("VSRTUNE_UPDATE_GOLDEN"):
        host.write_text(dumps(found), "utf-8")
    assert dumps(found) == host.read_text("utf-8")


@pytest.mark.parametrize("host", recorded_hosts.FILES, ids=lambda p: p.stem)
def test_recorded_host_is_fully_understood(host: Path) -> None:
    snapshot = recorded_hosts.shown(host)
    assert snapshot.guests
    for guest in snapshot.guests:
        interfaces = {i.target for i in guest.interfaces}
        assert guest.by_role(Role.VCPU)
        for worker in guest.by_role(Role.VHOST):
            assert (worker.interface in interfaces) is (guest.source != "kubevirt")


def test_a_recorded_guest_on_a_device_of_the_module() -> None:
    (guest,) = recorded_hosts.shown(recorded_hosts.file("trixie-napi")).guests
    device = next(i for i in guest.interfaces if i.kind is NicKind.NAPI_MACVTAP)
    assert (device.lower[0], device.threaded, device.txqueuelen) == ("n0", 1, 500)
    assert device.counters is not None
    (queue,) = device.counters.queues
    (worker,) = [t for t in guest.by_role(Role.VHOST) if t.interface == device.target]
    assert (worker.key.tid, worker.confidence) == (queue.worker_tid, Confidence.EXACT)
    (napi,) = guest.by_role(Role.NAPI)
    told = load(recorded_hosts.file("trixie-napi")).root().napi_thread(device.target)
    assert napi.key.tid == told
    assert (napi.interface, napi.confidence) == (device.target, Confidence.EXACT)


class FakeVirt:
    """Domains that a test sets; ``late`` has started since they were listed, ``fails`` makes
    libvirt unreachable, ``dies`` after it has listed them."""

    def __init__(self, *domains: DomainText) -> None:
        self.listed = domains
        self.late: DomainText | None = None
        self.fails = False
        self.dies = False

    def domains(self) -> tuple[DomainText, ...]:
        if self.fails:
            raise ObserveError("libvirt does not answer", where="qemu:///system")
        return self.listed

    def domain(self, name: str) -> DomainText | None:
        if self.dies:
            raise ObserveError("libvirt does not answer", where="qemu:///system")
        return self.late if self.late is not None and self.late.name == name else None


def domain(name: str, uuid: str = UUID) -> DomainText:
    nic = "<interface type='direct'><target dev='macvtap0'/><model type='virtio'/><alias name='net0'/></interface>"
    xml = f"<domain><devices>{nic}</devices></domain>"
    return DomainText(name, uuid, xml, (), CpuSet([0]))


def libvirt_qemu(tree: HostTree, pid: int, name: str, uuid: str = UUID) -> None:
    tree.qemu(
        pid,
        *("-name", f"guest={name},debug-threads=on"),
        *("-object", "secret,id=masterKey0"),
        *("-uuid", uuid),
        *("-netdev", "tap,fd=32,vhost=on,id=hostnet0"),
        *("-device", "virtio-net-pci,netdev=hostnet0"),
    )
    tree.thread(pid, pid + 1, f"vhost-{pid}", start=101)
    tree.thread(pid, pid + 2, "CPU 0/KVM", start=102)
    tree.fd(pid, 32, "/dev/tap8").fd(pid, 33, "/dev/vhost-net")


def two_guests(name: str) -> HostTree:
    """A libvirt guest of that name (pid 50) and a plain QEMU pq1 (pid 70) beside it."""
    tree = HostTree().host()
    libvirt_qemu(tree, 50, name)
    tree.qemu(70, "-name", "pq1,debug-threads=on")
    tree.thread(70, 71, "CPU 0/KVM")
    tree.device("macvtap0", 8, has="macvtap lower_p0").device("p0", 4)
    return tree


@pytest.fixture
def tree() -> HostTree:
    return two_guests("vr 1")


def test_libvirt_and_plain_guests_side_by_side(tree: HostTree) -> None:
    snapshot = Observer(tree.root(), FakeVirt(domain("vr 1"))).observe()
    assert [g.ref for g in snapshot.guests] == ["vr 1", "qemu:pq1"]
    assert snapshot.problems == ()
    assert snapshot.host.kernel == "6.12.0-test"
    assert snapshot.host.clock_ticks == 100
    assert snapshot.host.online == CpuSet(range(4))
    assert [n.name for n in snapshot.host.nics] == ["p0"]
    assert (snapshot.host.sched_rt_runtime_us, snapshot.host.sched_rt_period_us) == (
        950000,
        1000000,
    )
    assert decode(Snapshot, json.loads(snapshot.to_json())) == snapshot


def test_without_libvirt_its_guests_do_not_become_plain(tree: HostTree) -> None:
    virt = FakeVirt(domain("vr 1"))
    virt.fails = True
    snapshot = Observer(tree.root(), virt).observe()
    assert [g.ref for g in snapshot.guests] == ["vr 1", "qemu:pq1"]
    assert snapshot.guests[0].problems == (NOT_LISTED,)
    assert [(p.reader, p.what) for p in snapshot.problems] == [
        ("libvirt", "qemu:///system: libvirt does not answer")
    ]


def test_a_guest_of_another_libvirt_is_told_apart(tree: HostTree) -> None:
    libvirt_qemu(tree, 40, "vr 1", "c0ffee00-0000-4000-8000-000000000002")
    tree.file("/run/libvirt/qemu/vr 1.pid", "50\n")
    snapshot = Observer(tree.root(), FakeVirt(domain("vr 1"))).observe()
    assert [(g.ref, g.pid, g.problems) for g in snapshot.guests] == [
        ("foreign:vr 1", 40, (FOREIGN,)),
        ("vr 1", 50, ()),
        ("qemu:pq1", 70, ()),
    ]
    assert snapshot.guests[0].by_role(Role.VCPU)
    assert snapshot.problems == ()


def test_a_guest_that_libvirt_is_busy_with(tree: HostTree) -> None:
    coming = replace(domain("vr 1"), busy=True)
    snapshot = Observer(tree.root(), FakeVirt(coming)).observe()
    assert [(g.ref, g.busy) for g in snapshot.guests] == [("vr 1", True), ("qemu:pq1", False)]


def test_a_guest_that_starts_while_the_host_is_read_is_ours(tree: HostTree) -> None:
    virt = FakeVirt()
    virt.late = domain("vr 1")
    snapshot = Observer(tree.root(), virt).observe()
    assert [g.ref for g in snapshot.guests] == ["vr 1", "qemu:pq1"]
    assert snapshot.guests[0].problems == ()


def test_a_pass_shows_that_it_moves_on_between_two_questions_to_libvirt(tree: HostTree) -> None:
    """A slow libvirt may take seconds for each; the watchdog waits for a minute in all."""
    seen: list[str] = []

    class Slow(FakeVirt):
        def domain(self, name: str) -> DomainText | None:
            seen.append(name)
            return super().domain(name)

    libvirt_qemu(tree, 60, "vr 2", "c0ffee00-0000-4000-8000-000000000002")
    observer = Observer(tree.root(), Slow(), pulse=lambda: seen.append(""))
    observer.observe()
    observer.observe_some(frozenset(["vr 3", "vr 4"]))
    assert set(seen) == {"", "vr 1", "vr 2", "vr 3", "vr 4"}
    assert not [pair for pair in pairwise(seen) if all(pair)]


def test_a_libvirt_that_dies_while_the_host_is_read_has_no_foreign_guests(tree: HostTree) -> None:
    virt = FakeVirt()
    virt.dies = True
    snapshot = Observer(tree.root(), virt).observe()
    assert [g.ref for g in snapshot.guests] == ["vr 1", "qemu:pq1"]
    assert snapshot.guests[0].problems == (NOT_LISTED,)


@pytest.mark.parametrize("ours", [40, 50])
def test_a_guest_that_migrates_between_two_libvirts_of_this_host(tree: HostTree, ours: int) -> None:
    """Both have its name and UUID; libvirt has written down which process is its own."""
    libvirt_qemu(tree, 40, "vr 1")
    homes = (f"{SCOPE}/libvirt", "/machine/qemu-1-vr1.libvirt-qemu")
    for pid, home in zip((ours, 90 - ours), homes, strict=True):
        tree.file(f"/proc/{pid}/task/{pid}/cgroup", f"0::{home}/emulator\n")
    tree.file("/run/libvirt/qemu/vr 1.pid", f"{ours}\n")
    snapshot = Observer(tree.root(), FakeVirt(domain("vr 1"))).observe()
    found = {g.ref: g.pid for g in snapshot.guests if g.source != "qemu"}
    assert found == {"vr 1": ours, "foreign:vr 1": 90 - ours}


def test_a_plain_qemu_with_a_copied_uuid_stays_plain(tree: HostTree) -> None:
    tree.qemu(40, "-name", "copy,debug-threads=on", "-uuid", UUID)
    snapshot = Observer(tree.root(), FakeVirt(domain("vr 1"))).observe()
    assert [(g.ref, g.pid) for g in snapshot.guests] == [
        ("vr 1", 50),
        ("qemu:copy", 40),
        ("qemu:pq1", 70),
    ]


def test_a_domain_without_a_process_is_reported_unless_it_just_ended(tree: HostTree) -> None:
    virt = FakeVirt(domain("vr 1"), domain("lost", "c0ffee00-0000-4000-8000-00000000dead"))
    (problem,) = Observer(tree.root(), virt).observe().problems
    assert "lost runs according to libvirt" in problem.what

    class Ending(FakeVirt):
        def domains(self) -> tuple[DomainText, ...]:
            listed, self.listed = self.listed, self.listed[:1]
            return listed

    assert Observer(tree.root(), Ending(*virt.listed)).observe().problems == ()


def test_guests_that_a_policy_cannot_tell_apart(tree: HostTree) -> None:
    tree.qemu(80, "-name", "pq1,debug-threads=on")
    tree.thread(80, 81, "CPU 0/KVM")
    snapshot = Observer(tree.root(), FakeVirt(domain("vr 1"))).observe()
    problems = {g.pid: g.problems for g in snapshot.guests}
    assert problems == {
        50: (),
        70: ("2 guests are named qemu:pq1",),
        80: ("2 guests are named qemu:pq1",),
    }


@pytest.mark.parametrize(
    ("damage", "reader"),
    [
        (lambda t: t.errors.update({"/proc/sys/kernel/random/boot_id": "EIO"}), "host"),
        (lambda t: t.file("/sys/devices/system/cpu/online", "what\n"), "cpus"),
        (lambda t: t.file("/proc/sys/kernel/sched_rt_period_us", "\n"), "sched"),
        (lambda t: t.errors.update({"/sys/class/net": "EACCES"}), "net"),
        (lambda t: t.errors.update({"/proc/50/task": "EACCES"}), "guest vr 1"),
        (lambda t: t.file("/proc/50/task/51/stat", "51 (x"), "guest vr 1"),
    ],
)
def test_a_reader_that_fails_hides_nothing_else(
    tree: HostTree, damage: Callable[[HostTree], object], reader: str
) -> None:
    damage(tree)
    snapshot = Observer(tree.root(), FakeVirt(domain("vr 1"))).observe()
    assert reader in {p.reader for p in snapshot.problems}
    assert "qemu:pq1" in [g.ref for g in snapshot.guests]
    if not reader.startswith("guest"):
        assert "vr 1" in [g.ref for g in snapshot.guests]


def test_an_empty_machine() -> None:
    snapshot = Observer(RecordedRoot(Answers()), None).observe(trace_seconds=1)
    assert snapshot.guests == ()
    assert {p.reader for p in snapshot.problems} >= {"host", "cpus", "proc", "net", "trace"}


class FakeTracer(Tracer):
    """A tracer whose kernel counted ``sent`` and ``received``."""

    def __init__(self, sent: Counts, received: Counts) -> None:
        super().__init__()
        self.counted = sent, received
        self.watched: TracedDevices | None = None

    def trace(self, devices: TracedDevices, seconds: float) -> tuple[Counts, Counts]:
        if seconds > 5:
            raise ObserveError("tracing is unavailable")
        self.watched = devices
        return self.counted


def test_a_trace_makes_the_mapping_exact_and_is_remembered(tree: HostTree, tmp_path: Path) -> None:
    tracer = FakeTracer({("macvtap0", 51): 500, ("macvtap0", 9): 1}, {("p0", 2): 60, ("p0", 1): 2})
    virt = FakeVirt(domain("vr 1"))
    path = tmp_path / "run/trace-results.json"
    observer = Observer(tree.root(), virt, TraceMemory(path), tracer)
    (worker,) = observer.observe().guests[0].by_role(Role.VHOST)
    assert (worker.interface, worker.confidence) == ("macvtap0", Confidence.ORDER)
    snapshot = observer.observe(trace_seconds=1)
    assert tracer.watched == ({"macvtap0"}, set(), {"p0"})
    for seen in (snapshot, Observer(tree.root(), virt, TraceMemory(path)).observe()):
        (worker,) = seen.guests[0].by_role(Role.VHOST)
        assert (worker.interface, worker.confidence) == ("macvtap0", Confidence.EXACT)
        assert seen.host.nics[0].rx_cpus == CpuSet([2])
        assert seen.problems == ()


def test_a_trace_tells_nothing_of_a_bridge(tree: HostTree) -> None:
    """Its frames are received where a guest's worker runs, which a stored result told as well."""
    memory = TraceMemory(None)
    observer = Observer(
        tree.root(), FakeVirt(domain("vr 1")), memory, FakeTracer({}, {("p0", 2): 60})
    )
    tree.device("p0", 4, devtype="bridge", has="bridge")
    assert observer.observe(trace_seconds=1).host.nics[0].rx_cpus is None
    assert memory.results.nics == ()
    memory.remember([], [SeenNic("p0", 4, CpuSet([2]))], [])
    assert observer.observe().host.nics[0].rx_cpus is None


def test_a_trace_that_fails_is_a_problem_only(tree: HostTree) -> None:
    observer = Observer(
        tree.root(), FakeVirt(domain("vr 1")), TraceMemory(None), FakeTracer({}, {})
    )
    snapshot = observer.observe(trace_seconds=6)
    assert [(p.reader, p.what) for p in snapshot.problems] == [("trace", "tracing is unavailable")]
    assert len(snapshot.guests) == 2


PCI = "pci0000:00/0000:00:09.0"


def test_a_lower_device_shows_where_its_work_is_done(tree: HostTree) -> None:
    """Queues, NAPI threads, and interrupts that the kernel would not move."""
    tree.device("p0", 4, pci=PCI)
    base = f"/sys/devices/{PCI}/net/p0"
    tree.file(f"{base}/threaded", "1\n")
    for queue, mask in (("rx-0/rps_cpus", "3"), ("rx-10/rps_cpus", "0"), ("rx-2/rps_cpus", "4")):
        tree.file(f"{base}/queues/{queue}", f"{mask}\n")
    tree.file(f"{base}/queues/tx-0/xps_cpus", "00000000,00000002\n")
    tree.file(f"{base}/queues/tx-1/other", "")
    tree.thread(900, 900, "napi/p0-8193", ppid=2, flags=0x00200000, allowed="1")
    tree.thread(901, 901, "napi/p00-8194", ppid=2, flags=0x00200000)
    for number, name in ((41, "p0-rx-0"), (42, "p0-tx-0")):
        tree.file(f"/sys/kernel/irq/{number}/actions", f"{name}\n")
        tree.file(f"/sys/devices/{PCI}/msi_irqs/{number}", "msix\n")
        tree.file(f"/proc/irq/{number}/smp_affinity_list", "0-3\n")
        tree.file(f"/proc/irq/{number}/effective_affinity_list", "2\n")
    memory = TraceMemory(None)
    observer = Observer(tree.root(), None, memory)
    observer.observe()
    observer.remember_fixed([(42, "p0-tx-0")])
    (nic,) = observer.observe().host.nics
    assert [(q.name, None if q.cpus is None else str(q.cpus)) for q in nic.queues] == [
        ("rx-0", "0-1"), ("rx-2", "2"), ("rx-10", ""), ("tx-0", "1"), ("tx-1", None),
    ]  # fmt: skip
    assert nic.rps_cpus == CpuSet([0, 1, 2])
    assert [(t.name, t.affinity) for t in nic.napi] == [("napi/p0-8193", CpuSet([1]))]
    assert [(i.number, i.managed) for i in nic.irqs] == [(41, False), (42, True)]


def test_a_device_that_is_being_removed_costs_its_guest_nothing_else() -> None:
    """Between the unplug and the end of its directory sysfs answers EINVAL."""
    tree = two_guests("vr1")
    before = Observer(tree.root(), FakeVirt(domain("vr1"))).observe()
    guest = next(g for g in before.guests if g.interfaces)
    device = guest.interfaces[0].target
    (path,) = [p for p in tree.answers.texts if p.endswith(f"/{device}/tx_queue_len")]
    tree.errors[path] = "EINVAL"
    after = Observer(tree.root(), FakeVirt(domain("vr1"))).observe()
    (same,) = [g for g in after.guests if g.ref == guest.ref]
    assert device not in {i.target for i in same.interfaces}
    assert after.problems == before.problems
