"""A host below a directory, read as the live one is."""

from __future__ import annotations

import json
import os
from dataclasses import replace

from synthetic import Synthetic

from vsrtune.core.codec import decode
from vsrtune.host.filesystem import FileStat, LiveRoot
from vsrtune.host.libvirt import DomainText
from vsrtune.model.guest import Sched


class TreeRoot(LiveRoot):
    """Reads files as LiveRoot does, below ``base``. A thread's class comes from a file, which
    stands for the system call."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._scheds: dict[str, Sched] = {}

    def read(self, path: str) -> str:
        return super().read(self._base + path)

    def listdir(self, path: str, most: int | None = None) -> list[str]:
        return super().listdir(self._base + path, most)

    def stat(self, path: str, *, follow: bool = True) -> FileStat:
        if follow and os.path.islink(self._base + path):
            path = os.readlink(self._base + path)
        return super().stat(self._base + path, follow=False)

    def readlink(self, path: str) -> str:
        return super().readlink(self._base + path)

    def processes(self) -> list[tuple[str, int]]:
        with os.scandir(f"{self._base}/proc") as found:
            return [(e.name, e.inode()) for e in found if e.name.isdecimal()]

    def link_count(self, path: str) -> int:
        return super().link_count(self._base + path)

    def exists(self, path: str) -> bool:
        return super().exists(self._base + path)

    def sched_attr(self, tid: int) -> Sched:
        text = self.read(f"/sched_attr/{tid}.json")
        sched = self._scheds.get(text)
        if sched is None:
            sched = self._scheds[text] = decode(Sched, json.loads(text))
        return sched


class TreeVirt:
    """libvirt of a synthetic host. It answers from memory but for the XML, which is read
    again: what stands for a call to libvirt."""

    def __init__(self, host: Synthetic, root: TreeRoot) -> None:
        self._host = host
        self._root = root

    def domains(self) -> tuple[DomainText, ...]:
        return tuple(self._read(number) for number in range(len(self._host.domains)))

    def domain(self, name: str) -> DomainText | None:
        number = int(name.removeprefix("vr")) - 1
        return self._read(number) if 0 <= number < len(self._host.domains) else None

    def _read(self, number: int) -> DomainText:
        text = self._root.read(f"/libvirt/{number}.xml")
        return replace(self._host.domains[number], live_xml=text)
