"""The results of a pass over the host that the next pass needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from vsrtune.host.netdev import Device
from vsrtune.model.guest import Guest, Role, ThreadKey
from vsrtune.model.snapshot import Problem, Snapshot, SnapshotSlice
from vsrtune.observe.qemu_processes import Processes, QemuProcess


@dataclass(frozen=True, slots=True)
class CachedQemu:
    """One QEMU as the last pass read it. ``domain`` is the libvirt name of its domain, ``guest``
    is None when it could not be read, ``threads`` is the number of links of its task directory,
    ``home`` is its own cgroup: libvirt's scope, or the cgroup in which QEMU runs."""

    process: QemuProcess
    domain: str | None
    guest: Guest | None
    problems: tuple[Problem, ...]
    threads: int
    home: str

    @property
    def parent(self) -> str:
        """The cgroup that ``home`` is in."""
        return self.home.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class ObservationCache:
    """The results of a pass that the next one needs. ``before`` and ``after`` are the problems of
    the readers that run before and after those of guests; ``held`` is by pid, in pid order;
    ``names`` gives the pid of a libvirt domain; ``parents`` counts the QEMUs by the cgroup above
    their own; ``devices`` are the lower devices; ``partitioned`` says whether there are partitions
    or cgroups with exclusive CPUs. ``refreshed`` is the slice of the guests that the pass read,
    with the names of those that are gone."""

    snapshot: Snapshot
    processes: Processes
    held: dict[int, CachedQemu]
    names: dict[str, int]
    before: tuple[Problem, ...]
    after: tuple[Problem, ...]
    parents: Counter[str]
    devices: dict[str, Device]
    partitioned: bool
    refreshed: SnapshotSlice


def listed(held: dict[int, CachedQemu]) -> tuple[Guest, ...]:
    """The guests in the order of a snapshot."""
    found = [h.guest for h in held.values() if h.guest is not None]
    return _one_owner(sorted(_unique(found), key=lambda g: (g.source, g.name, g.pid)))


def _unique(found: list[Guest]) -> list[Guest]:
    """Mark guests that a policy cannot tell apart."""
    count = Counter(g.ref for g in found)
    if len(count) == len(found):
        return found
    return [
        replace(g, problems=(*g.problems, f"{count[g.ref]} guests are named {g.ref}"))
        if count[g.ref] > 1
        else g
        for g in found
    ]


def _one_owner(guests: Iterable[Guest]) -> tuple[Guest, ...]:
    """Leave the NAPI thread of a device that guests share to the first of them; otherwise each of
    their policies would claim it."""
    owner: dict[ThreadKey, str] = {}
    found = []
    for guest in guests:
        if not any(i.threaded for i in guest.interfaces):
            found.append(guest)
            continue
        shared = [
            t for t in guest.by_role(Role.NAPI) if owner.setdefault(t.key, guest.ref) != guest.ref
        ]
        told = (
            f"{t.interface} is shared, its NAPI thread is shown with {owner[t.key]}" for t in shared
        )
        found.append(
            replace(
                guest,
                threads=tuple(t for t in guest.threads if t not in shared),
                problems=(*guest.problems, *told),
            )
            if shared
            else guest
        )
    return tuple(found)
