"""What a run of labs keeps for the next one, and what it says of the difference; and of a lab's
emulator, what is mended in it, and when it is dead."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import labreport
import pytest
from labtool.emulator import mended
from labtool.machine import MainLoop

SLOW, SKIPPED = (
    "test_tune.py::test_without_a_policy_nothing_is_touched",
    "test_faults.py::test_run_full",
)


def report(path: Path, slow: float, skipped: str) -> Path:
    path.write_text(
        f'<testsuites><testsuite time="{slow + 2}">'
        f'<testcase classname="test_tune" name="{SLOW[14:]}" time="{slow}"/>'
        f'<testcase classname="test_faults" name="{SKIPPED[16:]}" time="1">{skipped}'
        "</testcase></testsuite></testsuites>"
    )
    return path


def test_a_run_is_compared_with_the_last_of_its_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, tier: str, slow: float, skipped: str = "", boots: int = 1) -> list[str]:
        monkeypatch.setattr(labreport, "REPORTS", {})
        place = tmp_path / name
        place.mkdir()
        labreport.read_report("trixie-veth", report(place / "x", slow, skipped), boots)
        summary = labreport.write_summary(place, tier, {})
        return list(labreport.compare(summary, labreport.last_summary(place, tier)))

    first = ["trixie-veth: boots 1, tests 102 s; there is no earlier run"]
    assert run("1", "core", 100) == first
    assert run("2", "", 100) == first
    name = f"test_tune::{SLOW[14:]}"
    assert run("3", "core", 160, "<skipped message='why'/>", 2) == [
        "trixie-veth: boots 2, tests 162 s; last run: boots 1, tests 102 s",
        f"  SLOWER {name}: 160 s, last 100 s",
        f"SKIPPED PROMISE {SKIPPED}, unlike in the last run",
    ]
    assert run("4", "core", 170, "<skipped/>") == [
        "trixie-veth: boots 1, tests 172 s; last run: boots 2, tests 162 s",
        f"SKIPPED PROMISE {SKIPPED}",
    ]


def test_a_promise_that_is_kept_in_one_lab_is_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labreport, "REPORTS", {})
    labreport.read_report("trixie-veth", report(tmp_path / "a", 1, "<skipped/>"))
    labreport.read_report("bookworm-veth", report(tmp_path / "b", 1, ""))
    unit = "tests/unit/daemon/test_daemon.py::test_what_was_put_back_is_not_what_stop_restores"
    elsewhere = {f"{unit}[a]": True, f"{unit}[b]": True}
    assert labreport.write_summary(tmp_path, "", elsewhere)["skipped"] == [unit]


@pytest.mark.parametrize("wait", [0.05, 1000])
def test_a_main_loop_that_has_lost_its_timers_is_asleep(wait: float) -> None:
    code = f"import time\nprint('ready', flush=True)\nwhile True: time.sleep({wait})\n"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
        loop, end = MainLoop(one.pid), time.monotonic() + 5
        assert not loop.asleep(2)
        while not (asleep := loop.asleep(2)) and time.monotonic() < end:
            time.sleep(0.1)
        one.kill()
    assert asleep is (wait == 1000)


CODE = b"\x81\xa0\xa4A\0\0\x7f\xff\xff\xffH\x83\xc4\x08"


def test_of_an_emulator_exactly_the_known_instructions_go() -> None:
    """Twice, or not at all, it would be another one."""
    assert mended(b"ab" + CODE + b"cd") == (
        b"ab" + 10 * b"\x90" + CODE[10:] + b"cd",
        ["helper_vmrun"],
    )
    assert mended(2 * CODE) == (2 * CODE, ["cpu_clear_ignne", "helper_vmrun"])


def test_a_lab_that_passed_on_what_it_reads_need_not_boot_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LAB_RESUME", raising=False)
    share = tmp_path / "run1/trixie-veth"
    share.mkdir(parents=True)
    labreport.passed(share, ["test_msr.py"])
    place = tmp_path / "run2"
    assert labreport.passed_before(place, "trixie-veth", ["test_msr.py"]) is None, "nobody asked"
    monkeypatch.setenv("LAB_RESUME", "1")
    assert labreport.passed_before(place, "trixie-veth", ["test_msr.py"]) == share
    assert labreport.passed_before(place, "bookworm-veth", ["test_msr.py"]) is None
    sums = labreport._sums()
    for name, booted in (
        ("tests/lab/inside/test_vfio.py", False),
        # test_msr.py imports it.
        ("tests/lab/inside/test_pvr.py", True),
        ("tests/lab/inside/labhelp.py", True),
        ("vsrtune/cli/main.py", True),
    ):
        monkeypatch.setattr(labreport, "_sums", lambda name=name: sums | {name: "other"})
        before = labreport.passed_before(place, "trixie-veth", ["test_msr.py"])
        assert (before is None) is booted, name
        assert name in sums
    assert not any(name.startswith(("tests/unit/cli/", "docs/results/")) for name in sums)
    assert "tests/unit/support/fake_kernel.py" in sums
