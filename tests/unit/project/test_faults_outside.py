"""Faults are met where a test arms them, and no variable of the environment arms one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vsrtune.cli import main

REPO = Path(__file__).resolve().parents[3]
INSIDE = REPO / "tests" / "lab" / "inside"
# Three changes of each kind; each prints its number before.
SWITCH = """
from vsrtune.attach.host import LiveHost
from vsrtune.attach.plan.clone_model import File
host = LiveHost("test:///default")
for n in (1, 2, 3):
    print(n, flush=True)
    host.remove_file(File("/nonexistent/file", "/nonexistent/base"))
"""
WRITES = """
import os
from vsrtune.core.cpuset import CpuSet
from vsrtune.execute.syscalls import LiveCalls
calls, cpus = LiveCalls(), CpuSet(os.sched_getaffinity(0))
for n in (1, 2, 3):
    print(n, flush=True)
    calls.set_affinity(0, cpus)
"""


def run(code: str, **environment: str) -> tuple[int, str]:
    """The exit code, and the changes that were begun."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=REPO,
        env={**os.environ, "PYTHONPATH": f"{REPO}:{INSIDE}", **environment}, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("fault", "code", "ended"),
    [
        ("kill:2", SWITCH, (-9, "1\n2\n")),
        ("fail:2", SWITCH, (1, "1\n2\n")),
        ("command:3:kill -TERM $PPID; sleep 5", SWITCH, (-15, "1\n2\n3\n")),
        ("crash:2", WRITES, (-9, "1\n2\n")),
        ("crash:2", SWITCH, (0, "1\n2\n3\n")),
    ],
)
def test_the_faults_that_the_lab_arms(fault: str, code: str, ended: tuple[int, str]) -> None:
    assert run(f"from faulty import Fault\nFault({fault!r}).arm()\n{code}") == ended


@pytest.mark.parametrize("transport", ["ext", "ssh", "libssh", "libssh2", "EXT", "tls"])
def test_a_connection_runs_no_command(
    transport: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """libvirt starts the program that such a URI names."""
    ran, program = tmp_path / "ran", tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(0o755)
    monkeypatch.setenv("VSRTUNE_CONNECT", f"qemu+{transport}://h/system?command={program}")
    assert main.run(["group", "status"]) == 2
    assert f"qemu+{transport}" in capsys.readouterr().err
    assert not ran.exists()


def test_a_connection_stays_on_this_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["group", "status", "--connect", "qemu://192.0.2.1/system"]) == 2
    assert "qemu://192.0.2.1/system leads to another host" in capsys.readouterr().err
