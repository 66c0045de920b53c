"""Boots real KVM hosts and runs tests/lab/inside on each of them.

One boot serves many tests, because under emulation a boot costs more than a test.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import events
import pytest
from labreport import REPORTS, TROUBLES, passed, passed_before, read_report
from labruns import GO, PASSED, LabRuns, nearly_done
from labtool.releases import RELEASES
from labtool.serial_log import Trouble, complaints
from labtool.session import EMULATOR_DIED, KERNEL_CRASHED, SERIAL

LAB = Path(__file__).parent / "lab"
INSIDE_HERE = Path(__file__).parent / "inside"
INSIDE = "/mnt/tests/lab/inside"
CORE_ONLY = os.environ.get("LAB_TIER") == "core"
PASSED_ON = (
    "LAB_TIER", "LAB_STRIDE", "LAB_BOOTS", "LAB_SWITCHES", "LAB_CHURN", "LAB_CROWD", "LAB_SEED",
    "LAB_NEIGHBOURS", "LAB_RANDOM", "LAB_TRIALS",
)  # fmt: skip


@dataclass(frozen=True)
class Boot:
    """A lab of the matrix: its release, what it is given, and which tests it runs."""

    release: str
    name: str
    options: tuple[str, ...]
    tests: tuple[str, ...] = ()
    # `make test` boots these for the tests marked core, `make test-all` all for every test.
    core: bool = False
    # Seconds for its tests.
    budget: int = 900 if CORE_ONLY else 9000
    # Its turn may come late.
    timeout: int = 1800 if CORE_ONLY else 10800

    @property
    def id(self) -> str:
        return f"{self.release}-{self.name}"

    @property
    def files(self) -> set[str]:
        """The files of its tests, of tests/lab/inside."""
        if self.tests:
            return {name.partition("::")[0] for name in self.tests}
        return {path.name for path in INSIDE_HERE.glob("test_*.py")} - set(ELSEWHERE)

    def command(self, share: Path) -> list[str]:
        """What boots it, and leaves a report in ``share``."""
        return [
            str(LAB), "run", "--release", self.release, *self.options,
            "--share", str(share), "--timeout", str(self.timeout), "--",
            "sh", "-c", f'until [ -e /mnt/share/{GO} ]; do sleep 0.3; done; exec "$@"', "sh",
            "env", *(f"{name}={os.environ.get(name, '')}" for name in PASSED_ON),
            "python3", "-B", "-m", "pytest", "-p", "no:cacheprovider", "-v", "-rs", "--tb=short",
            "--durations=10",
            "--junitxml=/mnt/share/junit.xml", "-o", f"junit_suite_name={self.id}", *os.environ.get("LAB_PYTEST", "").split(),
            *(() if self.tests else (f"--ignore={INSIDE}/{name}" for name in ELSEWHERE)),
            *(f"{INSIDE}/{name}" for name in self.tests or ("",)),
        ]  # fmt: skip


VETH = ("--cpus", "3", "--guest-name", "vr 1.ü", "--plain-qemu")
E1000E = ("--cpus", "3", "--guests", "2", "--vcpus", "2", "--queues", "2", "--nic", "e1000e")
BENCH = ("--cpus", "3")
CONTAINER = (*BENCH, "--container")
PAIR = ("--cpus", "3", "--guests", "2", "--agent")
ATTACH = ("test_attach.py",)
# What depends on the NIC, on queues or on a second guest; the rest would only be repeated.
TUNING = "test_tune.py::test_packets_leave_the_interrupt_cpu_to_the_nic"
WHOLE = ("test_show.py", "test_irq.py", "test_keep_off.py", "test_queues.py")
REAL_NIC = (
    *WHOLE, TUNING, "test_deadline.py::test_two_guests_share_a_cpu",
    "test_events.py::test_interrupt_affinity",
)  # fmt: skip
# These make and load devices of the kernel module on the lower ones.
KMOD = ("test_kmod.py", "test_kmod_interfaces.py", "test_kmod_random.py")
FRAMES = ("test_kmod_frames.py", "test_kmod_trust.py", "test_kmod_guest.py")
# The first attaches anew, for which a router without libvirt may not hold the lower devices.
# The second takes CPUs from everything else, and wants one guest and few others.
# The third puts them into bridges.
BENCHED = (
    "test_bench_configure.py", "test_deadline.py", "test_proxmox.py", "test_kubevirt.py",
    "test_container.py", "test_bottleneck.py", *FRAMES, "test_napi.py",
)  # fmt: skip
ALONE = (*BENCHED, *KMOD, *ATTACH)
WITH_ATTACH = (*BENCHED, *ATTACH)
# Guests that are one router: two, of one queue, and no other.
GROUPS = (
    "test_pvr.py", "test_bench_group.py", "test_msr_devices.py", "test_msr.py", "test_clone.py",
)  # fmt: skip
# Two CPUs, of which the router's threads share one.
SHARED_CPU = ("--cpus", "2", "--vcpus", "2", "--queues", "2")
STILL = ("test_guard.py", "test_standstill.py")
# Kernels with detectors, which have no KVM: what needs no guest.
DETECTORS = (*KMOD, "test_kmod_frames.py")
# `make test` has to go red when the module breaks; these are short and want no guest.
MODULE = (
    "test_kmod.py::test_its_self_tests_pass",
    "test_kmod_frames.py::test_unicast_from_the_nic",
)
REBOOT = ("test_reboot.py",)
# A host whose AppArmor, audit and IPv6 are as Debian has them.
DEBIAN = ("--cpus", "3", "--apparmor", "--ipv6")
WORLD = ("test_world.py",)
AS_DEBIAN = (*WORLD, "test_tune.py", "test_hotplug.py", "test_travel.py")
TUTORIAL = ("test_tutorial.py",)
FRR = ("test_frr.py",)
# A router that drives a virtual function of its own.
IGB = ("--cpus", "3", "--vcpus", "2", "--nic", "igb")
VFIO = ("test_vfio.py",)
# Threads that may part: two guests, and CPUs for three of their threads.
PLACEMENT = ("test_placement.py",)
# In the labs of real NICs, with two guests, or in a lab of their own.
ELSEWHERE = (
    *ALONE, *GROUPS, *STILL, *REBOOT, *WORLD, *WHOLE, *TUTORIAL, *FRR, *VFIO, *PLACEMENT,
)  # fmt: skip
# The longest first, since several may run at once.
MATRIX = [
    Boot("bookworm", "veth", VETH, core=True),
    Boot("trixie", "veth", VETH, core=True),
    Boot("bookworm", "e1000e", E1000E, REAL_NIC),
    Boot("trixie", "e1000e", E1000E, REAL_NIC),
    Boot("bookworm", "bench", CONTAINER, WITH_ATTACH),
    Boot("trixie", "bench", CONTAINER, WITH_ATTACH),
    Boot("bookworm", "shared-cpu", SHARED_CPU, STILL),
    Boot("trixie", "shared-cpu", SHARED_CPU, (*STILL, *MODULE), core=True),
    Boot("bookworm", "reboot", ("--cpus", "3", "--reboots"), REBOOT),
    Boot("trixie", "reboot", ("--cpus", "3", "--reboots"), REBOOT),
    Boot("bookworm", "debian", DEBIAN, AS_DEBIAN),
    Boot("trixie", "debian", DEBIAN, AS_DEBIAN),
    # The newest kernel, for the module above all, and for what vsrtune meets there first.
    Boot("backports", "kmod", BENCH, (*KMOD, *FRAMES, TUNING)),
    Boot("bookworm", "kmod", BENCH, (*KMOD, "test_show.py")),
    Boot("trixie", "kmod", BENCH, (*KMOD, "test_show.py")),
    *(
        Boot(release, kind, ("--cpus", "2", "--guests", "0", "--kernel", kind), DETECTORS)
        for release in ("bookworm", "trixie")
        for kind in ("kasan", "kcsan")
    ),
    Boot("trixie", "tutorial", ("--cpus", "2"), TUTORIAL),
    Boot("bookworm", "placement", ("--cpus", "4", "--guests", "2"), PLACEMENT),
    Boot("bookworm", "frr", ("--cpus", "2", "--frr"), FRR),
    Boot("trixie", "frr", ("--cpus", "2", "--frr"), FRR),
    Boot("bookworm", "vfio", IGB, VFIO),
    Boot("trixie", "vfio", IGB, VFIO),
    Boot("trixie", "pair", PAIR, GROUPS),
    Boot("bookworm", "pair", PAIR, GROUPS),
]


@pytest.mark.parametrize(
    "boot",
    [pytest.param(b, id=b.id, marks=() if b.core else pytest.mark.beyond) for b in MATRIX],
)
def test_inside(boot: Boot, lab_runs: LabRuns, capfd: pytest.CaptureFixture[str]) -> None:
    earlier = passed_before(lab_runs.place, boot.id, boot.files)
    if earlier is not None:
        with capfd.disabled():
            print(f"\n== lab {boot.id}: passed on what it reads now, see {earlier}", flush=True)
        assert read_report(boot.id, earlier / "junit.xml").count("failed") == 0
        return
    with capfd.disabled():
        print(f"\n== lab {boot.id}: {' '.join(boot.options)}", flush=True)
        run = lab_runs.follow(boot.id)
    TROUBLES.extend(run.troubles)
    report = run.share / "junit.xml"
    assert report.exists(), f"no report of the tests of lab {boot.id}: {run.end}"
    found = read_report(boot.id, report, run.boots)
    assert found.count("failed") == 0, f"{found.count('failed')} tests failed in lab {boot.id}"
    assert run.status == 0, f"lab {boot.id}: {run.end}"
    assert found.count("passed") > 0, "no test ran"
    assert found.seconds <= boot.budget, f"lab {boot.id} took {found.seconds:.0f} s for its tests"
    passed(run.share, boot.files)


def test_every_test_that_a_lab_names_exists() -> None:
    names = {name for boot in MATRIX for name in boot.tests}
    names |= {*ELSEWHERE, *(f"test_{name}.py" for name in events.TESTS)}
    for name in names:
        file, _, function = name.partition("::")
        assert f"def {function}" in (INSIDE_HERE / file).read_text(), name


@pytest.mark.beyond
def test_every_test_of_the_labs_runs_in_one() -> None:
    """What no lab has the CPUs, guests or NICs for passes for ever."""
    missing = [boot.id for boot in MATRIX if boot.id not in REPORTS]
    if missing:
        pytest.skip(f"tells of the whole matrix; not run: {' '.join(missing)}")
    rows = [row for report in REPORTS.values() for row in report.rows]
    ran = {name for outcome, name, _ in rows if outcome != "skipped"}
    # The report of a lab that reboots is that of its second boot.
    ran |= {name for _, name, reason in rows if reason == "was before the reboot"}
    assert {name: reason for _, name, reason in rows if name not in ran} == {}


RACE = """\
[    9.1] =====
[    9.1] BUG: KCSAN: data-race in skb_dequeue / {}
[    9.1] read to 0xffff of 4 bytes by task 81 on cpu 0:
[    9.1]  macvlan_start_xmit+0x1/0x2 [{}]
[    9.1] =====
[    9.2]  nmv_poll+0x1/0x2 [napi_macvlan]
"""
NULL = "[   12.5] BUG: kernel NULL pointer dereference, address: 0000\n"


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (NULL, [Trouble.CRASH]),
        ("[   12.5][  T812] BUG: KASAN: slab-use-after-free in a+0x1\n", [Trouble.CRASH]),
        ("[   12.5] WARNING: CPU: 1 PID: 8 at net/core/dev.c:6620 a+0x3\n", [Trouble.WARNING]),
        ("[   12.5] WARNING: possible circular locking dependency\n", [Trouble.WARNING]),
        (RACE.format("tap_do_read", "macvlan"), []),
        (RACE.format("skb_put", "napi_macvlan"), [Trouble.CRASH]),
        ("[   99.5] watchdog: BUG: soft lockup - CPU#1 stuck for 26s!\n", [Trouble.STALL]),
        ("[   99.5] rcu: INFO: rcu_preempt self-detected stall on CPU\n", [Trouble.STALL]),
        ("[    0.5] rcu: Hierarchical RCU implementation.\n", []),
        ("[    0.5] e1000e: Warning: Jumbo frames not available\n", []),
    ],
)
def test_what_a_serial_log_says_of_the_kernel(log: str, expected: list[Trouble]) -> None:
    assert [c.trouble for c in complaints(log)] == expected


TOLD = "x/inside/test_a.py::test_one[a b] PASSED [ 25%]\nx/test_a.py::test_two FAILED [ 50%]\n"
TOLD += "x/test_b.py::test_three PASSED  [ 75%]\nx/test_b.py::test_four "


def test_a_lab_whose_emulator_died_goes_on_where_it_was(tmp_path: Path) -> None:
    """With a shell in the lab's place, which ends so once."""

    def command(share: Path) -> list[str]:
        death = f"printf '%s' {shlex.quote(TOLD)}; exit {EMULATOR_DIED}"
        return ["sh", "-c", "true" if (share / PASSED).exists() else death]

    runs = LabRuns({"boot": command}, tmp_path)
    run = runs.follow("boot")
    runs.close()
    assert run.status == 0
    assert (run.share / PASSED).read_text() == "test_a.py::test_one[a b]"
    assert run.troubles == ["boot: emulator death, boot 1 of 3; 1 tests had passed; "]


def test_a_lab_whose_kernel_crashed_has_failed(tmp_path: Path) -> None:
    """With a shell in the lab's place."""
    log = "[   12.5] Oops: 0002 [#1] PREEMPT SMP\n"

    def command(share: Path) -> list[str]:
        written = f"printf '%s' {shlex.quote(log)} >>{share / SERIAL}"
        return ["sh", "-c", f"{written}; exit {KERNEL_CRASHED}"]

    runs = LabRuns({"boot": command}, tmp_path)
    run = runs.follow("boot")
    runs.close()
    assert run.end == "its kernel crashed"
    serial = run.share / SERIAL
    assert serial.read_text() == log
    assert run.troubles == [f"boot: kernel crash: Oops: 0002 [#1] PREEMPT SMP; see {serial}"]


def test_the_next_lab_boots_when_the_one_before_is_nearly_done(tmp_path: Path) -> None:
    """With shells in the labs' places, the first of which waits for the second."""

    def first(share: Path) -> list[str]:
        late = "printf 'x [ 84%%]\n'; sleep 1.5; [ ! -e ../second ] && printf 'x [ 99%%]\n'"
        until = "until [ -e ../second ]; do sleep 0.1; done"
        return ["sh", "-c", f"cd {shlex.quote(str(share))}; {late} && {until}"]

    runs = LabRuns({"first": first, "second": lambda _: ["true"]}, tmp_path)
    statuses = [runs.follow(name).status for name in ("first", "second")]
    runs.close()
    assert statuses == [0, 0]


def test_a_short_lab_is_nearly_done_earlier(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for tests, percent, done in ((11, 36, False), (11, 45, True), (86, 45, False), (86, 86, True)):
        log.write_text(f"collecting ... collected {tests} items\n\nx PASSED [ {percent}%]\n")
        assert nearly_done(log) is done


@pytest.mark.parametrize(
    "release",
    [pytest.param(r, marks=pytest.mark.beyond if r == "backports" else ()) for r in RELEASES],
)
def test_the_module_builds_without_a_warning(
    release: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Compiler with W=1 and sparse are silent, dkms builds, installs and removes it. Made
    beside the labs, in most runs, so that the answer is in the cache by now."""
    if os.geteuid() != 0:
        pytest.skip("work inside an image needs root")
    with capfd.disabled():
        done = subprocess.run([str(LAB), "kmod", "--release", release], check=False)
    assert done.returncode == 0
