"""metric_families.py and metric_subjects.py: what a scrape gets, and that every family of the table
keeps the conventions."""

from __future__ import annotations

import re
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import golden
import monitored_state
import pytest
import shell_samples as samples
from prometheus_client.parser import text_string_to_metric_families
from prometheus_tools import program
from top_samples import GOLDEN

from vsrtune.core.cpuset import CpuSet
from vsrtune.daemon import http
from vsrtune.model.daemon_state import BUCKETS, DaemonState, GuestState, Starved, Totals
from vsrtune.model.guest import Guest, Role, Sched, SchedClass, Thread
from vsrtune.views.metric_families import FAMILIES, Family


def tuned_state(name: str = "vr1") -> DaemonState:
    guest = samples.guest(name)
    emulator, vcpu, worker = guest.threads
    vcpu = replace(vcpu, sched=Sched(SchedClass.FIFO, 10), affinity=CpuSet([1]))
    guest = replace(guest, threads=(emulator, vcpu, worker))
    return DaemonState(
        snapshot=samples.snapshot(guest),
        guests=(GuestState(guest.ref, guest.source, tuned=True, drift=2, held=1, policy="p"),),
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


def test_a_scrape_of_a_recorded_host() -> None:
    """With every kind of series; without those of this process, its version and its time."""
    lines = http.exposition(everything()).splitlines()
    told = [
        line
        for line in lines
        if not re.match(r"#|process|vsrtune_(build|reconcile_(duration|last))_", line)
    ]
    golden.matches(GOLDEN / "metrics.txt", "\n".join(told) + "\n")


def test_a_scrape_of_a_guest_of_class_fifo() -> None:
    state = tuned_state()
    assert value(state, "vsrtune_thread_scheduling_priority", vcpu="0") == 10
    assert value(state, "vsrtune_thread_info", vcpu="0", **{"class": "fifo", "cpus": "1"}) == 1
    assert value(state, "vsrtune_reconcile_duration_seconds_count") == 2
    assert value(state, "vsrtune_reconcile_duration_seconds_bucket", le="0.05") == 1
    assert value(state, "vsrtune_reconcile_duration_seconds_bucket", le="0.25") == 2


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
        if name.startswith("vsrtune_tap_") or name == "vsrtune_interface_ring_dropped_frames_total"
    }
    assert told == {("vr1", None), ("vr1", "0"), ("vr1", "1"), ("vr2", "2")}


def test_what_the_loaded_module_does_not_count_makes_no_sample() -> None:
    state = replace(tuned_state(), snapshot=samples.snapshot(samples.napi_guest()))
    names = {name for name, labels in samples_of(state) if ("queue", "1") in labels}
    assert names == {"vsrtune_tap_queue_received_frames_total"}
    places = {dict(labels).get("place") for _, labels in samples_of(state)} - {None}
    assert places == {"ring_full", "queue_full", "no_queue"}
    assert not any(name.startswith("vsrtune_tap_") for name, _ in samples_of(tuned_state()))


def test_a_guest_without_a_policy_is_not_untuned() -> None:
    """Nor does it raise the alarm; one that two policies name does."""
    left, twice = GuestState("a", "libvirt", False), GuestState("b", "libvirt", False, refused=True)
    told = samples_of(replace(tuned_state(), guests=(left, twice)))
    assert [
        (dict(labels)["domain"], v) for (n, labels), v in told.items() if n.endswith("_tuned")
    ] == [("b", 0.0)]


@pytest.mark.parametrize("name", ["vr 1.ü", 'say "hi"\\', "line\nbreak", "bad\udcff"])
def test_awkward_names_round_trip_or_are_escaped(name: str) -> None:
    shown = name.encode("utf-8", "backslashreplace").decode()
    assert value(tuned_state(name), "vsrtune_guest_tuned", domain=shown) == 1


def everything() -> DaemonState:
    """A state with samples of nearly all families: a vcpu that overran its budget and was measured,
    and devices of the kernel module."""
    state = monitored_state.state()
    assert state.snapshot is not None
    (guest,) = state.snapshot.guests
    guest = replace(guest, threads=tuple(replace(t, load=(1.0, 1.0)) for t in guest.threads))
    return replace(
        state,
        snapshot=replace(state.snapshot, guests=(guest,)),
        recent=replace(state.recent, budgets=dict.fromkeys(state.recent.budgets, 1.004)),
    )


def test_before_the_first_pass_every_family_is_announced() -> None:
    text = http.exposition(DaemonState())
    for family in FAMILIES:
        assert f"# HELP {family.name} {family.help}\n" in text
        kind = "gauge" if family.kind == "info" else family.kind
        assert f"# TYPE {family.name} {kind}\n" in text


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_names_follow_the_conventions(family: Family[Any]) -> None:
    suffix = {"counter": "_total", "info": "_info"}.get(family.kind, "")
    unit = f"_{family.unit}" if family.unit else ""
    assert re.fullmatch(rf"vsrtune_[a-z_]+{unit}{suffix}", family.name)
    stem = family.name.removesuffix(suffix)
    assert not re.search(r"_(total|info|count|sum|bucket)$", stem)
    assert stem.endswith(unit) and family.unit in ("", "seconds", "ratio", "cpus", "frames")
    assert family.unit or not re.search(r"_(seconds|ratio|cpus|frames)$", stem)
    assert family.help.endswith(".")
    assert "tid" not in family.labels or family.name == "vsrtune_thread_info"
    assert len(set(family.labels)) == len(family.labels)


def test_samples_are_as_the_table_says() -> None:
    families = {family.name: family for family in FAMILIES}
    found = samples_of(everything())
    for (name, labels), number in found.items():
        family = families.get(re.sub("_(bucket|sum|count)$", "", name))
        if family is None:
            assert name.startswith("process_")
            continue
        assert {label for label, _ in labels} - {"le"} <= set(family.labels)
        assert all(text for _, text in labels), "a label that does not apply is left out"
        assert family.unit != "ratio" or 0 <= number <= 1, name
    ratios = {name for name, _ in found if name.endswith("_ratio")}
    assert ratios == {f.name for f in FAMILIES if f.unit == "ratio"}


def repeated(text: str) -> list[str]:
    """Series that a scrape has twice."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    count = Counter(line.rpartition(" ")[0] for line in lines)
    return [series for series, number in count.items() if number > 1]


def copies(guest: Guest, *roles: Role) -> tuple[Thread, ...]:
    """Second threads of these roles, with tids of their own."""
    return tuple(
        replace(t, key=replace(t.key, tid=t.key.tid + 50), cpu_ns=9_000_000_000)
        for t in guest.threads
        if t.role in roles
    )


# By pid, names that are the same once they are UTF-8.
LOOK_ALIKE = {100: "bad\udcff", 200: "bad\\udcff"}


def test_no_series_is_there_twice() -> None:
    """Whatever a QEMU calls itself and its threads."""
    guest = samples.guest("vr1", source="qemu")
    guest = replace(guest, threads=(*guest.threads, *copies(guest, Role.VCPU, Role.VHOST)))
    namesake = replace(guest, pid=300, threads=copies(guest, *Role))
    state = replace(tuned_state(), snapshot=samples.snapshot(guest, namesake))
    assert repeated(http.exposition(state)) == []
    cpu = value(state, "vsrtune_thread_cpu_seconds_total", domain="qemu:vr1", vcpu="0")
    assert cpu == 1.5, "that of the first"
    alike = [replace(samples.guest(name, pid), interfaces=()) for pid, name in LOOK_ALIKE.items()]
    starved = tuple(Starved(pid, "x", 1, name) for pid, name in LOOK_ALIKE.items())
    state = replace(tuned_state(), snapshot=samples.snapshot(*alike), starved=starved)
    assert repeated(http.exposition(state)) == []


@pytest.mark.parametrize(
    "nameless",
    [
        {"role": Role.WORKER},
        {"role": Role.VHOST, "interface": None, "queue": None},
        {"role": Role.IOTHREAD, "index": None},
    ],
)
def test_threads_that_only_the_tid_names_are_in_thread_info_alone(
    nameless: dict[str, object],
) -> None:
    guest = samples.guest()
    more = [samples.thread(100, tid, **nameless) for tid in (120, 121)]  # type: ignore[arg-type]
    guest = replace(guest, threads=(*guest.threads, *more))
    state = replace(tuned_state(), snapshot=samples.snapshot(guest))
    named = {"role": str(more[0].role.value), "domain": "vr1"}
    assert value(state, "vsrtune_thread_info", tid="120", **named) == 1
    assert value(state, "vsrtune_thread_info", tid="121", **named) == 1
    assert repeated(http.exposition(state)) == []
    mapped = 1 if more[0].role is Role.VHOST else 0
    per_thread = [
        labels
        for name, labels in samples_of(state)
        if name == "vsrtune_thread_cpu_seconds_total" and named.items() <= dict(labels).items()
    ]
    assert len(per_thread) == mapped


def test_numbered_iothreads_have_series_of_their_own() -> None:
    guest = samples.guest()
    more = [samples.thread(100, 120 + n, Role.IOTHREAD, index=n) for n in (1, 2)]
    state = replace(
        tuned_state(), snapshot=samples.snapshot(replace(guest, threads=(*guest.threads, *more)))
    )
    for number in ("1", "2"):
        assert value(state, "vsrtune_thread_cpu_seconds_total", iothread=number) == 1.5


def test_the_process_describes_itself() -> None:
    found = samples_of(tuned_state())
    for name in ("process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"):
        assert found[name, frozenset()] > 0


@pytest.mark.parametrize("state", [DaemonState, everything])
def test_promtool_finds_nothing_to_say(state: Callable[[], DaemonState]) -> None:
    done = subprocess.run(
        [program("promtool"), "check", "metrics"],
        input=http.exposition(state()),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


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
