"""Settings that other programs change: seen at once, with the program's process and unit.

The interval is an hour, so nothing but the kernel's own word can make the daemon look.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import hoststate
import labhelp
import pytest
from labhelp import LabGuest

TRIALS = int(os.environ.get("LAB_TRIALS") or "5")
TOLD = Path("/mnt/share/changes.jsonl")
TRACING = Path("/sys/kernel/tracing")
ENDED = "which has ended"
_SEEN = re.compile(r": (\S+) \(pid (\d+), ([^)]+)\) has changed it to ")


def probes() -> list[str]:
    """The kprobes of vsrtune, and its instances."""
    lines = (TRACING / "kprobe_events").read_text().splitlines()
    instances = (TRACING / "instances").iterdir()
    return [x for x in lines if "vsrtune" in x] + [i.name for i in instances]


@dataclass(frozen=True)
class Told:
    """What the daemon's log says of a change: how long after it, and who it was."""

    seconds: float
    comm: str
    pid: int
    unit: str


def told(since: float) -> list[Told]:
    """What the daemon has logged since then."""
    done = labhelp.sh("journalctl", "-u", "vsrtune", "-o", "json", f"--since=@{int(since)}")
    found = []
    for line in map(json.loads, done.stdout.splitlines()):
        match = _SEEN.search(str(line.get("MESSAGE")))
        if match is not None and int(line["__REALTIME_TIMESTAMP"]) / 1e6 >= since:
            seconds = float(line["VSRTUNE_SECONDS"])
            found.append(Told(seconds, match[1], int(match[2]), match[3]))
    return found


@dataclass(frozen=True)
class Tool:
    """A program that changes a setting: its command, the name of the thread that makes the change,
    its unit, and whether another process than the command's makes the change."""

    command: list[str]
    comm: str
    unit: str
    by_another: bool = False


def tools(guest: LabGuest) -> dict[str, Callable[[], Tool]]:
    """Programs that operators use, each with another value every time."""
    worker, device = guest.workers()[0], guest.device(0)
    active = labhelp.sh("systemctl", "is-active", "virtqemud", check=False).stdout
    libvirt = "virtqemud" if active.startswith("active") else "libvirtd"
    own = Path("/proc/self/cgroup").read_text().strip().rpartition("/")[2]
    cpus, pins = itertools.cycle(["0-2", "0-1"]), itertools.cycle(["0-1", "0-2"])
    classes = itertools.cycle(["-o", "-b", "-i"])
    lengths = itertools.count(600)
    code = (
        "import os, time\n"
        f"was = os.sched_getaffinity({worker})\n"
        f"os.sched_setaffinity({worker}, {{0, 2}} if 1 in was else {{1, 2}})\n"
        "time.sleep(1)\n"
    )
    return {
        "taskset": lambda: Tool(["taskset", "-pc", next(cpus), str(worker)], "taskset", own),
        "chrt": lambda: Tool(["chrt", next(classes), "-p", "0", str(worker)], "chrt", own),
        "ip": lambda: Tool(
            ["ip", "link", "set", device, "txqueuelen", str(next(lengths))], "ip", own
        ),
        "virsh": lambda: Tool(
            ["virsh", "vcpupin", guest.name, "0", next(pins), "--live"],
            f"rpc-{libvirt}", f"{libvirt}.service", True,
        ),
        "a service": lambda: Tool(
            ["systemd-run", "--quiet", "--wait", "--unit=lab-tuner", "python3", "-c", code],
            "python3", "lab-tuner.service", True,
        ),
    }  # fmt: skip


@pytest.fixture
def watched(untuned: None, libvirt_guest: LabGuest) -> Iterator[LabGuest]:
    """A tuned guest, and a daemon that looks once an hour, and only reports what others change. The
    guest is started anew in the end, because libvirt keeps a pin to all CPUs."""
    labhelp.write_policies("auto")
    for path in labhelp.POLICIES.glob("test*.yaml"):
        path.write_text(path.read_text() + "drift: report\n")
    labhelp.set_environment(VSRTUNE_INTERVAL="3600")
    labhelp.start()
    yield libvirt_guest
    labhelp.reset()
    labhelp.stop_guest(libvirt_guest)
    labhelp.start_guest(libvirt_guest)


def test_each_change_is_seen_at_once_with_who_made_it(
    watched: LabGuest, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tools(watched)
    order = [name for _ in range(-(-TRIALS // len(made))) for name in sorted(made)][:TRIALS]
    random.Random(4).shuffle(order)
    found: list[dict[str, object]] = []
    for name in order:
        labhelp.wait_for(lambda: time.time() - labhelp.last_pass() > 1.5, "the daemon is idle")
        tool, begin = made[name](), time.time()
        process = subprocess.Popen(
            tool.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        assert process.wait() == 0, tool.command
        time.sleep(1)
        seen = next(iter(told(begin)), None)
        right = (
            seen is not None
            and seen.comm == tool.comm
            and (tool.by_another or seen.pid == process.pid)
            and seen.unit in ((tool.unit,) if tool.by_another else (tool.unit, ENDED))
        )
        found.append(
            {
                "change": name,
                "seconds": seen.seconds if seen is not None else None,
                "unit": seen is not None and seen.unit != ENDED,
                "right": right,
                "seen": str(seen),
            }
        )
    if TOLD.parent.is_dir():
        with TOLD.open("a") as file:
            file.writelines(json.dumps(one) + "\n" for one in found)
    with capsys.disabled():
        for one in found:
            print(f"\n{labhelp.codename()}: {one}", end="")
    assert [one for one in found if not one["right"]] == []


def test_what_the_daemon_and_libvirt_for_it_set_is_nobodys_change(watched: LabGuest) -> None:
    labhelp.write_policies("auto")
    labhelp.sh("systemctl", "reload", "vsrtune")
    since = time.time()
    labhelp.stop_guest(watched)
    labhelp.start_guest(watched)
    labhelp.wait_for(lambda: time.time() - labhelp.last_pass() > 4, "the daemon is idle")
    # As slow as the lab is, the kernel now and then works for another process for over a second
    # without a break. A vcpu that waits for it is stepped down, which is rightly counted as drift.
    drift = re.search(r" (\d+) drift(?:, (\d+) stepped down)?$", labhelp.status_text())
    assert drift is not None and drift[1] == (drift[2] or "0"), labhelp.daemon_log(60)
    assert told(since) == [], labhelp.daemon_log(60)


def test_a_change_is_put_back_at_once(watched: LabGuest) -> None:
    labhelp.write_policies("auto")
    labhelp.sh("systemctl", "reload", "vsrtune")
    labhelp.wait_for(lambda: time.time() - labhelp.last_pass() > 2.5, "the daemon is idle")
    worker, begin = watched.workers()[0], time.time()
    tuned = hoststate.sched(worker)
    labhelp.sh("chrt", "-o", "-p", "0", str(worker))
    labhelp.wait_for(lambda: hoststate.sched(worker) == tuned, "it is put back")
    assert [one.comm for one in told(begin)] == ["chrt"]


@pytest.mark.parametrize("whose", ["nobody", "the guest's"])
def test_who_calls_the_kernel_in_a_loop_does_not_keep_the_daemon_busy(
    watched: LabGuest, whose: str
) -> None:
    """The kernel tells of calls, and judges only then. A worker's user, QEMU's own where it is one of
    QEMU's threads, may move it."""
    labhelp.wait_for(lambda: time.time() - labhelp.last_pass() > 2.5, "the daemon is idle")
    worker = watched.workers()[0]
    uid = "65534" if whose == "nobody" else hoststate.status_field(worker, "Uid").split()[0]
    code = (
        "import itertools, os\n"
        "for cpu in itertools.cycle([0, 1]):\n"
        "    try:\n"
        f"        os.sched_setaffinity({worker}, {{cpu}})\n"
        "    except PermissionError:\n"
        "        pass\n"
    )
    before, begin = passes(), time.monotonic()
    caller = subprocess.Popen(
        ["setpriv", f"--reuid={uid}", "--clear-groups", "python3", "-c", code]
    )
    try:
        time.sleep(12)
        assert caller.poll() is None
        done, seconds = passes() - before, time.monotonic() - begin
    finally:
        caller.kill()
        caller.wait()
    if whose == "nobody":
        assert done < 2, "refused calls ask for no pass"
        assert labhelp.status_text().endswith(" 0 drift")
    else:
        assert 2 < done < seconds + 5, "a pass a second at most"
        labhelp.wait_for(lambda: labhelp.status_text().endswith(" 1 drift"), "it is found")


def passes() -> int:
    """How many passes the daemon has made."""
    (line,) = (
        x for x in labhelp.scrape() if x.startswith("vsrtune_reconcile_duration_seconds_count")
    )
    return int(float(line.split()[-1]))


def test_probes_end_with_the_daemon_and_after_a_kill_with_the_next(watched: LabGuest) -> None:
    labhelp.wait_for(lambda: len(probes()) > 8, "it watches")
    killed = labhelp.main_pid()
    labhelp.sh("systemctl", "kill", "--signal=KILL", "vsrtune")
    labhelp.wait_for(lambda: labhelp.main_pid() not in (0, killed), "systemd restarts it")
    labhelp.wait_for(
        lambda: len(probes()) > 8 and str(killed) not in str(probes()), "it watches again"
    )
    labhelp.stop()
    assert probes() == [], labhelp.daemon_log(40)
    assert "record-cmd" in (TRACING / "trace_options").read_text().split()


def test_without_probes_the_daemon_says_so_and_looks_by_itself(watched: LabGuest) -> None:
    worker = watched.workers()[0]
    labhelp.stop()
    labhelp.set_environment(VSRTUNE_INTERVAL="3")
    hidden = "[Service]\nInaccessiblePaths=/sys/kernel/tracing\n"
    (labhelp.DROPIN / "hidden.conf").write_text(hidden)
    labhelp.sh("systemctl", "daemon-reload")
    labhelp.write_policies("auto")
    labhelp.start()
    assert "are not noticed at once" in labhelp.daemon_log(100)
    tuned = hoststate.sched(worker)
    labhelp.sh("chrt", "-o", "-p", "0", str(worker))
    labhelp.wait_for(lambda: hoststate.sched(worker) == tuned, "a check finds it")
