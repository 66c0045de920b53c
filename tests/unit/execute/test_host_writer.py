"""host_writer.py on the imitated kernel, and the few of its calls that any machine allows."""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from fake_kernel import KERNELS, LIBVIRT, OURS, UUID, FakeKernel, key, make_host

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import BusyError, Lasting, LateError, VanishedError, WriteError
from vsrtune.execute import syscalls
from vsrtune.execute.host_writer import LiveSysOps
from vsrtune.execute.syscalls import LibvirtPins
from vsrtune.host.libvirt import Patience
from vsrtune.host.scheduler import pack
from vsrtune.model.guest import Sched, SchedClass, ThreadKey
from vsrtune.model.targets import (
    HOST_REF,
    CgroupDir,
    EmulatorPin,
    IrqAffinity,
    NapiThreaded,
    Pin,
    Target,
    ThreadAffinity,
    ThreadCgroup,
    ThreadMask,
    ThreadSched,
    TxQueueLen,
    Value,
    VcpuPin,
)

ALL = CpuSet(range(4))
ZERO, ONE = CpuSet([0]), CpuSet([1])


@pytest.fixture(params=KERNELS)
def host(request: pytest.FixtureRequest) -> FakeKernel:
    return make_host(request.param)


def emulator(host: FakeKernel) -> EmulatorPin:
    return EmulatorPin("vr1", UUID, key(host, 1000))


def user(host: FakeKernel, tid: int) -> str:
    return str(host.state["threads"][str(tid)]["user"])


# -- affinities


def test_all_that_the_cpuset_allows_is_written_as_all_possible(host: FakeKernel) -> None:
    target = ThreadAffinity("vr1", key(host, 1011), "vcpu 1")
    host.ops().write(target, CpuSet([0, 1, 2]))
    assert (host.mask(1011), user(host, 1011)) == ("0-2", "0-3")
    host.ops().write(target, CpuSet([0, 1]))
    assert (host.mask(1011), user(host, 1011)) == ("0-1", "0-1")


def test_below_the_root_cpuset_alone_the_mask_is_written_as_it_is(host: FakeKernel) -> None:
    host.state["possible"] = "0-127"
    target = ThreadAffinity("qemu:vr2", key(host, 2010), "vcpu 0")
    host.ops().write(target, ALL)
    assert user(host, 2010) == "0-3"


def test_a_mask_outside_the_cpuset_is_refused_with_its_reason(host: FakeKernel) -> None:
    target = ThreadAffinity("vr1", key(host, 1011), "vcpu 1")
    with pytest.raises(WriteError, match=r"EINVAL.*cpuset") as caught:
        host.ops().write(target, CpuSet([3]))
    assert caught.value.lasting is Lasting.PERMANENT
    assert caught.value.hint


# -- pins


def test_a_pin_is_read_with_the_threads_beside_it(host: FakeKernel) -> None:
    pin = host.ops().read(emulator(host))
    assert isinstance(pin, Pin)
    assert (pin.cpus, pin.cpuset) == (ALL, "")
    assert pin.others == (
        ThreadMask(key(host, 1002), CpuSet([2])),
        ThreadMask(key(host, 1021), CpuSet([1, 2, 3])),
    )


@pytest.mark.parametrize("text", ["", "0-3", "0-2"])
def test_a_pin_goes_and_comes_back_to_the_letter(host: FakeKernel, text: str) -> None:
    host.write(f"/sys/fs/cgroup/{LIBVIRT}/emulator/cpuset.cpus", text)
    host.set_affinity(1002, CpuSet([2]))
    before, original = host.visible(), host.ops().read(emulator(host))
    host.ops().write(emulator(host), Pin(ZERO, "0"))
    assert {host.mask(t) for t in (1000, 1001, 1002, 1020, 1021)} == {"0"}
    host.ops().write(emulator(host), original)
    assert host.visible() == before


def test_threads_born_while_a_cpuset_is_emptied_come_along(host: FakeKernel) -> None:
    before, original = host.visible(), host.ops().read(emulator(host))
    host.ops().write(emulator(host), Pin(ZERO, "0"))
    births = [1031, 1032]

    def bear(what: str) -> None:
        if what.endswith("cgroup.threads 1000") and births:
            threads = host.state["threads"]
            tid = births.pop()
            threads[str(tid)] = threads["1000"] | {"start": tid, "cgroup": f"{LIBVIRT}/emulator"}

    host.ahead = bear
    host.ops().write(emulator(host), original)
    assert births == []
    after = host.visible()
    for tid in ("1031", "1032"):
        assert after["threads"].pop(tid)["cgroup"] == f"{LIBVIRT}/emulator"
    assert after == before


def test_threads_that_a_crash_left_parked_come_home(host: FakeKernel) -> None:
    before, original = host.visible(), host.ops().read(emulator(host))
    parking = f"{LIBVIRT}/vsrtune-emulator"
    host.mkdir(f"/sys/fs/cgroup/{parking}")
    host.write(f"/sys/fs/cgroup/{parking}/cgroup.type", "threaded")
    for tid in ("1000", "1001"):
        host.write(f"/sys/fs/cgroup/{parking}/cgroup.threads", tid)
    assert host.ops().read(emulator(host)) == original
    host.ops().write(emulator(host), original)
    assert host.visible() == before


def test_an_affinity_narrower_than_the_cpuset_comes_back(host: FakeKernel) -> None:
    """With isolcpus libvirt starts QEMU on the other CPUs, and leaves the cpuset unset."""
    for tid in (1000, 1001, 1010):
        host.set_affinity(tid, CpuSet([0, 1]))
    before = host.visible()
    vcpu = VcpuPin("vr1", UUID, 0, key(host, 1010))
    originals = [host.ops().read(t) for t in (emulator(host), vcpu)]
    host.ops().write(emulator(host), Pin(ONE, "1"))
    host.ops().write(vcpu, Pin(CpuSet([2]), "2"))
    host.ops().write(vcpu, originals[1])
    host.ops().write(emulator(host), originals[0])
    assert host.visible() == before


def test_a_pin_through_libvirt_that_fails_half_way_can_be_written_again(
    host: FakeKernel,
) -> None:
    vcpu = VcpuPin("vr1", UUID, 0, key(host, 1010))
    before, original = host.visible(), host.ops().read(vcpu)

    def refuse(what: str) -> None:
        if what.startswith("libvirt affinity"):
            raise OSError(errno.EBUSY, "Device or resource busy")

    host.ahead = refuse
    with pytest.raises(WriteError, match="libvirt refused"):
        host.ops().write(vcpu, Pin(ONE, "1"))
    assert host.visible() != before
    host.ahead = lambda _what: None
    host.ops().write(vcpu, original)
    assert host.visible() == before


def test_a_guest_that_dies_during_its_pin_has_vanished(host: FakeKernel) -> None:
    target = emulator(host)

    def die(_what: str) -> None:
        host.end_guest(1000)
        raise OSError(errno.EIO, "Input/output error")

    host.ahead = die
    with pytest.raises(VanishedError):
        host.ops().write(target, Pin(ZERO, "0"))


# -- cgroups


def test_a_move_keeps_the_affinity(host: FakeKernel) -> None:
    ops = host.ops()
    ops.write(CgroupDir("vr1", OURS), True)
    for tid, mask in ((1020, "0-3"), (1021, "1-3")):
        target = ThreadCgroup("vr1", key(host, tid), "vhost")
        assert ops.read(target) == f"{LIBVIRT}/emulator"
        ops.write(target, OURS)
        assert (ops.read(target), host.mask(tid)) == (OURS, mask)
        ops.write(target, f"{LIBVIRT}/emulator")
        assert host.mask(tid) == mask
    ops.write(CgroupDir("vr1", OURS), False)
    assert ops.read(CgroupDir("vr1", OURS)) is False


@pytest.mark.parametrize(("pauses", "goes"), [(1, True), (9, True), (10, False)])
def test_a_cgroup_goes_as_soon_as_its_last_thread_has_left(
    host: FakeKernel, monkeypatch: pytest.MonkeyPatch, pauses: int, goes: bool
) -> None:
    ops, thread = host.ops(), host.state["threads"]["1020"]
    ops.write(CgroupDir("vr1", OURS), True)
    thread["cgroup"] = OURS
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == pauses:
            thread["cgroup"] = f"{LIBVIRT}/emulator"

    monkeypatch.setattr("vsrtune.execute.cgroups.time.sleep", sleep)
    if not goes:
        with pytest.raises(WriteError, match="threads inside: 1020"):
            ops.write(CgroupDir("vr1", OURS), False)
    else:
        ops.write(CgroupDir("vr1", OURS), False)
    assert (OURS not in host.state["cgroups"]) is goes
    assert len(slept) == min(pauses, 9)
    assert 0 < sum(slept) < 0.25


def test_a_cgroup_is_made_threaded(host: FakeKernel) -> None:
    target = CgroupDir("vr1", OURS)
    host.ops().write(target, True)
    assert host.state["cgroups"][OURS]["type"] == "threaded"
    host.ops().write(target, True)
    assert host.ops().read(target) is True


def test_a_half_made_cgroup_is_finished(host: FakeKernel) -> None:
    host.mkdir(f"/sys/fs/cgroup/{OURS}")
    host.ops().write(CgroupDir("vr1", OURS), True)
    assert host.state["cgroups"][OURS]["type"] == "threaded"


def test_a_cgroup_below_an_ordinary_one_is_refused(host: FakeKernel) -> None:
    with pytest.raises(WriteError, match="cannot hold single threads"):
        host.ops().write(CgroupDir("vr1", "system.slice/vr2.service/vsrtune"), True)
    assert "system.slice/vr2.service/vsrtune" not in host.state["cgroups"]


def test_a_cgroup_of_a_dead_guest_has_vanished(host: FakeKernel) -> None:
    host.end_guest(1000)
    target = CgroupDir("vr1", OURS)
    for attempt in (lambda: host.ops().read(target), lambda: host.ops().write(target, True)):
        with pytest.raises(VanishedError):
            attempt()


def test_threaded_napi_of_a_device_without_any_may_come_later(host: FakeKernel) -> None:
    with pytest.raises(WriteError, match=r"EOPNOTSUPP.*no NAPI instance") as caught:
        host.ops().write(NapiThreaded("qemu:vr2", "tap1", 8), 1)
    assert caught.value.lasting is Lasting.TRANSIENT


@pytest.mark.parametrize("kind", [VcpuPin, EmulatorPin])
def test_a_guest_that_libvirt_does_not_know_is_not_half_tuned(
    host: FakeKernel, kind: type[VcpuPin | EmulatorPin], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise VanishedError("the domain is gone or not running")

    monkeypatch.setattr(host, "pin", refuse)
    target = (
        VcpuPin("vr1", UUID, 0, key(host, 1010))
        if kind is VcpuPin
        else EmulatorPin("vr1", UUID, key(host, 1000))
    )
    with pytest.raises(WriteError, match="its QEMU runs") as caught:
        host.ops().write(target, Pin(ONE, "1"))
    assert not isinstance(caught.value, VanishedError)
    assert caught.value.lasting is Lasting.TRANSIENT
    host.end_guest(1000)
    with pytest.raises(VanishedError):
        host.ops().write(target, Pin(ONE, "1"))


# -- identity


def test_every_kind_checks_the_identity_before_reading_and_writing(host: FakeKernel) -> None:
    stale = replace(key(host, 1010), start_time=1)
    before = host.visible()
    cases: list[tuple[Target, Value]] = [
        (ThreadAffinity("vr1", stale, "vcpu 0"), ONE),
        (ThreadSched("vr1", stale, "vcpu 0"), Sched(SchedClass.FIFO, 1)),
        (ThreadCgroup("vr1", stale, "vcpu 0"), f"{LIBVIRT}/emulator"),
        (VcpuPin("vr1", UUID, 0, stale), Pin(ONE, "1")),
        (EmulatorPin("vr1", UUID, stale), Pin(ONE, "1")),
        (TxQueueLen("vr1", "macvtap0", 70), 100),
        (NapiThreaded("vr1", "macvtap0", 70), 1),
        (IrqAffinity(HOST_REF, 41, "nvme0q1"), ONE),
    ]
    for target, value in cases:
        with pytest.raises(VanishedError):
            host.ops().read(target)
        with pytest.raises(VanishedError):
            host.ops().write(target, value)
    assert host.visible() == before


# -- this machine


def test_sched_attr_is_laid_out_as_the_kernel_wants() -> None:
    data = pack(Sched(SchedClass.DEADLINE, 0, 0, True, 1000, 2000, 3000))
    assert struct.unpack("=IIQiIQQQ", data) == (48, 6, 1, 0, 0, 1000, 2000, 3000)


@pytest.fixture
def thread() -> Iterator[ThreadKey]:
    """A thread of this process that does nothing."""
    ready, stop = threading.Event(), threading.Event()
    tids: list[int] = []

    def run() -> None:
        tids.append(threading.get_native_id())
        ready.set()
        stop.wait()

    worker = threading.Thread(target=run)
    worker.start()
    ready.wait()
    text = open(f"/proc/self/task/{tids[0]}/stat").read()  # noqa: SIM115
    yield ThreadKey(os.getpid(), tids[0], int(text.rpartition(")")[2].split()[19]))
    stop.set()
    worker.join()


def test_a_real_thread_takes_an_affinity(thread: ThreadKey) -> None:
    ops = LiveSysOps()
    target = ThreadAffinity("t", thread, "thread")
    original = ops.read(target)
    assert isinstance(original, CpuSet)
    one = CpuSet([original.first()])
    ops.write(target, one)
    assert ops.read(target) == one
    ops.write(target, original)
    assert ops.read(target) == original


def test_a_real_thread_takes_a_class(thread: ThreadKey) -> None:
    ops = LiveSysOps()
    target = ThreadSched("t", thread, "thread")
    original = ops.read(target)
    batch = Sched(SchedClass.BATCH, nice=3, reset_on_fork=True)
    ops.write(target, batch)
    assert ops.read(target) == batch
    if os.geteuid() == 0:
        fifo = Sched(SchedClass.FIFO, 2, reset_on_fork=True)
        ops.write(target, fifo)
        assert ops.read(target) == fifo
        ops.write(target, original)
        assert ops.read(target) == original


def test_libvirt_that_does_not_answer_is_transient() -> None:
    pytest.importorskip("libvirt")
    with pytest.raises(WriteError, match="does not answer") as caught:
        LibvirtPins("qemu+unix:///system?socket=/nonexistent").pin(UUID, 0, ONE)
    assert caught.value.lasting is Lasting.TRANSIENT
    assert "libvirtd" in caught.value.hint


def test_a_pin_does_not_wait_for_a_libvirt_that_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    libvirt = pytest.importorskip("libvirt")
    end = threading.Event()
    monkeypatch.setattr(libvirt.virConnect, "getLibVersion", lambda _connection: end.wait())
    pins = LibvirtPins("test:///default")
    monkeypatch.setattr(pins._kept, "_patience", Patience(0.1))
    with pytest.raises(WriteError, match="libvirt does not answer: no answer in") as caught:
        pins.pin(UUID, 0, ONE)
    assert caught.value.lasting is Lasting.TRANSIENT
    end.set()


def test_a_domain_that_libvirt_does_not_know_has_vanished() -> None:
    pytest.importorskip("libvirt")
    with pytest.raises(VanishedError):
        LibvirtPins("test:///default").pin(UUID, None, ZERO)


def test_a_pin_does_not_wait_for_a_job_of_libvirts(monkeypatch: pytest.MonkeyPatch) -> None:
    """libvirt lets it wait for 30 s; a domain that migrates away, or is dumped, runs."""
    libvirt = pytest.importorskip("libvirt")
    connection = libvirt.open("test:///default")
    domain = connection.lookupByName("test")
    before = domain.emulatorPinInfo()
    job: dict[str, int] = {}
    monkeypatch.setattr(libvirt.virDomain, "jobStats", lambda _domain: job)
    pins = LibvirtPins("test:///default")
    for name, does in (
        ("MIGRATION_OUT", "migrates it away"),
        ("SNAPSHOT", "takes a snapshot of it"),
        ("SAVE", "saves it"),
        ("DUMP", "dumps its memory"),
        ("SNAPSHOT_DELETE", "has a job on it"),
    ):
        operation = getattr(libvirt, f"VIR_DOMAIN_JOB_OPERATION_{name}")
        job = {"type": libvirt.VIR_DOMAIN_JOB_UNBOUNDED, "operation": operation}
        with pytest.raises(BusyError) as caught:
            pins.pin(domain.UUIDString(), None, ONE)
        assert str(caught.value) == (
            f"domain {domain.UUIDString()} emulator: libvirt is busy with the domain: it {does}, "
            "and takes no pins until that is done; see: virsh domjobinfo; the daemon tries again "
            "at its next pass"
        )
        assert caught.value.lasting is Lasting.TRANSIENT
        assert domain.emulatorPinInfo() == before
    # A backup, which takes changes, and no job at all.
    backup = libvirt.VIR_DOMAIN_JOB_OPERATION_BACKUP
    for harmless, cpu in (
        ({"type": libvirt.VIR_DOMAIN_JOB_UNBOUNDED, "operation": backup}, 2),
        ({"type": libvirt.VIR_DOMAIN_JOB_NONE}, 3),
    ):
        job = harmless
        pins.pin(domain.UUIDString(), None, CpuSet([cpu]))
        assert [n for n, used in enumerate(domain.emulatorPinInfo()) if used] == [cpu]
    connection.close()


def test_a_pin_does_not_wait_for_a_guest_that_says_nothing_of_its_backup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a backup runs, libvirt asks QEMU for the job, which may never answer."""
    libvirt = pytest.importorskip("libvirt")
    connection = libvirt.open("test:///default")
    domain = connection.lookupByName("test")
    before, end = domain.emulatorPinInfo(), threading.Event()
    monkeypatch.setattr(libvirt.virDomain, "jobStats", lambda _domain: end.wait())
    monkeypatch.setattr(syscalls, "_JOB_SECONDS", 0.1)
    pins = LibvirtPins("test:///default")
    with pytest.raises(BusyError, match=r"does not say in 0\.1 s") as caught:
        pins.pin(domain.UUIDString(), None, ONE)
    assert not isinstance(caught.value, LateError), "the next guest is tried"
    end.set()
    assert domain.emulatorPinInfo() == before
    monkeypatch.setattr(libvirt.virDomain, "jobStats", lambda _domain: {"type": 0})
    pins.pin(domain.UUIDString(), None, ONE)
    assert domain.emulatorPinInfo() != before
    connection.close()


def test_a_driver_that_knows_no_jobs_takes_pins() -> None:
    libvirt = pytest.importorskip("libvirt")
    connection = libvirt.open("test:///default")
    domain = connection.lookupByName("test")
    LibvirtPins("test:///default").pin(domain.UUIDString(), None, ONE)
    assert [n for n, used in enumerate(domain.emulatorPinInfo()) if used] == [1]
    connection.close()


def test_a_domain_whose_job_cannot_even_be_asked_for_is_not_waited_for_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    libvirt = pytest.importorskip("libvirt")
    connection = libvirt.open("test:///default")
    domain = connection.lookupByName("test")
    before = domain.emulatorPinInfo()
    late = libvirt.libvirtError("cannot acquire state change lock")
    monkeypatch.setattr(late, "get_error_code", lambda: libvirt.VIR_ERR_OPERATION_TIMEOUT)

    def wait(_domain: object) -> None:
        raise late

    monkeypatch.setattr(libvirt.virDomain, "jobStats", wait)
    with pytest.raises(LateError, match="state change lock"):
        LibvirtPins("test:///default").pin(domain.UUIDString(), None, ONE)
    assert domain.emulatorPinInfo() == before
    connection.close()
