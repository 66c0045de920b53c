"""The NAPI threads of a guest's devices, and guests on devices of our kernel module."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hosttree import HostTree
from planning_samples import napi_macvtap

from vsrtune.host.netdev import NetReader
from vsrtune.host.procfs import PF_KTHREAD, napi_device
from vsrtune.model.guest import Confidence, Guest, Interface, NicKind, Role
from vsrtune.model.snapshot import Snapshot
from vsrtune.observe.observer import Observer
from vsrtune.observe.qemu_processes import ProcessTable
from vsrtune.observe.tap_backends import read_napi_threads

THREADED = napi_macvtap(0, threaded=1)


def host(threads: Mapping[int, str], told: int | None = None) -> HostTree:
    """A host with these threads, whose module tells that one of the device."""
    tree = HostTree().host()
    if told is not None:
        tree.answers.napi[THREADED.target] = told
    for tid, name in threads.items():
        tree.thread(tid, tid, name, ppid=2, flags=PF_KTHREAD, cgroup="/")
    return tree


def found(tree: HostTree, *interfaces: Interface) -> list[tuple[int, str, Confidence]]:
    root = tree.root()
    threads, problems = read_napi_threads(root, interfaces, ProcessTable().scan(root).napi)
    assert problems == []
    return [(thread.key.tid, device, confidence) for thread, device, confidence in threads]


def problem(tree: HostTree, interface: Interface) -> str:
    root = tree.root()
    threads, problems = read_napi_threads(root, [interface], ProcessTable().scan(root).napi)
    assert threads == []
    return "\n".join(problems)


def test_the_name_of_a_thread_tells_its_device() -> None:
    assert napi_device("napi/nvt72000100-8193") == "nvt72000100"
    assert napi_device("napi/wan-1-2") == "wan-1"
    assert napi_device("napi/wan") is None
    assert napi_device("ksoftirqd/0") is None


def test_the_module_names_the_thread_whatever_it_is_called() -> None:
    tree = host({70: "napi/nvt0-1", 71: "napi/nvt0-2", 72: "napi/oldname-3"}, told=72)
    assert found(tree, THREADED) == [(72, "nvt0", Confidence.EXACT)]


def test_a_module_that_does_not_tell_leaves_the_name() -> None:
    tree = host({70: "napi/nvt0-8193", 71: "napi/nvt00-8194"})
    assert found(tree, THREADED) == [(70, "nvt0", Confidence.ORDER)]


def test_a_name_that_two_threads_have_is_not_believed() -> None:
    tree = host({70: "napi/nvt0-1", 71: "napi/nvt0-2"})
    assert "threads 70, 71 all have its name" in problem(tree, THREADED)


def test_a_process_of_such_a_name_is_no_thread_of_the_kernel() -> None:
    for told, said in ((None, "no thread has its name"), (70, "thread 70 is no NAPI thread now")):
        tree = host({}, told)
        tree.thread(70, 70, "napi/nvt0-1")
        assert said in problem(tree, THREADED)


def test_a_thread_that_has_ended() -> None:
    assert "thread 99 is no NAPI thread now" in problem(host({}, told=99), THREADED)
    assert "the module says it has no thread" in problem(host({}, told=0), THREADED)


def test_without_threaded_napi_no_thread_counts() -> None:
    tree = host({70: "napi/nvt0-1"})
    for value in (0, None):
        assert found(tree, napi_macvtap(0, threaded=value)) == []


def test_a_device_of_the_module() -> None:
    tree = HostTree()
    tree.napi_macvtap("nvt0", 9, "eth0", threaded=1, rx_dropped_ring_full=4, tapq0_received=5)
    tree.device("eth0", 2, pci="pci0000:00/0000:00:05.0")
    net = NetReader(tree.root())
    device = net.device("nvt0")
    assert device is not None
    assert (device.kind, net.numbers(device)["threaded"]) == (
        NicKind.NAPI_MACVTAP,
        1,
    )
    assert net.lower_chain("nvt0") == ("eth0",)
    counters = net.counters(device)
    assert counters is not None
    assert (counters.rx_dropped_ring_full, counters.queues[0].received) == (4, 5)


def test_a_device_that_goes_while_it_is_read() -> None:
    tree = HostTree()
    tree.device("nvt0", 9, has="napi_macvtap")
    net = NetReader(tree.root())
    device = net.device("nvt0")
    assert device is not None
    assert (net.counters(device), net.numbers(device)["threaded"]) == (None, None)


# -- whole guests


def plain_guest(tree: HostTree, pid: int, name: str, *queues: tuple[str, int]) -> None:
    """A QEMU with a tap queue and a worker for each (device, ifindex) of ``queues``."""
    arguments = ["-name", f"{name},debug-threads=on"]
    for number, (device, ifindex) in enumerate(queues):
        fd = 20 + 2 * number
        tree.fd(pid, fd, f"/dev/tap{ifindex}").fd(pid, fd + 1, "/dev/vhost-net")
        arguments += ["-netdev", f"tap,fd={fd},vhost=on,vhostfd={fd + 1},id=n{number}"]
        arguments += [
            "-device",
            f"virtio-net-pci,netdev=n{number},mac=02:00:00:00:00:{device[-1]}0",
        ]
    tree.qemu(pid, *arguments)
    for number in range(len(queues)):
        tree.thread(pid, pid + 1 + number, f"vhost-{pid}", start=110)
    tree.thread(pid, pid + 9, "CPU 0/KVM", start=120)


def observed(tree: HostTree) -> Snapshot:
    return Observer(tree.root(), None).observe()


def only(tree: HostTree) -> Guest:
    (guest,) = observed(tree).guests
    return guest


def mapping(guest: Guest) -> list[tuple[int, str | None, int | None, str]]:
    return [
        (t.key.tid, t.interface, t.queue, t.confidence.value if t.confidence else "")
        for t in guest.by_role(Role.VHOST)
    ]


NO_WORKER = "which is no vhost worker of this guest now"


@pytest.mark.parametrize(
    ("senders", "expected", "problem"),
    [
        # Against the order of age: 51 is the older worker.
        ((52, 51), [(51, "nvt2", 0, "exact"), (52, "nvt1", 0, "exact")], ""),
        ((0,), [(51, "nvt1", 0, "order")], ""),
        (
            (4711,), [(51, "nvt1", 0, "order")],
            f"nvt1 queue 0: task 4711 sent last, {NO_WORKER}; not used for the mapping",
        ),
        (
            (51, 51), [(51, "nvt1", 0, "order"), (52, "nvt2", 0, "order")],
            "task 51 sent last on nvt1 queue 0, nvt2 queue 0: not used for the mapping",
        ),
    ],
    ids=["told", "before any frame", "no worker of the guest", "two queues name one"],
)  # fmt: skip
def test_the_module_tells_which_worker_serves_which_queue(
    senders: tuple[int, ...], expected: list[tuple[int, str, int, str]], problem: str
) -> None:
    """``senders``: who sent last on the only queue of nvt1 and nvt2."""
    tree = HostTree().host()
    queues = [(f"nvt{n}", 7 + n) for n in range(1, 1 + len(senders))]
    for (name, index), tid in zip(queues, senders, strict=True):
        tree.napi_macvtap(name, index, f"p{index - 8}", tapq0_worker_tid=tid)
    plain_guest(tree, 50, "vr1", *queues)
    guest = only(tree)
    assert mapping(guest) == expected
    assert guest.problems == ((problem,) if problem else ())
    assert {i.kind for i in guest.interfaces} == {NicKind.NAPI_MACVTAP}


def test_queues_of_one_device_are_told_apart() -> None:
    tree = HostTree().host()
    tree.napi_macvtap("nvt1", 8, "p0", tapq0_worker_tid=52, tapq1_worker_tid=51)
    plain_guest(tree, 50, "vr1", ("nvt1", 8), ("nvt1", 8))
    # Two -netdev on one device are two interfaces to QEMU; the queues are the device's.
    tree.qemu(
        50, "-name", "vr1,debug-threads=on", "-netdev",
        "tap,fds=20:22,vhost=on,vhostfds=21:23,id=n0", "-device", "virtio-net-pci,netdev=n0",
    )  # fmt: skip
    assert mapping(only(tree)) == [(51, "nvt1", 1, "exact"), (52, "nvt1", 0, "exact")]


def test_guests_that_share_a_device() -> None:
    tree = HostTree().host()
    tree.thread(70, 70, "napi/nvt1-8193", ppid=2, flags=PF_KTHREAD, cgroup="/")
    tree.napi_macvtap(
        "nvt1", 8, "p0", threaded=1, napi_thread=70, tapq0_worker_tid=51, tapq1_worker_tid=61
    )
    plain_guest(tree, 50, "vr1", ("nvt1", 8))
    plain_guest(tree, 60, "vr2", ("nvt1", 8))
    first, second = observed(tree).guests
    assert mapping(first) == [(51, "nvt1", 0, "exact")]
    assert mapping(second) == [(61, "nvt1", 0, "exact")]
    assert [t.key.tid for t in first.by_role(Role.NAPI)] == [70]
    assert second.by_role(Role.NAPI) == ()
    assert second.problems == ("nvt1 is shared, its NAPI thread is shown with qemu:vr1",)


def test_the_napi_thread_is_one_of_the_guests_threads() -> None:
    tree = HostTree().host()
    tree.thread(70, 70, "napi/nvt1-8193", ppid=2, flags=PF_KTHREAD, cgroup="/", allowed="2")
    tree.napi_macvtap("nvt1", 8, "p0", threaded=1, napi_thread=70)
    plain_guest(tree, 50, "vr1", ("nvt1", 8))
    (thread,) = only(tree).by_role(Role.NAPI)
    assert (thread.key.pid, thread.key.tid, thread.name) == (70, 70, "napi/nvt1-8193")
    assert (thread.interface, thread.confidence) == ("nvt1", Confidence.EXACT)
    assert (str(thread.affinity), thread.cgroup, thread.worker) == ("2", "", None)
