"""What a run of labs keeps for the next one, and what it says of the difference; and by what an
emulator is known that has lost the timer of a CPU."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import labreport
import pytest
from labtool.machine import MAIN_LOOP, CpuThreads

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


@pytest.mark.parametrize(
    ("main", "second", "named"), [(0.05, 1000, "CPU 1/TCG"), (1000, 0.05, MAIN_LOOP)]
)
def test_what_of_an_emulator_never_runs_any_more_is_named(
    main: float, second: float, named: str
) -> None:
    code = (
        "import ctypes, threading, time\n"
        "def run(number, wait):\n"
        "    ctypes.CDLL(None).prctl(15, b'CPU %d/TCG' % number)\n"
        "    while True: time.sleep(wait)\n"
        f"for number, wait in enumerate((0.05, {second})):\n"
        "    threading.Thread(target=run, args=(number, wait), daemon=True).start()\n"
        "time.sleep(1)\n"
        "print('ready', flush=True)\n"
        f"while True: time.sleep({main})\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
        threads, end = CpuThreads(one.pid), time.monotonic() + 60
        assert threads.asleep(2) == ""
        while not (found := threads.asleep(2)) and time.monotonic() < end:
            time.sleep(0.1)
        one.kill()
    assert found == named


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
