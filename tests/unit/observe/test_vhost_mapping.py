"""Mapping vhost workers to interfaces and queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from vsrtune.model.guest import Confidence, ThreadKey
from vsrtune.observe.vhost_mapping import KnownQueue, Slot, WorkerMapping, assign


def key(tid: int, start: int = 100) -> ThreadKey:
    return ThreadKey(50, tid, start)


def slot(name: str, queue: int = 0, *, cold: bool = True) -> Slot:
    return Slot(name, ord(name[-1]), queue, cold)


A, B, C = slot("tapa"), slot("tapb"), slot("tapc")
VCPU = key(60)


def told(
    mapped: tuple[Mapping[ThreadKey, WorkerMapping], str], workers: Sequence[ThreadKey]
) -> list[tuple[str, int, str]]:
    found = []
    for worker in workers:
        slot, confidence = mapped[0][worker]
        name = (slot.interface, slot.queue) if slot is not None else ("-", 0)
        found.append((*name, confidence.value))
    return found


def test_order_of_age_is_order_of_back_ends() -> None:
    workers = [key(53), key(51), key(52, start=99)]
    slots = [A, slot("tapa", 1), B]
    mapped = assign(workers, slots, first_vcpu=VCPU)
    assert told(mapped, [key(52, start=99), key(51), key(53)]) == [
        ("tapa", 0, "order"),
        ("tapa", 1, "order"),
        ("tapb", 0, "order"),
    ]
    assert mapped[1] == ""


def test_no_workers() -> None:
    mapped = assign([], [], first_vcpu=VCPU)
    assert (dict(mapped[0]), mapped[1]) == ({}, "")


def test_counts_that_differ_map_nothing() -> None:
    mapped = assign([key(51)], [A, B], first_vcpu=VCPU)
    assert told(mapped, [key(51)]) == [("-", 0, "none")]
    assert mapped[1] == "1 vhost workers for 2 queues: not mapped"


def test_without_known_vcpus_hotplug_cannot_be_ruled_out() -> None:
    mapped = assign([key(51), key(52)], [A, B], first_vcpu=None)
    assert told(mapped, [key(51), key(52)]) == [
        ("tapa", 0, "uncertain"),
        ("tapb", 0, "uncertain"),
    ]


def test_a_hotplugged_nic_leaves_the_cold_ones_sure() -> None:
    workers = [key(51), key(52), key(70, start=999)]
    mapped = assign(workers, [A, B, slot("tapc", cold=False)], first_vcpu=VCPU)
    assert told(mapped, workers) == [
        ("tapa", 0, "order"),
        ("tapb", 0, "order"),
        ("tapc", 0, "uncertain"),
    ]


def test_a_replugged_nic_makes_all_uncertain() -> None:
    # tapa was unplugged, and came back on the same alias: its slot is not cold, and
    # one of two cold workers is left.
    workers = [key(52), key(70)]
    mapped = assign(workers, [A, B], first_vcpu=VCPU)
    assert [c for _, _, c in told(mapped, workers)] == ["uncertain", "uncertain"]


def test_vsock_worker_is_told_by_its_age() -> None:
    workers = [key(51), key(52), key(70)]
    mapped = assign(workers, [A, B], first_vcpu=VCPU, others=1)
    assert told(mapped, workers) == [("tapa", 0, "order"), ("tapb", 0, "order"), ("-", 0, "none")]
    assert mapped[1] == ""


def test_vsock_and_hotplug_cannot_be_told_apart() -> None:
    workers = [key(51), key(70), key(71)]
    mapped = assign(workers, [A, slot("tapb", cold=False)], first_vcpu=VCPU, others=1)
    assert told(mapped, workers) == [("tapa", 0, "order"), ("-", 0, "none"), ("-", 0, "none")]
    assert "hotplugged" in mapped[1]


def test_seen_workers_are_exact() -> None:
    workers = [key(51), key(52)]
    seen = {key(51): KnownQueue("tapa", A.ifindex)}
    mapped = assign(workers, [A, B], first_vcpu=VCPU, known=seen)
    assert told(mapped, workers) == [("tapa", 0, "exact"), ("tapb", 0, "order")]


def test_seeing_beats_order_and_the_rest_follows() -> None:
    workers = [key(51), key(52)]
    seen = {key(51): KnownQueue("tapb", B.ifindex)}
    mapped = assign(workers, [A, B], first_vcpu=VCPU, known=seen)
    assert told(mapped, workers) == [("tapb", 0, "exact"), ("tapa", 0, "order")]


def test_once_order_is_wrong_the_rest_is_uncertain() -> None:
    workers = [key(51), key(52), key(53)]
    seen = {key(51): KnownQueue("tapb", B.ifindex)}
    mapped = assign(workers, [A, B, C], first_vcpu=VCPU, known=seen)
    assert told(mapped, workers) == [
        ("tapb", 0, "exact"),
        ("tapa", 0, "uncertain"),
        ("tapc", 0, "uncertain"),
    ]


def test_seeing_maps_where_counts_do_not_agree() -> None:
    workers = [key(51), key(52), key(53)]
    seen = {key(51): KnownQueue("tapa", A.ifindex), key(53): KnownQueue("tapb", B.ifindex)}
    mapped = assign(workers, [A, B], first_vcpu=VCPU, known=seen)
    assert told(mapped, workers) == [("tapa", 0, "exact"), ("-", 0, "none"), ("tapb", 0, "exact")]
    assert mapped[1] != ""


def test_a_device_of_another_time_is_ignored() -> None:
    seen = {key(51): KnownQueue("tapb", 4711)}
    mapped = assign([key(51), key(52)], [A, B], first_vcpu=VCPU, known=seen)
    assert [c for _, _, c in told(mapped, [key(51), key(52)])] == ["order", "order"]


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
