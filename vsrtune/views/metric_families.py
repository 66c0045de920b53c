"""Prometheus metrics of the daemon: from the latest DaemonState, never from the host.

FAMILIES is the list that docs/metrics.md explains; a test compares the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vsrtune import __version__
from vsrtune.model.daemon_state import BUCKETS, DaemonState
from vsrtune.model.deadline import UNIT
from vsrtune.model.guest import REALTIME, Guest, SchedClass, Thread, ThreadKey
from vsrtune.model.host import Host
from vsrtune.model.load import mean
from vsrtune.model.root_domains import books, waits_for_domain
from vsrtune.views import module_metrics

_THREAD = ("domain", "role", "vcpu", "target_device", "queue", "tid")
_INTERFACE = ("domain", "target_device")


@dataclass(frozen=True)
class Family:
    """One metric family. ``name`` is without the ``_total`` and ``_info`` suffixes."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str

    @property
    def exposed(self) -> str:
        """The name as it appears in the exposition."""
        suffix = {"counter": "_total", "info": "_info"}.get(self.kind, "")
        return f"vsrtune_{self.name}{suffix}"


FAMILIES = {
    f.name: f
    for f in (
        Family("build", "info", ("version",), "Version of vsrtune."),
        Family(
            "thread_cpu_seconds", "counter", _THREAD, "CPU time the thread has used, in seconds."
        ),
        Family(
            "thread",
            "info",
            (*_THREAD, "class", "cpus", "mapping"),
            "Scheduling class and allowed CPUs of the thread, and how sure its interface is.",
        ),
        Family(
            "thread_scheduling_priority",
            "gauge",
            _THREAD,
            "Real-time priority of the thread, 0 when none.",
        ),
        Family(
            "thread_deadline_runtime_seconds",
            "gauge",
            _THREAD,
            "CPU time the thread gets in each period, in seconds; class deadline only.",
        ),
        Family(
            "thread_deadline_period_seconds",
            "gauge",
            _THREAD,
            "Period of the thread's budget, in seconds; class deadline only.",
        ),
        Family(
            "thread_deadline_deadline_seconds",
            "gauge",
            _THREAD,
            "When in each period the runtime is due, in seconds; class deadline only.",
        ),
        Family(
            "thread_deadline_used_ratio",
            "gauge",
            _THREAD,
            "Share of its budget the thread used since the pass before, 1 when throttled.",
        ),
        Family(
            "thread_deadline_pending",
            "gauge",
            _THREAD,
            "1 while the thread has to run in its root domain before it can be deadline.",
        ),
        Family(
            "root_domain_deadline_booked_ratio",
            "gauge",
            ("cpus", "cgroup"),
            "Bandwidth that deadline threads have booked in the root domain, in CPUs.",
        ),
        Family(
            "root_domain_deadline_free_ratio",
            "gauge",
            ("cpus", "cgroup"),
            "Bandwidth the kernel still admits in the root domain, in CPUs.",
        ),
        Family(
            "thread_load_ratio",
            "gauge",
            _THREAD,
            "Share of a CPU the thread asked for in the latest windows; placement: auto only.",
        ),
        Family("thread_allowed_cpus", "gauge", _THREAD, "Number of CPUs the thread may run on."),
        Family("thread_last_cpu", "gauge", _THREAD, "CPU on which the thread last ran."),
        Family(
            "interface_queue_length",
            "gauge",
            _INTERFACE,
            "Length of each ring of the host device (txqueuelen), in frames.",
        ),
        Family(
            "interface_ring_drops",
            "counter",
            _INTERFACE,
            "Frames for the guest that were dropped because the ring was full.",
        ),
        Family(
            "interface",
            "info",
            (*_INTERFACE, "kind", "lower"),
            "How the guest's interface is attached, and to which lower device.",
        ),
        *(Family(*family) for family in module_metrics.FAMILIES),
        Family(
            "guest_tuned", "gauge", ("domain", "source"), "1 when the guest is as its policy says."
        ),
        Family(
            "guest_drift",
            "gauge",
            ("domain", "source"),
            "Settings of the guest that differ from its policy.",
        ),
        Family(
            "drift",
            "gauge",
            ("domain", "setting", "rule", "by"),
            "Settings somebody has changed since, by what is done about it and who it was.",
        ),
        Family(
            "guest_held",
            "gauge",
            ("domain", "source"),
            "Settings somebody changed that are left alone until the next reload.",
        ),
        Family(
            "guest_pending",
            "gauge",
            ("domain", "source"),
            "Settings of the guest that can only be made later: when their thread has run, or "
            "libvirt is done with it.",
        ),
        Family(
            "guest_step_level",
            "gauge",
            ("domain", "source"),
            "How far the guest is stepped down: 0 not at all, 1 rr, 2 other, 3 undone.",
        ),
        Family("step_downs", "counter", (), "How often a guest was stepped down by one level."),
        Family(
            "starved_threads",
            "gauge",
            ("cpu", "domain"),
            "Threads of others that do not get to run on the CPU, which the guest holds.",
        ),
        Family("policies", "gauge", (), "Number of policies in use."),
        Family(
            "policy_reload_success",
            "gauge",
            (),
            "1 when the policies were read without error last time, 0 when older ones are kept.",
        ),
        Family(
            "reconcile_duration_seconds",
            "histogram",
            (),
            "Time a pass over the host takes, in seconds.",
        ),
        Family(
            "reconcile_last_timestamp_seconds",
            "gauge",
            (),
            "When the last pass ended, in seconds since the epoch.",
        ),
        Family("reconcile_errors", "counter", (), "Passes that ended with an error."),
        Family("writes", "counter", (), "Settings written to the host."),
        Family("write_errors", "counter", (), "Settings that could not be written."),
        Family(
            "corrections",
            "counter",
            (),
            "Settings written again because something else had changed them.",
        ),
        Family("placement_moves", "counter", (), "Threads moved from one CPU to another."),
        Family(
            "placement_last_moves",
            "gauge",
            (),
            "Threads that the last pass with any moved from one CPU to another.",
        ),
        Family(
            "http_refused_connections",
            "counter",
            (),
            "Connections to this server that were closed at once because too many were open.",
        ),
    )
}


def families(state: DaemonState, refused: int = 0) -> list[Any]:
    """All metric families, including those without samples; ``refused`` is the number of
    connections that were closed unanswered."""
    out = {name: _empty(family) for name, family in FAMILIES.items()}
    out["build"].add_metric([], {"version": __version__})
    if state.snapshot is not None:
        sharing = module_metrics.Sharing(state.snapshot.guests)
        budgets = dict(state.budgets)
        for guest in state.snapshot.guests:
            _add_guest(out, guest, state.snapshot.host, sharing, budgets)
        for domain in books(state.snapshot):
            values = [str(domain.cpus), domain.made_by]
            out["root_domain_deadline_booked_ratio"].add_metric(values, domain.booked / UNIT)
            if domain.admitted is not None:
                free = (domain.admitted - domain.booked) / UNIT
                out["root_domain_deadline_free_ratio"].add_metric(values, free)
    for one in state.guests:
        labels = [_label(one.ref), one.source]
        out["guest_tuned"].add_metric(labels, float(one.tuned))
        out["guest_drift"].add_metric(labels, one.drift)
        out["guest_held"].add_metric(labels, one.held)
        out["guest_pending"].add_metric(labels, one.pending)
        level = one.step.level.number if one.step is not None else 0
        out["guest_step_level"].add_metric(labels, level)
    drifts = Counter((_label(d.target.guest), d.setting, d.rule.value, d.by) for d in state.drifts)
    for names, number in sorted(drifts.items()):
        out["drift"].add_metric(list(names), number)
    starved = Counter((str(s.cpu), _label(s.guest)) for s in state.starved)
    for on, number in sorted(starved.items()):
        out["starved_threads"].add_metric(list(on), number)
    totals = state.totals
    out["step_downs"].add_metric([], totals.step_downs)
    out["http_refused_connections"].add_metric([], refused)
    out["policies"].add_metric([], state.policies)
    out["policy_reload_success"].add_metric([], float(state.reload_success))
    out["reconcile_last_timestamp_seconds"].add_metric([], state.last_pass)
    out["reconcile_errors"].add_metric([], totals.pass_errors)
    out["writes"].add_metric([], totals.writes)
    out["write_errors"].add_metric([], totals.write_errors)
    out["corrections"].add_metric([], totals.corrections)
    out["placement_moves"].add_metric([], totals.moves)
    out["placement_last_moves"].add_metric([], state.last_moves)
    buckets, count = [], 0
    for bound, number in zip((*map(str, BUCKETS), "+Inf"), totals.durations, strict=True):
        count += number
        buckets.append((bound, count))
    out["reconcile_duration_seconds"].add_metric([], buckets, totals.duration_sum)
    return list(out.values())


def _empty(family: Family) -> Any:
    from prometheus_client import core

    make = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
        "info": core.InfoMetricFamily,
    }[family.kind]
    labels = () if family.kind == "info" else family.labels
    return make(f"vsrtune_{family.name}", family.help, labels=labels)


def _add_budget(
    out: dict[str, Any], values: list[str], thread: Thread, host: Host, used: float | None
) -> None:
    sched = thread.sched
    if waits_for_domain(host, thread):
        out["thread_deadline_pending"].add_metric(values, 1)
    if sched.cls is not SchedClass.DEADLINE:
        return
    out["thread_deadline_pending"].add_metric(values, 0)
    for name in ("runtime", "period", "deadline"):
        seconds = getattr(sched, f"{name}_ns") / 1e9
        out[f"thread_deadline_{name}_seconds"].add_metric(values, seconds)
    if used is not None:
        out["thread_deadline_used_ratio"].add_metric(values, used)


def _add_guest(
    out: dict[str, Any],
    guest: Guest,
    host: Host,
    sharing: module_metrics.Sharing,
    budgets: Mapping[ThreadKey, float],
) -> None:
    domain = _label(guest.ref)
    for thread in guest.threads:
        values = _thread_labels(domain, thread)
        out["thread_cpu_seconds"].add_metric(values, thread.cpu_ns / 1e9)
        real_time = thread.sched.cls in REALTIME
        out["thread_scheduling_priority"].add_metric(
            values, thread.sched.priority if real_time else 0
        )
        _add_budget(out, values, thread, host, budgets.get(thread.key))
        if thread.load:
            out["thread_load_ratio"].add_metric(values, mean(thread.load))
        out["thread_allowed_cpus"].add_metric(values, len(thread.affinity))
        out["thread_last_cpu"].add_metric(values, thread.last_cpu)
        out["thread"].add_metric(
            [],
            {
                **dict(zip(_THREAD, values, strict=True)),
                "class": thread.sched.cls.value,
                "cpus": str(thread.affinity),
                "mapping": thread.confidence.value if thread.confidence is not None else "",
            },
        )
    for interface in guest.interfaces:
        values = [domain, _label(interface.target)]
        out["interface_queue_length"].add_metric(values, interface.txqueuelen)
        if sharing.of_device(guest, interface):
            out["interface_ring_drops"].add_metric(values, interface.ring_drops)
        module_metrics.add(out, values, guest, interface, sharing)
        out["interface"].add_metric(
            [],
            {
                **dict(zip(_INTERFACE, values, strict=True)),
                "kind": interface.kind.value,
                "lower": _label(interface.lower[0] if interface.lower else ""),
            },
        )


def _thread_labels(domain: str, thread: Thread) -> list[str]:
    vcpu = thread.index if thread.role.value == "vcpu" else None
    return [
        domain,
        thread.role.value,
        "" if vcpu is None else str(vcpu),
        _label(thread.interface or ""),
        "" if thread.queue is None else str(thread.queue),
        str(thread.key.tid),
    ]


def _label(text: str) -> str:
    """Escape bytes that are not UTF-8 (os.fsdecode), because label values must be UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
