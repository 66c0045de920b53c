"""Small hosts for tests, written by hand."""

from __future__ import annotations

import re

from vsrtune.host.procfs import PF_USER_WORKER
from vsrtune.host.recorded import Answers, RecordedRoot
from vsrtune.model.guest import Sched


def stat_line(tid: int, comm: str, *, ppid: int = 1, flags: int = 0, start: int = 100) -> str:
    """/proc/TID/stat with a last CPU of 1 and 3 + 2 ticks of CPU time."""
    before = f"{tid} ({comm}) S {ppid} 0 0 0 -1 {flags} 0 0 0 0 3 2 0 0 20 0 1 0 {start}"
    return before + " 0" * 16 + " 1 0 0 0 0 0 0 0 0 0 0 0 0 0\n"


def scope(name: str) -> str:
    """The cgroup that systemd makes for a domain. libvirt gives it the letters and digits of
    ASCII only, and nothing after the id without any (virDomainDriverGenerateMachineName)."""
    kept = re.sub(r"[^0-9A-Za-z.-]", "", name)
    words = ("/machine.slice/machine-qemu", "1", *([kept] if kept else []))
    return "\\x2d".join(words) + ".scope"


class HostTree:
    """Files, links and errors of an imagined host. A root sees what is changed later."""

    def __init__(self) -> None:
        self.answers = Answers()
        self.links = self.answers.links
        self.errors = self.answers.errors
        self.stats = self.answers.stats
        # The cgroup of each process.
        self.homes: dict[int, str] = {}

    def file(self, path: str, text: str | bytes) -> HostTree:
        """Add a file."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", "backslashreplace")
        self.answers.texts[path] = text
        return self

    def text(self, path: str) -> str:
        """The text of a file."""
        return self.answers.texts[path]

    def remove(self, path: str) -> HostTree:
        """Take a file away."""
        del self.answers.texts[path]
        return self

    def directory(self, path: str) -> HostTree:
        """Add a directory, which may stay empty."""
        self.answers.present[path] = True
        return self

    def qmp(self, pid: int, vcpus: dict[str, int], error: str | None = None) -> HostTree:
        """Let the monitor of a QEMU answer so."""
        self.answers.qmp[str(pid)] = vcpus if error is None else error
        return self

    def link(self, path: str, target: str) -> HostTree:
        """Add a symbolic link; its name shows in a listing of its directory."""
        self.links[path] = target
        return self

    def device(
        self, name: str, ifindex: int, *, devtype: str = "", has: str = "", pci: str = ""
    ) -> HostTree:
        """Add a network device; ``has`` names further entries, blank separated, ``pci``
        the directory of its hardware below /sys/devices."""
        base = f"/sys/devices/{pci or 'virtual'}/net/{name}"
        up = "../../devices/" + base.removeprefix("/sys/devices/")
        self.links[f"/sys/class/net/{name}"] = up
        uevent = f"DEVTYPE={devtype}\n" if devtype else ""
        self.file(f"{base}/uevent", f"{uevent}INTERFACE={name}\nIFINDEX={ifindex}\n")
        self.file(f"{base}/tx_queue_len", "500\n")
        self.file(f"{base}/iflink", f"{ifindex}\n")
        self.file(f"{base}/statistics/rx_dropped", "7\n")
        self.file(f"{base}/statistics/tx_dropped", "9\n")
        self.file(f"{base}/queues/rx-0/rps_cpus", "0\n")
        self.file(f"/sys/class/net/{name}/ifindex", f"{ifindex}\n")
        for entry in [*has.split(), *(["device"] if pci else [])]:
            self.file(f"{base}/{entry}", "")
            if entry in ("macvtap", "napi_macvtap"):
                self.link(f"{base}/tap{ifindex}", f"macvtap/tap{ifindex}")
        return self

    def napi_macvtap(
        self,
        name: str,
        ifindex: int,
        lower: str,
        threaded: int = 0,
        napi_thread: int | None = None,
        **counters: int,
    ) -> HostTree:
        """Add a device of our kernel module; ``counters`` beside those it always has."""
        self.device(name, ifindex, has=f"napi_macvtap lower_{lower}")
        self.file(f"/sys/devices/virtual/net/{name}/threaded", f"{threaded}\n")
        told = {"rx_received": 0, "rx_dropped_queue_full": 0, **counters}
        self.answers.ethtool[name] = told
        if napi_thread is not None:
            self.answers.napi[name] = napi_thread
        return self

    def thread(
        self,
        pid: int,
        tid: int,
        comm: str,
        *,
        ppid: int = 1,
        flags: int = 0,
        start: int = 100,
        allowed: str = "0-7",
        cgroup: str = "",
        uid: int = 0,
    ) -> HostTree:
        """Add a thread of process ``pid``, in the cgroup of that unless told. Threads named as
        vhost names its own are its own, and vcpus of libvirt's guests in their cgroups."""
        if not flags and comm.startswith("vhost-"):
            flags = PF_USER_WORKER
        cgroup = cgroup or self.homes.get(pid, "/system.slice/pq1.service")
        vcpu = re.fullmatch(r"CPU (\d+)/KVM", comm)
        if vcpu and cgroup == self.homes.get(pid):
            cgroup = cgroup.replace("/libvirt/emulator", f"/libvirt/vcpu{vcpu[1]}")
        line = stat_line(tid, comm, ppid=ppid, flags=flags, start=start)
        base = f"/proc/{pid}/task/{tid}"
        self.file(f"{base}/stat", line)
        uids = "\t".join([str(uid)] * 4)
        status = f"Name:\t{comm}\nUid:\t{uids}\nCpus_allowed_list:\t{allowed}\n"
        self.file(f"{base}/status", status)
        self.file(f"{base}/cgroup", f"0::{cgroup}\n")
        self.file(f"{base}/schedstat", "1234 5 6\n")
        self.answers.sched[str(tid)] = Sched()
        if pid == tid:
            self.file(f"/proc/{pid}/stat", line)
        return self

    def qemu(self, pid: int, *arguments: str, start: int = 100, uid: int = 0) -> HostTree:
        """Add a QEMU process with its main thread. One with what libvirt leaves in a command
        line runs in a cgroup of libvirt's, which has written its pid down."""
        if "secret,id=masterKey0" in ",".join(arguments):
            name = arguments[arguments.index("-name") + 1].split(",")[0].removeprefix("guest=")
            self.homes[pid] = f"{scope(name)}/libvirt/emulator"
            self.file(f"/run/libvirt/qemu/{name}.pid", f"{pid}\n")
        self.thread(pid, pid, "qemu-system-x86", start=start, uid=uid)
        argv = ["/usr/bin/qemu-system-x86_64", *arguments]
        self.file(f"/proc/{pid}/cmdline", "".join(f"{a}\0" for a in argv))
        self.links[f"/proc/{pid}/exe"] = "/usr/bin/qemu-system-x86_64"
        return self.directory(f"/proc/{pid}/fd")

    def fd(self, pid: int, number: int, target: str, info: str = "") -> HostTree:
        """Add an open descriptor."""
        self.link(f"/proc/{pid}/fd/{number}", target)
        return self.file(f"/proc/{pid}/fdinfo/{number}", info) if info else self

    def host(self, cpus: str = "0-3") -> HostTree:
        """Add what every host has."""
        kernel = "/proc/sys/kernel"
        self.file(f"{kernel}/random/boot_id", "0b007ed0-0000-4000-8000-000000000001\n")
        self.file(f"{kernel}/osrelease", "6.12.0-test\n")
        self.file(f"{kernel}/sched_rt_runtime_us", "950000\n")
        self.file(f"{kernel}/sched_rt_period_us", "1000000\n")
        self.file("/sys/devices/system/cpu/online", f"{cpus}\n")
        self.file("/sys/devices/system/cpu/present", f"{cpus}\n")
        self.file("/sys/devices/system/cpu/smt/active", "0\n")
        return self.directory("/sys/class/net")

    def root(self) -> RecordedRoot:
        """The tree as a HostRoot."""
        return RecordedRoot(self.answers)
