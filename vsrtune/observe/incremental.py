"""What a look at the host has given, and what the next one needs of it."""

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
    """One QEMU as it was last seen. ``domain`` is the libvirt name of its domain, ``guest``
    None when it could not be read, ``threads`` how many links its task directory had,
    ``home`` the cgroup that is its own: libvirt's scope, or where its QEMU runs."""

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
    """What a look has given, and what the next one needs of it. ``before`` and ``after``
    are the problems of the readers ahead of the guests' and behind them; ``held`` is by
    pid, in pid order; ``places`` says where in the snapshot the guest of a pid stands,
    ``parents`` how many of them have their cgroup in which; ``devices`` are the lower
    devices; ``partitioned`` whether there are partitions or cgroups with exclusive CPUs.
    ``refreshed`` are the guests that were looked at, with those that are gone; None: all."""

    snapshot: Snapshot
    processes: Processes
    held: dict[int, CachedQemu]
    names: dict[str, int]
    before: tuple[Problem, ...]
    after: tuple[Problem, ...]
    places: dict[int, int]
    parents: Counter[str]
    devices: dict[str, Device]
    partitioned: bool
    refreshed: SnapshotSlice

    @property
    def napi(self) -> bool:
        """Whether guests have devices with NAPI threads, which they may share."""
        return bool(self.processes.napi)


def places(guests: tuple[Guest, ...]) -> dict[int, int]:
    """Where in the snapshot the guest of each pid stands."""
    return {g.pid: place for place, g in enumerate(guests)}


def relisted(
    known: ObservationCache,
    held: dict[int, CachedQemu],
    fresh: list[CachedQemu],
    vanished: list[CachedQemu],
) -> tuple[tuple[Guest, ...], dict[int, int], tuple[int, ...] | None]:
    """The guests in their order, where each stands, and where the new ones do. Where all are
    who they were, only these are put in the places of the old; else their places are None."""
    guests = list(known.snapshot.guests)
    same = not vanished and not known.napi
    for one in fresh:
        place = known.places.get(one.process.pid)
        new = one.guest
        if place is None or new is None or any(i.threaded for i in new.interfaces):
            same = False
            break
        old = guests[place]
        same = same and (old.source, old.name, old.pid) == (new.source, new.name, new.pid)
        same = same and known.held[new.pid].guest is old
        guests[place] = new
    if same:
        fresh_places = sorted(known.places[h.process.pid] for h in fresh)
        return tuple(guests), known.places, tuple(fresh_places)
    ordered = listed(held)
    return ordered, places(ordered), None


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
    """Leave the NAPI thread of a device that guests share to the first of them, or
    each of their policies would have it for its own."""
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
