"""metric_families.py: the exposition, and that docs/metrics.md tells the same."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import shell_samples as samples
from prometheus_client.parser import text_string_to_metric_families

from vsrtune.core.cpuset import CpuSet
from vsrtune.daemon import http
from vsrtune.model.daemon_state import BUCKETS, DaemonState, GuestState, Totals
from vsrtune.model.guest import Sched, SchedClass
from vsrtune.views import metric_families

DOCS = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


def tuned_state(name: str = "vr1") -> DaemonState:
    guest = samples.guest(name)
    emulator, vcpu, worker = guest.threads
    vcpu = replace(vcpu, sched=Sched(SchedClass.FIFO, 10), affinity=CpuSet([1]))
    guest = replace(guest, threads=(emulator, vcpu, worker))
    return DaemonState(
        snapshot=samples.snapshot(guest),
        guests=(GuestState(guest.ref, guest.source, tuned=True, drift=2, held=1),),
        totals=Totals(
            passes=2, writes=5, duration_sum=0.3, durations=(1, 0, 1) + (0,) * (len(BUCKETS) - 2)
        ),
        policies=1,
        last_pass=1700000000.0,
    )


def samples_of(state: DaemonState) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {}
    text = http.exposition(state)
    for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]
        for sample in family.samples:
            found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


def value(state: DaemonState, name: str, **labels: str) -> float:
    matching = [
        v
        for (n, have), v in samples_of(state).items()
        if n == name and frozenset(labels.items()) <= have
    ]
    assert len(matching) == 1, f"{name}{labels}: {len(matching)} samples"
    return matching[0]


def test_worker_cpu_time_is_labelled_with_its_interface() -> None:
    got = value(
        tuned_state(),
        "vsrtune_thread_cpu_seconds_total",
        domain="vr1",
        role="vhost",
        target_device="macvtap100",
        queue="0",
        tid="102",
        vcpu="",
    )
    assert got == 1.5


def test_class_priority_and_cpus_of_a_vcpu() -> None:
    state = tuned_state()
    assert value(state, "vsrtune_thread_scheduling_priority", vcpu="0") == 10
    assert value(state, "vsrtune_thread_allowed_cpus", vcpu="0") == 1
    assert value(state, "vsrtune_thread_info", vcpu="0", **{"class": "fifo", "cpus": "1"}) == 1


def test_interface_guest_and_daemon_series() -> None:
    state = tuned_state()
    assert value(state, "vsrtune_interface_queue_length", target_device="macvtap100") == 500
    assert value(state, "vsrtune_interface_ring_drops_total", domain="vr1") == 7
    assert value(state, "vsrtune_guest_tuned", domain="vr1", source="libvirt") == 1
    assert value(state, "vsrtune_guest_drift", domain="vr1") == 2
    assert value(state, "vsrtune_guest_held", domain="vr1") == 1
    assert value(state, "vsrtune_writes_total") == 5
    assert value(state, "vsrtune_policy_reload_success") == 1
    assert value(state, "vsrtune_reconcile_duration_seconds_count") == 2
    assert value(state, "vsrtune_reconcile_duration_seconds_bucket", le="0.05") == 1
    assert value(state, "vsrtune_reconcile_duration_seconds_bucket", le="0.25") == 2


def test_what_the_module_counts() -> None:
    state = replace(tuned_state(), snapshot=samples.snapshot(samples.napi_guest()))
    device = {"domain": "vr1", "target_device": "macvtap100"}
    assert value(state, "vsrtune_interface_info", kind="napi_macvtap", lower="p0", **device) == 1
    assert value(state, "vsrtune_tap_received_total", **device) == 106
    assert value(state, "vsrtune_tap_received_by_origin_total", origin="nic") == 6
    assert value(state, "vsrtune_tap_received_by_origin_total", origin="broadcast") == 100
    assert value(state, "vsrtune_tap_delivered_total", **device) == 100
    assert value(state, "vsrtune_tap_dropped_total", place="ring_full") == 4
    assert value(state, "vsrtune_tap_dropped_total", place="no_queue") == 0
    assert value(state, "vsrtune_tap_own_queue_high_water") == 31
    assert value(state, "vsrtune_tap_threaded") == 1
    assert value(state, "vsrtune_tap_sent_total", to="lower") == 9
    assert value(state, "vsrtune_tap_queue_ring_full_total", queue="0") == 4
    assert value(state, "vsrtune_tap_queue_ring_high_water", queue="0") == 500
    assert value(state, "vsrtune_tap_queue_sent_total", queue="0") == 9
    assert value(state, "vsrtune_tap_queue_worker_tid", queue="0") == 102
    assert value(state, "vsrtune_tap_queue_worker_tid", queue="1") == 0
    cpu = value(state, "vsrtune_thread_cpu_seconds_total", role="napi", tid="170")
    assert cpu == 1.5


def test_what_guests_share_is_told_once() -> None:
    """Each member of a group tells of its own queue, the first of the device."""
    first = samples.napi_guest()
    second = replace(first, name="vr2", threads=tuple(
        replace(t, key=replace(t.key, tid=t.key.tid + 1000)) for t in first.threads
    ))  # fmt: skip
    (interface,) = first.interfaces
    assert interface.counters is not None
    own, silent = interface.counters.queues
    theirs = replace(own, queue=2, worker_tid=1102)
    counters = replace(interface.counters, queues=(own, silent, theirs))
    shared = (replace(interface, counters=counters),)
    guests = (replace(first, interfaces=shared), replace(second, interfaces=shared))
    state = replace(tuned_state(), snapshot=samples.snapshot(*guests))
    told = {
        (dict(labels)["domain"], dict(labels).get("queue"))
        for name, labels in samples_of(state)
        if name.startswith("vsrtune_tap_") or name == "vsrtune_interface_ring_drops_total"
    }
    assert told == {("vr1", None), ("vr1", "0"), ("vr1", "1"), ("vr2", "2")}


def test_what_the_loaded_module_does_not_count_makes_no_sample() -> None:
    state = replace(tuned_state(), snapshot=samples.snapshot(samples.napi_guest()))
    names = {name for name, labels in samples_of(state) if ("queue", "1") in labels}
    assert names == {"vsrtune_tap_queue_received_total", "vsrtune_tap_queue_worker_tid"}
    places = {dict(labels).get("place") for _, labels in samples_of(state)} - {None}
    assert places == {"ring_full", "queue_full", "no_queue"}
    assert not any(name.startswith("vsrtune_tap_") for name, _ in samples_of(tuned_state()))


@pytest.mark.parametrize("name", ["vr 1.ü", 'say "hi"\\', "line\nbreak", "bad\udcff"])
def test_awkward_names_round_trip_or_are_escaped(name: str) -> None:
    shown = name.encode("utf-8", "backslashreplace").decode()
    assert value(tuned_state(name), "vsrtune_guest_tuned", domain=shown) == 1


def test_before_the_first_pass_every_family_is_announced() -> None:
    text = http.exposition(DaemonState())
    for family in metric_families.FAMILIES.values():
        assert f"# HELP {family.exposed} " in text


def test_names_follow_the_conventions() -> None:
    for family in metric_families.FAMILIES.values():
        assert re.fullmatch(r"vsrtune_[a-z_]+", family.exposed)
        assert not re.search(r"_(total|info|count|sum|bucket)$", family.name)
        assert not re.search(r"(milli|micro|nano|minutes|percent)", family.name)
        assert family.help.endswith(".")
        if family.kind != "counter":
            assert not family.exposed.endswith("_total")


def test_documentation_lists_exactly_these_metrics() -> None:
    rows = {}
    for line in DOCS.read_text().splitlines():
        cells = [c.strip() for c in line.strip("|").split("|")]
        if cells[0].startswith("`vsrtune_"):
            rows[cells[0].strip("`")] = tuple(cells[1:])
    expected = {
        f.exposed: (
            "gauge" if f.kind == "info" else f.kind,
            " ".join(f"`{label}`" for label in f.labels),
            f.help,
        )
        for f in metric_families.FAMILIES.values()
    }
    assert rows == expected


def test_a_scrape_sees_the_latest_update_and_only_whole_ones() -> None:
    served = http.Metrics()
    done = threading.Event()

    def flip() -> None:
        states = [replace(tuned_state(), policies=n) for n in (1, 2)]
        while not done.is_set():
            for state in states:
                served.update(state)

    writer = threading.Thread(target=flip)
    writer.start()
    try:
        for _ in range(50):
            by_name = {f.name: f for f in served.collect()}
            assert by_name["vsrtune_policies"].samples[0].value in (0, 1, 2)
    finally:
        done.set()
        writer.join()
