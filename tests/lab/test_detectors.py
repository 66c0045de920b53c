"""A mistake of each class, made on purpose (kmod/mistakes.c), makes a run red: on Debian's own kernels,
and on those with detectors."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from labtool.serial_log import complaints
from labtool.session import KERNEL_CRASHED, KERNEL_WARNED, SERIAL

LAB = Path(__file__).parent / "lab"
# By mistake: the kernel that has to notice, how the lab ends, and an expression for its log.
CASES = {
    "null": ("", KERNEL_CRASHED, "BUG: kernel NULL pointer dereference"),
    "warn": ("", KERNEL_WARNED, "WARNING: "),
    "freed": ("kasan", KERNEL_CRASHED, "KASAN: (slab-)?use-after-free in nmv_mistake_freed"),
    "past-end": ("kasan", KERNEL_CRASHED, "KASAN: slab-out-of-bounds in nmv_mistake_past_end"),
    "order": ("kasan", KERNEL_WARNED, "WARNING: possible circular locking dependency"),
    "sleep": ("kasan", KERNEL_CRASHED, "BUG: scheduling while atomic"),
    "rcu": ("kasan", KERNEL_WARNED, "WARNING: suspicious RCU usage"),
    "object": ("kasan", KERNEL_WARNED, "ODEBUG: free active"),
    "race": ("kcsan", KERNEL_CRASHED, "KCSAN: data-race in nmv_racer"),
}
LOAD = """modprobe -a tap macvlan
insmod /lib/modules/$(uname -r)/napi_macvlan-selftest.ko mistake=$1
sleep 3
"""

pytestmark = [
    pytest.mark.beyond,
    pytest.mark.skipif(not os.environ.get("LAB_MISTAKES"), reason="ten minutes: make kmod-debug"),
]


@pytest.mark.parametrize("release", ["bookworm", "trixie"])
@pytest.mark.parametrize("mistake", CASES)
def test_a_mistake_is_reported(
    release: str, mistake: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kernel, status, words = CASES[mistake]
    command = [
        str(LAB), "run", "--release", release, "--cpus", "2", "--guests", "0", "--no-install",
        "--share", str(tmp_path), "--timeout", "120", "--quiet-failure",
        *(("--kernel", kernel) if kernel else ()),
        "--", "sh", "-c", LOAD, "sh", mistake,
    ]  # fmt: skip
    with capfd.disabled():
        ended = subprocess.run(command, check=False).returncode
    log = (tmp_path / SERIAL).read_text(errors="replace")
    assert re.search(words, log), log[-3000:]
    assert complaints(log)
    assert ended == status
