# SPDX-License-Identifier: GPL-2.0-or-later
"""Which vhost worker serves which interface and queue.

The kernel does not say (every worker is ``vhost-<pid>``), so the mapping rests on two facts. The
kernel creates a worker when QEMU sets the owner of a vhost descriptor, which ``net_init_tap_one``
does queue by queue in the order of the back ends on the command line. And QEMU creates the back
ends of its command line before its vcpus, so a worker older than the first vcpu came from the
command line, and a younger one from a hotplug or from a device that is no NIC (vsock, scsi).

Two sources are more certain. A device of our kernel module names the task that last transmitted
through each of its queues, and a trace shows on which device a worker transmits.

Invariants: no slot is given to two workers, and a worker without a slot has confidence NONE.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vsrtune.model.guest import Confidence, Interface, ThreadKey


@dataclass(frozen=True, slots=True)
class Slot:
    """One vhost queue of one interface. ``cold``: its back end is on QEMU's command line, so its
    worker was made when QEMU started."""

    interface: str
    ifindex: int
    queue: int
    cold: bool = True


# The slot of a worker, None exactly for Confidence.NONE.
WorkerMapping = tuple[Slot | None, Confidence]
UNMAPPED: WorkerMapping = (None, Confidence.NONE)


@dataclass(frozen=True, slots=True)
class KnownQueue:
    """The device and queue on which a worker is known to transmit; ``queue`` is None when only the
    device is known."""

    interface: str
    ifindex: int
    queue: int | None = None

    def fits(self, slot: Slot) -> bool:
        """Whether the slot can be the worker's."""
        here = (slot.interface, slot.ifindex) == (self.interface, self.ifindex)
        return here and self.queue in (None, slot.queue)


def age(key: ThreadKey) -> tuple[int, int]:
    """Creation order: start times have a resolution of 10 ms, tids give the order within."""
    return key.start_time, key.tid


def told(
    interfaces: Iterable[Interface], workers: Iterable[ThreadKey]
) -> tuple[dict[ThreadKey, KnownQueue], list[str]]:
    """The queues of workers as the devices of our kernel module report them, and why some reports
    are not used.

    A device names the last sender by its tid, which is meaningless once that task has ended. So
    only a tid of the guest's present ``workers`` counts, and only if a single queue names it. The
    module counts all open queues in the order in which they were opened, as QEMU does its own. If
    another process holds some of them, the number of a queue is not known here, but its device is.
    """
    by_tid = {key.tid: key for key in workers}
    claims: list[tuple[int, KnownQueue]] = []
    problems: list[str] = []
    for interface in interfaces:
        if interface.counters is None or not interface.vhost:
            continue
        queues = interface.counters.queues
        alone = len(queues) == interface.queues
        for queue in queues:
            tid = queue.worker_tid
            if tid in by_tid:
                number = queue.queue if alone else None
                claims.append((tid, KnownQueue(interface.target, interface.ifindex, number)))
            elif tid and alone:
                problems.append(
                    f"{interface.target} queue {queue.queue}: task {tid} sent last, which is no "
                    "vhost worker of this guest now; not used for the mapping"
                )
    count = Counter(tid for tid, _ in claims)
    for tid in sorted(t for t, times in count.items() if times > 1):
        queues_of = ", ".join(f"{k.interface} queue {k.queue}" for t, k in claims if t == tid)
        problems.append(f"task {tid} sent last on {queues_of}: not used for the mapping")
    return {by_tid[tid]: where for tid, where in claims if count[tid] == 1}, problems


def assign(
    workers: Sequence[ThreadKey],
    slots: Sequence[Slot],
    *,
    first_vcpu: ThreadKey | None,
    others: int = 0,
    known: Mapping[ThreadKey, KnownQueue] | None = None,
) -> tuple[Mapping[ThreadKey, WorkerMapping], str]:
    """Map workers to ``slots``, which are in back end, then queue order. Returns the mapping, and
    why some workers are not mapped ("" when all are).

    ``first_vcpu`` is the oldest vcpu thread, None when vcpus are not known. ``others`` counts
    vhost descriptors that are not for networking. ``known`` says where workers transmit; it wins
    over order.
    """
    ordered = sorted(workers, key=age)
    mapped, problem = _by_order(ordered, slots, first_vcpu, others)
    known = {
        key: where for key, where in (known or {}).items() if any(where.fits(s) for s in slots)
    }
    if known:
        mapped = _correct(ordered, slots, mapped, known)
        if all(key in known or mapped[key][0] is not None for key in ordered):
            problem = ""
    _check(mapped, ordered)
    return mapped, problem


def _by_order(
    ordered: Sequence[ThreadKey],
    slots: Sequence[Slot],
    first_vcpu: ThreadKey | None,
    others: int,
) -> tuple[dict[ThreadKey, WorkerMapping], str]:
    mapped = dict.fromkeys(ordered, UNMAPPED)
    cold_slots = [s for s in slots if s.cold]
    hot_slots = [s for s in slots if not s.cold]
    if first_vcpu is not None:
        cold = [k for k in ordered if age(k) < age(first_vcpu)]
        late = ordered[len(cold) :]
        if len(cold) == len(cold_slots) and len(late) == len(hot_slots) + others:
            _pair(mapped, cold, cold_slots, Confidence.ORDER)
            if hot_slots and not others:
                _pair(mapped, late, hot_slots, Confidence.UNCERTAIN)
            elif hot_slots:
                return mapped, "vhost workers of hotplugged devices cannot be told apart"
            return mapped, ""
    if len(ordered) == len(slots) and not others:
        _pair(mapped, ordered, [*cold_slots, *hot_slots], Confidence.UNCERTAIN)
        return mapped, ""
    extra = f" and {others} other vhost device(s)" if others else ""
    return mapped, f"{len(ordered)} vhost workers for {len(slots)} queues{extra}: not mapped"


def _pair(
    mapped: dict[ThreadKey, WorkerMapping],
    keys: Sequence[ThreadKey],
    slots: Sequence[Slot],
    confidence: Confidence,
) -> None:
    for key, slot in zip(keys, slots, strict=True):
        mapped[key] = slot, confidence


def _correct(
    ordered: Sequence[ThreadKey],
    slots: Sequence[Slot],
    guess: Mapping[ThreadKey, WorkerMapping],
    known: Mapping[ThreadKey, KnownQueue],
) -> dict[ThreadKey, WorkerMapping]:
    """Map known workers first: those with a known queue to it, the others to the queues of their
    interface in order of age."""
    mapped: dict[ThreadKey, WorkerMapping] = {}
    free = list(slots)
    for key in sorted((k for k in ordered if k in known), key=lambda k: known[k].queue is None):
        fitting = [s for s in free if known[key].fits(s)]
        if fitting:
            own = guess[key][0]
            slot = own if own in fitting else fitting[0]
            mapped[key] = slot, Confidence.EXACT
            free.remove(slot)
    wrong = any(guess[key][0] not in (None, mapped[key][0]) for key in mapped)
    rest = [key for key in ordered if key not in mapped]
    if not wrong:
        for key in rest:
            own = guess[key][0]
            mapped[key] = guess[key] if own is None or own in free else UNMAPPED
        return mapped
    # The order is proved wrong for this guest. The rest is certain only where all of it belongs to
    # one interface.
    single = len({s.interface for s in free}) == 1
    confidence = Confidence.ORDER if single else Confidence.UNCERTAIN
    for key in rest:
        mapped[key] = UNMAPPED
    if len(rest) == len(free):
        _pair(mapped, rest, free, confidence)
    return mapped


def _check(mapped: Mapping[ThreadKey, WorkerMapping], ordered: Sequence[ThreadKey]) -> None:
    used = [slot for slot, _ in mapped.values() if slot is not None]
    if len(used) != len(set(used)) or set(mapped) != set(ordered):
        raise AssertionError("a vhost queue was given to two workers")
    for slot, confidence in mapped.values():
        if (slot is None) != (confidence is Confidence.NONE):
            raise AssertionError("an unmapped vhost worker claims a queue")
