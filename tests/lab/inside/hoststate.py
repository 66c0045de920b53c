"""An independent reading of everything vsrtune may change, for exact comparison.

Uses nothing of the package under test: /proc, /sys and one system call.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from pathlib import Path

SYS_SCHED_GETATTR = 315
CGROUP = Path("/sys/fs/cgroup")


class SchedAttr(ctypes.Structure):
    """``struct sched_attr`` of sched_getattr(2), version 0."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    ]


_libc = ctypes.CDLL(None, use_errno=True)


def sched(tid: int) -> str:
    """Policy number, flags, nice and priority of a thread as one text."""
    attr = SchedAttr()
    size = ctypes.sizeof(attr)
    if _libc.syscall(SYS_SCHED_GETATTR, tid, ctypes.byref(attr), size, 0) != 0:
        raise ProcessLookupError(tid)
    return (
        f"policy={attr.policy} flags={attr.flags} nice={attr.nice} priority={attr.priority} "
        f"runtime={attr.runtime} deadline={attr.deadline} period={attr.period}"
    )


def status_field(tid: int, name: str) -> str:
    """One line of /proc/TID/status."""
    found = re.search(rf"^{name}:\s*(.*)$", Path(f"/proc/{tid}/status").read_text(), re.MULTILINE)
    assert found is not None, f"/proc/{tid}/status has no {name}"
    return found[1]


def last_cpu(tid: int) -> int:
    """The CPU a thread last ran on (field 39 of /proc/TID/stat)."""
    return int(Path(f"/proc/{tid}/stat").read_text().rpartition(")")[2].split()[36])


def cpu_ticks(tid: int) -> int:
    """User and system time of a thread in clock ticks."""
    fields = Path(f"/proc/{tid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def qemus() -> dict[int, str]:
    """pid -> name of every QEMU guest, by its command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "qemu-system" in words[0] and "-name" in words:
            name = words[words.index("-name") + 1]
            found[int(entry.name)] = re.sub(r"^guest=|,debug-threads=\w+$", "", name)
    return found


def threads(pid: int) -> list[int]:
    """Threads of a QEMU process and its vhost kthreads."""
    tids = [int(t) for t in os.listdir(f"/proc/{pid}/task")]
    return sorted({*tids, *vhost_workers(pid)})


def comm(tid: int) -> str:
    return Path(f"/proc/{tid}/comm").read_text().strip()


def vhost_workers(pid: int) -> list[int]:
    """vhost workers of a QEMU process, as kthreads or as its own threads."""
    name = f"vhost-{pid}"
    found = [int(t) for t in os.listdir(f"/proc/{pid}/task") if comm(int(t)) == name]
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and comm(int(entry)) == name:
                found.append(int(entry))
        except OSError:
            continue
    return sorted(set(found))


def cgroup(tid: int) -> str:
    """The cgroup v2 path of a thread."""
    for line in Path(f"/proc/{tid}/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return line[3:]
    raise AssertionError(f"thread {tid} has no cgroup v2 path")


def _threads_of(pid: int, values: dict[str, str]) -> None:
    for tid in threads(pid):
        try:
            where = f"thread {tid} ({comm(tid)})"
            path = cgroup(tid)
            values[f"{where} mask"] = status_field(tid, "Cpus_allowed_list")
            values[f"{where} scheduling"] = sched(tid)
            values[f"{where} cgroup"] = path
        except (OSError, ProcessLookupError):
            # QEMU's own pool threads come and go; they are nobody's setting.
            continue
        for scope in (path, str(Path(path).parent)):
            for file in ("cpuset.cpus", "cpuset.cpus.effective", "cpuset.cpus.partition"):
                text = CGROUP / scope.lstrip("/") / file
                if text.exists():
                    values[f"cgroup {scope} {file}"] = text.read_text().strip()
        parent = CGROUP / str(Path(path).parent).lstrip("/")
        values[f"cgroups below {parent}"] = " ".join(
            sorted(p.name for p in parent.iterdir() if p.is_dir())
        )


def capture() -> dict[str, str]:
    """Every value that tuning may touch: "what" -> its text."""
    values: dict[str, str] = {}
    for pid in qemus():
        _threads_of(pid, values)
    for entry in sorted(Path("/proc").glob("[0-9]*/comm")):
        try:
            name = entry.read_text().strip()
            if name.startswith("ksoftirqd/"):
                values[f"{name} scheduling"] = sched(int(entry.parent.name))
        except (OSError, ProcessLookupError):
            continue
    for device in sorted(Path("/sys/class/net").iterdir()):
        values[f"{device.name} txqueuelen"] = (device / "tx_queue_len").read_text().strip()
        values[f"{device.name} threaded"] = (device / "threaded").read_text().strip()
    for name in virsh("list", "--name").splitlines():
        if name:
            values[f"{name} vcpupin"] = virsh("vcpupin", name)
            values[f"{name} emulatorpin"] = virsh("emulatorpin", name)
    return values


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """One line for every value that is not byte for byte what it was."""
    lines = []
    for what in sorted({*before, *after}):
        if "(worker)" in what:
            continue
        old, new = before.get(what, "absent"), after.get(what, "absent")
        if old != new:
            lines.append(f"{what}: was {old!r}, is {new!r}")
    return lines


def virsh(*words: str) -> str:
    """Standard output of virsh; "" where libvirt is not there."""
    try:
        return subprocess.run(
            ["virsh", "-q", *words], capture_output=True, text=True, check=False
        ).stdout.strip()
    except FileNotFoundError:
        return ""
