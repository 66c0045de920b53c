"""A recorded host whose guests change, and its libvirt."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

from vsrtune.rootfs import INDEX, DirRoot
from vsrtune.virt import DomainText, RecordedVirt


class _Counting(DirRoot):
    def __init__(self, path: Path, read: list[str]) -> None:
        super().__init__(path)
        self._seen = read

    def load(self) -> None:
        """Take the tree as it is now."""
        super().__init__(self.path)

    def read(self, path: str) -> str:
        self._seen.append(path)
        return super().read(path)


class MovingHost:
    """Changes the tree at ``path`` in place. ``root`` reads it as it is now, ``read`` lists
    the files that were read, ``done`` what was changed. It is its own libvirt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read: list[str] = []
        self.done: list[tuple[str, str]] = []
        self.index = json.loads((path / INDEX).read_text())
        for name in ("links", "listings", "errors", "present"):
            self.index.setdefault(name, {})
        recorded = RecordedVirt(DirRoot(path)).domains()
        self._domains = {d.name: d for d in recorded}
        self.running = sorted(self._domains)
        self._pids = {name: self._pid(d.uuid) for name, d in self._domains.items()}
        self._next = 90_000
        self._away: dict[str, tuple[int, DomainText]] = {}
        self.root = _Counting(path, self.read)
        self._save()

    # -- libvirt

    def domains(self) -> tuple[DomainText, ...]:
        return tuple(self._domains[name] for name in self.running)

    def domain(self, name: str) -> DomainText | None:
        return self._domains[name] if name in self.running else None

    # -- changes

    def change(self, rng: random.Random) -> str:
        """Change something of one guest; its name."""
        name = rng.choice(sorted(self._domains))
        if name not in self.running:
            kinds = ["start"]
        else:
            kinds = ["pin", "sched", "queue", "hotplug", "unplug", "cpuset", "stop"]
        kind = rng.choice(kinds)
        getattr(self, f"_{kind}")(name, rng)
        self.done.append((kind, name))
        self._save()
        return name

    def _pin(self, name: str, rng: random.Random) -> None:
        file = self._task(name, rng) / "status"
        cpus = rng.choice(["0", "1", "0-1", "0-2"])
        text = re.sub(r"Cpus_allowed_list:.*", f"Cpus_allowed_list:\t{cpus}", file.read_text())
        file.write_text(text)

    def _sched(self, name: str, rng: random.Random) -> None:
        tid = self._task(name, rng).name
        sched = {"cls": rng.choice(["fifo", "rr"]), "priority": rng.randint(1, 9)}
        (self.path / f"sched_attr/{tid}.json").write_text(json.dumps(sched))

    def _queue(self, name: str, rng: random.Random) -> None:
        device = re.search(r'<target dev="([^"]+)"', self._domains[name].live_xml)
        assert device is not None
        file = self.path / f"sys/devices/virtual/net/{device[1]}/tx_queue_len"
        file.write_text(f"{rng.randint(10, 500)}\n")

    def _cpuset(self, name: str, rng: random.Random) -> None:
        """As vcpupin does: libvirt's own list, and what it says of it."""
        task = self._task(name, rng)
        cgroup = (task / "cgroup").read_text().strip().removeprefix("0::")
        file = self.path / f"sys/fs/cgroup{cgroup}/cpuset.cpus"
        if file.exists():
            file.write_text(f"{rng.choice(['0', '1', '0-1'])}\n")

    def _hotplug(self, name: str, rng: random.Random) -> None:
        pid, like = self._pids[name], self._task(name, rng)
        tid = self._fresh()
        shutil.copytree(like, like.parent / str(tid))
        self._renumber(like.parent / str(tid) / "stat", int(like.name), tid)
        attr = self.path / "sched_attr"
        shutil.copy(attr / f"{like.name}.json", attr / f"{tid}.json")
        self.index["listings"][f"/proc/{pid}/task"].append(str(tid))

    def _unplug(self, name: str, rng: random.Random) -> None:
        pid, task = self._pids[name], self._task(name, rng)
        if task.name != str(pid):
            shutil.rmtree(task)
            self.index["listings"][f"/proc/{pid}/task"].remove(task.name)

    def _stop(self, name: str, rng: random.Random) -> None:
        pid = self._pids[name]
        self.index["listings"]["/proc"].remove(str(pid))
        os.rename(self.path / f"proc/{pid}", self.path / f"away-{name}")
        self.running.remove(name)

    def _start(self, name: str, rng: random.Random) -> None:
        """The same guest in a new process, now and then of the pid it had."""
        old = self._pids[name]
        pid = old if rng.random() < 0.2 else self._fresh()
        os.rename(self.path / f"away-{name}", self.path / f"proc/{pid}")
        base = self.path / f"proc/{pid}"
        for kind in ("links", "listings", "errors", "present"):
            moved = {
                re.sub(rf"^/proc/{old}/", f"/proc/{pid}/", k): v
                for k, v in self.index[kind].items()
            }
            self.index[kind] = moved
        if pid != old:
            os.rename(base / f"task/{old}", base / f"task/{pid}")
            tasks = self.index["listings"][f"/proc/{pid}/task"]
            tasks[tasks.index(str(old))] = str(pid)
            self._renumber(base / f"task/{pid}/stat", old, pid)
            attr = self.path / "sched_attr"
            shutil.copy(attr / f"{old}.json", attr / f"{pid}.json")
        self._renumber(base / "stat", old, pid, start=self._fresh())
        shutil.copy(base / "stat", base / f"task/{pid}/stat")
        for task in (base / "task").iterdir():
            text = (task / "stat").read_text().replace(f"(vhost-{old})", f"(vhost-{pid})")
            (task / "stat").write_text(text)
        self.index["listings"]["/proc"].append(str(pid))
        self._pids[name] = pid
        self.running.append(name)
        self.running.sort()
        pins = tuple(reversed(self._domains[name].vcpu_pins))
        self._domains[name] = replace(self._domains[name], vcpu_pins=pins)

    def copy(self, name: str, pid: int, cgroup: str) -> None:
        """Someone starts a guest's command line by hand, in a cgroup of his own."""
        old = self._pids[name]
        base = self.path / f"proc/{pid}"
        shutil.copytree(self.path / f"proc/{old}", base)
        os.rename(base / f"task/{old}", base / f"task/{pid}")
        for kind in ("links", "listings", "errors", "present"):
            copied = {
                re.sub(rf"^/proc/{old}/", f"/proc/{pid}/", k): v
                for k, v in self.index[kind].items()
                if k.startswith(f"/proc/{old}/")
            }
            self.index[kind] |= copied
        tasks = [str(pid) if t == str(old) else t for t in self._tasks(old)]
        self.index["listings"][f"/proc/{pid}/task"] = tasks
        self.index["listings"]["/proc"].append(str(pid))
        self._renumber(base / "stat", old, pid, start=self._fresh())
        shutil.copy(base / "stat", base / f"task/{pid}/stat")
        for task in (base / "task").iterdir():
            (task / "cgroup").write_text(f"0::/{cgroup}\n")
        attr = self.path / "sched_attr"
        shutil.copy(attr / f"{old}.json", attr / f"{pid}.json")
        self._save()

    # -- pieces

    def _tasks(self, pid: int) -> list[str]:
        tasks: list[str] = self.index["listings"][f"/proc/{pid}/task"]
        return tasks

    def _fresh(self) -> int:
        self._next += 1
        return self._next

    def _save(self) -> None:
        (self.path / INDEX).write_text(json.dumps(self.index))
        self.root.load()

    def _pid(self, uuid: str) -> int:
        found = [p for p in self.path.glob("proc/*/cmdline") if uuid in p.read_text()]
        return int(found[0].parent.name)

    def _task(self, name: str, rng: random.Random) -> Path:
        tasks = (self.path / f"proc/{self._pids[name]}/task").iterdir()
        return rng.choice(sorted(tasks))

    def _renumber(self, file: Path, old: int, new: int, start: int | None = None) -> None:
        head, _, tail = file.read_text().rpartition(")")
        fields = tail.split()
        fields[19] = str(start if start is not None else int(fields[19]) + 1)
        file.write_text(f"{head.replace(str(old), str(new), 1)}) {' '.join(fields)}\n")
