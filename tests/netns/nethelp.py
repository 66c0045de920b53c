"""ip(8) for the tests."""

from __future__ import annotations

import subprocess

import pytest


def ip(*words: str) -> str:
    """Run ip(8); a refusal of the kernel skips the test with its words."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[0] if done.stderr else "ip failed"
        pytest.skip(f"this machine cannot: ip {' '.join(words)}: {reason}")
    return done.stdout
