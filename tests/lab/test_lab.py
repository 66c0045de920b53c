"""Boots real KVM hosts and runs tests/lab/inside on each of them.

One boot serves many tests, because under emulation a boot costs more than a test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from labreport import CRASHES, read_report
from labtool.session import CRASHED

LAB = Path(__file__).parent / "lab"
INSIDE = "/mnt/tests/lab/inside"


@dataclass(frozen=True)
class Boot:
    """A lab of the matrix: its release, what it is given, and which tests it runs."""

    release: str
    name: str
    options: tuple[str, ...]
    tests: tuple[str, ...] = ()
    timeout: int = 1500

    @property
    def id(self) -> str:
        return f"{self.release}-{self.name}"


# A broken kernel says nothing about what was tested, which is all in user space; it is
# told at the end all the same. Tests that fail are not run again.
ATTEMPTS = 3

VETH = ("--cpus", "3", "--guest-name", "vr 1.ü", "--plain-qemu")
E1000E = ("--cpus", "3", "--guests", "2", "--vcpus", "2", "--queues", "2", "--nic", "e1000e")
BENCH = ("--cpus", "3")
# What depends on the NIC, on queues or on a second guest; the rest would only be repeated.
REAL_NIC = ("test_show.py", "test_tune.py")
# The first attaches anew, for which a router without libvirt may not hold the lower devices.
# The second takes CPUs from everything else, and wants one guest and few others.
ALONE = ("test_bench_configure.py", "test_deadline.py")
MATRIX = [
    Boot(release, name, options, tests)
    for release in ("bookworm", "trixie")
    for name, options, tests in (
        ("veth", VETH, ()),
        ("e1000e", E1000E, REAL_NIC),
        ("bench", BENCH, ALONE),
    )
]


@pytest.mark.parametrize("boot", MATRIX, ids=lambda boot: boot.id)
def test_inside(boot: Boot, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if os.geteuid() != 0:
        pytest.skip("building and booting a lab needs root")
    command = [
        str(LAB), "run", "--release", boot.release, *boot.options,
        "--share", str(tmp_path), "--timeout", str(boot.timeout), "--",
        "python3", "-B", "-m", "pytest", "-p", "no:cacheprovider", "-v", "-rs", "--tb=short",
        "--durations=10",
        "--junitxml=/mnt/share/junit.xml", *os.environ.get("LAB_PYTEST", "").split(),
        *(() if boot.tests else (f"--ignore={INSIDE}/{name}" for name in ALONE)),
        *(f"{INSIDE}/{name}" for name in boot.tests or ("",)),
    ]  # fmt: skip
    with capfd.disabled():
        for attempt in range(1, ATTEMPTS + 1):
            print(f"\n== lab {boot.id}: {' '.join(boot.options)}", flush=True)
            status = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=sys.stdout, stderr=sys.stderr, check=False
            ).returncode
            if status != CRASHED:
                break
            CRASHES.append(f"{boot.id}: the lab crashed, boot {attempt} of {ATTEMPTS}")
    report = tmp_path / "junit.xml"
    assert report.exists(), f"the lab ended with status {status} before its tests reported"
    counts = read_report(boot.id, report)
    assert counts["failed"] == 0, f"{counts['failed']} tests failed in lab {boot.id}"
    assert status == 0, f"the lab ended with status {status}"
    assert counts["passed"] > 0, "no test ran"
