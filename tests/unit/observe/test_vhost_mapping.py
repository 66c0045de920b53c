"""Mapping vhost workers to interfaces and queues."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vsrtune.model.guest import Confidence, ThreadKey
from vsrtune.observe.vhost_mapping import KnownQueue, Slot, assign


def key(tid: int, start: int = 100) -> ThreadKey:
    return ThreadKey(50, tid, start)


def slot(name: str, queue: int = 0, *, cold: bool = True) -> Slot:
    return Slot(name, ord(name[-1]), queue, cold)


A, B, C = slot("tapa"), slot("tapb"), slot("tapc")
VCPU = key(60)


HOT_B, HOT_C = slot("tapb", cold=False), slot("tapc", cold=False)
ON_A, ON_B = KnownQueue("tapa", A.ifindex), KnownQueue("tapb", B.ifindex)

# Workers in the order of age, slots, what else is known, and the slots of the workers.
CASES: dict[str, tuple[list[ThreadKey], list[Slot], dict[str, Any], str]] = {
    "order of age is order of back ends": (
        [key(52, start=99), key(51), key(53)], [A, slot("tapa", 1), B], {},
        "tapa/0 order, tapa/1 order, tapb/0 order",
    ),
    "no workers": ([], [], {}, ""),
    "without known vcpus hotplug cannot be ruled out": (
        [key(51), key(52)], [A, B], {"first_vcpu": None}, "tapa/0 uncertain, tapb/0 uncertain",
    ),
    "a hotplugged NIC leaves the cold ones sure": (
        [key(51), key(52), key(70, start=999)], [A, B, HOT_C], {},
        "tapa/0 order, tapb/0 order, tapc/0 uncertain",
    ),
    # tapa was unplugged, and came back on the same alias: one of two cold workers is left.
    "a replugged NIC makes all uncertain": (
        [key(52), key(70)], [A, B], {}, "tapa/0 uncertain, tapb/0 uncertain",
    ),
    "a vsock worker is told by its age": (
        [key(51), key(52), key(70)], [A, B], {"others": 1}, "tapa/0 order, tapb/0 order, none",
    ),
    "seen workers are exact": (
        [key(51), key(52)], [A, B], {"known": {key(51): ON_A}}, "tapa/0 exact, tapb/0 order",
    ),
    "seeing beats order and the rest follows": (
        [key(51), key(52)], [A, B], {"known": {key(51): ON_B}}, "tapb/0 exact, tapa/0 order",
    ),
    "once order is wrong the rest is uncertain": (
        [key(51), key(52), key(53)], [A, B, C], {"known": {key(51): ON_B}},
        "tapb/0 exact, tapa/0 uncertain, tapc/0 uncertain",
    ),
    "a device of another time is ignored": (
        [key(51), key(52)], [A, B], {"known": {key(51): KnownQueue("tapb", 4711)}},
        "tapa/0 order, tapb/0 order",
    ),
}  # fmt: skip
# The same where not all are mapped, and why.
PROBLEMS: dict[str, tuple[list[ThreadKey], list[Slot], dict[str, Any], str, str]] = {
    "counts that differ map nothing": (
        [key(51)], [A, B], {}, "none", "1 vhost workers for 2 queues: not mapped",
    ),
    "vsock and hotplug cannot be told apart": (
        [key(51), key(70), key(71)], [A, HOT_B], {"others": 1}, "tapa/0 order, none, none",
        "vhost workers of hotplugged devices cannot be told apart",
    ),
    "seeing maps where counts do not agree": (
        [key(51), key(52), key(53)], [A, B], {"known": {key(51): ON_A, key(53): ON_B}},
        "tapa/0 exact, none, tapb/0 exact", "3 vhost workers for 2 queues: not mapped",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("workers", "slots", "more", "expected", "problem"),
    [*((*case, "") for case in CASES.values()), *PROBLEMS.values()],
    ids=[*CASES, *PROBLEMS],
)
def test_which_worker_serves_what(
    workers: list[ThreadKey], slots: list[Slot], more: dict[str, Any], expected: str, problem: str
) -> None:
    mapped, told = assign(workers[::-1], slots, **{"first_vcpu": VCPU, **more})
    found = [(mapped[w][0], mapped[w][1].value) for w in workers]
    assert ", ".join(f"{s.interface}/{s.queue} {c}" if s else c for s, c in found) == expected
    assert told == problem


SLOTS = st.lists(
    st.builds(slot, st.sampled_from(["tapa", "tapb"]), st.integers(0, 3), cold=st.booleans()),
    unique_by=lambda s: (s.interface, s.queue),
)


@given(
    tids=st.sets(st.integers(1, 20)),
    slots=SLOTS,
    vcpu=st.none() | st.integers(1, 20),
    others=st.integers(0, 2),
    seen=st.dictionaries(st.integers(1, 20), st.sampled_from(["tapa", "tapb"])),
)
def test_no_queue_is_given_twice_and_none_means_none(
    tids: set[int], slots: list[Slot], vcpu: int | None, others: int, seen: dict[int, str]
) -> None:
    workers = [key(t) for t in tids]
    mapped = assign(
        workers,
        slots,
        first_vcpu=key(vcpu) if vcpu is not None else None,
        others=others,
        known={key(t): KnownQueue(name, ord(name[-1])) for t, name in seen.items()},
    )
    assert set(mapped[0]) == set(workers)
    used = [slot for slot, _ in mapped[0].values() if slot is not None]
    assert len(used) == len(set(used))
    assert set(used) <= set(slots)
    for worker, (found, confidence) in mapped[0].items():
        assert (found is None) == (confidence is Confidence.NONE)
        if confidence is Confidence.EXACT:
            assert found is not None
            assert seen[worker.tid] == found.interface
