"""Property tests do not fail because the machine is busy with something else, and try the same
examples each time, so that a failure tells of a change: VSRTUNE_RANDOM=1 looks for new ones.
Temporary files are kept in memory: thousands of journals are written, none to outlive its test."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "busy",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=os.environ.get("VSRTUNE_RANDOM") != "1",
)
settings.load_profile("busy")

if os.access("/dev/shm", os.W_OK):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")
