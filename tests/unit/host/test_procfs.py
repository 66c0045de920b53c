"""Processes and threads from /proc texts."""

from __future__ import annotations

import pytest
from hosttree import HostTree, stat_line

from vsrtune.core.cpuset import CpuSet
from vsrtune.host.procfs import (
    PF_KTHREAD,
    is_qemu,
    parse_cgroup,
    parse_fdinfo_iff,
    parse_stat,
    parse_status_allowed,
    read_links,
    read_threads,
    worker_owner,
)
from vsrtune.model.guest import Sched, ThreadKey
from vsrtune.observe.qemu_processes import ProcessTable


def test_stat_of_a_comm_with_blanks_and_parentheses() -> None:
    found = parse_stat(stat_line(77, "CPU 0) (KVM", ppid=3, flags=PF_KTHREAD, start=912))
    assert (found.tid, found.comm, found.ppid) == (77, "CPU 0) (KVM", 3)
    assert (found.start_time, found.processor, found.cpu_ticks) == (912, 1, 5)
    assert found.kthread


@pytest.mark.parametrize("text", ["", "1 (x", "1 (x) S 1 2 3\n", "x (y) " + "0 " * 40])
def test_stat_that_is_damaged(text: str) -> None:
    with pytest.raises((ValueError, IndexError)):
        parse_stat(text)


def test_allowed_cpus_of_status() -> None:
    text = "Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t0-3,6\nMems_allowed:\t1\n"
    assert parse_status_allowed(text) == CpuSet([0, 1, 2, 3, 6])
    with pytest.raises(ValueError, match="Cpus_allowed_list"):
        parse_status_allowed("Name:\tx\n")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("0::/\n", ""),
        (
            "0::/machine.slice/machine-qemu\\x2d3\\x2dvr\\x2d1.scope/libvirt/vcpu0\n",
            "machine.slice/machine-qemu\\x2d3\\x2dvr\\x2d1.scope/libvirt/vcpu0",
        ),
        # Hybrid: processes are under v2 as well, the cpuset controller is not.
        ("4:cpuset,cpu:/machine/a\n0::/machine/a\n", None),
        ("4:cpuacct:/x\n0::/a:b\n", "a:b"),
        ("1:name=systemd:/x\n", None),
        ("", None),
    ],
)
def test_cgroup(text: str, path: str | None) -> None:
    assert parse_cgroup(text) == path


@pytest.mark.parametrize(
    ("comm", "owner"),
    [("vhost-1234", 1234), ("vhost-", None), ("vhost-12a", None), ("xvhost-1", None)],
)
def test_worker_owner(comm: str, owner: int | None) -> None:
    assert worker_owner(comm) == owner


@pytest.mark.parametrize(
    ("exe", "is_one"),
    [
        ("/usr/bin/qemu-system-x86_64", True),
        ("/usr/bin/qemu-system-x86_64 (deleted)", True),
        ("/usr/bin/kvm", True),
        ("/usr/libexec/qemu-kvm", True),
        ("/usr/bin/qemu-img", False),
        ("/usr/bin/qemu-storage-daemon", False),
        ("/usr/bin/kvmtool", False),
        ("/usr/bin/cloud-hypervisor", False),
        ("/usr/bin/bash", False),
    ],
)
def test_is_qemu(exe: str, is_one: bool) -> None:
    assert is_qemu(exe) is is_one


def test_fdinfo() -> None:
    assert parse_fdinfo_iff("pos:\t0\nflags:\t0104002\niff:\tvnet3\n") == "vnet3"
    assert parse_fdinfo_iff("pos:\t0\n") == ""


def test_scan_finds_guests_workers_and_daemons() -> None:
    tree = HostTree()
    tree.qemu(100, "-name", "pq1", start=55)
    tree.thread(200, 200, "vhost-100", ppid=2, flags=PF_KTHREAD)
    tree.thread(201, 201, "vhost-100", ppid=2, flags=PF_KTHREAD)
    tree.thread(300, 300, "irqbalance")
    tree.thread(301, 301, "vhost-100")  # not a kernel thread: somebody's process
    tree.file("/proc/self/stat", "")
    found = ProcessTable().scan(tree.root())
    assert [(q.pid, q.start_time, q.args.name) for q in found.qemus] == [(100, 55, "pq1")]
    assert found.workers == {100: (200, 201)}
    assert found.daemons == (("irqbalance", 300),)


def test_scan_leaves_out_what_is_no_guest() -> None:
    tree = HostTree()
    tree.qemu(100, "-name", "a")
    tree.qemu(101, "-name", "a")
    tree.file("/proc/101/stat", stat_line(101, "qemu-system-x86", ppid=100))
    tree.qemu(102, "-S", "-machine", "none,accel=kvm:tcg", "-qmp", "unix:/x,server=on")
    tree.qemu(103)
    tree.file("/proc/103/cmdline", "")  # already a zombie
    assert [q.pid for q in ProcessTable().scan(tree.root()).qemus] == [100]


def test_scan_without_the_right_to_see_executables_believes_nobody() -> None:
    tree = HostTree()
    tree.qemu(100, "-name", "a")
    tree.errors["/proc/100/exe"] = "EACCES"
    found = ProcessTable().scan(tree.root())
    assert found.qemus == ()
    assert [(s.pid, s.why) for s in found.strangers] == [
        (100, "its executable is not ours to see: run vsrtune as root")
    ]


def test_threads_that_vanish_are_left_out() -> None:
    tree = HostTree()
    tree.qemu(100)
    tree.thread(100, 101, "CPU 0/KVM", allowed="1")
    tree.thread(100, 102, "gone while its status was read")
    tree.errors["/proc/100/task/102/status"] = "ESRCH"
    tree.thread(100, 103, "gone before its scheduling was read")
    del tree.answers.sched["103"]
    main, vcpu = read_threads(tree.root(), 100)
    assert main.key == ThreadKey(100, 100, 100)
    assert vcpu.name == "CPU 0/KVM"
    assert vcpu.affinity == CpuSet([1])
    assert vcpu.sched == Sched()
    assert (vcpu.last_cpu, vcpu.cpu_ns, vcpu.kthread) == (1, 1234, False)
    assert vcpu.cgroup == "system.slice/pq1.service"


def test_cpu_time_without_schedstat_comes_from_ticks() -> None:
    tree = HostTree()
    tree.qemu(100)
    tree.remove("/proc/100/task/100/schedstat")
    assert read_threads(tree.root(), 100)[0].cpu_ns == 50_000_000


def test_threads_of_a_process_that_is_gone() -> None:
    with pytest.raises(FileNotFoundError):
        read_threads(HostTree().root(), 100)


def test_links_in_number_order_without_closed_ones() -> None:
    tree = HostTree()
    tree.qemu(100)
    tree.fd(100, 9, "/dev/tap5").fd(100, 10, "/dev/vhost-net").fd(100, 8, "x")
    tree.errors["/proc/100/fd/8"] = "ENOENT"
    assert list(read_links(tree.root(), 100).items()) == [
        (9, "/dev/tap5"),
        (10, "/dev/vhost-net"),
    ]
