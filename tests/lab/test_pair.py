"""Two KVM hosts at the same time: `lab pair` with the tests in pair/. One measures with the other
(`vsrtune bench paper`), then the Ansible role tunes both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TIMEOUT = 3600


def test_two_hosts(capfd: pytest.CaptureFixture[str]) -> None:
    if os.environ.get("LAB_PAIR") != "1":
        pytest.skip("two labs at a time take the whole machine: LAB_PAIR=1, or make pair")
    if os.geteuid() != 0:
        pytest.skip("building and booting a lab needs root")
    words = ["-p", "no:cacheprovider", "-v", "-rs", "-x", "-s", "--tb=short", "--durations=0"]
    with capfd.disabled():
        done = subprocess.run(
            [
                HERE / "lab", "pair", "--release", "trixie", "--timeout", str(TIMEOUT), "--",
                sys.executable, "-B", "-m", "pytest", *words, HERE / "pair",
            ],
            check=False,
        )  # fmt: skip
    assert done.returncode == 0
