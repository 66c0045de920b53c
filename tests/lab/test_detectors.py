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
# In one boot: the kernel that has to notice, and by mistake an expression for its log.
# After a wrong order of locks lockdep looks no further, so that comes last.
CASES = [
    ("", {"null": "BUG: kernel NULL pointer dereference"}),
    ("", {"warn": "WARNING: .* nmv_mistake_warn"}),
    ("kasan", {"freed": "KASAN: (slab-)?use-after-free in nmv_mistake_freed"}),
    ("kasan", {"past-end": "KASAN: slab-out-of-bounds in nmv_mistake_past_end"}),
    ("kasan", {"sleep": "BUG: scheduling while atomic"}),
    (
        "kasan",
        {
            "rcu": "WARNING: suspicious RCU usage",
            "object": "ODEBUG: free active",
            "order": "WARNING: possible circular locking dependency",
        },
    ),
    ("kcsan", {"race": "KCSAN: data-race in nmv_racer"}),
]
LOAD = """modprobe -a tap macvlan
for mistake; do
    insmod /lib/modules/$(uname -r)/napi_macvlan-selftest.ko mistake=$mistake && rmmod napi_macvlan
done
sleep 3
"""

pytestmark = [
    pytest.mark.beyond,
    pytest.mark.skipif(not os.environ.get("LAB_MISTAKES"), reason="half an hour: make kmod-debug"),
]


@pytest.mark.parametrize("release", ["bookworm", "trixie"])
@pytest.mark.parametrize("case", [pytest.param(c, id=" ".join(c[1])) for c in CASES])
def test_mistakes_are_reported(
    release: str,
    case: tuple[str, dict[str, str]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    kernel, words = case
    command = [
        str(LAB), "run", "--release", release, "--cpus", "2", "--guests", "0", "--no-install",
        "--share", str(tmp_path), "--timeout", "120", "--quiet-failure",
        *(("--kernel", kernel) if kernel else ()),
        "--", "sh", "-c", LOAD, "sh", *words,
    ]  # fmt: skip
    with capfd.disabled():
        ended = subprocess.run(command, check=False).returncode
    log = (tmp_path / SERIAL).read_text(errors="replace")
    for mistake, expected in words.items():
        assert re.search(expected, log), f"{mistake}: {log[-3000:]}"
    assert complaints(log)
    # What a kernel survives may be noticed after the command has ended.
    assert ended in (KERNEL_CRASHED, KERNEL_WARNED)
