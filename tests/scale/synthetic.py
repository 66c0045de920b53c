"""Makes hosts with many guests as trees of files, after a recorded one.

Every text is that of a real libvirt guest and its host (tests/hosts), with other numbers and
names: files have the length and the shape that the readers meet on a host. Links are real
ones, so that a tree can be read like a host below a directory.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vsrtune.core.codec import encode
from vsrtune.core.cpuset import CpuSet
from vsrtune.host.libvirt import DomainText
from vsrtune.host.recorded import load

RECORDED = load(Path(__file__).resolve().parents[1] / "hosts" / "trixie-veth-multiqueue.json")
TEXTS = RECORDED.host.texts
CPUS = CpuSet(range(64))
VCPUS, NICS, QUEUES = 8, 2, 2
# Processes of a host besides its guests: they are looked at, and are none of ours.
OTHERS = 200
_GUEST = 429  # the QEMU of the recorded libvirt guest
_VCPU, _VHOST, _MAIN = 443, 438, 429
_LOWERS = ("p0", "p1")
QEMU = "/usr/bin/qemu-system-x86_64"


@dataclass(frozen=True)
class Names:
    """What tells one synthetic guest from the next; ``number`` counts from 1."""

    number: int

    @property
    def name(self) -> str:
        return f"vr{self.number}"

    @property
    def uuid(self) -> str:
        return f"44982d44-c3bc-4e73-a3e5-{self.number:012x}"

    @property
    def pid(self) -> int:
        return 10_000 + 40 * self.number

    @property
    def scope(self) -> str:
        return f"machine.slice/machine-qemu\\x2d{self.number}\\x2d{self.name}.scope/libvirt"

    def device(self, nic: int) -> str:
        return f"macvtap{NICS * (self.number - 1) + nic}"

    def ifindex(self, nic: int) -> int:
        return 100 + NICS * (self.number - 1) + nic

    def threads(self) -> Iterator[tuple[int, int, str, str]]:
        """(tid, tid in the recording, comm, cgroup) of every thread, in the order of age."""
        pid = self.pid
        emulator = f"{self.scope}/emulator"
        yield pid, _MAIN, "qemu-system-x86", emulator
        yield pid + 1, 437, "qemu-system-x86", emulator
        for queue in range(NICS * QUEUES):
            yield pid + 2 + queue, _VHOST, f"vhost-{pid}", emulator
        tid = pid + 2 + NICS * QUEUES
        yield tid, 442, "IO mon_iothread", emulator
        for vcpu in range(VCPUS):
            yield tid + 1 + vcpu, _VCPU, f"CPU {vcpu}/KVM", f"{self.scope}/vcpu{vcpu}"
        yield tid + 1 + VCPUS, 460, "kvm-nx-lpage-re", f"{self.scope}/vcpu0"


class Synthetic:
    """A host of ``guests`` guests below ``place``, which must be new. ``domains`` are what
    its libvirt says."""

    def __init__(self, place: Path, guests: int) -> None:
        self.place = place
        self.guests = tuple(Names(n) for n in range(1, guests + 1))
        self._made: set[str] = set()
        self._host()
        for names in self.guests:
            self._guest(names)
        self._lowers()
        self.domains = [self._domain(names) for names in self.guests]

    # -- the host

    def _host(self) -> None:
        for path, text in TEXTS.items():
            if path.startswith(("/proc/sys/", "/sys/devices/system/")):
                self.file(path, text)
        self.file(QEMU, "")
        for name in ("online", "present"):
            self.file(f"/sys/devices/system/cpu/{name}", f"{CPUS}\n")
        self.file("/sys/devices/system/node/node0/cpulist", f"{CPUS}\n")
        self.cgroup("", "")
        for path in ("init.scope", "system.slice", "user.slice", "machine.slice"):
            self.cgroup(path, "")
        self._net("lo", 1, "p0", ())
        for cpu in CPUS:
            self._kthread(12 + cpu, 17, f"ksoftirqd/{cpu}", cpu)
        for number in range(OTHERS):
            pid = 1000 + number
            self._stat(pid, pid, 17, f"service-{number}", number, flags=4194560)
            self.link(f"/proc/{pid}/exe", f"/usr/sbin/service-{number}")

    def _lowers(self) -> None:
        for number, name in enumerate(_LOWERS):
            upper = [f"upper_{g.device(number)}" for g in self.guests]
            self._net(name, 2 + number, name, (*upper,))

    # -- one guest

    def _guest(self, names: Names) -> None:
        pid = names.pid
        text = TEXTS[f"/proc/{_GUEST}/cmdline"].replace("guest=vr1,", f"guest={names.name},")
        text = re.sub(r"-uuid\0[0-9a-f-]+", f"-uuid\0{names.uuid}", text)
        self.file(f"/proc/{pid}/cmdline", text)
        self.link(f"/proc/{pid}/exe", QEMU)
        self.file(f"/run/libvirt/qemu/{names.name}.pid", f"{pid}\n")
        for path in ("", *(f"/vcpu{n}" for n in range(VCPUS)), "/emulator"):
            self.cgroup(f"{names.scope}{path}", "")
        self.cgroup(names.scope.rpartition("/")[0], "")
        for tid, like, comm, cgroup in names.threads():
            base = self._thread(pid, tid, like, comm, tid % len(CPUS), cgroup)
            if tid == pid:
                self.file(f"/proc/{pid}/stat", (self.place / f"{base}/stat"[1:]).read_text())
        for number, target in self._fds(names):
            self.link(f"/proc/{pid}/fd/{number}", target)
        for nic in range(NICS):
            lower = (f"lower_{_LOWERS[nic]}",)
            self._net(names.device(nic), names.ifindex(nic), f"macvtap{nic}", lower)

    def _fds(self, names: Names) -> Iterator[tuple[int, str]]:
        for path, target in RECORDED.host.links.items():
            found = re.fullmatch(rf"/proc/{_GUEST}/fd/(\d+)", path)
            if found:
                tap = re.fullmatch(r"/dev/tap(\d+)", target)
                nic = int(tap[1]) - 8 if tap else 0
                yield int(found[1]), f"/dev/tap{names.ifindex(nic)}" if tap else target

    def _domain(self, names: Names) -> DomainText:
        xml = RECORDED.virt().domains()[0].live_xml
        xml = xml.replace("<name>vr1<", f"<name>{names.name}<")
        xml = re.sub(r"<uuid>[^<]*", f"<uuid>{names.uuid}", xml)
        xml = xml.replace(' id="1">', f' id="{names.number}">', 1)
        for nic in range(NICS):
            xml = xml.replace(f'dev="macvtap{nic}"', f'dev="{names.device(nic)}"', 1)
        self.file(f"/libvirt/{names.number - 1}.xml", xml)
        pins = (CPUS,) * VCPUS
        return DomainText(names.name, names.uuid, xml, pins, CPUS)

    # -- pieces

    def file(self, path: str, text: str) -> None:
        directory = path.rpartition("/")[0]
        if directory not in self._made:
            os.makedirs(f"{self.place}{directory}", exist_ok=True)
            self._made.add(directory)
        with open(f"{self.place}{path}", "w", encoding="utf-8") as file:
            file.write(text)

    def link(self, path: str, target: str) -> None:
        directory = path.rpartition("/")[0]
        os.makedirs(f"{self.place}{directory}", exist_ok=True)
        os.symlink(target, f"{self.place}{path}")

    def cgroup(self, path: str, cpus: str) -> None:
        base = f"/sys/fs/cgroup/{path}" if path else "/sys/fs/cgroup"
        self.file(f"{base}/cgroup.procs", "")
        self.file(f"{base}/cpuset.cpus.effective", f"{CPUS}\n")
        if path:
            self.file(f"{base}/cgroup.events", "populated 1\nfrozen 0\n")
            self.file(f"{base}/cpuset.cpus", f"{cpus}\n")
            self.file(f"{base}/cpuset.cpus.partition", "member\n")
            self.file(f"{base}/cpuset.cpus.exclusive", "\n")

    def _stat(
        self, pid: int, tid: int, like: int, comm: str, cpu: int, flags: int | None = None
    ) -> str:
        owner = _GUEST if like != 17 else like
        text = TEXTS[f"/proc/{owner}/task/{like}/stat"]
        fields = text.rpartition(")")[2].split()
        fields[19] = str(100 + tid)
        fields[36] = str(cpu)
        if flags is not None:
            fields[6] = str(flags)
        line = f"{tid} ({comm}) {' '.join(fields)}\n"
        if pid == tid:
            self.file(f"/proc/{pid}/stat", line)
        return line

    def _kthread(self, tid: int, like: int, comm: str, cpu: int) -> None:
        self._thread(tid, tid, like, comm, cpu, "")

    def _thread(self, pid: int, tid: int, like: int, comm: str, cpu: int, cgroup: str) -> str:
        owner = _GUEST if like != 17 else like
        source = f"/proc/{owner}/task/{like}"
        base = f"/proc/{pid}/task/{tid}"
        self.file(f"{base}/stat", self._stat(pid, tid, like, comm, cpu))
        allowed = f"Cpus_allowed_list:\t{CPUS}"
        status = re.sub(r"Cpus_allowed_list:.*", allowed, TEXTS[f"{source}/status"])
        self.file(f"{base}/status", re.sub(r"^Name:.*", f"Name:\t{comm}", status))
        self.file(f"{base}/cgroup", f"0::/{cgroup}\n")
        self.file(f"{base}/schedstat", TEXTS[f"{source}/schedstat"])
        self.file(f"/sched_attr/{tid}.json", json.dumps(encode(RECORDED.host.sched[str(like)])))
        return base

    def _net(self, name: str, ifindex: int, like: str, more: tuple[str, ...]) -> None:
        base = f"/sys/devices/virtual/net/{name}"
        listed = RECORDED.host.listings[f"/sys/devices/virtual/net/{like}"]
        files = {
            "uevent": f"INTERFACE={name}\nIFINDEX={ifindex}\n",
            "ifindex": f"{ifindex}\n",
            "iflink": f"{ifindex}\n",
            "tx_queue_len": "500\n",
            "threaded": "0\n",
        }
        kept = [e for e in listed if not e.startswith(("tap", "upper_", "lower_"))]
        for entry in (*kept, *more):
            if entry not in ("statistics", "queues"):
                self.file(f"{base}/{entry}", files.get(entry, ""))
        self.file(f"{base}/statistics/rx_dropped", "7\n")
        self.file(f"{base}/queues/rx-0/rps_cpus", "0\n")
        os.makedirs(f"{self.place}/sys/class/net", exist_ok=True)
        self.link(f"/sys/class/net/{name}", f"../../devices/virtual/net/{name}")
