"""What docs/reliability.md promises when the host itself is in trouble."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hoststate
import labhelp
from labhelp import LabGuest

STATE = "/var/lib/vsrtune"
RUN = "/run/vsrtune"
TRIXIE = "trixie"


@contextlib.contextmanager
def small(place: str, kilobytes: int = 64) -> Iterator[Path]:
    """A file system of that size over a directory; the file that fills it."""
    Path(place).mkdir(exist_ok=True)
    labhelp.sh("mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "full", place)
    try:
        yield Path(place) / "filler"
    finally:
        labhelp.sh("umount", place)


@contextlib.contextmanager
def read_only(place: str) -> Iterator[None]:
    labhelp.sh("mount", "--bind", place, place)
    try:
        labhelp.sh("mount", "-o", "remount,bind,ro", place)
        yield
    finally:
        labhelp.sh("umount", place)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@labhelp.one_release("which files are written", TRIXIE)
def test_etc_read_only(restored: None, guests: list[LabGuest], irq_cpus: set[int]) -> None:
    """Nothing needs to be written there; a policy that is asked for cannot be, and that is told."""
    labhelp.write_policies("auto")
    before = hoststate.capture()
    with read_only("/etc"):
        labhelp.vsrtune("apply")
        for guest in guests:
            assert labhelp.untuned_lines(guest, irq_cpus) == []
        labhelp.vsrtune("undo")
        assert hoststate.differences(before, hoststate.capture()) == []
        path = str(labhelp.POLICIES / "new.yaml")
        refused = labhelp.vsrtune("policy", "init", guests[0].ref, "-o", path, check=False)
        assert refused.returncode == 2
        assert f"{labhelp.POLICIES}: no file can be written there: Read-only" in refused.stderr


@labhelp.one_release("the journal", TRIXIE)
def test_var_full(restored: None, guests: list[LabGuest], irq_cpus: set[int]) -> None:
    """Full before: the host is not written. Full meanwhile: undo works all the same."""
    labhelp.write_policies("auto")
    before = hoststate.capture()
    with small(STATE, 256) as filler:
        fill(filler)
        refused = labhelp.vsrtune("apply", check=False)
        assert refused.returncode == 1
        assert "host is not written" in refused.stderr
        assert "free space" in refused.stderr
        assert hoststate.differences(before, hoststate.capture()) == []
        filler.unlink()
        labhelp.vsrtune("apply")
        for guest in guests:
            assert labhelp.untuned_lines(guest, irq_cpus) == []
        fill(filler)
        labhelp.vsrtune("undo")
        assert hoststate.differences(before, hoststate.capture()) == []


def test_run_full(restored: None, guests: list[LabGuest], irq_cpus: set[int]) -> None:
    labhelp.write_policies("auto")
    with small(RUN) as filler:
        fill(filler)
        labhelp.start()
        for guest in guests:
            assert labhelp.untuned_lines(guest, irq_cpus) == []
        labhelp.stop()


@labhelp.one_release("how errors are told", TRIXIE)
def test_eperm_as_in_a_container(restored: None, guests: list[LabGuest]) -> None:
    """Root without the capabilities may move a thread to another cgroup and then not give it
    its CPUs, nor take that back: it says so, and undo with the rights restores all."""
    labhelp.write_policies("auto")
    done = labhelp.sh(
        "setpriv", "--bounding-set", "-sys_nice,-net_admin,-sys_admin",
        "/usr/bin/vsrtune", "apply", check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "vsrtune: error: " in done.stderr
    assert "CAP_SYS_NICE" in done.stderr, "what is missing"
    assert "not all is as it was; `vsrtune undo`" in done.stderr
    assert "settings restored" in labhelp.vsrtune("undo").stdout
    assert "othing to undo" in labhelp.vsrtune("undo").stdout


def test_the_clock_jumps(tuned: set[int], guests: list[LabGuest]) -> None:
    begin = time.monotonic()
    now = time.time()
    pid = labhelp.main_pid()
    try:
        for jump in (86400, -86400):
            labhelp.sh("date", "-s", f"@{int(now + jump)}")
            labhelp.sh("chrt", "-o", "-p", "0", str(guests[0].workers()[0]))
            labhelp.wait_for(
                lambda: labhelp.untuned_lines(guests[0], tuned) == [], "drift is set right", 40
            )
    finally:
        labhelp.sh("date", "-s", f"@{int(now + time.monotonic() - begin)}")
    assert labhelp.main_pid() == pid


def test_stopped_past_its_watchdog(tuned: set[int], guests: list[LabGuest]) -> None:
    labhelp.DROPIN.mkdir(parents=True)
    (labhelp.DROPIN / "test.conf").write_text("[Service]\nWatchdogSec=10\nTimeoutAbortSec=2\n")
    labhelp.sh("systemctl", "daemon-reload")
    labhelp.sh("systemctl", "restart", "vsrtune")
    first = labhelp.main_pid()
    os.kill(first, signal.SIGSTOP)
    labhelp.started_again(first)
    for guest in guests:
        assert labhelp.untuned_lines(guest, tuned) == []


THREADS = """
import _thread, sys
_thread.stack_size(32768)
end = _thread.allocate_lock()
end.acquire()
for _ in range(int(sys.argv[1])):
    _thread.start_new_thread(end.acquire, ())
print("ready", flush=True)
sys.stdin.read()
"""


def test_ten_thousand_threads(restored: None, guests: list[LabGuest], irq_cpus: set[int]) -> None:
    labhelp.write_policies("auto")
    scope = ("systemd-run", "--scope", "--quiet", "--property=TasksMax=20000")
    with subprocess.Popen(
        [*scope, sys.executable, "-c", THREADS, "10000"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as crowd:  # fmt: skip
        assert crowd.stdout is not None
        assert crowd.stdout.readline() == b"ready\n"
        labhelp.start()
        for guest in guests:
            assert labhelp.untuned_lines(guest, irq_cpus) == []
        labhelp.stop()
        crowd.kill()


def test_a_pinned_cpu_goes_away(untuned: None, guests: list[LabGuest], irq_cpus: set[int]) -> None:
    """Its threads are given the CPUs that are left, and spread again when it is back. A thread that
    has no cpuset of its own does not get its mask back, docs/reliability.md says."""
    labhelp.write_policies("auto")
    last = labhelp.lab_cpus() - 1
    online = Path(f"/sys/devices/system/cpu/cpu{last}/online")
    before = hoststate.capture()
    labhelp.start()

    def on_it() -> set[int]:
        return {tid for g in guests for tid in g.data_plane() if labhelp.mask(tid) == {last}}

    there = on_it()
    assert there, f"nothing is pinned to CPU {last}"
    try:
        online.write_text("0")
        labhelp.wait_for(
            lambda: all(labhelp.untuned_lines(g, irq_cpus | {last}) == [] for g in guests),
            "tuned on the CPUs that are left", 60,
        )  # fmt: skip
    finally:
        online.write_text("1")
    labhelp.wait_for(on_it, "threads are on it again", 60)
    labhelp.wait_for(
        lambda: labhelp.status_text().endswith(" 0 drift"), "no drift once it is back", 60
    )
    labhelp.stop()
    pinned_by_libvirt = {t for g in guests if g.kind == "libvirt" for t in g.vcpus().values()}
    masks = {f"thread {tid} ({hoststate.comm(tid)}) mask" for tid in there - pinned_by_libvirt}
    changed = hoststate.differences(before, hoststate.capture())
    print("changed at the end:", changed)
    for tid in there - pinned_by_libvirt:
        os.sched_setaffinity(tid, range(labhelp.lab_cpus()))
    assert [line for line in changed if line.partition(": was ")[0] not in masks] == []
    assert hoststate.differences(before, hoststate.capture()) == []
