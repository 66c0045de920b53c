"""Writes settings into a synthetic host, as the kernel and libvirt would."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace

from hostroot import TreeRoot
from synthetic import CPUS, Synthetic

from vsrtune.core.codec import decode, encode
from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import VanishedError
from vsrtune.host.procfs import parse_cgroup, parse_stat, parse_status_allowed
from vsrtune.model.guest import Sched, ThreadKey
from vsrtune.model.targets import (
    CgroupDir,
    EmulatorPin,
    Pin,
    Target,
    ThreadAffinity,
    ThreadCgroup,
    ThreadSched,
    TxQueueLen,
    Value,
    VcpuPin,
)

CGROUP = "/sys/fs/cgroup"


class TreeOps:
    """SysOps on a synthetic host."""

    def __init__(self, host: Synthetic, root: TreeRoot) -> None:
        self._host = host
        self._root = root

    def online(self) -> CpuSet:
        return CPUS

    def unpartitioned(self, cpus: CpuSet) -> CpuSet:
        return cpus

    def left(self, target: Target, cpus: CpuSet) -> CpuSet:
        return cpus

    def whole(self, target: Target, value: Value) -> Value:
        return value

    def heir(self, target: ThreadSched) -> ThreadSched | None:
        return None

    def read(self, target: Target) -> Value:
        match target:
            case CgroupDir(path=path):
                return self._root.exists(f"{CGROUP}/{path}")
            case TxQueueLen(device=device):
                return int(self._root.read(f"/sys/devices/virtual/net/{device}/tx_queue_len"))
            case ThreadSched(thread=key):
                self._base(key)
                text = self._root.read(f"/sched_attr/{key.tid}.json")
                return decode(Sched, json.loads(text))
            case ThreadCgroup(thread=key):
                return self._cgroup(key)
            case ThreadAffinity(thread=key):
                return self._allowed(key)
            case VcpuPin(thread=key) | EmulatorPin(thread=key):
                list_ = self._root.read(f"{CGROUP}/{self._cgroup(key)}/cpuset.cpus").strip()
                return Pin(self._allowed(key), list_)
        raise TypeError(target)

    def write(self, target: Target, value: Value) -> None:
        match target, value:
            case CgroupDir(path=path), bool():
                os.makedirs(f"{self._host.place}{CGROUP}/{path}", exist_ok=True)
                self._host.cgroup(path, "")
            case TxQueueLen(device=device), int():
                self._host.file(f"/sys/devices/virtual/net/{device}/tx_queue_len", f"{value}\n")
            case ThreadSched(thread=key), Sched():
                self._host.file(f"/sched_attr/{key.tid}.json", json.dumps(encode(value)))
            case ThreadCgroup(thread=key), str():
                self._host.file(f"{self._base(key)}/cgroup", f"0::/{value}\n")
            case ThreadAffinity(thread=key), CpuSet():
                self._allow(self._base(key), value)
            case VcpuPin(thread=key, vcpu=number), Pin():
                self._pin(key, value, [self._base(key)])
                self._told(key, lambda d: replace(d, vcpu_pins=_with(d.vcpu_pins, number, value)))
            case EmulatorPin(thread=key), Pin():
                self._pin(key, value, self._beside(key))
                self._told(key, lambda d: replace(d, emulator_pin=value.cpus))
            case _:
                raise TypeError(target)

    def _pin(self, key: ThreadKey, value: Pin, bases: list[str]) -> None:
        path = self._cgroup(key)
        self._host.file(f"{CGROUP}/{path}/cpuset.cpus", f"{value.cpuset}\n")
        effective = value.cpuset or str(CPUS)
        self._host.file(f"{CGROUP}/{path}/cpuset.cpus.effective", f"{effective}\n")
        for base in bases:
            self._allow(base, value.cpus)

    def _beside(self, key: ThreadKey) -> list[str]:
        mine = self._cgroup(key)
        bases = [f"/proc/{key.pid}/task/{t}" for t in self._root.listdir(f"/proc/{key.pid}/task")]
        return [b for b in bases if parse_cgroup(self._root.read(f"{b}/cgroup")) == mine]

    def _told(self, key, change) -> None:  # type: ignore[no-untyped-def]
        number = (key.pid - 10_000) // 40 - 1
        self._host.domains[number] = change(self._host.domains[number])

    def _allow(self, base: str, cpus: CpuSet) -> None:
        text = self._root.read(f"{base}/status")
        line = f"Cpus_allowed_list:\t{cpus}"
        self._host.file(f"{base}/status", re.sub(r"Cpus_allowed_list:.*", line, text))

    def _allowed(self, key: ThreadKey) -> CpuSet:
        return parse_status_allowed(self._root.read(f"{self._base(key)}/status"))

    def _cgroup(self, key: ThreadKey) -> str:
        return parse_cgroup(self._root.read(f"{self._base(key)}/cgroup")) or ""

    def _base(self, key: ThreadKey) -> str:
        base = f"/proc/{key.pid}/task/{key.tid}"
        try:
            stat = parse_stat(self._root.read(f"{base}/stat"))
        except FileNotFoundError:
            raise VanishedError("no such thread", where=str(key)) from None
        if stat.start_time != key.start_time:
            raise VanishedError("another thread", where=str(key))
        return base


def _with(pins: tuple[CpuSet, ...], number: int, value: Pin) -> tuple[CpuSet, ...]:
    return tuple(value.cpus if n == number else cpus for n, cpus in enumerate(pins))
