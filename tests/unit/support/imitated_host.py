"""A snapshot's host as an imitated kernel, on which plans are carried out for real.

``ImitatedHost`` gives FakeKernel the threads, cgroups, devices and interrupts of a snapshot. The
product's executor and writer carry plans out there, and ``observed`` reads the snapshot anew. So a
plan is judged by what the kernel does with it, not by the planner's own projection. The journal
is kept in memory, and each pass reads it from its records, as a new process would.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fake_kernel import FakeKernel
from planning_samples import BOOT

from vsrtune.core.codec import decode, encode
from vsrtune.core.cpuset import CpuSet
from vsrtune.execute import executor
from vsrtune.execute.executor import Result
from vsrtune.execute.host_writer import LiveSysOps
from vsrtune.execute.journal import Journal
from vsrtune.model.cpuset_tree import CpusetGroup
from vsrtune.model.guest import Guest, Interface, Irq, Role, Sched, Thread, WorkerKind
from vsrtune.model.host import Host, Nic, rps_cpus
from vsrtune.model.journal_records import Entry, Fold
from vsrtune.model.load import data_plane, measured, merged, moves
from vsrtune.model.plan import Plan
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import CgroupTarget
from vsrtune.plan.full_plan import full_plan
from vsrtune.policy.model import Policy

Visible = dict[str, Any]
# A thread of none of the guests.
STRANGER = 900


class Records:
    """The journal's log in memory; ``JsonlLog`` as far as Journal needs it."""

    path = Path("journal in memory")
    room = 1 << 30

    def __init__(self) -> None:
        self.lines: list[str] = []

    def append(self, record: Mapping[str, Any]) -> None:
        self.lines.append(json.dumps(record))

    def claim(self, length: int) -> None:
        """There is room."""

    def compact_if_grown(self, records: Any, room: int = 0) -> None:
        """It stays small."""

    def close(self) -> None:
        """Nobody else reads it."""


class ImitatedHost:
    """``scene`` is a snapshot of the host, of which only what no plan changes is used."""

    def __init__(self, scene: Snapshot) -> None:
        self.scene = scene
        self.kernel = FakeKernel(_state(scene))
        self.records = Records()

    def clone(self) -> ImitatedHost:
        other = copy.copy(self)
        other.kernel = self.kernel.clone()
        other.records = Records()
        other.records.lines = list(self.records.lines)
        return other

    @property
    def loose(self) -> bool:
        """Whether a whole slice of guests is one root domain."""
        slices = (g for path, g in self.kernel.state["cgroups"].items() if path.endswith(".slice"))
        return any(g.get("partition") == "root" for g in slices)

    # -- passes

    def journal(self) -> Journal:
        fold = Fold()
        for line in self.records.lines:
            fold.record(json.loads(line))
        journal = Journal(self.records, BOOT)  # type: ignore[arg-type]
        journal._fold = fold
        return journal

    def entries(self) -> tuple[Entry, ...]:
        return self.journal().entries()

    def plan(self, policies: tuple[Policy, ...]) -> Plan:
        plan = full_plan(self.observed(), policies, self.entries())
        assert [str(r) for r in plan.refusals if "internal error" in r.reason] == []
        return plan

    def apply(self, plan: Plan) -> Result:
        """Carry the plan out. All threads run afterwards, and loads are measured anew."""
        journal = self.journal()
        result = executor.apply(plan, self._ops(journal), journal)
        self._rest(plan)
        return result

    def undo(self) -> Result:
        journal = self.journal()
        return executor.undo(self._ops(journal), journal)

    def leave(self, ref: str) -> None:
        """The guest ends, and the journal drops what went with it."""
        gone = next(g for g in self.scene.guests if g.ref == ref)
        rest = tuple(g for g in self.scene.guests if g is not gone)
        self.scene = replace(self.scene, guests=rest)
        state = self.kernel.state
        for thread in gone.threads:
            del state["threads"][str(thread.key.tid)]
        shared = {i.target for g in rest for i in g.interfaces}
        for interface in gone.interfaces:
            if interface.target not in shared:
                del state["devices"][interface.target]
        domain = state["domains"].pop(gone.uuid, None)
        if domain is not None:
            scope = domain["path"].rpartition("/")[0]
            for path in [p for p in state["cgroups"] if f"{p}/".startswith(f"{scope}/")]:
                del state["cgroups"][path]
        journal = self.journal()
        for target in [e.target for e in self.entries() if e.target.guest == ref]:
            if not isinstance(target, CgroupTarget) or target.path not in state["cgroups"]:
                journal.drop(target, "its guest has ended")

    def _ops(self, journal: Journal) -> LiveSysOps:
        ops = LiveSysOps(root=self.kernel, calls=self.kernel, original=journal.original)
        ops._sleep = lambda _seconds: None
        return ops

    def _rest(self, plan: Plan) -> None:
        for thread in self.kernel.state["threads"].values():
            cpus = CpuSet.parse(thread["mask"])
            if thread["cpu"] not in cpus:
                thread["cpu"] = cpus.first()
        if moves(plan.actions):
            loads = {t.key: merged(t.load) for t in data_plane(self.scene)}
            self.scene = measured(self.scene, loads)

    def visible(self) -> Visible:
        """All that an operator can see, without the CPUs that threads and interrupts last used."""
        seen = self.kernel.visible()
        for thread in seen["threads"].values():
            del thread["cpu"]
        for irq in seen["irqs"].values():
            del irq["effective"]
        for group in seen["cgroups"].values():
            if group["cpus"] is not None:
                group.update({"partition": "member", "exclusive": ""} | group)
        # Bandwidth of threads that left class deadline asleep; gone with their root domain.
        seen.pop("leaked", None)
        return seen

    # -- observing

    def observed(self) -> Snapshot:
        """The snapshot of the host as it is now."""
        host = self._host()
        return replace(self.scene, host=host, guests=tuple(map(self._guest, self.scene.guests)))

    def _guest(self, guest: Guest) -> Guest:
        threads = tuple(self._thread(guest, t) for t in guest.threads)
        return replace(
            guest,
            threads=threads,
            interfaces=tuple(map(self._device, guest.interfaces)),
            passed=tuple(replace(d, irqs=tuple(map(self._irq, d.irqs))) for d in guest.passed),
        )

    def _irq(self, irq: Irq) -> Irq:
        row = self.kernel.state["irqs"][str(irq.number)]
        return replace(
            irq,
            affinity=CpuSet.parse(row["mask"]),
            effective=CpuSet.parse(row["effective"]),
        )

    def _thread(self, guest: Guest, thread: Thread) -> Thread:
        row = self.kernel.state["threads"][str(thread.key.tid)]
        path = row["cgroup"]
        domain = self.kernel.state["domains"].get(guest.uuid)
        pin = thread.pin
        if pin is not None and domain is not None:
            name = f"vcpu{thread.index}" if thread.role is Role.VCPU else "emulator"
            pin = CpuSet.parse(domain["pins"].get(name, str(pin)))
        controlled = bool(self.scene.host.cpusets)
        return replace(
            thread,
            sched=decode(Sched, row["sched"]),
            affinity=CpuSet.parse(row["mask"]),
            last_cpu=row["cpu"],
            cgroup=path,
            cpuset_cpus=self.kernel.state["cgroups"].get(path, {}).get("cpus"),
            cpuset_effective=self.kernel.effective(path) if controlled else None,
            cpuset_limit=(
                self.kernel.effective(path.rpartition("/")[0]) if controlled and path else None
            ),
            pin=pin,
        )

    def _device(self, interface: Interface) -> Interface:
        row = self.kernel.state["devices"][interface.target]
        return replace(interface, txqueuelen=row["tx_queue_len"], threaded=row.get("threaded"))

    def _host(self) -> Host:
        host, state = self.scene.host, self.kernel.state
        softirq = tuple(
            replace(t, sched=decode(Sched, state["threads"][str(t.key.tid)]["sched"]))
            for t in host.softirq
        )
        return replace(
            host,
            nics=tuple(map(self._nic, host.nics)),
            softirq=softirq,
            rr_timeslice_ms=state["rr_timeslice"],
            sched_rt_runtime_us=state["rt_runtime"],
            cpusets=self._cpusets() if host.cpusets else (),
        )

    def _nic(self, nic: Nic) -> Nic:
        threads = self.kernel.state["threads"]
        files = self.kernel.state["devices"][nic.name]["queues"]
        queues = tuple(
            q if q.cpus is None else replace(q, cpus=CpuSet.parse(files[q.name]))
            for q in nic.queues
        )
        return replace(
            nic,
            irqs=tuple(map(self._irq, nic.irqs)),
            queues=queues,
            rps_cpus=rps_cpus(queues),
            napi=tuple(
                replace(t, affinity=CpuSet.parse(threads[str(t.key.tid)]["mask"])) for t in nic.napi
            ),
        )

    def _cpusets(self) -> tuple[CpusetGroup, ...]:
        state = self.kernel.state
        homes = [t["cgroup"] + "/" for t in state["threads"].values()]
        old = state["kernel"] == "6.1"
        return tuple(
            CpusetGroup(
                path,
                group["cpus"],
                self.kernel.effective(path),
                group.get("partition", "member"),
                None if old else group.get("exclusive", ""),
                any(home.startswith(f"{path}/") for home in homes),
            )
            for path, group in sorted(state["cgroups"].items())
        )


def _state(scene: Snapshot) -> dict[str, Any]:
    host = scene.host
    online = host.online
    possible = str(CpuSet(c.id for c in host.cpus))
    rows: dict[str, dict[str, Any]] = {}

    def add(guest: int, tid: int, comm: str, cgroup: str, cpus: CpuSet, **more: Any) -> None:
        # Who may run everywhere has no mask of its own.
        user = possible if online <= cpus else str(cpus)
        rows[str(tid)] = {
            "guest": guest, "pid": tid, "start": 1, "comm": comm, "cgroup": cgroup,
            "mask": str(cpus & online), "user": user, "cpu": (cpus & online).first(),
            "sched": encode(Sched()), **more,
        }  # fmt: skip

    domains = {}
    for guest in scene.guests:
        for t in guest.threads:
            kthread = t.worker is WorkerKind.KTHREAD or t.role is Role.NAPI
            add(
                guest.pid, t.key.tid, t.name, t.cgroup, t.affinity, pid=t.key.pid,
                start=t.key.start_time, sched=encode(t.sched), kthread=kthread,
            )  # fmt: skip
        if guest.source == "libvirt":
            names = {f"vcpu{t.index}": t.key.tid for t in guest.by_role(Role.VCPU)}
            home = guest.by_role(Role.EMULATOR)[0].cgroup.rpartition("/")[0]
            threads = {"emulator": guest.pid, **names}
            domains[guest.uuid] = {"path": home, "threads": threads, "pins": {}}
    add(0, STRANGER, "sshd", "system.slice", online)
    for s in host.softirq:
        cpus = CpuSet([s.cpu])
        add(0, s.key.tid, f"ksoftirqd/{s.cpu}", "", cpus, start=s.key.start_time,
            sched=encode(s.sched), kthread=True, per_cpu=True)  # fmt: skip
    for nic in host.nics:
        for n in nic.napi:
            add(0, n.key.tid, n.name, "", n.affinity, start=n.key.start_time, kthread=True)
    return {
        "kernel": "6.1" if host.kernel.startswith("6.1.") else "6.12",
        "possible": possible,
        "online": str(online),
        "isolated": str(host.isolated),
        "rt_runtime": host.sched_rt_runtime_us,
        "rr_timeslice": host.rr_timeslice_ms or 100,
        "threads": rows,
        "cgroups": _cgroups(scene, {str(row["cgroup"]) for row in rows.values()}),
        "domains": domains,
        "irqs": {
            str(i.number): {
                "actions": i.name, "mask": str(i.affinity), "effective": str(i.effective)
            }
            for i in (
                *(i for nic in host.nics for i in nic.irqs),
                *(i for g in scene.guests for device in g.passed for i in device.irqs),
            )
        },
        "devices": _devices(scene),
    }  # fmt: skip


def _cgroups(scene: Snapshot, used: set[str]) -> dict[str, dict[str, Any]]:
    known = {g.path: g for g in scene.host.cpusets}
    paths = set(known)
    for path in used:
        while path:
            paths.add(path)
            path = path.rpartition("/")[0]
    found = {}
    for path in sorted(paths):
        above = path.rpartition("/")[0]
        kind = "threaded" if above.endswith("/libvirt") else "domain"
        kind = "domain threaded" if path.endswith("/libvirt") else kind
        found[path] = {"cpus": None, "type": kind}
        if path in known:
            found[path] |= {"cpus": known[path].cpus, "partition": "member", "exclusive": ""}
    return found


def _devices(scene: Snapshot) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for guest in scene.guests:
        for i in guest.interfaces:
            row = {"guest": guest.pid, "ifindex": i.ifindex, "tx_queue_len": i.txqueuelen}
            found[i.target] = row if i.threaded is None else {**row, "threaded": i.threaded}
    for nic in scene.host.nics:
        queues = {q.name: str(q.cpus) for q in nic.queues if q.cpus is not None}
        row = {"guest": 0, "ifindex": nic.ifindex, "tx_queue_len": nic.txqueuelen}
        found[nic.name] = {**row, "queues": queues}
    return found
