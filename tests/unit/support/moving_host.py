"""A recorded host whose guests change, and its libvirt."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vsrtune.host.libvirt import DomainText
from vsrtune.host.recorded import Answers, RecordedRoot, Recording
from vsrtune.model.guest import Sched, SchedClass


class _Counting(RecordedRoot):
    def __init__(self, answers: Answers, read: list[str]) -> None:
        super().__init__(answers)
        self._seen = read

    def read(self, path: str) -> str:
        self._seen.append(path)
        return super().read(path)


class MovingHost:
    """Changes the recording in memory. ``root`` reads it as it is now, ``read`` lists the files
    that were read, ``done`` what was changed. It is its own libvirt."""

    def __init__(self, recording: Recording) -> None:
        self.answers = recording.host
        self.texts = self.answers.texts
        self.read: list[str] = []
        self.done: list[tuple[str, str]] = []
        self._domains = {d.name: d for d in recording.virt().domains()}
        self.running = sorted(self._domains)
        self._pids = {name: self._pid(d.uuid) for name, d in self._domains.items()}
        self._next = 90_000
        self._away: dict[str, dict[str, str]] = {}
        self.root = _Counting(self.answers, self.read)

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
        return name

    def _pin(self, name: str, rng: random.Random) -> None:
        path = f"{self._task(name, rng)}/status"
        cpus = rng.choice(["0", "1", "0-1", "0-2"])
        allowed = f"Cpus_allowed_list:\t{cpus}"
        self.texts[path] = re.sub(r"Cpus_allowed_list:.*", allowed, self.texts[path])

    def _sched(self, name: str, rng: random.Random) -> None:
        tid = _last(self._task(name, rng))
        cls = SchedClass(rng.choice(["fifo", "rr"]))
        self.answers.sched[tid] = Sched(cls, rng.randint(1, 9))

    def _queue(self, name: str, rng: random.Random) -> None:
        device = re.search(r'<target dev="([^"]+)"', self._domains[name].live_xml)
        assert device is not None
        path = f"/sys/devices/virtual/net/{device[1]}/tx_queue_len"
        self.texts[path] = f"{rng.randint(10, 500)}\n"

    def _cpuset(self, name: str, rng: random.Random) -> None:
        """As vcpupin does: libvirt's own list, and what it says of it."""
        task = self._task(name, rng)
        cgroup = self.texts[f"{task}/cgroup"].strip().removeprefix("0::")
        path = f"/sys/fs/cgroup{cgroup}/cpuset.cpus"
        if path in self.texts:
            self.texts[path] = f"{rng.choice(['0', '1', '0-1'])}\n"

    def _hotplug(self, name: str, rng: random.Random) -> None:
        pid, like = self._pids[name], self._task(name, rng)
        tid = str(self._fresh())
        task = f"/proc/{pid}/task/{tid}"
        self.texts |= _moved(self._below(like), like, task)
        self._renumber(f"{task}/stat", _last(like), tid)
        self.answers.sched[tid] = self.answers.sched[_last(like)]
        self._list(f"/proc/{pid}/task", add=tid)

    def _unplug(self, name: str, rng: random.Random) -> None:
        pid, task = self._pids[name], self._task(name, rng)
        if _last(task) != str(pid):
            self._take(task)
            self._list(f"/proc/{pid}/task", remove=_last(task))

    def _stop(self, name: str, rng: random.Random) -> None:
        pid = self._pids[name]
        self._list("/proc", remove=str(pid))
        self._away[name] = self._take(f"/proc/{pid}")
        self.running.remove(name)

    def _start(self, name: str, rng: random.Random) -> None:
        """The same guest in a new process, now and then of the pid it had."""
        old = self._pids[name]
        pid = old if rng.random() < 0.2 else self._fresh()
        was, base = f"/proc/{old}", f"/proc/{pid}"
        self.texts |= _moved(self._away.pop(name), was, base)
        for answers in self._others():
            moved = _moved(answers, f"{was}/", f"{base}/")
            answers.clear()
            answers.update(moved)
        if pid != old:
            self._new_leader(old, pid)
        self._renumber(f"{base}/stat", str(old), str(pid), start=self._fresh())
        self.texts[f"{base}/task/{pid}/stat"] = self.texts[f"{base}/stat"]
        for tid in self._tasks(pid):
            path = f"{base}/task/{tid}/stat"
            self.texts[path] = self.texts[path].replace(f"(vhost-{old})", f"(vhost-{pid})")
        self._list("/proc", add=str(pid))
        self._pids[name] = pid
        self.texts[f"/run/libvirt/qemu/{name}.pid"] = f"{pid}\n"
        self.running.append(name)
        self.running.sort()
        pins = tuple(reversed(self._domains[name].vcpu_pins))
        self._domains[name] = replace(self._domains[name], vcpu_pins=pins)

    def copy(self, name: str, pid: int, cgroup: str) -> None:
        """Someone starts a guest's command line by hand, in a cgroup of his own."""
        old = self._pids[name]
        was, base = f"/proc/{old}", f"/proc/{pid}"
        self.texts |= _moved(self._below(was), was, base)
        for answers in self._others():
            mine = {path: answer for path, answer in answers.items() if path.startswith(f"{was}/")}
            answers.update(_moved(mine, was, base))
        self._new_leader(old, pid)
        self._list("/proc", add=str(pid))
        self._renumber(f"{base}/stat", str(old), str(pid), start=self._fresh())
        self.texts[f"{base}/task/{pid}/stat"] = self.texts[f"{base}/stat"]
        for tid in self._tasks(pid):
            self.texts[f"{base}/task/{tid}/cgroup"] = f"0::/{cgroup}\n"

    # -- pieces

    def _others(self) -> tuple[dict[str, Any], ...]:
        """What is known by path besides texts."""
        answers = self.answers
        return answers.links, answers.listings, answers.errors, answers.present

    def _below(self, path: str) -> dict[str, str]:
        return {p: text for p, text in self.texts.items() if p.startswith(f"{path}/")}

    def _take(self, path: str) -> dict[str, str]:
        """The files below, which are gone then."""
        taken = self._below(path)
        for known in taken:
            del self.texts[known]
        return taken

    def _list(self, path: str, *, add: str | None = None, remove: str | None = None) -> None:
        names = tuple(name for name in self.answers.listings[path] if name != remove)
        self.answers.listings[path] = names if add is None else (*names, add)

    def _tasks(self, pid: int) -> list[str]:
        return sorted(self.answers.listings[f"/proc/{pid}/task"])

    def _new_leader(self, old: int, pid: int) -> None:
        """The main thread of a process has its new pid."""
        tasks = f"/proc/{pid}/task"
        self.texts |= _moved(self._take(f"{tasks}/{old}"), f"{tasks}/{old}", f"{tasks}/{pid}")
        self._list(tasks, remove=str(old), add=str(pid))
        self._renumber(f"{tasks}/{pid}/stat", str(old), str(pid))
        self.answers.sched[str(pid)] = self.answers.sched[str(old)]

    def _fresh(self) -> int:
        self._next += 1
        return self._next

    def _pid(self, uuid: str) -> int:
        found = [p for p, text in self.texts.items() if p.endswith("/cmdline") and uuid in text]
        return int(found[0].split("/")[2])

    def _task(self, name: str, rng: random.Random) -> str:
        pid = self._pids[name]
        return f"/proc/{pid}/task/{rng.choice(self._tasks(pid))}"

    def _renumber(self, path: str, old: str, new: str, start: int | None = None) -> None:
        head, _, tail = self.texts[path].rpartition(")")
        fields = tail.split()
        fields[19] = str(start if start is not None else int(fields[19]) + 1)
        self.texts[path] = f"{head.replace(old, new, 1)}) {' '.join(fields)}\n"


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _moved(answers: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Answers of paths that begin with ``old``, which is ``new`` now."""
    return {
        new + path.removeprefix(old) if path.startswith(old) else path: answer
        for path, answer in answers.items()
    }
