"""Two samples as one frame: loads, rates, what stands where, and the text of all that."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, ClassVar

import golden
import pytest
import shell_samples as samples
import top_scene
from top_samples import GOLDEN, busy, sample, with_nic

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import Irq, Role, Sched, SchedClass, ThreadKey
from vsrtune.model.host import SoftirqThread
from vsrtune.model.load import CpuTimes, DropPlace, FrameRates, GuestFrames
from vsrtune.model.snapshot import Problem
from vsrtune.views import layout, top_tables
from vsrtune.views.host_view import ThreadView, Use
from vsrtune.views.top_frame import Frame, Resident, make_frame

RING = DropPlace("macvtap100", "ring", "vr1")


def thread(frame: Frame, label: str) -> ThreadView:
    (view,) = [v for v in frame.threads if v.label == label]
    return view


def on(frame: Frame, cpu: int) -> tuple[Resident, ...]:
    (row,) = [r for r in frame.cpus if r.cpu == cpu]
    return row.residents


def text(frame: Frame) -> str:
    return "\n".join("\n".join(layout.lines(t)) + "\n" for t in top_tables.tables(frame))


def test_the_recorded_host_as_text() -> None:
    golden.matches(GOLDEN / "plain.txt", text(top_scene.frame()))


class TestThreads:
    seen = samples.snapshot()
    first = sample(seen, 0, {100: (0, 0), 101: (1, 0), 102: (3, 1)})
    last = sample(seen, 2, {100: (0.01, 0), 101: (2.5, 0.25), 102: (3, 1.5)})

    def test_load_and_wait_are_shares_of_the_time_between(self) -> None:
        frame = make_frame(self.first, self.last)
        assert frame.seconds == 2
        assert thread(frame, "vcpu 0").use == Use(0.75, 0.125)
        assert thread(frame, "vhost macvtap100/0").use == Use(0.0, 0.25)

    def test_each_thread_has_its_own_time(self) -> None:
        late = {k: replace(r, at_ns=r.at_ns + 10**9) for k, r in self.last.threads.items()}
        frame = make_frame(self.first, replace(self.last, threads=late))
        assert thread(frame, "vcpu 0").use.load == 0.5

    def test_one_sample_tells_where_everything_is_and_no_load(self) -> None:
        frame = make_frame(self.first, self.first)
        assert frame.seconds == 0
        assert [v.label for v in frame.threads] == ["vcpu 0", "vhost macvtap100/0"]
        assert {(v.thread.last_cpu, v.use) for v in frame.threads} == {(0, Use())}
        assert "measuring" in top_tables.headline(frame)

    def test_a_thread_that_is_new_has_no_load_yet(self) -> None:
        known = {k: r for k, r in self.first.threads.items() if k.tid != 102}
        frame = make_frame(replace(self.first, threads=known), self.last)
        assert thread(frame, "vhost macvtap100/0").use == Use()
        assert thread(frame, "vcpu 0").use.load == 0.75

    def test_other_threads_are_told_while_they_do_something(self) -> None:
        assert "emulator" not in {v.label for v in make_frame(self.first, self.last).threads}
        much = sample(self.seen, 2, {100: (0.02, 0), 101: (1, 0), 102: (3, 1)})
        assert thread(make_frame(self.first, much), "emulator").use.load == 0.01

    def test_a_thread_on_an_interrupt_cpu_is_marked(self) -> None:
        assert thread(make_frame(self.first, self.last), "vcpu 0").beside_interrupts
        elsewhere = with_nic(self.seen, irqs=(Irq(24, "p0-rx-0", samples.ALL, CpuSet([3])),))
        frame = make_frame(self.first, replace(self.last, snapshot=elsewhere))
        assert not thread(frame, "vcpu 0").beside_interrupts

    @pytest.mark.parametrize(("ran", "share", "throttled"), [(0.2, 1.0, True), (0.1, 0.5, False)])
    def test_budgets(self, ran: float, share: float, throttled: bool) -> None:
        sched = Sched(SchedClass.DEADLINE, runtime_ns=1, deadline_ns=10, period_ns=10)
        (guest,) = self.seen.guests
        threads = tuple(
            replace(t, sched=sched) if t.role is Role.VHOST else t for t in guest.threads
        )
        seen = replace(self.seen, guests=(replace(guest, threads=threads),))
        frame = make_frame(
            sample(seen, 0, {102: (1, 0), 101: (0, 0)}),
            sample(seen, 2, {102: (1 + ran, 0), 101: (0, 0)}),
        )
        use = thread(frame, "vhost macvtap100/0").use
        assert (use.budget, use.throttled) == (share, throttled)
        assert thread(frame, "vcpu 0").use.budget is None
        assert ("throttled" in text(frame)) == throttled


class TestCpus:
    def test_what_sits_where_and_what_for(self) -> None:
        ksoftirqd = SoftirqThread(ThreadKey(33, 33, 5), 2, Sched())
        seen = samples.snapshot()
        seen = replace(seen, host=replace(seen.host, softirq=(ksoftirqd,)))
        frame = make_frame(
            sample(seen, 0, {33: (0, 0), 101: (0, 0)}, interrupts={24: 100}),
            sample(seen, 2, {33: (1, 0), 101: (1, 0)}, interrupts={24: 2100}),
        )
        assert [r.use for r in frame.cpus] == ["interrupts", "", "", ""]
        assert [top_tables.resident_text(r) for r in on(frame, 0)] == [
            "irq 24 p0-rx-0 (vr1) 1,000/s",
            "vr1 vcpu 0 50.0%",
            "vr1 vhost macvtap100/0",
        ]
        assert [top_tables.resident_text(r) for r in on(frame, 2)] == ["ksoftirqd/2 50.0%"]

    def test_where_interrupts_are_is_assumed_when_nothing_tells(self) -> None:
        seen = with_nic(samples.snapshot(), irqs=())
        assert make_frame(sample(seen, 0, {}), sample(seen, 1, {})).cpus[0].use == "interrupts?"
        seen = with_nic(seen, rx_cpus=CpuSet([1]))
        frame = make_frame(sample(seen, 0, {}), sample(seen, 1, {}))
        assert [r.use for r in frame.cpus] == ["guests", "interrupts", "", ""]
        assert on(frame, 1) == (Resident("softirq", "softirq p0", ("vr1",)),)

    def test_busy_and_softirq_shares(self) -> None:
        seen = samples.snapshot()
        frame = make_frame(
            sample(seen, 0, {}, cpus={0: CpuTimes(1000, 800, 100), 1: CpuTimes(5, 5, 0)}),
            sample(seen, 2, {}, cpus={0: CpuTimes(1200, 850, 180), 1: CpuTimes(5, 5, 0)}),
        )
        assert (frame.cpus[0].busy, frame.cpus[0].softirq) == (0.75, 0.4)
        assert (frame.cpus[1].busy, frame.cpus[2].busy) == (None, None)


class TestDrops:
    seen = samples.snapshot(samples.guest(), samples.guest("vr2", 200))

    def frame(self, before: dict[DropPlace, int], after: dict[DropPlace, int], *only: str) -> Frame:
        first = sample(self.seen, 0, {}, before)
        return make_frame(first, sample(self.seen, 2, {}, after), frozenset(only))

    def test_rates_and_the_fastest_first(self) -> None:
        backlog, missed = DropPlace("CPU 0", "backlog"), DropPlace("p0", "rx_missed_errors")
        frame = self.frame({RING: 9, backlog: 0, missed: 0}, {RING: 9, backlog: 50, missed: 0})
        found = [(d.where, d.place, d.guest, d.rate, d.total) for d in frame.drops]
        assert found == [("CPU 0", "backlog", "", 25.0, 50), ("macvtap100", "ring", "vr1", 0.0, 9)]
        assert "25 frames/s dropped" in top_tables.headline(frame)

    def test_a_counter_that_is_new_or_was_reset_has_no_false_rate(self) -> None:
        assert self.frame({}, {RING: 1000}).drops[0].rate is None
        assert self.frame({RING: 1000}, {RING: 10}).drops[0].rate == 0.0

    def test_only_a_guest_has_its_own_and_what_it_shares(self) -> None:
        other, shared = DropPlace("macvtap200", "ring", "vr2"), DropPlace("p0", "rx_dropped")
        frame = self.frame({}, {RING: 1, other: 2, shared: 3}, "vr1")
        assert {d.where for d in frame.drops} == {"macvtap100", "p0"}


class TestGuests:
    def test_the_busiest_first_and_equals_by_name(self) -> None:
        frame = make_frame(*busy(5))
        assert frame.guests == ("vr4", "vr3", "vr2", "vr1", "vr0")
        assert [r.guest for r in frame.threads][::2] == list(frame.guests)

    def test_one_of_many_with_all_that_sits_on_its_cpu(self) -> None:
        first, last = busy(3)
        frame = make_frame(first, last, frozenset(["vr1"]))
        assert {r.guest for r in frame.threads} == {"vr1"}
        assert {g for r in on(frame, 0) for g in r.guests if r.kind == "thread"} == {
            "vr0",
            "vr1",
            "vr2",
        }


class TestRates:
    first, second = samples.guest(), samples.guest("vr2", 200)
    seen = samples.snapshot(first, second)
    before: ClassVar = {"macvtap100": GuestFrames(50, 10, 40), "macvtap200": GuestFrames(9, 9, 9)}
    after: ClassVar = before | {"macvtap100": GuestFrames(3050, 1010, 2041)}

    def frame(self, after: dict[str, GuestFrames], *, shared: bool = False) -> Frame:
        seen = self.seen
        if shared:
            same = replace(self.second, interfaces=self.first.interfaces)
            seen = replace(seen, guests=(self.first, same))
        return make_frame(
            replace(sample(seen, 0, {}), frames=self.before),
            replace(sample(seen, 2, {}), frames=after),
        )

    def test_a_guest_forwards_what_it_sends(self) -> None:
        frame = self.frame(self.after)
        assert frame.rates == {"vr1": FrameRates(1000.5, 500), "vr2": FrameRates(0, 0)}
        assert top_tables.rate_table(frame).rows == [("vr1", "1,000", "500"), ("vr2", "0", "0")]

    def test_counters_that_begin_anew_or_are_of_several_guests_tell_no_rate(self) -> None:
        anew = self.after | {"macvtap100": GuestFrames(60, 0, 50)}
        assert list(self.frame(anew).rates) == ["vr2"]
        assert top_tables.rate_table(self.frame(anew)).rows[0] == ("vr1", "-", "-")
        gone = {name: count for name, count in self.after.items() if name != "macvtap200"}
        assert list(self.frame(gone).rates) == ["vr1"]
        assert self.frame(self.after, shared=True).rates == {}
        assert "forwarded" not in text(self.frame(self.after, shared=True))


class TestBottlenecks:
    """What of the samples each guest's path is judged by."""

    first, second = samples.guest(), samples.guest("vr2", 200)
    seen = samples.snapshot(first, second)
    frames: ClassVar = {"macvtap100": GuestFrames(2000, 0, 0), "macvtap200": GuestFrames(0, 0, 0)}

    def frame(self, drops: dict[DropPlace, int], full_cpu: int = 0, **changed: Any) -> Frame:
        seen = replace(self.seen, **changed)
        cpus = {cpu: CpuTimes(0, 0, 0) for cpu in range(4)}
        full = cpus | {full_cpu: CpuTimes(200, 0, 190)}
        before = sample(seen, 0, {101: (0, 0), 201: (0, 0)}, dict.fromkeys(drops, 0), cpus)
        after = sample(seen, 2, {101: (0.2, 0), 201: (0.2, 0)}, drops, full)
        nothing = dict.fromkeys(self.frames, GuestFrames())
        return make_frame(replace(before, frames=nothing), replace(after, frames=self.frames))

    def stages(self, drops: dict[DropPlace, int], **changed: Any) -> dict[str, tuple[str, str]]:
        found = self.frame(drops, **changed).bottlenecks
        return {b.guest: (b.stage.value, b.where) for b in found}

    def test_what_a_cpu_loses_is_of_the_guests_above_its_nic(self) -> None:
        found = self.stages({DropPlace("CPU 0", "backlog"): 9000, DropPlace("CPU 3", "backlog"): 9})
        assert found == {"vr1": ("interrupts", "CPU 0"), "vr2": ("interrupts", "CPU 0")}
        assert self.stages({DropPlace("CPU 3", "backlog"): 9000})["vr1"] == ("outside", "")
        for missed in (DropPlace("p0", f"rx_{why}_errors") for why in ("missed", "fifo")):
            assert self.stages({missed: 9000})["vr1"] == ("interrupts", "CPU 0")

    def test_what_a_nic_of_several_queues_misses_counts_once_on_its_fullest_cpu(self) -> None:
        irqs = tuple(Irq(24 + n, f"p0-rx-{n}", samples.ALL, CpuSet([3 - n])) for n in range(4))
        host = with_nic(self.seen, irqs=irqs).host
        missed = DropPlace("p0", "rx_missed_errors")
        assert self.stages({missed: 8}, host=host)["vr1"] == ("outside", "")
        assert self.stages({missed: 12}, host=host)["vr1"] == ("interrupts", "CPU 0")
        elsewhere = self.frame({missed: 12}, 2, host=host).bottlenecks[0]
        assert elsewhere.why == "CPU 2 loses 6 frames/s before the tap; 95% SoftIRQ"

    def test_a_ring_is_of_its_guest_alone(self) -> None:
        found = self.stages({RING: 1000})
        assert found == {"vr1": ("tap ring", "macvtap100"), "vr2": ("outside", "")}

    def test_what_a_lower_device_cannot_send(self) -> None:
        assert self.stages({DropPlace("p0", "tx_dropped"): 900})["vr1"] == ("outside", "p0")

    def test_a_device_of_several_guests_tells_of_none(self) -> None:
        same = replace(self.second, interfaces=self.first.interfaces)
        assert self.stages({RING: 1000}, guests=(self.first, same)) == {}

    def test_one_sample_tells_nothing(self) -> None:
        only = sample(self.seen, 0, {})
        assert make_frame(only, only).bottlenecks == ()


def test_a_host_without_guests() -> None:
    seen = replace(samples.snapshot(), guests=(), problems=(Problem("libvirt", "is away"),))
    shown = text(make_frame(sample(seen, 0, {}), sample(seen, 2, {})))
    assert "no guest to show" in shown
    assert "libvirt: is away" in shown


def test_the_json_of_the_recorded_host() -> None:
    """Its values are those of the text; these are what the text leaves out."""
    data = json.loads(json.dumps(top_tables.data(top_scene.frame())))
    golden.matches(GOLDEN / "frame-keys.txt", golden.keys(data))
    assert data["threads"][2] == {
        "guest": "vr1", "thread": "vhost macvtap1/0", "role": "vhost", "tid": 436, "cpu": 2,
        "allowed": "1-2", "sched": "deadline:2ms/20ms", "load": 0.0998, "wait": 0.244,
        "budget": 0.998, "throttled": True, "pending": False, "beside_interrupts": False,
    }  # fmt: skip
    assert data["cpus"][0]["residents"][0] == {
        "kind": "irq", "label": "irq 41 p0-rx-0", "guests": ["vr1", "vr2"], "load": None,
        "rate": 12056.0,
    }  # fmt: skip
