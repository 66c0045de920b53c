"""The hosts from which cases of tests/plans start: ``base:`` names one, ``with:`` gives its
arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import recorded_hosts
from planning_samples import (
    host,
    macvtap,
    napi_macvtap,
    nic,
    own_processes,
    router,
    snapshot,
    with_cpusets,
    with_napi,
)

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import Irq, Sched, WorkerKind
from vsrtune.model.host import Host, Nic, NicQueue
from vsrtune.model.snapshot import Snapshot


def routers(
    names: Iterable[str] = ("vr1", "vr2"),
    pids: Iterable[int] = (1000, 2000),
    *,
    cpus: int = 4,
    vcpus: int = 1,
    taps: int = 2,
    queues: int = 1,
    source: str = "libvirt",
    napi: int | None = None,
    nics: str = "e1000e",
    stacked: bool = False,
    softirq: bool = False,
    cpusets: str = "",
) -> Snapshot:
    """Untuned routers on CPUs 0..cpus-1, each with ``taps`` macvtap devices, in turn on p0 and p1.

    ``napi`` takes devices of our kernel module instead; 1 gives them NAPI threads. ``nics`` is
    the driver of p0 and p1: an e1000e has one interrupt on CPU 0, an ixgbe two queues.
    ``stacked`` adds the VLAN v5 on the bond bond0 above them. ``softirq`` adds a ksoftirqd for
    each CPU. ``cpusets`` is the kernel release whose cpusets the host has, 6.1 or 6.12; in 6.1
    the vhost workers are kernel threads.
    """
    online = f"0-{cpus - 1}"
    kthreads = cpusets == "6.1"
    guests = []
    for name, pid in zip(names, pids, strict=False):
        number = pid // 100
        device = macvtap if napi is None else napi_macvtap
        more = {} if napi is None else {"threaded": napi}
        interfaces = [device(number + n, f"p{n % 2}", queues=queues, **more) for n in range(taps)]
        made = router(
            name, pid, online=online, vcpus=vcpus, interfaces=interfaces, source=source,
            kind=WorkerKind.KTHREAD if kthreads else WorkerKind.TASK,
        )  # fmt: skip
        guests.append(with_napi(own_processes(made) if kthreads else made))
    machine = host(
        cpus,
        _ixgbe() if nics == "ixgbe" else None,
        softirq=dict.fromkeys(range(cpus), Sched()) if softirq else None,
    )
    if stacked:
        machine = replace(
            machine, nics=(_above("v5", 8, "vlan"), _above("bond0", 7, "bond"), *machine.nics)
        )
    found = snapshot(*guests, on=machine)
    return with_cpusets(found, exclusive=not kthreads) if cpusets else found


def _ixgbe() -> list[Nic]:
    served = {"p0": {40: "1", 41: "2"}, "p1": {42: "3", 43: "1"}}
    every = CpuSet(range(4))
    queues = tuple(NicQueue(name, CpuSet()) for name in ("rx-0", "rx-1", "tx-0", "tx-1"))
    return [
        nic(
            name, None, ifindex=ifindex, driver="ixgbe", node=0, queues=queues,
            irqs=tuple(
                Irq(number, f"{name}-TxRx-{queue}", every, CpuSet.parse(where))
                for queue, (number, where) in enumerate(irqs.items())
            ),
        )
        for ifindex, (name, irqs) in enumerate(served.items(), 2)
    ]  # fmt: skip


def _above(name: str, ifindex: int, driver: str) -> Nic:
    queues = (NicQueue("rx-0", CpuSet()), NicQueue("tx-0", None))
    return nic(name, None, ifindex=ifindex, driver=driver, queues=queues)


def fleet(
    count: int, *, cpus: int = 4, taps: int = 2, first: int = 0, cpusets: str = ""
) -> Snapshot:
    """Routers vr01, vr02 and so on, on a host whose CPUs share a cache. ``first`` is the number
    of the first macvtap device."""
    guests = [
        router(
            f"vr{n + 1:02}",
            1000 + 100 * n,
            online=f"0-{cpus - 1}",
            interfaces=[macvtap(first + taps * n + tap, f"p{tap}") for tap in range(taps)],
        )
        for n in range(count)
    ]
    found = snapshot(*guests, on=_one_cache(host(cpus)))
    return with_cpusets(found) if cpusets else found


def _one_cache(machine: Host) -> Host:
    together = CpuSet(c.id for c in machine.cpus)
    return replace(
        machine,
        cpus=tuple(replace(c, cache=together) for c in machine.cpus),
        nics=tuple(replace(n, node=0) for n in machine.nics),
    )


def _recorded(file: Path) -> Callable[[], Snapshot]:
    return lambda: recorded_hosts.shown(file)


BASES: dict[str, Callable[..., Snapshot]] = {
    "router": lambda **how: routers(["vr1"], **how),
    "routers": routers,
    "fleet": fleet,
    **{file.stem: _recorded(file) for file in recorded_hosts.FILES},
}
