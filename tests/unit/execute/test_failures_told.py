"""What each failure tells: its place, what is wrong, what to do next, and whether a later try may
help."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_kernel import BOOT, LIBVIRT, OURS, UUID, FakeKernel, key, make_host, releases

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import (
    JournalError,
    Lasting,
    VanishedError,
    VsrtuneError,
    WriteError,
)
from vsrtune.execute import jsonl_log
from vsrtune.execute.executor import apply
from vsrtune.execute.journal import Journal
from vsrtune.execute.syscalls import LibvirtPins
from vsrtune.model.guest import Sched, SchedClass, ThreadKey
from vsrtune.model.plan import Action, Plan
from vsrtune.model.targets import (
    HOST_REF,
    CgroupDir,
    CpusetFile,
    CpusetList,
    EmulatorPin,
    IrqAffinity,
    Partition,
    PartitionState,
    Pin,
    QueueCpus,
    Target,
    ThreadAffinity,
    ThreadCgroup,
    ThreadSched,
    TxQueueLen,
    Value,
    VcpuPin,
)

LATER, NEVER = Lasting.TRANSIENT, Lasting.PERMANENT
QUEUE = TxQueueLen("vr1", "macvtap0", 7)
LONGER = Plan((Action(QUEUE, 500, 100, "policy"),))
KEPT = "new threads kept coming; the daemon tries again at its next pass"


@pytest.fixture
def host() -> FakeKernel:
    return make_host("6.12")


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal.open(tmp_path / "journal.jsonl", BOOT) as opened:
        yield opened


def told(error: VsrtuneError) -> tuple[str, Lasting]:
    return str(error), error.lasting


def only_failure(plan: Plan, host: FakeKernel, journal: Journal) -> tuple[str, Lasting]:
    ((_, error),) = apply(plan, host.ops(), journal).failed
    return told(error)


# -- passes


def test_a_value_that_somebody_changed_meanwhile(host: FakeKernel, journal: Journal) -> None:
    host.write("/sys/class/net/macvtap0/tx_queue_len", "77")
    assert only_failure(LONGER, host, journal) == (
        "vr1: macvtap0 txqueuelen: is 77 now, but was 500 when the plan was made; plan again",
        LATER,
    )


def test_an_original_that_somebody_changed_meanwhile(host: FakeKernel, journal: Journal) -> None:
    apply(LONGER, host.ops(), journal)
    (release,) = releases(journal).actions
    assert only_failure(Plan((replace(release, after=400),)), host, journal) == (
        (
            "vr1: macvtap0 txqueuelen: was 400 before vsrtune when the plan was made, and is 500 now; "
            "plan again"
        ),
        LATER,
    )


@pytest.mark.parametrize("times", [1, 9])
def test_a_value_that_does_not_stay(host: FakeKernel, journal: Journal, times: int) -> None:
    """Something sets it to 77 after each of our writes, of which the second takes ours back."""
    writes: list[str] = []

    def meddle(what: str) -> None:
        writes.append(what)
        if len(writes) <= times:
            host.state["devices"]["macvtap0"]["tx_queue_len"] = 77

    host.behind = meddle
    result = apply(LONGER, host.ops(), journal)
    ((_, error),) = result.failed
    wrote = "wrote {}, but the host has 77; something else sets this value too, or the kernel does "
    wrote += "not allow it here"
    name = "vr1: macvtap0 txqueuelen"
    taken_back = times == 1
    assert result.rolled_back is taken_back
    assert len(writes) == 2
    assert host.ops().read(QUEUE) == (500 if taken_back else 77)
    assert told(error) == (
        f"{name}: {wrote.format(100)}"
        if taken_back
        else f"{name}: {name}: {wrote.format(100)}; and could not be taken back: {name}: "
        f"{wrote.format(500)}; run `vsrtune undo`",
        LATER,
    )


# -- writes


def full_parking(host: FakeKernel) -> None:
    """Whoever leaves the emulator's cgroup is followed by another thread that is born there."""
    host.pin(UUID, None, CpuSet([0]))

    def bear(what: str) -> None:
        if "vsrtune-emulator/cgroup.threads" in what:
            threads = host.state["threads"]
            tid = str(max(map(int, threads)) + 1)
            threads[tid] = threads["1000"] | {"cgroup": f"{LIBVIRT}/emulator", "start": int(tid)}

    host.behind = bear


def no_threaded_parent(host: FakeKernel) -> None:
    host.state["cgroups"][LIBVIRT]["type"] = "domain"


def without_domain(host: FakeKernel) -> None:
    def gone(*_: object) -> None:
        raise VanishedError("the domain is gone or not running")

    host.pin = gone  # type: ignore[method-assign]


def kept_cgroup(host: FakeKernel) -> None:
    host.state["cgroups"][OURS] = {"cpus": "", "type": "threaded"}
    for tid in ("1020", "1021"):
        host.state["threads"][tid]["cgroup"] = OURS


def fails(what: str, number: int) -> Callable[[FakeKernel], None]:
    """A host on which this call fails."""

    def arrange(host: FakeKernel) -> None:
        def refuse(asked: str) -> None:
            if what in asked:
                raise OSError(number, os.strerror(number))

        host.ahead = refuse

    return arrange


def empty_cgroup(host: FakeKernel) -> None:
    host.mkdir(f"/sys/fs/cgroup/{OURS}")
    fails("rmdir", errno.EPERM)(host)


def nonsense(host: FakeKernel) -> None:
    host.state["irqs"]["41"]["mask"] = "3-1"


def nothing(_host: FakeKernel) -> None:
    """The host as it is."""


IRQ = IrqAffinity(HOST_REF, 41, "eth0-rx-0")
KEY = ThreadKey(1000, 1010, 6000)
VCPU = f"{LIBVIRT}/vcpu0"
WRITES: list[tuple[Callable[[FakeKernel], None], Target, Value, str, Lasting]] = [
    (
        nothing, IRQ, CpuSet([9]),
        ("host/: irq 41 (eth0-rx-0) affinity: not written: CPU 9 does not exist on this host; choose "
        "from CPUs 0-3 that are online"), NEVER,
    ),
    (
        nothing, IRQ, CpuSet(),
        ("host/: irq 41 (eth0-rx-0) affinity: not written: none of CPUs none is online; choose from "
        "CPUs 0-3 that are online"), NEVER,
    ),
    (
        nothing, QueueCpus(HOST_REF, "eth0", 2, "rx-0"), CpuSet([9]),
        ("host/: eth0 rx-0 rps_cpus: not written: CPU 9 does not exist on this host; choose from "
        "CPUs 0-3 that are online"), NEVER,
    ),
    (
        fails("rps_cpus", errno.EINVAL), QueueCpus(HOST_REF, "eth0", 2, "rx-0"), CpuSet([1]),
        ("host/: eth0 rx-0 rps_cpus: write to rps_cpus of '1' failed with EINVAL because the kernel "
        "steers no frames to isolated CPUs (isolcpus, nohz_full); name CPUs that are not isolated"),
        NEVER,
    ),
    (
        fails("smp_affinity", errno.EIO), IRQ, CpuSet([1]),
        ("host/: irq 41 (eth0-rx-0) affinity: write to smp_affinity_list of '1' failed with EIO "
        "because the interrupt is kernel-managed: its driver leaves its CPUs to the kernel; name "
        "its CPU in cpus.irq too, which keeps guests off it, or give the device fewer queues "
        "(ethtool -L)"), NEVER,
    ),
    (
        fails("smp_affinity", errno.EINVAL), IRQ, CpuSet([1]),
        ("host/: irq 41 (eth0-rx-0) affinity: write to smp_affinity_list of '1' failed with EINVAL "
        "because the interrupt controller cannot route it there; name its CPU in cpus.irq too, which "
        "keeps guests off it, or give the device fewer queues (ethtool -L)"), NEVER,
    ),
    (
        fails("tx_queue_len", errno.ENOMEM), QUEUE, 100,
        ("vr1: macvtap0 txqueuelen: write to tx_queue_len of '100' failed with ENOMEM because there "
        "is no memory for rings of that length; choose a shorter queue"), LATER,
    ),
    (
        without_domain, VcpuPin("vr1", UUID, 0, KEY), Pin(CpuSet([1]), "1"),
        ("vr1: vcpu 0 pin: its QEMU runs, but libvirt has no such domain running: the domain is gone "
        "or not running; it is just coming or going, or another libvirt's; see: virsh list --all"),
        LATER,
    ),
    (
        no_threaded_parent, CgroupDir("vr1", OURS), True,
        (f"vr1: cgroup {OURS}: the parent cgroup is of type 'domain', which cannot hold single "
        "threads; only guests whose cgroups libvirt made threaded can be served"), NEVER,
    ),
    (
        kept_cgroup, CgroupDir("vr1", OURS), False,
        (f"vr1: cgroup {OURS} (threads inside: 1020 1021): rmdir of a cgroup failed with EBUSY "
        "because threads or child cgroups are still in it; retried; look at its cgroup.threads"),
        LATER,
    ),
    (
        empty_cgroup, CgroupDir("vr1", OURS), False,
        (f"vr1: cgroup {OURS} (threads inside: none): rmdir of a cgroup failed with EPERM because the "
        "process may not do that; run as root"), NEVER,
    ),
    (
        full_parking, EmulatorPin("vr1", UUID, ThreadKey(1000, 1000, 6000)),
        Pin(CpuSet(range(4)), ""),
        f"vr1: emulator pin: cpuset.cpus of {LIBVIRT}/emulator could not be unset: {KEPT}", LATER,
    ),
    (
        fails("cpuset.cpus 0", errno.EBUSY), CpusetFile("vr1", VCPU, "cpuset.cpus"),
        CpusetList("0"),
        (f"vr1: cgroup {VCPU} cpuset.cpus: write to cpuset.cpus of '0' failed with EBUSY because DEADLINE "
        "threads in the cpuset would lose their CPUs; give them another class first"), NEVER,
    ),
    (
        fails("cpuset.cpus.exclusive", errno.EINVAL),
        CpusetFile("vr1", VCPU, "cpuset.cpus.exclusive"), CpusetList("0"),
        (f"vr1: cgroup {VCPU} cpuset.cpus.exclusive: write to cpuset.cpus.exclusive of '0' failed with "
        "EINVAL because a cgroup beside it, or a partition, has one of these CPUs for itself; look "
        "at cpuset.cpus and cpuset.cpus.exclusive of the cgroups beside it"), NEVER,
    ),
    (
        fails("partition", errno.EINVAL), Partition("vr1", VCPU), PartitionState("root"),
        (f"vr1: partition {VCPU}: write to cpuset.cpus.partition of 'root' failed with EINVAL "
        "because the kernel makes no partition here; look at cpuset.cpus.partition"), NEVER,
    ),
    (
        fails("sched 1010", errno.EPERM), ThreadSched("vr1", KEY, "vcpu 0"),
        Sched(SchedClass.FIFO, 5),
        ("vr1: vcpu 0 (tid 1010) scheduling: sched_setattr of 'fifo:5' failed with EPERM because "
        "real-time classes are forbidden here: CAP_SYS_NICE is missing, or the kernel has "
        "RT_GROUP_SCHED and the thread's cpu cgroup has no real-time budget; run as root; under "
        "RT_GROUP_SCHED give the cgroup cpu.rt_runtime_us (v1) or disable the cpu controller for "
        "the guests' cgroups (v2)"), NEVER,
    ),
    (
        fails("affinity 1010", errno.EPERM), ThreadAffinity("vr1", KEY, "vcpu 0"), CpuSet([1]),
        ("vr1: vcpu 0 (tid 1010) affinity: sched_setaffinity of '1' failed with EPERM because the "
        "process may not change other users' threads; run as root with CAP_SYS_NICE"), NEVER,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("arrange", "target", "value", "text", "lasting"), WRITES)
def test_writes_that_are_refused(
    host: FakeKernel,
    monkeypatch: pytest.MonkeyPatch,
    arrange: Callable[[FakeKernel], None],
    target: Target,
    value: Value,
    text: str,
    lasting: Lasting,
) -> None:
    monkeypatch.setattr("vsrtune.execute.cgroups._RMDIR_PAUSE", 0)
    arrange(host)
    with pytest.raises(VsrtuneError) as caught:
        host.ops().write(target, value)
    assert told(caught.value) == (text, lasting)


def test_an_answer_that_makes_no_sense(host: FakeKernel) -> None:
    nonsense(host)
    with pytest.raises(VsrtuneError) as caught:
        host.ops().read(IRQ)
    assert str(caught.value).startswith(
        "host/: irq 41 (eth0-rx-0) affinity: the kernel's answer makes no sense: '3-1' is not"
    )
    assert "vsrtune record" in caught.value.hint


def ended(host: FakeKernel) -> None:
    host.end_guest(1000)


def reused(host: FakeKernel) -> None:
    host.state["threads"]["1010"]["start"] += 1


def without_controller(host: FakeKernel) -> None:
    host.state["cgroups"][VCPU]["cpus"] = None


def renumbered(host: FakeKernel) -> None:
    host.state["devices"]["macvtap0"]["ifindex"] = 70


def given_to_another(host: FakeKernel) -> None:
    host.state["irqs"]["41"]["actions"] = "nvme0q1"


def removed(host: FakeKernel) -> None:
    del host.state["irqs"]["41"]


@pytest.mark.parametrize(
    ("arrange", "target", "text"),
    [
        (ended, ThreadAffinity("vr1", KEY, "vcpu 0"), "the thread has ended"),
        (reused, ThreadSched("vr1", KEY, "vcpu 0"), "the thread has ended, its number is reused"),
        (ended, CgroupDir("vr1", OURS), "the guest's cgroup is gone"),
        (ended, Partition("vr1", VCPU), "the guest's cgroup is gone"),
        (without_controller, Partition("vr1", VCPU), "the cgroup has no cpuset any more"),
        (without_controller, CpusetFile("vr1", VCPU, "cpuset.cpus"), "the cgroup has no cpuset any more"),
        (renumbered, QUEUE, "no device has ifindex 7 now"),
        (given_to_another, IRQ, "the number is that of nvme0q1 now"),
        (removed, IRQ, "the interrupt is gone"),
        (nothing, QueueCpus(HOST_REF, "eth0", 2, "rx-9"), "the device has no such queue now"),
    ],
)  # fmt: skip
def test_what_has_vanished(
    host: FakeKernel, arrange: Callable[[FakeKernel], None], target: Target, text: str
) -> None:
    arrange(host)
    with pytest.raises(VanishedError) as caught:
        host.ops().read(target)
    assert str(caught.value) == f"{target}: {text}"


def test_a_move_between_cgroups_that_is_refused(host: FakeKernel) -> None:
    host.mkdir(f"/sys/fs/cgroup/{OURS}")
    with pytest.raises(VsrtuneError) as caught:
        host.ops().write(ThreadCgroup("vr1", key(host, 1020), "vhost"), OURS)
    assert told(caught.value) == (
        (
            f"vr1: vhost (tid 1020) cgroup: write to cgroup.threads of '{OURS}' failed with EOPNOTSUPP "
            "because the cgroup is not threaded, or belongs to another threaded domain than the "
            "thread; cgroup.type of both cgroups must be 'threaded' below the same domain"
        ),
        NEVER,
    )


# -- libvirt


def test_a_pin_beyond_the_cpus_that_libvirt_counts() -> None:
    libvirt = pytest.importorskip("libvirt")
    connection = libvirt.open("test:///default")
    uuid = connection.lookupByName("test").UUIDString()
    count = connection.getCPUMap()[0]
    connection.close()
    pins = LibvirtPins("test:///default")
    hint = "name CPUs of this host in the policy"
    for cpu in (count, 500):
        told = f"libvirt counts {count} CPUs, CPU {cpu} is not one of them; {hint}"
        with pytest.raises(WriteError) as caught:
            pins.pin(uuid, 0, CpuSet([cpu]))
        assert str(caught.value) == f"domain {uuid} vcpu 0: {told}"
        with pytest.raises(VsrtuneError) as caught:
            pins.pin(uuid, None, CpuSet([0, cpu]))
        assert str(caught.value) == f"domain {uuid} emulator: {told}"
    pins.pin(uuid, None, CpuSet([count - 1]))


# -- the journal


def linked(path: Path) -> Path:
    with Journal.open(path.with_name("elsewhere"), BOOT) as journal:
        journal.intent(LONGER.actions[0])
    path.symlink_to(journal.path)
    return path


def below_a_file(path: Path) -> Path:
    path.touch()
    return path / "journal.jsonl"


@pytest.mark.parametrize(
    ("place", "hint"),
    [
        (linked, "is a symbolic link; name the file itself"),
        (below_a_file, "journal.jsonl is no directory; name another place"),
        (lambda path: below_a_file(path) / "x", "is no directory; name another place"),
    ],
)
def test_a_journal_whose_path_leads_elsewhere(
    tmp_path: Path, place: Callable[[Path], Path], hint: str
) -> None:
    with pytest.raises(JournalError) as caught:
        Journal.open(place(tmp_path / "journal.jsonl"), BOOT)
    assert caught.value.hint.endswith(hint)


@pytest.mark.parametrize(
    ("number", "hint", "lasting"),
    [
        (errno.ENOSPC, "free space on that file system: df {}", LATER),
        (errno.EDQUOT, "free space on that file system: df {}", LATER),
        (errno.EROFS, "remount that file system read-write", NEVER),
        (errno.EACCES, "run as root", NEVER),
        (errno.EPERM, "run as root", NEVER),
        (errno.EIO, "see the kernel log", NEVER),
    ],
)
def test_a_journal_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, hint: str, lasting: Lasting
) -> None:
    path = tmp_path / "journal.jsonl"

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    text = f"{path}: the journal cannot be written ({os.strerror(number)}), so the host is not "
    text += f"written either; {hint.format(tmp_path)}"
    with Journal.open(path, BOOT) as journal:
        monkeypatch.setattr(os, "write", refuse)
        with pytest.raises(JournalError) as caught:
            journal.intent(LONGER.actions[0])
        assert told(caught.value) == (text, lasting)
        monkeypatch.undo()
        monkeypatch.setattr(os, "fsync", refuse)
        with pytest.raises(JournalError) as caught:
            journal.intent(LONGER.actions[0])
        assert told(caught.value) == (text, lasting)
        monkeypatch.undo()
        with pytest.raises(JournalError) as caught:
            journal.intent(LONGER.actions[0])
        assert str(caught.value) == (
            f"{path}: an earlier write failed: [Errno {number}] {os.strerror(number)}; restart "
            "vsrtune once the disk is well"
        )


def test_a_journal_that_cannot_be_read(tmp_path: Path) -> None:
    place = tmp_path / "directory"
    place.mkdir()
    with pytest.raises(JournalError) as caught:
        Journal.open(place, BOOT)
    assert str(caught.value) == (
        f"{place}: cannot be read: it is no regular file; name the file that was used before, or "
        "a new one"
    )


@pytest.mark.parametrize(
    ("number", "look"),
    [
        (errno.EIO, "see the kernel log; "),
        (errno.EUCLEAN, "see the kernel log; "),
        (errno.EFBIG, ""),
    ],
)
def test_no_new_file_is_advised_in_place_of_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, look: str
) -> None:
    """What vsrtune has set would be taken for the originals."""
    path = tmp_path / "journal.jsonl"
    Journal.open(path, BOOT).close()

    def refuse(_path: Path, _most: int) -> bytes:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(jsonl_log, "read_file", refuse)
    with pytest.raises(JournalError) as caught:
        Journal.open(path, BOOT)
    assert str(caught.value) == (
        f"{path}: cannot be read: {os.strerror(number)}; {look}with another file, what "
        "vsrtune has changed would count as what was there before it (a reboot ends all "
        "settings)"
    )
