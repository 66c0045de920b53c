"""Which vhost worker serves which interface and queue.

The kernel does not tell (every worker is ``vhost-<pid>``), so this rests on two
facts. A worker is created when QEMU sets the owner of a vhost descriptor, which
``net_init_tap_one`` does queue by queue in the order of the back ends on the
command line. And QEMU creates the back ends of its command line before its
vcpus, so a worker older than the first vcpu came from the command line, and a
younger one from a hotplug or from a device that is no NIC (vsock, scsi).

Invariants: no slot is given to two workers, and a worker without a slot has
confidence NONE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vsrtune.model import Confidence, ThreadKey


@dataclass(frozen=True, slots=True)
class Slot:
    """One vhost queue of one interface. ``cold`` when its back end stands on QEMU's
    command line, so that its worker was made when QEMU started."""

    interface: str
    ifindex: int
    queue: int
    cold: bool = True


@dataclass(frozen=True, slots=True)
class Assignment:
    """What is known of one worker; ``slot`` is None exactly for Confidence.NONE."""

    slot: Slot | None
    confidence: Confidence


@dataclass(frozen=True, slots=True)
class Mapped:
    """All workers of a guest, and why some are not mapped ("" when all are)."""

    workers: Mapping[ThreadKey, Assignment]
    problem: str = ""


UNMAPPED = Assignment(None, Confidence.NONE)


def age(key: ThreadKey) -> tuple[int, int]:
    """Creation order: start times count in 10 ms, tids order within."""
    return key.start_time, key.tid


def assign(
    workers: Sequence[ThreadKey],
    slots: Sequence[Slot],
    *,
    first_vcpu: ThreadKey | None,
    others: int = 0,
    seen: Mapping[ThreadKey, tuple[str, int]] | None = None,
) -> Mapped:
    """Map workers to ``slots``, which are in back end, then queue order.

    ``first_vcpu`` is the oldest vcpu thread, None when vcpus are not known.
    ``others`` counts vhost descriptors that are not for networking. ``seen``
    gives (interface, ifindex) of workers seen transmitting; it wins over order.
    """
    ordered = sorted(workers, key=age)
    mapped, problem = _by_order(ordered, slots, first_vcpu, others)
    known = {
        key: device
        for key, device in (seen or {}).items()
        if any((s.interface, s.ifindex) == device for s in slots)
    }
    if known:
        mapped = _correct(ordered, slots, mapped, known)
        if all(key in known or mapped[key].slot is not None for key in ordered):
            problem = ""
    _check(mapped, ordered)
    return Mapped(mapped, problem)


def _by_order(
    ordered: Sequence[ThreadKey],
    slots: Sequence[Slot],
    first_vcpu: ThreadKey | None,
    others: int,
) -> tuple[dict[ThreadKey, Assignment], str]:
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
    mapped: dict[ThreadKey, Assignment],
    keys: Sequence[ThreadKey],
    slots: Sequence[Slot],
    confidence: Confidence,
) -> None:
    for key, slot in zip(keys, slots, strict=True):
        mapped[key] = Assignment(slot, confidence)


def _correct(
    ordered: Sequence[ThreadKey],
    slots: Sequence[Slot],
    guess: Mapping[ThreadKey, Assignment],
    known: Mapping[ThreadKey, tuple[str, int]],
) -> dict[ThreadKey, Assignment]:
    """Put seen workers on the interface they were seen on, queues in order of age."""
    mapped: dict[ThreadKey, Assignment] = {}
    free = list(slots)
    for key in ordered:
        fitting = [s for s in free if (s.interface, s.ifindex) == known.get(key)]
        if fitting:
            own = guess[key].slot
            slot = own if own in fitting else fitting[0]
            mapped[key] = Assignment(slot, Confidence.EXACT)
            free.remove(slot)
    wrong = any(guess[key].slot not in (None, mapped[key].slot) for key in mapped)
    rest = [key for key in ordered if key not in mapped]
    if not wrong:
        for key in rest:
            own = guess[key].slot
            mapped[key] = guess[key] if own is None or own in free else UNMAPPED
        return mapped
    # Order has been proved wrong for this guest. What is left is certain only
    # where all of it belongs to one interface.
    single = len({s.interface for s in free}) == 1
    confidence = Confidence.ORDER if single else Confidence.UNCERTAIN
    for key in rest:
        mapped[key] = UNMAPPED
    if len(rest) == len(free):
        _pair(mapped, rest, free, confidence)
    return mapped


def _check(mapped: Mapping[ThreadKey, Assignment], ordered: Sequence[ThreadKey]) -> None:
    used = [a.slot for a in mapped.values() if a.slot is not None]
    if len(used) != len(set(used)) or set(mapped) != set(ordered):
        raise AssertionError("a vhost queue was given to two workers")
    for assignment in mapped.values():
        if (assignment.slot is None) != (assignment.confidence is Confidence.NONE):
            raise AssertionError("an unmapped vhost worker claims a queue")
