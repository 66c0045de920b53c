"""Random operations on the module's devices; on kernels with detectors above all (make kmod-debug)."""

from __future__ import annotations

import os
import subprocess

import kmodhelp

SECONDS = os.environ.get("LAB_RANDOM") or ("600" if kmodhelp.DETECTORS else "60")
SEED = os.environ.get("LAB_SEED") or "1"


def test_random_operations_under_a_flood() -> None:
    end = kmodhelp.log_end()
    words = ["python3", "-B", "/run/lab/kmod-tests/churn.py", SECONDS, SEED]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert kmodhelp.complaints(end) == []
