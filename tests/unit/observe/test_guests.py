"""A guest from its process: roles, interfaces, and who serves which queue."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hosttree import HostTree

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import ObserveError
from vsrtune.host.cgroupfs import CpusetReader
from vsrtune.host.libvirt import DomainText
from vsrtune.host.netdev import NetReader
from vsrtune.host.procfs import PF_KTHREAD
from vsrtune.host.recorded import RecordedRoot
from vsrtune.model.guest import Confidence, Guest, NicKind, Role, ThreadKey, WorkerKind
from vsrtune.observe.guests import (
    MONITORS_SECONDS,
    NO_TIME,
    NO_VCPUS,
    NOT_LISTED,
    GuestReader,
    VcpuFinder,
)
from vsrtune.observe.observer import Observer
from vsrtune.observe.qemu_processes import ProcessTable
from vsrtune.observe.trust import Judge
from vsrtune.policy.matching import QemuFilter

UUID = "c0ffee00-0000-4000-8000-000000000001"
LIBVIRT = [
    "-name", "guest=vr1,debug-threads=on",
    "-object", "secret,id=masterKey0",
    "-uuid", UUID,
    "-netdev", '{"type":"tap","fd":"32","vhost":true,"vhostfd":"34","id":"hostnet0"}',
    "-device", '{"driver":"virtio-net-pci","netdev":"hostnet0","id":"net0","mac":"02:00:00:00:00:01"}',
    "-netdev", "tap,fds=33:35,vhost=on,vhostfds=36:37,id=hostnet1",
    "-device", "virtio-net-pci,netdev=hostnet1,id=net1,mac=02:00:00:00:00:02",
]  # fmt: skip
SCOPE = "/machine.slice/machine-qemu\\x2d1\\x2dvr1.scope/libvirt"


def interface_xml(number: int, target: str) -> str:
    return (
        f"<interface type='direct'><mac address='02:00:00:00:00:0{number + 1}'/>"
        f"<target dev='{target}'/><model type='virtio'/><driver name='vhost'/>"
        f"<alias name='net{number}'/></interface>"
    )


def domain(*targets: str) -> DomainText:
    nics = "".join(interface_xml(n, t) for n, t in enumerate(targets))
    xml = f"<domain><vcpu>2</vcpu><devices>{nics}</devices></domain>"
    pins = (CpuSet([1]), CpuSet([2]))
    return DomainText("vr1", UUID, xml, pins, CpuSet([0, 3]))


def libvirt_host(*, kthreads: bool) -> HostTree:
    """Two NICs, the second with two queues, and two vcpus."""
    tree = HostTree().host()
    tree.qemu(50, *LIBVIRT, start=100)
    emulator = f"{SCOPE}/emulator"
    tree.thread(50, 50, "qemu-system-x86", start=100, cgroup=emulator)
    for tid in (52, 53, 54):
        if kthreads:
            tree.thread(tid, tid, "vhost-50", ppid=2, flags=PF_KTHREAD, start=110, cgroup=emulator)
        else:
            tree.thread(50, tid, "vhost-50", start=110, cgroup=emulator)
    tree.thread(50, 60, "CPU 0/KVM", start=111, allowed="1", cgroup=f"{SCOPE}/vcpu0")
    tree.thread(50, 61, "CPU 1/KVM", start=111, allowed="2", cgroup=f"{SCOPE}/vcpu1")
    tree.thread(50, 62, "IO iothread1", start=111, cgroup=f"{SCOPE}/iothread1")
    tree.thread(50, 63, "worker", start=112, cgroup=emulator)
    tree.thread(50, 64, "IO mon_iothread", start=112, cgroup=emulator)
    tree.file(f"/sys/fs/cgroup{SCOPE}/vcpu0/cpuset.cpus", "1\n")
    tree.file(f"/sys/fs/cgroup{SCOPE}/vcpu0/cpuset.cpus.effective", "1\n")
    tree.device("macvtap0", 8, has="macvtap lower_p0")
    tree.device("macvtap1", 9, has="macvtap lower_p1")
    tree.device("p0", 4).device("p1", 5)
    tree.fd(50, 32, "/dev/tap8").fd(50, 33, "/dev/tap9").fd(50, 35, "/dev/tap9")
    for number in (34, 36, 37):
        tree.fd(50, number, "/dev/vhost-net")
    return tree


def read(
    tree: HostTree, of: DomainText | None, seen: dict[int, tuple[str, int]] | None = None
) -> Guest:
    guest = try_read(tree.root(), of, seen)
    assert guest is not None
    return guest


def try_read(
    root: RecordedRoot, of: DomainText | None, seen: dict[int, tuple[str, int]] | None = None
) -> Guest | None:
    found = ProcessTable().scan(root)
    reader = GuestReader(
        root=root,
        net=NetReader(root),
        cpusets=CpusetReader(root),
        online=CpuSet(range(4)),
        processes=found,
        traced=lambda key: (seen or {}).get(key.tid),
        vcpus=VcpuFinder(),
        judge=Judge(root),
    )
    return reader.read(found.qemus[0], of)


def workers_of(guest: Guest) -> list[tuple[int, str | None, int | None, Confidence | None]]:
    found = guest.by_role(Role.VHOST)
    return [(t.key.tid, t.interface, t.queue, t.confidence) for t in found]


ORDERED = [
    (52, "macvtap0", 0, Confidence.ORDER),
    (53, "macvtap1", 0, Confidence.ORDER),
    (54, "macvtap1", 1, Confidence.ORDER),
]


def test_libvirt_guest_with_worker_tasks() -> None:
    guest = read(libvirt_host(kthreads=False), domain("macvtap0", "macvtap1"))
    assert (guest.name, guest.uuid, guest.source, guest.pid) == ("vr1", UUID, "libvirt", 50)
    assert guest.problems == ()
    roles = {t.key.tid: (t.role, t.index) for t in guest.threads}
    assert roles == {
        50: (Role.EMULATOR, None),
        52: (Role.VHOST, None),
        53: (Role.VHOST, None),
        54: (Role.VHOST, None),
        60: (Role.VCPU, 0),
        61: (Role.VCPU, 1),
        62: (Role.IOTHREAD, 1),
        63: (Role.WORKER, None),
        64: (Role.WORKER, None),
    }
    assert workers_of(guest) == ORDERED
    assert {t.worker for t in guest.by_role(Role.VHOST)} == {WorkerKind.TASK}
    first, second = guest.by_role(Role.VCPU)
    assert (first.affinity, first.pin, first.cpuset_cpus) == (CpuSet([1]), CpuSet([1]), "1")
    assert first.cpuset_effective == CpuSet([1])
    assert first.cgroup == f"{SCOPE}/vcpu0".removeprefix("/")
    assert (second.pin, second.cpuset_cpus) == (CpuSet([2]), None)
    assert guest.by_role(Role.EMULATOR)[0].pin == CpuSet([0, 3])
    # 0-7 in /proc, of which four are online.
    assert guest.by_role(Role.EMULATOR)[0].affinity == CpuSet(range(4))
    assert guest.by_role(Role.VHOST)[0].pin is None
    macvtap0, macvtap1 = guest.interfaces
    assert (macvtap0.target, macvtap0.ifindex, macvtap0.kind) == ("macvtap0", 8, NicKind.MACVTAP)
    assert (macvtap0.mac, macvtap0.model, macvtap0.alias) == ("02:00:00:00:00:01", "virtio", "net0")
    assert (macvtap0.vhost, macvtap0.queues, macvtap0.txqueuelen) == (True, 1, 500)
    assert (macvtap0.ring_drops, macvtap0.lower) == (7, ("p0",))
    assert (macvtap1.queues, macvtap1.lower) == (2, ("p1",))


@pytest.mark.parametrize(
    ("vcpu", "pin", "known"),
    [
        ("<vcpu>6</vcpu>", "<vcpupin vcpu='4' cpuset='2-3'/>", "2-3"),
        ("<vcpu cpuset='1-2'>6</vcpu>", "<vcpupin vcpu='1' cpuset='3'/>", "1-2"),
        ("<vcpu>6</vcpu>", "", "0-3"),
    ],
)
def test_the_pin_of_a_vcpu_beyond_one_that_is_offline(vcpu: str, pin: str, known: str) -> None:
    """Vcpus 0 and 4 are online, and libvirt's binding tells the pins of vcpus 0 and 1."""
    tree = libvirt_host(kthreads=False)
    tree.thread(50, 61, "CPU 4/KVM", start=111, allowed="2", cgroup=f"{SCOPE}/vcpu4")
    of = domain("macvtap0", "macvtap1")
    xml = of.live_xml.replace("<vcpu>2</vcpu>", f"{vcpu}<cputune>{pin}</cputune>")
    pins = {t.index: t.pin for t in read(tree, replace(of, live_xml=xml)).by_role(Role.VCPU)}
    assert pins == {0: CpuSet([1]), 4: CpuSet.parse(known)}


def test_threads_beside_the_vcpu_in_its_cgroup_are_workers() -> None:
    tree = libvirt_host(kthreads=False)
    tree.thread(50, 58, "kvm-nx-lpage-re", start=110, cgroup=f"{SCOPE}/vcpu0")
    tree.thread(50, 70, "kvm-nx-lpage-re", start=113, cgroup=f"{SCOPE}/vcpu1")
    guest = read(tree, domain("macvtap0", "macvtap1"))
    assert [(t.key.tid, t.index) for t in guest.by_role(Role.VCPU)] == [(60, 0), (61, 1)]
    assert {t.role for t in guest.threads if t.key.tid in (58, 70)} == {Role.WORKER}


def test_libvirt_guest_with_kernel_workers() -> None:
    guest = read(libvirt_host(kthreads=True), domain("macvtap0", "macvtap1"))
    assert workers_of(guest) == ORDERED
    workers = guest.by_role(Role.VHOST)
    assert {t.worker for t in workers} == {WorkerKind.KTHREAD}
    assert [t.key.pid for t in workers] == [52, 53, 54]


def test_a_worker_seen_on_its_interface_is_exact() -> None:
    tree = libvirt_host(kthreads=False)
    guest = read(tree, domain("macvtap0", "macvtap1"), {52: ("macvtap0", 8)})
    assert workers_of(guest) == [(52, "macvtap0", 0, Confidence.EXACT), *ORDERED[1:]]


def test_libvirt_guest_that_libvirt_does_not_list_stays_libvirts() -> None:
    guest = read(libvirt_host(kthreads=False), None)
    assert (guest.name, guest.source, guest.problems) == ("vr1", "libvirt", (NOT_LISTED,))
    assert workers_of(guest) == ORDERED
    assert [t.index for t in guest.by_role(Role.VCPU)] == [0, 1]
    assert {t.pin for t in guest.threads} == {None}


def test_a_hotplugged_nic() -> None:
    tree = libvirt_host(kthreads=False)
    tree.device("macvtap2", 10, has="macvtap lower_p0")
    tree.fd(50, 40, "/dev/tap10").fd(50, 41, "/dev/vhost-net")
    tree.thread(50, 90, "vhost-50", start=5000)
    guest = read(tree, domain("macvtap0", "macvtap1", "macvtap2"))
    assert workers_of(guest) == [*ORDERED, (90, "macvtap2", 0, Confidence.UNCERTAIN)]


def replugged(descriptor: int) -> HostTree:
    """net0 was unplugged, and came back under the same alias on another device."""
    tree = libvirt_host(kthreads=False)
    tree.device("macvtap7", 17, has="macvtap lower_p0")
    del tree.links["/proc/50/fd/32"]
    tree.fd(50, descriptor, "/dev/tap17")
    for place in ("stat", "status"):
        tree.remove(f"/proc/50/task/52/{place}")
    return tree.thread(50, 90, "vhost-50", start=5000)


def test_a_nic_replugged_under_its_old_alias() -> None:
    guest = read(replugged(40), domain("macvtap7", "macvtap1"))
    assert {i.target: i.queues for i in guest.interfaces} == {"macvtap7": 1, "macvtap1": 2}
    assert workers_of(guest) == [
        (53, "macvtap1", 0, Confidence.ORDER),
        (54, "macvtap1", 1, Confidence.ORDER),
        (90, "macvtap7", 0, Confidence.UNCERTAIN),
    ]


def test_a_nic_replugged_with_the_same_descriptor_number() -> None:
    guest = read(replugged(32), domain("macvtap7", "macvtap1"))
    assert {i.target: i.queues for i in guest.interfaces} == {"macvtap7": 1, "macvtap1": 2}
    assert {c for *_, c in workers_of(guest)} == {Confidence.UNCERTAIN}


def test_a_guest_with_vsock() -> None:
    tree = libvirt_host(kthreads=False)
    tree.fd(50, 43, "/dev/vhost-vsock").thread(50, 91, "vhost-50", start=112)
    guest = read(tree, domain("macvtap0", "macvtap1"))
    assert workers_of(guest) == [*ORDERED, (91, None, None, Confidence.NONE)]
    assert guest.problems == ()


def test_a_worker_too_few_is_a_problem() -> None:
    tree = libvirt_host(kthreads=False)
    tree.errors["/proc/50/task/54/stat"] = "ESRCH"
    guest = read(tree, domain("macvtap0", "macvtap1"))
    assert [c for *_, c in workers_of(guest)] == [Confidence.NONE, Confidence.NONE]
    assert guest.problems == ("2 vhost workers for 3 queues: not mapped",)


def test_without_cpusets_in_cgroup_v2() -> None:
    tree = libvirt_host(kthreads=False)
    for tid in (50, 52, 53, 54, 60, 61, 62, 63, 64):
        text = "5:cpuset:/machine/qemu-1-vr1.libvirt-qemu/vcpu0\n0::/x\n"
        tree.file(f"/proc/50/task/{tid}/cgroup", text)
    guest = read(tree, domain("macvtap0", "macvtap1"))
    assert {(t.cgroup, t.cpuset_cpus, t.cpuset_effective) for t in guest.threads} == {
        ("", None, None)
    }
    # The names tell then.
    assert [t.index for t in guest.by_role(Role.VCPU)] == [0, 1]
    assert [t.index for t in guest.by_role(Role.IOTHREAD)] == [1]


def test_a_process_that_ends_meanwhile() -> None:
    tree = libvirt_host(kthreads=False)
    tree.errors["/proc/50/task"] = "ENOENT"
    assert try_read(tree.root(), None) is None


PLAIN = [
    "-name", "pq 1",
    "-qmp", "unix:/run/pq1.qmp,server=on,wait=off",
    "-netdev", "tap,id=n0,vhost=on,fd=10",
    "-device", "virtio-net-pci,netdev=n0,mac=02:00:00:00:00:0A",
    "-netdev", "tap,id=n1,ifname=tap5,vhost=off",
    "-device", "e1000,netdev=n1,id=second",
]  # fmt: skip


def plain_host(*arguments: str) -> HostTree:
    tree = HostTree().host()
    tree.qemu(50, *(arguments or PLAIN), start=100)
    tree.thread(50, 52, "vhost-50", start=105)
    for tid in (60, 61):
        tree.thread(50, tid, "qemu-system-x86", start=106)
    tree.qmp(50, {"0": 61})
    tree.device("pq1-0", 8, has="macvtap lower_p0").device("p0", 4)
    tree.device("tap5", 9, has="tun_flags")
    tree.fd(50, 10, "/dev/tap8").fd(50, 11, "/dev/vhost-net")
    return tree.fd(50, 12, "/dev/net/tun", "pos:\t0\niff:\ttap5\n")


def test_plain_qemu() -> None:
    guest = read(plain_host(), None)
    assert (guest.name, guest.ref, guest.source) == ("pq 1", "qemu:pq 1", "qemu")
    assert guest.problems == ()
    assert [(t.key.tid, t.index) for t in guest.by_role(Role.VCPU)] == [(61, 0)]
    assert [t.key.tid for t in guest.by_role(Role.WORKER)] == [60]
    assert workers_of(guest) == [(52, "pq1-0", 0, Confidence.ORDER)]
    first, second = guest.interfaces
    assert (first.target, first.mac, first.model) == ("pq1-0", "02:00:00:00:00:0a", "virtio")
    assert (second.target, second.kind, second.model) == ("tap5", NicKind.TAP, "e1000")
    assert (second.vhost, second.alias, second.ring_drops) == (False, "second", 9)


def test_a_pass_for_changes_counts_what_the_ring_of_a_tap_in_no_bridge_drops() -> None:
    tree = plain_host()
    observer = Observer(tree.root(), None)
    observer.observe()
    tree.file("/proc/net/dev", "head\nhead\n tap5: 1 2 0 7 0 0 0 0 3 4 0 41 0 0 0 0\n")
    part = observer.observe_unannounced()
    assert (part.names, part.snapshot.guests[0].interfaces[1].ring_drops) == (frozenset(), 41)


def test_plain_qemu_whose_monitor_is_busy() -> None:
    tree = plain_host()
    tree.qmp(50, {}, "no answer to QMP")
    guest = read(tree, None)
    assert guest.by_role(Role.VCPU) == ()
    assert guest.problems[0].startswith("vcpu threads are not known: /run/pq1.qmp: no answer")
    # Whether a worker is older than the vcpus is unknown then.
    assert workers_of(guest) == [(52, "pq1-0", 0, Confidence.UNCERTAIN)]


def test_plain_qemu_with_named_threads_needs_no_monitor() -> None:
    tree = plain_host("-name", "pq1,debug-threads=on", *PLAIN[4:])
    tree.thread(50, 61, "CPU 0/TCG", start=106)
    guest = read(tree, None)
    assert [t.key.tid for t in guest.by_role(Role.VCPU)] == [61]
    assert guest.problems == ()


def test_plain_qemu_that_tells_nothing() -> None:
    guest = read(plain_host("-nodefaults"), None)
    assert guest.name == "pid-50"
    assert guest.problems == (NO_VCPUS,)
    # NICs that are not on the command line are found by their descriptors.
    assert [(i.target, i.vhost, i.mac) for i in guest.interfaces] == [
        ("pq1-0", True, ""),
        ("tap5", False, ""),
    ]
    assert workers_of(guest) == [(52, "pq1-0", 0, Confidence.UNCERTAIN)]


def test_a_monitor_is_asked_again_only_when_threads_change() -> None:
    tree = plain_host()
    root = tree.root()
    process = ProcessTable().scan(root).qemus[0]
    now = [0.0]
    finder = VcpuFinder(lambda: now[0])
    keys = frozenset(ThreadKey(50, tid, 106) for tid in (50, 60, 61))
    more = keys | {ThreadKey(50, 70, 200)}
    assert finder.find(root, process, keys, Judge(root)) == ({61: 0}, "")
    tree.qmp(50, {}, "busy")
    assert finder.find(root, process, keys, Judge(root)) == ({61: 0}, "")
    assert finder.unanswered == set()
    # Threads that live stay what they were; not so another one of the same number.
    found, problem = finder.find(root, process, more, Judge(root))
    assert (found, finder.unanswered) == ({61: 0}, {50})
    assert problem == "new vcpu threads are not known: /run/pq1.qmp: busy"
    other = frozenset([ThreadKey(50, 50, 106), ThreadKey(50, 61, 300)])
    now[0] = 3.0
    found, problem = finder.find(root, process, other, Judge(root))
    assert (found, problem) == ({}, "vcpu threads are not known: /run/pq1.qmp: busy")
    # A busy monitor is left in peace for a while, for longer each time.
    now[0] = 5.0
    assert finder.find(root, process, more, Judge(root))[1] != ""
    tree.qmp(50, {"0": 70})
    now[0] = 12.0
    assert finder.find(root, process, more, Judge(root))[1] != ""
    now[0] = 14.0
    assert finder.find(root, process, more, Judge(root)) == ({70: 0}, "")
    assert finder.unanswered == set()
    finder.forget_all_but(set())
    tree.qmp(50, {"0": 60})
    assert finder.find(root, process, more, Judge(root)) == ({60: 0}, "")


def test_vcpus_stay_while_the_monitor_is_busy_and_it_is_asked_again() -> None:
    """Also when nothing else of the guest changes."""
    tree = plain_host()
    observer = Observer(tree.root(), None)
    now = [0.0]
    observer._vcpus = VcpuFinder(lambda: now[0])

    def vcpus() -> list[tuple[int, int | None]]:
        (guest,) = observer.observe_unannounced().snapshot.guests
        return [(t.key.tid, t.index) for t in guest.by_role(Role.VCPU)]

    assert vcpus() == [(61, 0)]
    tree.thread(50, 62, "qemu-system-x86", start=300)
    tree.qmp(50, {}, "busy")
    assert vcpus() == [(61, 0)]
    tree.qmp(50, {"0": 62})
    assert vcpus() == [(61, 0)]
    now[0] = 5.0
    assert vcpus() == [(62, 0)]


def test_all_monitors_of_a_look_share_its_time() -> None:
    """Two hundred that are silent take no longer than one; later looks ask the others."""
    tree = HostTree().host()
    for number in range(200):
        pid = 1000 + 10 * number
        tree.qemu(pid, "-name", f"s{number}", "-qmp", f"unix:/run/{number},server=on")
    processes = ProcessTable().scan(tree.root()).qemus
    now = [0.0]
    asked: list[int] = []

    class Slow(RecordedRoot):
        def qmp_vcpus(self, pid: int, socket: str, timeout: float) -> dict[int, int]:
            now[0] += timeout
            asked.append(pid)
            raise ObserveError("no answer to QMP")

    finder, root = VcpuFinder(lambda: now[0]), Slow(tree.answers)
    for look in range(1, 4):
        begin = now[0]
        finder.update(QemuFilter())
        own = {p: frozenset([ThreadKey(p.pid, p.pid, 100)]) for p in processes}
        problems = [finder.find(root, p, own[p], Judge(root))[1] for p in processes]
        assert now[0] - begin <= MONITORS_SECONDS
        assert len(asked) == len(set(asked)) == look
        assert problems.count(NO_TIME) == 200 - look
