"""The bottlenecks of a recorded host on which time passes, as the daemon reports them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import recorded_hosts
from advanced_root import SECOND, AdvancedRoot, proc_stat

from vsrtune.daemon import load_tracker
from vsrtune.daemon.http import exposition, html
from vsrtune.daemon.load_tracker import LIMITS, BottleneckKeeper
from vsrtune.model.daemon_state import DaemonState, GuestState
from vsrtune.model.guest import Role, Sched, SchedClass, ThreadKey
from vsrtune.model.load import PathStage
from vsrtune.observe.recording import replay
from vsrtune.views.page_data import status_page


class Host:
    """Two guests of two queues; only the first has traffic, more than its vcpus can take."""

    def __init__(self) -> None:
        self.root = AdvancedRoot(recorded_hosts.file("trixie-e1000e"))
        self.seen = replay(self.root.path)
        self.first, self.second = self.seen.guests
        self.keeper = BottleneckKeeper(self.root, lambda: self.root.clock() / SECOND)
        self.state = DaemonState(snapshot=self.seen)
        self.busy = 0
        self.lost = {i.target: 0 for i in self.first.interfaces}
        self.traffic()

    def traffic(self) -> None:
        lines = [f"{n}: 0 {10 * lost} 0 {lost} 0 0 0 0 0 0 0 0" for n, lost in self.lost.items()]
        lines += [f"{i.target}: 0 0 0 0 0 0 0 0 0 0 0 0" for i in self.second.interfaces]
        self.root.set("/proc/net/dev", "\n".join(["h", "h", *lines, ""]))
        self.root.set("/proc/stat", proc_stat({0: (self.busy, 0, 0), 1: (self.busy, 0, 0)}))

    def after(
        self, seconds: float, beside: Mapping[ThreadKey, tuple[float, float]] | None = None
    ) -> DaemonState:
        device = self.first.interfaces[0].target
        self.lost[device] += 10_000
        self.busy += int(100 * seconds)
        vcpus: dict[ThreadKey, tuple[float, float]] = {
            t.key: (0.55, 0.44) if beside else (0.99, 0.01) for t in self.first.by_role(Role.VCPU)
        }
        vcpus.update(beside or {})
        drops = {f"/sys/devices/virtual/net/{device}/statistics/rx_dropped": 10_000}
        self.root.pass_time(seconds, vcpus, drops)
        self.traffic()
        self.state = self.keeper.update(self.state)
        return self.state


def test_it_takes_two_samples() -> None:
    host = Host()
    assert host.keeper.update(host.state).recent.bottlenecks == {}
    assert host.after(LIMITS - 1).recent.bottlenecks == {}
    found = host.after(1).recent.bottlenecks
    assert found[host.first.ref].stage is PathStage.VCPU
    assert found[host.second.ref].stage is PathStage.OUTSIDE


def test_in_metrics_and_on_the_page() -> None:
    host = Host()
    host.state = host.keeper.update(host.state)
    state = host.after(LIMITS)
    text = exposition(state)
    (one,) = [
        line
        for line in text.splitlines()
        if line.startswith("vsrtune_guest_bottleneck{") and f'domain="{host.first.ref}"' in line
    ]
    assert 'stage="vcpu"' in one and 'where="vcpu ' in one and one.endswith(" 1.0")
    waits = [li for li in text.splitlines() if li.startswith("vsrtune_thread_wait_seconds_total{")]
    assert len(waits) == len(set(waits)) >= sum(len(g.by_role(Role.VCPU)) for g in host.seen.guests)


def test_guests_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_tracker, "BATCH", 1)
    host = Host()
    host.state = host.keeper.update(host.state)
    host.after(LIMITS)
    assert host.after(LIMITS).recent.bottlenecks.keys() == {host.first.ref}
    assert host.after(LIMITS).recent.bottlenecks.keys() == {host.first.ref, host.second.ref}


def test_a_device_whose_other_guest_has_another_turn_tells_of_neither(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_tracker, "BATCH", 1)
    host = Host()
    sharing = replace(host.second, interfaces=host.first.interfaces)
    seen = replace(host.seen, guests=(host.first, sharing))
    host.state = host.keeper.update(replace(host.state, snapshot=seen))
    for _ in range(4):
        assert host.after(LIMITS).recent.bottlenecks == {}


def test_a_guests_own_thread_on_the_cpu_is_named() -> None:
    host = Host()
    vcpu, (emulator,) = host.first.by_role(Role.VCPU)[0], host.first.by_role(Role.EMULATOR)
    beside = replace(emulator, affinity=vcpu.affinity, last_cpu=vcpu.last_cpu)
    threads = tuple(beside if t is emulator else t for t in host.first.threads)
    seen = replace(host.seen, guests=(replace(host.first, threads=threads), host.second))
    host.state = host.keeper.update(replace(host.state, snapshot=seen))
    found = host.after(LIMITS, {emulator.key: (0.4, 0.0)}).recent.bottlenecks[host.first.ref]
    assert "emulator" in found.help and "other processes" not in found.help


def test_a_guest_that_went_has_none() -> None:
    host = Host()
    host.state = host.keeper.update(host.state)
    assert host.first.ref in host.after(LIMITS).recent.bottlenecks
    host.state = replace(host.state, snapshot=replace(host.seen, guests=(host.second,)))
    state = host.after(LIMITS)
    assert state.recent.bottlenecks.keys() <= {host.second.ref}
    assert state.recent.waited.keys() <= {t.key for t in host.second.threads}


def test_the_used_share_of_budgets() -> None:
    host = Host()
    ms = 1_000_000
    budget = Sched(SchedClass.DEADLINE, runtime_ns=10 * ms, deadline_ns=20 * ms, period_ns=20 * ms)
    threads = (replace(t, sched=budget) for t in host.first.by_role(Role.VCPU))
    first = replace(host.first, threads=tuple(threads))
    told = tuple(GuestState(g.ref, "libvirt", tuned=True) for g in host.seen.guests)
    seen = replace(host.seen, guests=(first, host.second))
    host.state = host.keeper.update(replace(host.state, snapshot=seen, guests=told))
    assert host.state.recent.budgets == {}
    state = host.after(LIMITS)
    # They ran all the time, which the imitated kernel does not keep them from.
    assert state.recent.budgets == {t.key: 1.98 for t in first.threads}
    (page,) = [g for g in status_page(state)["guests"] if g["name"] == first.ref]
    assert {t["used"] for t in page["threads"]} == {1.98}
    host.state = replace(state, snapshot=replace(seen, guests=(host.second,)))
    assert host.after(LIMITS).recent.budgets == {}


def test_the_page_has_it_beside_the_guest() -> None:
    host = Host()
    told = tuple(GuestState(g.ref, "libvirt", tuned=True) for g in host.seen.guests)
    host.state = host.keeper.update(replace(host.state, guests=told))
    page = status_page(host.after(LIMITS))
    stages = {g["name"]: g["bottleneck"]["stage"] for g in page["guests"]}
    assert stages == {host.first.ref: "vcpu", host.second.ref: "outside"}
    text = html(page)
    assert text.count("Limited by vcpu 0") == text.count("Limited by") == 1
