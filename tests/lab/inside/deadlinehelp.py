"""What the tests of class deadline share: the kernel's books, cgroups, and a planner in
this process, which is quicker than the command."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import hoststate
import labhelp
from labhelp import LabGuest

from vsrtune.execute import executor
from vsrtune.execute.executor import Result
from vsrtune.execute.host_writer import LiveSysOps
from vsrtune.execute.journal import Journal
from vsrtune.model.host import release_of
from vsrtune.model.plan import Plan
from vsrtune.model.snapshot import Snapshot
from vsrtune.observe.observer import live_observer
from vsrtune.plan.full_plan import full_plan
from vsrtune.policy.parser import parse

CGROUP = Path("/sys/fs/cgroup")
DEBUG = Path("/sys/kernel/debug/sched")
BUDGET = "{class: deadline, runtime: 2ms, period: 10ms}"
# A thread is born asleep or sleeps between frames; so it is woken before it is judged.
QUIET = 0.3


def policy(
    guest: LabGuest, vcpu: str, vhost: str, vcpu_cpus: str = "1", vhost_cpus: str = "2"
) -> str:
    """A policy with CPUs and scheduling for vcpu and vhost."""
    return (
        f'guest: "{guest.ref}"\nprofile: none\n'
        f"cpus: {{irq: 0, vcpu: {vcpu_cpus}, vhost: {vhost_cpus}}}\n"
        f"scheduler:\n  vcpu: {vcpu}\n  vhost: {vhost}\n"
    )


def exclusive() -> bool:
    """Whether the kernel can make remote partitions (6.7)."""
    return (CGROUP / "machine.slice" / "cpuset.cpus.exclusive").exists()


def forgetful() -> bool:
    """Whether partitions cost threads their masks (before 6.2)."""
    return release_of(platform.release()) < (6, 2)


def books() -> dict[int, int]:
    """CPU to what the kernel has booked in its root domain, its own share taken off."""
    text = (DEBUG / "debug").read_text()
    found = {}
    for part in re.split(r"^dl_rq\[", text, flags=re.MULTILINE)[1:]:
        total = re.search(r"\.dl_bw->total_bw\s*:\s*(-?\d+)", part)
        assert total is not None
        found[int(part.partition("]")[0])] = int(total[1])
    return found


def fair_server() -> int:
    """What the kernel books of each CPU for ordinary threads."""
    base = DEBUG / "fair_server" / "cpu0"
    if not base.exists():
        return 0
    runtime, period = (int((base / name).read_text()) for name in ("runtime", "period"))
    return (runtime << 20) // period


def booked(cpu: int) -> int:
    """What DEADLINE threads have booked in the root domain of a CPU. The kernel's own
    share stands in its books for each CPU of the domain, or (6.12) for only some."""
    total, own = books()[cpu], fair_server()
    for known in range(labhelp.lab_cpus(), 0, -1):
        if own and total == known * own:
            return 0
    return total


def nothing_booked() -> bool:
    """Whether no root domain has more booked than the kernel's own share."""
    return all(booked(cpu) == 0 for cpu in books())


def cpusets() -> dict[str, str]:
    """Every cpuset file of every cgroup that guests have to do with. A list of all CPUs
    counts as none: with threads below, the kernel takes none away again."""
    everything = f"0-{labhelp.lab_cpus() - 1}"
    found = {"top": " ".join(sorted(p.name for p in CGROUP.iterdir() if p.is_dir()))}
    for directory, _, files in os.walk(CGROUP / "machine.slice"):
        for name in files:
            if name.startswith("cpuset.cpus"):
                text = (Path(directory) / name).read_text().strip()
                if name == "cpuset.cpus" and text == everything:
                    text = ""
                found[f"{directory}/{name}"] = text
    return found


def wake(guest: LabGuest) -> None:
    """Make the guest's workers and vcpus run."""
    for nic in (0, 1):
        labhelp.send_frames(nic, guest.macs[nic], 20)
    # Each queue gets some of so many flows.
    traffic = ("--rate", "500", "--seconds", "1", "--flows", "64")
    labhelp.sh("lab-traffic", "--guest", guest.name, *traffic)


def forwards(guest: LabGuest) -> None:
    """Fails unless the router forwards light traffic. Emulated routers are slow: with part
    of a CPU one may need more than a second for what came first."""
    command = ("lab-traffic", "--guest", guest.name, "--rate", "500", "--seconds", "1")

    def some() -> bool:
        return int(json.loads(labhelp.sh(*command).stdout)["forwarded"]) > 100

    labhelp.wait_for(some, f"{guest.name} forwards", 15)


class Engine:
    """Plans, applies and undoes in this process, with the journal of the command."""

    def __init__(self) -> None:
        self.observer = live_observer()

    def observe(self) -> Snapshot:
        return self.observer.observe()

    def ops(self, journal: Journal) -> LiveSysOps:
        """New each time, as in a process of its own."""
        return LiveSysOps(budgets_end=journal.budgets_end)

    @contextmanager
    def journal(self) -> Iterator[Journal]:
        with Journal.open(labhelp.JOURNAL, labhelp.text("/proc/sys/kernel/random/boot_id")) as one:
            yield one

    def plan(self, text: str | Sequence[str], journal: Journal) -> Plan:
        texts = [text] if isinstance(text, str) else text
        policies = [parse(one, f"policy{n}.yaml") for n, one in enumerate(texts)]
        return full_plan(self.observe(), policies, journal.entries(), reassert=True)

    def apply(self, text: str | Sequence[str]) -> tuple[Plan, Result]:
        with self.journal() as journal:
            plan = self.plan(text, journal)
            return plan, executor.apply(plan, self.ops(journal), journal)

    def undo(self) -> Result:
        with self.journal() as journal:
            result = executor.undo(self.ops(journal), journal)
            assert journal.entries() == () or result.failed
            return result

    def tune(self, guest: LabGuest, text: str) -> None:
        """Apply until nothing is pending, waking the threads."""
        self.tune_all([guest], [text])

    def tune_all(self, guests: Sequence[LabGuest], texts: Sequence[str]) -> None:
        """``tune`` for several guests together."""
        end = time.monotonic() + 20
        while True:
            plan, result = self.apply(texts)
            assert plan.refusals == ()
            assert result.failed == (), [f"{a.target}: {e}" for a, e in result.failed]
            if not result.pending and not any(s.pending for s in plan.skipped):
                return
            assert time.monotonic() < end, f"still pending: {result.pending}"
            for guest in guests:
                wake(guest)


def problems(guest: LabGuest, wanted: Mapping[str, tuple[set[int], str]]) -> list[str]:
    """What is not as wanted: role -> (CPUs, the start of hoststate.sched)."""
    lines = []
    roles = {"vcpu": list(guest.vcpus().values()), "vhost": guest.workers()}
    for role, (cpus, sched) in wanted.items():
        for tid in roles[role]:
            mask, has = labhelp.mask(tid), hoststate.sched(tid)
            if mask != cpus:
                lines.append(f"{role} {tid}: CPUs {mask}, not {cpus}")
            if not has.startswith("policy=6 flags=1 ") or not has.endswith(sched):
                lines.append(f"{role} {tid}: {has}")
    return lines


def budget(runtime_ms: float, period_ms: float, deadline_ms: float | None = None) -> str:
    """The end of hoststate.sched for these times."""
    runtime, period = round(runtime_ms * 10**6), round(period_ms * 10**6)
    due = period if deadline_ms is None else round(deadline_ms * 10**6)
    return f"runtime={runtime} deadline={due} period={period}"
