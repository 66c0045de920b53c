"""An independent reading of everything vsrtune may change, for exact comparison.

Uses nothing of the package under test: /proc, /sys and one system call.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
from pathlib import Path

SYS_SCHED_GETATTR = 315
_BETWEEN = "====="
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


def comms() -> dict[int, str]:
    """pid -> comm of every process and kernel thread."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # ended meanwhile
                found[int(entry)] = comm(int(entry))
    return found


def qemus(processes: dict[int, str] | None = None) -> dict[int, str]:
    """pid -> name of every QEMU guest, by its command line."""
    found = {}
    for pid, name in (comms() if processes is None else processes).items():
        if not name.startswith("qemu-system"):
            continue
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "qemu-system" in words[0] and "-name" in words:
            name = words[words.index("-name") + 1]
            found[pid] = re.sub(r"^guest=|,debug-threads=\w+$", "", name)
    return found


def threads(pid: int, processes: dict[int, str] | None = None) -> list[int]:
    """Threads of a QEMU process and its vhost kthreads."""
    tids = [int(t) for t in os.listdir(f"/proc/{pid}/task")]
    return sorted({*tids, *vhost_workers(pid, processes)})


def comm(tid: int) -> str:
    return Path(f"/proc/{tid}/comm").read_text().strip()


def vhost_workers(pid: int, processes: dict[int, str] | None = None) -> list[int]:
    """vhost workers of a QEMU process, as kthreads or as its own threads."""
    wanted = f"vhost-{pid}"
    found = [int(t) for t in os.listdir(f"/proc/{pid}/task") if comm(int(t)) == wanted]
    found += [p for p, c in (comms() if processes is None else processes).items() if c == wanted]
    return sorted(set(found))


def cgroup(tid: int) -> str:
    """The cgroup v2 path of a thread."""
    for line in Path(f"/proc/{tid}/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return line[3:]
    raise AssertionError(f"thread {tid} has no cgroup v2 path")


def _threads_of(pid: int, processes: dict[int, str], values: dict[str, str]) -> None:
    paths: set[str] = set()
    parents: set[Path] = set()
    for tid in threads(pid, processes):
        try:
            where = f"thread {tid} ({comm(tid)})"
            path = cgroup(tid)
            values[f"{where} mask"] = status_field(tid, "Cpus_allowed_list")
            values[f"{where} scheduling"] = sched(tid)
            values[f"{where} cgroup"] = path
        except (OSError, ProcessLookupError):
            # QEMU's own pool threads come and go; they are nobody's setting.
            continue
        paths |= {path, str(Path(path).parent)}
        parents.add(CGROUP / str(Path(path).parent).lstrip("/"))
    for scope in paths:
        for file in ("cpuset.cpus", "cpuset.cpus.effective", "cpuset.cpus.partition"):
            text = CGROUP / scope.lstrip("/") / file
            if text.exists():
                values[f"cgroup {scope} {file}"] = text.read_text().strip()
    for parent in parents:
        values[f"cgroups below {parent}"] = " ".join(
            sorted(p.name for p in parent.iterdir() if p.is_dir())
        )


def capture() -> dict[str, str]:
    """Every value that tuning may touch: "what" -> its text.

    Runs around every test of an emulated host, so /proc is walked once and virsh called
    twice, whatever the number of guests.
    """
    values: dict[str, str] = {}
    processes = comms()
    for pid in qemus(processes):
        _threads_of(pid, processes, values)
    for tid, name in sorted(processes.items()):
        if name.startswith("ksoftirqd/"):
            values[f"{name} scheduling"] = sched(tid)
        # A guest device's own thread may stay, asleep, once threading is off again.
        if name.startswith(("napi/p0-", "napi/p1-")):
            with contextlib.suppress(OSError):
                values[f"{name} mask"] = status_field(tid, "Cpus_allowed_list")
    slice_ms = Path("/proc/sys/kernel/sched_rr_timeslice_ms")
    values["time slice of class rr"] = slice_ms.read_text().strip()
    limit = Path("/proc/sys/kernel/sched_rt_runtime_us")
    values["limit of realtime threads"] = limit.read_text().strip()
    _nics(values)
    for device in sorted(Path("/sys/class/net").iterdir()):
        values[f"{device.name} txqueuelen"] = (device / "tx_queue_len").read_text().strip()
        values[f"{device.name} threaded"] = (device / "threaded").read_text().strip()
    values.update(_pins())
    return values


def _nics(values: dict[str, str]) -> None:
    """Interrupts and queues of the NICs below the routers, interrupts of those that routers drive
    themselves."""
    nics = (Path("/sys/class/net/p0"), Path("/sys/class/net/p1"))
    devices = {nic.name: nic / "device" for nic in nics}
    devices |= {path.name: path for path in Path("/sys/bus/pci/drivers/vfio-pci").glob("0000:*")}
    for name, device in devices.items():
        for irq in device.glob("msi_irqs/*"):
            path = Path(f"/proc/irq/{irq.name}/smp_affinity_list")
            values[f"{name} irq {irq.name}"] = path.read_text().strip()
    for nic in nics:
        for file in nic.glob("queues/*/[rx]ps_cpus"):
            with contextlib.suppress(OSError):  # one transmit queue has no XPS
                values[f"{nic.name} {file.parent.name} {file.name}"] = file.read_text().strip()


def _pins() -> dict[str, str]:
    """What virsh says of the pins of every guest that runs."""
    rows = [line.split(None, 1) for line in virsh("list", "--uuid", "--name").splitlines() if line]
    verbs = [
        (f"{name.strip()} {verb}", f"{verb} {uuid}")
        for uuid, name in rows
        for verb in ("vcpupin", "emulatorpin")
    ]
    if not verbs:
        return {}
    answers = virsh(f"; echo {_BETWEEN}; ".join(words for _, words in verbs)).split(_BETWEEN)
    assert len(answers) == len(verbs), f"virsh answered {answers} to {verbs}"
    return {what: text.strip() for (what, _), text in zip(verbs, answers, strict=True)}


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
