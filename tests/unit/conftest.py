"""Property tests do not fail because the machine is busy with something else, and try the same
examples each time, so that a failure tells of a change. LAB_STRIDE=1 (`make test-all`) looks for
new examples, and more of them; those that fail are stored outside the tree and tried first the next
time. Temporary files are kept in memory: thousands of journals are written, none to outlive its
test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, is_hypothesis_test, settings
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.database import DirectoryBasedExampleDatabase

FRESH = os.environ.get("LAB_STRIDE") == "1"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
EXAMPLES = CACHE / "vsrtune" / "hypothesis"

set_hypothesis_home_dir(EXAMPLES)
settings.register_profile(
    "fixed",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    print_blob=True,
)
settings.register_profile(
    "fresh",
    settings.get_profile("fixed"),
    max_examples=500,
    derandomize=False,
    database=DirectoryBasedExampleDatabase(EXAMPLES / "examples"),
)
# `make mutants` asks whether a test fails, not for the smallest example.
settings.register_profile(
    "mutants", settings.get_profile("fixed"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("fresh" if FRESH else "fixed")

if os.access("/dev/shm", os.W_OK):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Say how to try the failing example of a property again."""
    report = yield
    if report.failed and call.when == "call" and is_hypothesis_test(getattr(item, "obj", None)):
        again = f"python -m pytest '{item.nodeid}'"
        if FRESH:
            text = f"The example is stored in {EXAMPLES}; to try it first: LAB_STRIDE=1 {again}"
        else:
            text = f"The examples are the same each time; to try them again: {again}"
        report.sections.append(("how to replay", text))
    return report
