"""Two KVM hosts at the same time: `lab pair` with the tests in pair/. One measures with the other
(`vsrtune bench paper`), then the Ansible role tunes both. The result of the first, kit.json, and its
report, kit.txt, stay beside pytest's own report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TIMEOUT = 3600


def test_two_hosts(pytestconfig: pytest.Config, capfd: pytest.CaptureFixture[str]) -> None:
    if os.environ.get("LAB_PAIR") != "1":
        pytest.skip("two labs at a time take the whole machine: LAB_PAIR=1, or make pair")
    if os.geteuid() != 0:
        pytest.skip("building and booting a lab needs root")
    words = ["-p", "no:cacheprovider", "-v", "-rs", "-x", "-s", "--tb=short", "--durations=0"]
    report = pytestconfig.option.xmlpath
    kept = {"PAIR_KEPT": str(Path(report).absolute().parent)} if report else {}
    with capfd.disabled():
        done = subprocess.run(
            [
                HERE / "lab", "pair", "--release", "trixie", "--timeout", str(TIMEOUT), "--",
                sys.executable, "-B", "-m", "pytest", *words, HERE / "pair",
            ],
            env={**os.environ, **kept}, check=False,
        )  # fmt: skip
    assert done.returncode == 0
