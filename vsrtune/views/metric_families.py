# SPDX-License-Identifier: GPL-2.0-or-later
"""Prometheus metrics of the daemon: from the latest DaemonState, never from the host.

FAMILIES is the one table of them. A scrape, the table of docs/metrics.md and the tests of names,
labels and values are made from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple

from vsrtune import __version__
from vsrtune.model.daemon_state import BUCKETS
from vsrtune.model.deadline import UNIT
from vsrtune.model.guest import REALTIME, SchedClass
from vsrtune.model.load import mean
from vsrtune.model.root_domains import DomainBooks, waits_for_domain
from vsrtune.views.metric_subjects import (
    DAEMON,
    DEVICE,
    GROUP_GUEST,
    GUEST,
    INTERFACE,
    ROOT_DOMAIN,
    TAP,
    TAP_QUEUE,
    TASK,
    THREAD,
    GuestThread,
    Labels,
    MetricSubject,
    Scrape,
    T,
    labelled,
    utf8,
)


class Histogram(NamedTuple):
    """Cumulative counts by upper bound, the last one ``+Inf``, and the sum of all values. It has
    no labels."""

    buckets: list[tuple[str, float]]
    total: float


# A sample's number, None for no sample, or numbers by the values of the family's own labels.
Value = float | None | Mapping[Labels, float | None] | Histogram


@dataclass(frozen=True)
class Family(Generic[T]):
    """One metric family. ``name`` is as Prometheus stores it and ends in ``unit``, a base unit
    ("" for a number without one), then in the suffix of its kind. ``value`` gives the samples of
    one of ``subject``, whose labels they have, and ``own`` labels besides."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "info"]
    unit: str
    subject: MetricSubject[T]
    help: str
    value: Callable[[T], Value]
    own: Labels = ()

    @property
    def labels(self) -> Labels:
        """The names of all labels."""
        return (*self.subject.labels, *self.own)


def _info(*values: str) -> Mapping[Labels, float]:
    return {values: 1}


def _pending(one: GuestThread) -> float | None:
    if waits_for_domain(one.host, one.thread):
        return 1
    return 0 if one.thread.sched.cls is SchedClass.DEADLINE else None


def _budget(field: str) -> Callable[[GuestThread], float | None]:
    def seconds(one: GuestThread) -> float | None:
        sched = one.thread.sched
        value: int = getattr(sched, field)
        return value / 1e9 if sched.cls is SchedClass.DEADLINE else None

    return seconds


def _used(one: GuestThread) -> float | None:
    # The kernel throttles at ticks, so a thread can run a little longer than its budget.
    if one.used is None or one.thread.sched.cls is not SchedClass.DEADLINE:
        return None
    return min(one.used, 1.0)


def _thread_info(one: GuestThread) -> Value:
    thread = one.thread
    mapping = thread.confidence.value if thread.confidence is not None else ""
    return _info(thread.sched.cls.value, str(thread.affinity), mapping)


def _free(domain: DomainBooks) -> float | None:
    return None if domain.admitted is None else (domain.admitted - domain.booked) / UNIT


def _drifts(scrape: Scrape) -> Value:
    found = Counter(
        (utf8(d.target.guest), d.setting, d.rule.value, utf8(d.by)) for d in scrape.state.drifts
    )
    return dict(sorted(found.items()))


def _bottlenecks(scrape: Scrape) -> Value:
    return {
        (utf8(b.guest), b.stage.value, utf8(b.where), "yes" if b.sure else "no"): 1
        for b in scrape.state.recent.bottlenecks.values()
    }


def _unread(scrape: Scrape) -> Value:
    snapshot = scrape.state.snapshot
    if snapshot is None:
        return {}
    # Names of guests are not told: there may be as many of them as somebody likes.
    return Counter((utf8(p.reader.partition(" ")[0]),) for p in snapshot.problems)


def _starved(scrape: Scrape) -> Value:
    found = Counter((str(s.cpu), utf8(s.guest)) for s in scrape.state.starved)
    return dict(sorted(found.items()))


def _durations(scrape: Scrape) -> Histogram:
    totals = scrape.state.totals
    buckets, count = [], 0
    for bound, number in zip((*map(str, BUCKETS), "+Inf"), totals.durations, strict=True):
        count += number
        buckets.append((bound, float(count)))
    return Histogram(buckets, totals.duration_sum)


FAMILIES: tuple[Family[Any], ...] = (
    Family(
        "vsrtune_build_info", "info", "", DAEMON,
        "Version of vsrtune.",
        lambda _: _info(__version__), ("version",),
    ),
    # -- threads
    Family(
        "vsrtune_thread_info", "info", "", TASK,
        "Tid, scheduling class and allowed CPUs of each thread, and how sure its interface is.",
        _thread_info, ("class", "cpus", "mapping"),
    ),
    Family(
        "vsrtune_thread_cpu_seconds_total", "counter", "seconds", THREAD,
        "CPU time the thread has used.",
        lambda t: t.thread.cpu_ns / 1e9,
    ),
    Family(
        "vsrtune_thread_wait_seconds_total", "counter", "seconds", THREAD,
        "Time the thread has waited for a CPU in a run queue.",
        lambda t: t.waited,
    ),
    Family(
        "vsrtune_thread_scheduling_priority", "gauge", "", THREAD,
        "Real-time priority of the thread, 0 when none.",
        lambda t: t.thread.sched.priority if t.thread.sched.cls in REALTIME else 0,
    ),
    Family(
        "vsrtune_thread_deadline_runtime_seconds", "gauge", "seconds", THREAD,
        "CPU time the thread gets in each period; class deadline only.",
        _budget("runtime_ns"),
    ),
    Family(
        "vsrtune_thread_deadline_period_seconds", "gauge", "seconds", THREAD,
        "Period of the thread's budget; class deadline only.",
        _budget("period_ns"),
    ),
    Family(
        "vsrtune_thread_deadline_deadline_seconds", "gauge", "seconds", THREAD,
        "When in each period the runtime is due; class deadline only.",
        _budget("deadline_ns"),
    ),
    Family(
        "vsrtune_thread_deadline_used_ratio", "gauge", "ratio", THREAD,
        "Share of its budget the thread used since the sample before, 1 when throttled.",
        _used,
    ),
    Family(
        "vsrtune_thread_deadline_pending", "gauge", "", THREAD,
        "1 while the thread has to run in its root domain before it can be deadline.",
        _pending,
    ),
    Family(
        "vsrtune_thread_load_ratio", "gauge", "ratio", THREAD,
        "Share of a CPU the thread asked for in the latest windows; placement: auto only.",
        lambda t: mean(t.thread.load) if t.thread.load else None,
    ),
    Family(
        "vsrtune_thread_allowed_cpus", "gauge", "cpus", THREAD,
        "Number of CPUs the thread may run on.",
        lambda t: len(t.thread.affinity),
    ),
    Family(
        "vsrtune_thread_last_cpu", "gauge", "", THREAD,
        "Number of the CPU on which the thread last ran.",
        lambda t: t.thread.last_cpu,
    ),
    Family(
        "vsrtune_root_domain_deadline_booked_cpus", "gauge", "cpus", ROOT_DOMAIN,
        "Bandwidth that deadline threads have booked in the root domain.",
        lambda d: d.booked / UNIT,
    ),
    Family(
        "vsrtune_root_domain_deadline_free_cpus", "gauge", "cpus", ROOT_DOMAIN,
        "Bandwidth the kernel still admits in the root domain.",
        _free,
    ),
    # -- CPUs
    Family(
        "vsrtune_cpu_busy_ratio", "gauge", "ratio", DAEMON,
        "Share of the CPU's time in which it was not idle, since the sample before.",
        lambda s: {(str(cpu),): found.busy for cpu, found in s.state.recent.cpus.items()},
        ("cpu",),
    ),
    Family(
        "vsrtune_cpu_softirq_ratio", "gauge", "ratio", DAEMON,
        "Share of the CPU's time that went to SoftIRQs, since the sample before.",
        lambda s: {(str(cpu),): found.softirq for cpu, found in s.state.recent.cpus.items()},
        ("cpu",),
    ),
    # -- interfaces
    Family(
        "vsrtune_interface_info", "info", "", INTERFACE,
        "How the guest's interface is attached, and to which lower device.",
        lambda i: _info(i.kind.value, i.lower[0] if i.lower else ""), ("kind", "lower"),
    ),
    Family(
        "vsrtune_interface_queue_length_frames", "gauge", "frames", INTERFACE,
        "Length of each ring of the host device (txqueuelen).",
        lambda i: i.txqueuelen,
    ),
    Family(
        "vsrtune_interface_ring_dropped_frames_total", "counter", "frames", DEVICE,
        "Frames for the guest that were dropped because the ring was full.",
        lambda i: i.ring_drops,
    ),
    # -- devices of our kernel module: a counter that it does not have makes no sample
    Family(
        "vsrtune_tap_received_frames_total", "counter", "frames", TAP,
        "Frames for the guest that came to its napi_macvtap device.",
        lambda c: c.rx_received,
    ),
    Family(
        "vsrtune_tap_received_by_origin_frames_total", "counter", "frames", TAP,
        "The same by origin: nic, forwarded (by another guest), broadcast (and multicast), copied.",
        lambda c: {(origin,): frames for origin, frames in c.origins}, ("origin",),
    ),
    Family(
        "vsrtune_tap_diverted_frames_total", "counter", "frames", TAP,
        "Frames that another member of the group got because theirs did not read.",
        lambda c: c.rx_diverted,
    ),
    Family(
        "vsrtune_tap_delivered_frames_total", "counter", "frames", TAP,
        "Frames put into a ring of the guest.",
        lambda c: c.rx_delivered,
    ),
    Family(
        "vsrtune_tap_dropped_frames_total", "counter", "frames", TAP,
        "Frames for the guest that were dropped, by the place where they died.",
        lambda c: {(place,): frames for place, frames in c.dropped}, ("place",),
    ),
    Family(
        "vsrtune_tap_own_queue_high_water_frames", "gauge", "frames", TAP,
        "Most frames that ever waited in the device's own queue.",
        lambda c: c.queue_high_water,
    ),
    Family(
        "vsrtune_tap_threaded", "gauge", "", DEVICE,
        "1 when a NAPI thread serves the device's own queue.",
        lambda i: None if i.threaded is None else float(i.threaded != 0),
    ),
    Family(
        "vsrtune_tap_sent_frames_total", "counter", "frames", TAP,
        "Frames from the guest: to the lower device, or straight to a sibling.",
        lambda c: {("lower",): c.tx_packets_lower, ("sibling",): c.tx_to_sibling}, ("to",),
    ),
    Family(
        "vsrtune_tap_send_dropped_frames_total", "counter", "frames", TAP,
        "Frames from the guest that were dropped.",
        lambda c: c.tx_dropped,
    ),
    Family(
        "vsrtune_tap_queue_info", "info", "", TAP_QUEUE,
        "Tid of the thread that last sent through the tap queue; absent before any did.",
        lambda q: _info(str(q.worker_tid)) if q.worker_tid else None, ("worker_tid",),
    ),
    Family(
        "vsrtune_tap_queue_received_frames_total", "counter", "frames", TAP_QUEUE,
        "Frames for the guest directed to the tap queue.",
        lambda q: q.received,
    ),
    Family(
        "vsrtune_tap_queue_delivered_frames_total", "counter", "frames", TAP_QUEUE,
        "Frames put into the ring of the tap queue.",
        lambda q: q.delivered,
    ),
    Family(
        "vsrtune_tap_queue_ring_full_frames_total", "counter", "frames", TAP_QUEUE,
        "Frames dropped because the ring of the tap queue was full.",
        lambda q: q.dropped_ring_full,
    ),
    Family(
        "vsrtune_tap_queue_ring_high_water_frames", "gauge", "frames", TAP_QUEUE,
        "Most frames that ever waited in the ring of the tap queue.",
        lambda q: q.ring_high_water,
    ),
    Family(
        "vsrtune_tap_queue_sent_frames_total", "counter", "frames", TAP_QUEUE,
        "Frames the guest sent through the tap queue.",
        lambda q: q.tx_packets,
    ),
    Family(
        "vsrtune_tap_queue_stalled", "gauge", "", TAP_QUEUE,
        "1 when frames wait in the ring of the tap queue and nobody takes them.",
        lambda q: q.stalled,
    ),
    # -- guests
    Family(
        "vsrtune_guest_tuned", "gauge", "", GUEST,
        "1 when the guest's settings are as its policy says; absent without a policy. Its "
        "attachment does not count.",
        lambda g: float(g.tuned) if g.policy or g.refused else None,
    ),
    Family(
        "vsrtune_guest_drift", "gauge", "", GUEST,
        "Settings of the guest that differ from its policy.",
        lambda g: g.drift,
    ),
    Family(
        "vsrtune_guest_held", "gauge", "", GUEST,
        "Settings somebody changed that are left alone until the next reload.",
        lambda g: g.held,
    ),
    Family(
        "vsrtune_guest_pending", "gauge", "", GUEST,
        "Settings of the guest that can only be made later: when their thread has run, or "
        "libvirt is done with it.",
        lambda g: g.pending,
    ),
    Family(
        "vsrtune_guest_bottleneck", "gauge", "", DAEMON,
        "1 for the stage that limits what the guest forwards, and whether that is sure.",
        _bottlenecks, ("domain", "stage", "where", "sure"),
    ),
    Family(
        "vsrtune_guest_step_level", "gauge", "", GUEST,
        "How far the guest is stepped down: 0 not at all, 1 rr, 2 other, 3 undone.",
        lambda g: g.step.level.number if g.step is not None else 0,
    ),
    Family(
        "vsrtune_drift", "gauge", "", DAEMON,
        "Settings somebody has changed since, by what is done about it and who it was.",
        _drifts, ("domain", "setting", "rule", "by"),
    ),
    Family(
        "vsrtune_unread", "gauge", "", DAEMON,
        "What the last pass could not read, by its reader: libvirt, domain, guest, proc, net, ...",
        _unread, ("reader",),
    ),
    Family(
        "vsrtune_starved_threads", "gauge", "", DAEMON,
        "Threads of others that do not get to run on the CPU, which the guest holds.",
        _starved, ("cpu", "domain"),
    ),
    # -- guests of groups that the daemon watches
    Family(
        "vsrtune_group_guest_faulty", "gauge", "", GROUP_GUEST,
        "1 while a router gets no frames, or a balancer does not forward or lacks rules.",
        lambda g: float(bool(g.fault)),
    ),
    Family(
        "vsrtune_group_guest_faults_total", "counter", "", GROUP_GUEST,
        "How often that began.",
        lambda g: g.faults,
    ),
    # -- the daemon
    Family(
        "vsrtune_step_downs_total", "counter", "", DAEMON,
        "How often a guest was stepped down by one level.",
        lambda s: s.state.totals.step_downs,
    ),
    Family(
        "vsrtune_policies", "gauge", "", DAEMON,
        "Number of policies in use.",
        lambda s: s.state.policies,
    ),
    Family(
        "vsrtune_policy_reload_success", "gauge", "", DAEMON,
        "1 when the policies were read without error last time, 0 when older ones are kept.",
        lambda s: float(s.state.reload_success),
    ),
    Family(
        "vsrtune_reconcile_duration_seconds", "histogram", "seconds", DAEMON,
        "Time a pass over the host takes.",
        _durations,
    ),
    Family(
        "vsrtune_reconcile_last_timestamp_seconds", "gauge", "seconds", DAEMON,
        "When the last pass ended, since the epoch.",
        lambda s: s.state.last_pass,
    ),
    Family(
        "vsrtune_reconcile_errors_total", "counter", "", DAEMON,
        "Passes that ended with an error.",
        lambda s: s.state.totals.pass_errors,
    ),
    Family(
        "vsrtune_writes_total", "counter", "", DAEMON,
        "Settings written to the host.",
        lambda s: s.state.totals.writes,
    ),
    Family(
        "vsrtune_write_errors_total", "counter", "", DAEMON,
        "Settings that could not be written.",
        lambda s: s.state.totals.write_errors,
    ),
    Family(
        "vsrtune_corrections_total", "counter", "", DAEMON,
        "Settings written again because something else had changed them.",
        lambda s: s.state.totals.corrections,
    ),
    Family(
        "vsrtune_placement_moves_total", "counter", "", DAEMON,
        "Threads moved from one CPU to another.",
        lambda s: s.state.totals.moves,
    ),
    Family(
        "vsrtune_http_refused_connections_total", "counter", "", DAEMON,
        "Connections to this server that were closed at once because too many were open.",
        lambda s: s.refused,
    ),
)  # fmt: skip


def collect(scrape: Scrape) -> list[Any]:
    """All families for prometheus_client, including those without samples."""
    rows: dict[MetricSubject[Any], list[tuple[dict[str, str], Any]]] = {}
    found = []
    for family in FAMILIES:
        if family.subject not in rows:
            rows[family.subject] = family.subject.rows(scrape)
        found.append(_collected(family, rows[family.subject]))
    return found


def _collected(family: Family[Any], rows: list[tuple[dict[str, str], Any]]) -> Any:
    from prometheus_client import core

    metric = _empty(family)
    for labels, one in rows:
        found = family.value(one)
        if isinstance(found, Histogram):
            metric.add_metric([], found.buckets, found.total)
        elif isinstance(found, Mapping):
            metric.samples += [
                core.Sample(family.name, labels | labelled(family.own, own), number)
                for own, number in found.items()
                if number is not None
            ]
        elif found is not None:
            metric.samples.append(core.Sample(family.name, labels, found))
    return metric


def _empty(family: Family[Any]) -> Any:
    from prometheus_client import core

    # The library adds the suffixes _info and _total itself.
    if family.kind == "info":
        return core.InfoMetricFamily(family.name.removesuffix("_info"), family.help)
    make = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }[family.kind]
    return make(family.name, family.help, unit=family.unit)
