"""Routers that never boot, so that a lab carries many: real QEMUs under KVM with real vcpu and vhost
threads on real macvtaps, which cost no CPU time because their vcpus are stopped (-S)."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hoststate
import labhelp

LOWER = "p0"
MEMORY_MIB = 16
# A locally administered MAC, which none of the lab's routers has.
MAC = "52:54:00:c0:{:02x}:{:02x}"


def make_macvtap(name: str, number: int) -> int:
    """A macvtap on the lower device that the lab's routers have too; open, as QEMU wants it."""
    mac = MAC.format(number >> 8 & 255, number & 255)
    words = f"ip link add link {LOWER} name {name} address {mac} type macvtap mode bridge"
    labhelp.sh(*words.split())
    labhelp.sh("ip", "link", "set", name, "up")
    path = f"/dev/tap{labhelp.text(f'/sys/class/net/{name}/ifindex')}"
    labhelp.wait_for(lambda: os.path.exists(path), f"{path} is there")
    return os.open(path, os.O_RDWR)


@dataclass
class Member:
    """One of them. ``taps`` are the macvtaps it has, by the id of their back end."""

    number: int
    vcpus: int
    process: subprocess.Popen[bytes]
    taps: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"crowd{self.number}"

    def ask(self, *commands: dict[str, Any], fd: int | None = None) -> Any:
        """QMP commands over one connection; a descriptor goes with the first of them. What the
        last one returns."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(60)
            labhelp.wait_for(lambda: self._reached(sock), f"{self.name} has a monitor")
            stream = sock.makefile("r", encoding="utf-8")
            stream.readline()
            answer: Any = None
            for number, command in enumerate(({"execute": "qmp_capabilities"}, *commands)):
                descriptors = [fd] if fd is not None and number == 1 else []
                socket.send_fds(sock, [json.dumps(command).encode()], descriptors)
                while "return" not in (answer := json.loads(stream.readline())):
                    assert "error" not in answer, (self.name, command, answer)
            return answer["return"]

    def _reached(self, sock: socket.socket) -> bool:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            sock.connect(f"/run/{self.name}.qmp")
            return True
        return False

    def data_plane(self) -> list[int]:
        """Threads that would carry packets: vcpus and workers."""
        found = self.ask({"execute": "query-cpus-fast"})
        return [*(c["thread-id"] for c in found), *hoststate.vhost_workers(self.process.pid)]

    def untuned_lines(self, irq: set[int]) -> list[str]:
        """What is not as the tests' policy says."""
        return self._lines(irq, labhelp.realtime_start(), labhelp.QUEUE)

    def touched_lines(self) -> list[str]:
        """What is not as QEMU and the kernel made it."""
        every = set(range(labhelp.lab_cpus()))
        lines = self._lines(set(), "policy=0 flags=0 nice=0 ", 500)
        return lines + [
            f"{self.name} {tid}: mask {labhelp.mask(tid)}"
            for tid in self.data_plane()
            if labhelp.mask(tid) != every
        ]

    def _lines(self, irq: set[int], start: str, queue: int) -> list[str]:
        lines = []
        tids = self.data_plane()
        if len(tids) != self.vcpus + len(self.taps):
            lines.append(f"{self.name}: {len(tids)} threads, {self.vcpus} vcpus, {self.taps}")
        devices = self.taps.values()
        return lines + labhelp.different(self.name, tids, devices, irq, start, queue)


class Crowd:
    """At most ``most`` of them, that come, go, and are plugged by chance."""

    def __init__(self, chance: random.Random, most: int) -> None:
        self._chance, self._most = chance, most
        self._number = 0
        self.members: list[Member] = []
        self.done: list[str] = []

    def something(self) -> None:
        """One change."""
        here = self.members
        changes = [self.stop, self.plug] if here else []
        changes += [self.unplug] if any(len(m.taps) > 1 for m in here) else []
        # They come more often than they go until it is crowded.
        changes += [self.start] * 2 if len(here) < self._most else []
        change = self._chance.choice(changes)
        self.done.append(change.__name__)
        change()

    def start(self) -> None:
        """One comes; half of them do not name their threads, so that QEMU has to be asked."""
        self._number += 1
        name, device = f"crowd{self._number}", f"c{self._number}-0"
        vcpus = self._chance.choice((1, 2))
        tap = make_macvtap(device, self._number << 4)
        names = f"{name},debug-threads=on" if self._chance.random() < 0.5 else name
        command = (
            f"qemu-system-x86_64 -accel kvm -S -machine pc -cpu host -m {MEMORY_MIB} -nodefaults"
        )
        command += f" -display none -smp {vcpus} -name {names}"
        command += f" -qmp unix:/run/{name}.qmp,server=on,wait=off"
        command += f" -netdev tap,id=n0,vhost=on,fd={tap} -device virtio-net-pci,netdev=n0,romfile="
        process = subprocess.Popen(
            command.split(), pass_fds=[tap], stdin=subprocess.DEVNULL, start_new_session=True
        )
        os.close(tap)
        self.members.append(Member(self._number, vcpus, process, {"n0": device}))

    def stop(self) -> None:
        """One dies."""
        self._end(self.members.pop(self._chance.randrange(len(self.members))))

    def plug(self) -> None:
        """One is given another back end."""
        member = self._chance.choice(self.members)
        number = next(n for n in range(16) if f"n{n}" not in member.taps)
        device = f"c{member.number}-{number}"
        tap = make_macvtap(device, member.number << 4 | number)
        back_end = {"type": "tap", "id": f"n{number}", "fd": "tap", "vhost": True}
        member.ask(
            {"execute": "getfd", "arguments": {"fdname": "tap"}},
            {"execute": "netdev_add", "arguments": back_end},
            fd=tap,
        )
        os.close(tap)
        member.taps[f"n{number}"] = device

    def unplug(self) -> None:
        """One loses what it was given."""
        member = self._chance.choice([m for m in self.members if len(m.taps) > 1])
        ident = self._chance.choice([ident for ident in member.taps if ident != "n0"])
        member.ask({"execute": "netdev_del", "arguments": {"id": ident}})
        labhelp.sh("ip", "link", "del", member.taps.pop(ident))

    def end(self) -> None:
        """All of them go."""
        while self.members:
            self._end(self.members.pop())

    def _end(self, member: Member) -> None:
        member.process.kill()
        member.process.wait()
        Path(f"/run/{member.name}.qmp").unlink(missing_ok=True)
        for device in member.taps.values():
            labhelp.sh("ip", "link", "del", device)
