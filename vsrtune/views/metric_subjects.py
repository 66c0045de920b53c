# SPDX-License-Identifier: GPL-2.0-or-later
"""What the daemon's metrics are about: threads, interfaces, tap queues, guests, root domains.

A subject names the labels that identify one of its kind and lists those of a scrape. No two of a
subject have the same labels: Prometheus rejects a scrape with two samples of one series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from vsrtune.model.daemon_state import DaemonState, GroupGuest, GuestState
from vsrtune.model.guest import Guest, Interface, Role, Thread
from vsrtune.model.host import Host
from vsrtune.model.module_counters import QueueCounters, TapCounters
from vsrtune.model.root_domains import DomainBooks, books

T = TypeVar("T")
Labels = tuple[str, ...]


class Scrape:
    """The facts that one scrape reports: the latest ``state`` of the daemon, and ``refused``, the
    number of connections that were closed unanswered."""

    def __init__(self, state: DaemonState, refused: int) -> None:
        self.state = state
        self.refused = refused
        self.guests = state.snapshot.guests if state.snapshot is not None else ()

    @cached_property
    def sharing(self) -> Sharing:
        """Which guest reports a device that several are plugged into."""
        return Sharing(self.guests)


@dataclass(frozen=True)
class MetricSubject(Generic[T]):
    """A kind of thing that metrics describe. ``labels`` are the names of the labels that identify
    one, ``listed`` gives the values of these labels and the thing."""

    labels: Labels
    listed: Callable[[Scrape], Iterable[tuple[Labels, T]]]

    def rows(self, scrape: Scrape) -> list[tuple[dict[str, str], T]]:
        """Those of a scrape, with their labels. Of two with the same labels only the first is
        kept: a plain QEMU chooses the names of its guest and threads."""
        found: dict[Labels, T] = {}
        for values, one in self.listed(scrape):
            found.setdefault(tuple(map(utf8, values)), one)
        return [(labelled(self.labels, values), one) for values, one in found.items()]


def labelled(names: Labels, values: Labels) -> dict[str, str]:
    """The labels of a sample. An empty one is left out: to Prometheus it is none, and most labels
    of a thread are empty."""
    return {name: utf8(text) for name, text in zip(names, values, strict=True) if text}


def utf8(text: str) -> str:
    """Escape bytes that are not UTF-8 (os.fsdecode), because label values must be UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


# -- threads


@dataclass(frozen=True, slots=True)
class GuestThread:
    """A thread on its ``host``. ``used`` is the share of its DEADLINE budget that it used between
    two samples, None when it was not measured. ``waited`` is the time that it has stood in run
    queues, in seconds, None when it was not measured."""

    thread: Thread
    host: Host
    used: float | None
    waited: float | None


def _lasting(thread: Thread) -> bool:
    """Whether labels other than the tid identify the thread in its guest. They do not for other
    threads of QEMU (role worker), for a vhost worker whose interface is unknown, and for an
    iothread without a number."""
    match thread.role:
        case Role.VCPU | Role.IOTHREAD:
            return thread.index is not None
        case Role.VHOST | Role.NAPI:
            return thread.interface is not None
        case Role.EMULATOR:
            return True
    return False


def _thread_labels(guest: Guest, thread: Thread) -> Labels:
    index = "" if thread.index is None else str(thread.index)
    return (
        guest.ref,
        thread.role.value,
        index if thread.role is Role.VCPU else "",
        index if thread.role is Role.IOTHREAD else "",
        thread.interface or "",
        "" if thread.queue is None else str(thread.queue),
    )


def _threads(scrape: Scrape) -> Iterator[tuple[Labels, GuestThread]]:
    for guest, one in _every_thread(scrape):
        if _lasting(one.thread):
            yield _thread_labels(guest, one.thread), one


def _tasks(scrape: Scrape) -> Iterator[tuple[Labels, GuestThread]]:
    for guest, one in _every_thread(scrape):
        yield (*_thread_labels(guest, one.thread), str(one.thread.key.tid)), one


def _every_thread(scrape: Scrape) -> Iterator[tuple[Guest, GuestThread]]:
    if scrape.state.snapshot is None:
        return
    host, recent = scrape.state.snapshot.host, scrape.state.recent
    for guest in scrape.guests:
        for thread in guest.threads:
            used, waited = recent.budgets.get(thread.key), recent.waited.get(thread.key)
            yield guest, GuestThread(thread, host, used, waited)


# -- interfaces and the devices below them


class Sharing:
    """Decides which guest reports a device that several guests are plugged into, as the members
    of a group are. The guest whose thread last sent through a queue reports the queue; the first
    guest reports everything else."""

    def __init__(self, guests: Iterable[Guest]) -> None:
        self._users: dict[tuple[str, int, str], list[str]] = {}
        self._owner: dict[int, str] = {}
        for guest in guests:
            for interface in guest.interfaces:
                self._users.setdefault(_device(interface), []).append(guest.ref)
            self._owner.update((thread.key.tid, guest.ref) for thread in guest.threads)

    def of_device(self, guest: Guest, interface: Interface) -> bool:
        """Whether this guest reports the device's numbers."""
        return self._users[_device(interface)][0] == guest.ref

    def of_queue(self, guest: Guest, interface: Interface, queue: QueueCounters) -> bool:
        """Whether this guest reports the queue's numbers."""
        owner = self._owner.get(queue.worker_tid or 0)
        if owner not in self._users[_device(interface)]:
            return self.of_device(guest, interface)
        return owner == guest.ref


def _device(interface: Interface) -> tuple[str, int, str]:
    # Devices of two network namespaces may share a name, or a number.
    return (interface.target, interface.ifindex, interface.mac)


def _interfaces(scrape: Scrape) -> Iterator[tuple[Labels, Interface]]:
    for guest in scrape.guests:
        for interface in guest.interfaces:
            yield (guest.ref, interface.target), interface


def _devices(scrape: Scrape) -> Iterator[tuple[Labels, Interface]]:
    for guest in scrape.guests:
        for interface in guest.interfaces:
            if scrape.sharing.of_device(guest, interface):
                yield (guest.ref, interface.target), interface


def _taps(scrape: Scrape) -> Iterator[tuple[Labels, TapCounters]]:
    for values, interface in _devices(scrape):
        if interface.counters is not None:
            yield values, interface.counters


def _tap_queues(scrape: Scrape) -> Iterator[tuple[Labels, QueueCounters]]:
    for guest in scrape.guests:
        for interface in guest.interfaces:
            for queue in interface.counters.queues if interface.counters is not None else ():
                if scrape.sharing.of_queue(guest, interface, queue):
                    yield (guest.ref, interface.target, str(queue.queue)), queue


# -- guests, root domains, the daemon


def _guests(scrape: Scrape) -> Iterator[tuple[Labels, GuestState]]:
    for one in scrape.state.guests:
        yield (one.ref, one.source), one


def _group_guests(scrape: Scrape) -> Iterator[tuple[Labels, GroupGuest]]:
    for one in scrape.state.groups:
        yield (one.group, one.guest, one.role), one


def _root_domains(scrape: Scrape) -> Iterator[tuple[Labels, DomainBooks]]:
    if scrape.state.snapshot is not None:
        for domain in books(scrape.state.snapshot):
            yield (str(domain.cpus), domain.made_by), domain


_PLACE = ("domain", "role", "vcpu", "iothread", "target_device", "queue")

# The daemon itself.
DAEMON = MetricSubject[Scrape]((), lambda scrape: [((), scrape)])
GUEST = MetricSubject[GuestState](("domain", "source"), _guests)
# Threads whose labels stay the same as long as the guest runs (_lasting).
THREAD = MetricSubject[GuestThread](_PLACE, _threads)
# All threads of guests, by tid.
TASK = MetricSubject[GuestThread]((*_PLACE, "tid"), _tasks)
# Interfaces of guests, however they are attached.
INTERFACE = MetricSubject[Interface](("domain", "target_device"), _interfaces)
# Host devices of interfaces. One that guests share is listed once, so that sums hold.
DEVICE = MetricSubject[Interface](("domain", "target_device"), _devices)
# Counters of devices of our kernel module, and of their tap queues.
TAP = MetricSubject[TapCounters](("domain", "target_device"), _taps)
TAP_QUEUE = MetricSubject[QueueCounters](("domain", "target_device", "queue"), _tap_queues)
# Routers and balancers of groups that the daemon watches.
GROUP_GUEST = MetricSubject[GroupGuest](("group", "domain", "role"), _group_guests)
ROOT_DOMAIN = MetricSubject[DomainBooks](("cpus", "cgroup"), _root_domains)
