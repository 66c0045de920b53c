"""guard.py: the right guest is stepped down once, on a made-up /proc,
and what is read of a real one."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import shell_samples as samples
from shell_samples import Clock

from vsrtune.core.cpuset import CpuSet
from vsrtune.daemon.guard import MOST, GuardSampler, StandstillGuard
from vsrtune.host.filesystem import LiveRoot
from vsrtune.model.daemon_state import DaemonState, GuestState, Starved
from vsrtune.model.guest import Guest, NicKind, Role, Sched, SchedClass, ThreadKey
from vsrtune.model.plan import Drift, DriftRule
from vsrtune.model.stepdown import Step, StepLevel
from vsrtune.model.targets import ThreadAffinity
from vsrtune.plan.safety.starvation import GuardedThread, Subject

PF_KTHREAD = 0x00200000
FIFO = Sched(SchedClass.FIFO, 7, reset_on_fork=True)
# A whole CPU, which the kernel admits where sched_rt_runtime_us is -1.
WHOLE = Sched(SchedClass.DEADLINE, 0, 0, True, 10_000_000, 10_000_000, 10_000_000)


class Root:
    """/proc in memory. A thread is (state, cpu, run time in ns)."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.reads: list[str] = []

    def thread(
        self,
        key: ThreadKey,
        state: str,
        cpu: int,
        ran: int = 0,
        *,
        name: str = "x",
        flags: int = 0,
        threads: int = 1,
    ) -> None:
        fields = [state, "1", "1", "1", "0", "-1", str(flags), *["0"] * 4]
        fields += [str(ran // 10_000_000), "0", "0", "0", "20", "0", str(threads), "0"]
        fields += [str(key.start_time), *["0"] * 16, str(cpu), "0"]
        line = f"{key.tid} ({name}) {' '.join(fields)}\n"
        self.files[f"/proc/{key.pid}/task/{key.tid}/stat"] = line
        self.files[f"/proc/{key.pid}/task/{key.tid}/schedstat"] = f"{ran} 0 1\n"
        if key.pid == key.tid:
            self.files[f"/proc/{key.pid}/stat"] = line

    def read(self, path: str) -> str:
        self.reads.append(path)
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    def listdir(self, path: str) -> list[str]:
        found = {p[len(path) + 1 :].split("/")[0] for p in self.files if p.startswith(f"{path}/")}
        return sorted(found)

    def processes(self) -> list[tuple[str, int]]:
        return [(name, 0) for name in self.listdir("/proc") if name.isdecimal()]


def fifo(guest: Guest, cpu: int = 1, sched: Sched = FIFO) -> Guest:
    """Its vcpu and worker under ``sched`` on one CPU."""
    threads = tuple(
        replace(t, sched=sched, affinity=CpuSet([cpu])) if t.role is not Role.EMULATOR else t
        for t in guest.threads
    )
    return replace(guest, threads=threads)


class Scene:
    """A host with tuned guests, watched by a guard whose steps are only noted."""

    def __init__(self, *names: str) -> None:
        self.root, self.clock = Root(), Clock()
        self.guests = tuple(fifo(samples.guest(n, 100 * i)) for i, n in enumerate(names, 1))
        self.states = [GuestState(n, "libvirt", True, policy="p.yaml") for n in names]
        self.steps: list[tuple[str, str, StepLevel]] = []
        self.starving: list[tuple[Starved, ...]] = []
        self.state = DaemonState()
        self.publish()
        root: Any = self.root
        self.guard = StandstillGuard(
            root, lambda: self.state, lambda *s: self.steps.append(s), self.starving.append,
            self.clock,
        )  # fmt: skip
        self.ran = 0
        # Ticks for which the CPUs were idle, and for how many more at each sample.
        self.idle, self.step = 0.0, 10.0
        self.full = False
        for guest in self.guests:
            for thread in guest.threads:
                self.root.thread(thread.key, "S", 1)

    def publish(self, **changes: object) -> None:
        snapshot = samples.snapshot(*self.guests)
        self.state = DaemonState(snapshot, tuple(self.states), **changes)  # type: ignore[arg-type]

    def level(self, level: StepLevel | None) -> None:
        """A pass has stepped the first guest to a level."""
        step = None if level is None else Step(level, "why")
        self.states[0] = replace(self.states[0], step=step, tuned=step is None)
        self.publish()

    def spin(self, number: int = 0, *, seconds: float = 2.5, victim: int | None = None) -> None:
        """The vcpu of one guest runs all the time, a worker (its own, or another guest's)
        waits."""
        vcpu = self.guests[number].by_role(Role.VCPU)[0]
        other = number if victim is None else victim
        worker = self.guests[other].by_role(Role.VHOST)[0]
        for _ in range(int(seconds * 4)):
            self.ran += 250_000_000
            self.root.thread(vcpu.key, "R", 1, self.ran)
            self.root.thread(worker.key, "R", 1, 5)
            self.update()

    def update(self) -> None:
        self.clock.now += 0.25
        self.idle += 0 if self.full else self.step
        zeroes = "0 0 0 0 0 0"
        cpus = "".join(f"cpu{n} 0 0 0 {int(self.idle) + 7 * (1 - n)} {zeroes}\n" for n in (0, 1))
        self.root.files["/proc/stat"] = f"cpu 0 0 0 9 {zeroes}\n{cpus}intr 1\n"
        self.guard.update()

    def beside(self, name: str, flags: int = PF_KTHREAD, cpu: int = 1) -> ThreadKey:
        """A thread of nobody's that waits."""
        key = ThreadKey(17, 17, 3)
        self.root.thread(key, "R", cpu, 1, name=name, flags=flags)
        return key


def test_a_step_is_asked_for_once_until_it_is_made() -> None:
    scene = Scene("vr1")
    scene.spin()
    assert [guest for guest, _, _ in scene.steps] == ["vr1"]
    assert "vhost macvtap100/0" in scene.steps[0][1]
    scene.level(StepLevel.RR)
    scene.spin(seconds=0.75)
    assert len(scene.steps) == 1, "the level is looked at for a second first"
    scene.spin(seconds=0.75)
    assert [seen for _, _, seen in scene.steps] == [StepLevel.POLICY, StepLevel.RR]
    scene.level(StepLevel.UNDONE)
    scene.spin()
    assert len(scene.steps) == 2, "nothing is left to take"
    scene.level(None)
    scene.spin()
    assert len(scene.steps) == 3, "a reload begins anew"


def test_a_step_that_nobody_makes_is_asked_for_again() -> None:
    scene = Scene("vr1")
    scene.spin(seconds=9)
    assert len(scene.steps) == 2


def test_threads_are_read_while_a_cpu_of_theirs_is_busy() -> None:
    scene = Scene("vr1")
    scene.step = 25
    for _ in range(8):
        scene.update()
    scene.root.reads.clear()
    for _ in range(8):
        scene.update()
    assert not any("task" in path for path in scene.root.reads), "its CPUs are idle"
    scene.step = 0
    scene.spin(seconds=1.5)
    assert [guest for guest, _, _ in scene.steps] == ["vr1"]


def test_who_spins_is_stepped_down_and_not_its_victim() -> None:
    scene = Scene("vr1", "vr2")
    scene.spin(1, victim=0)
    assert [guest for guest, _, _ in scene.steps] == ["vr2"]


@pytest.mark.parametrize("refused", [False, True])
def test_a_guest_that_keeps_its_classes_is_looked_at_whatever_it_is(refused: bool) -> None:
    """One setting that fails or is fought over takes the guard from no realtime thread."""
    scene = Scene("vr1")
    scene.states[0] = replace(scene.states[0], tuned=False, refused=refused)
    scene.publish()
    scene.spin()
    assert [guest for guest, _, _ in scene.steps] == ["vr1"]


def test_a_second_process_of_a_guests_name_takes_no_guard_from_the_first() -> None:
    scene = Scene("vr1")
    twin = samples.guest("vr1", 300)
    scene.guests = (*scene.guests, twin)
    scene.states = [replace(scene.states[0], tuned=False, refused=True)] * 2
    scene.publish()
    scene.spin()
    assert [guest for guest, _, _ in scene.steps] == ["vr1"]


def test_an_untuned_guest_that_libvirt_keeps_waiting_is_not_looked_at() -> None:
    """Nothing is planned for it, so a step down could only make it untuned for good."""
    scene = Scene("vr1")
    scene.guests = (replace(samples.guest("vr1", 100), unconfirmed=True),)
    scene.states[0] = replace(scene.states[0], tuned=False, pending=1)
    scene.publish()
    scene.spin()
    assert scene.steps == []


def test_a_thread_that_its_guest_moved_blames_no_other() -> None:
    scene = Scene("vr1", "vr2")
    worker = scene.guests[0].by_role(Role.VHOST)[0]
    target = ThreadAffinity("vr1", worker.key, "vhost")
    drift = Drift(target, "cpus.vhost", DriftRule.REPORT, "CPUs 0", "CPUs 1", "", "reported")
    scene.publish(drifts=(drift,))
    scene.spin(1, victim=0)
    assert scene.steps == []


@pytest.mark.parametrize("why", ["no policy", "no class"])
def test_a_guest_that_is_not_tuned_is_not_looked_at(why: str) -> None:
    scene = Scene("vr1")
    scene.states[0] = replace(
        scene.states[0], tuned=False, policy="" if why == "no policy" else "p.yaml"
    )
    if why == "no class":
        scene.guests = (samples.guest("vr1", 100),)
    scene.publish()
    scene.spin()
    assert scene.steps == []
    assert not any("task" in path for path in scene.root.reads)


def test_a_thread_id_that_is_somebody_elses_by_now_tells_nothing() -> None:
    scene = Scene("vr1")
    worker = scene.guests[0].by_role(Role.VHOST)[0]
    for _ in range(12):
        scene.root.thread(replace(worker.key, start_time=1), "R", 1, 5)
        scene.update()
    assert scene.steps == []


@pytest.mark.parametrize("sched", [FIFO, WHOLE], ids=str)
def test_a_starving_ksoftirqd_steps_the_guest_down_that_holds_its_cpu(sched: Sched) -> None:
    scene = Scene("vr1", "vr2")
    scene.guests = tuple(fifo(guest, sched=sched) for guest in scene.guests)
    scene.publish()
    scene.full = True
    scene.beside("ksoftirqd/1")
    vcpu = scene.guests[1].by_role(Role.VCPU)[0]
    for n in range(1, 41):
        scene.root.thread(vcpu.key, "R", 1, n * 250_000_000)
        scene.update()
    assert [guest for guest, _, _ in scene.steps][:1] == ["vr2"]
    assert "ksoftirqd/1 (tid 17)" in scene.steps[0][1]
    assert scene.starving[-1] == (Starved(17, "ksoftirqd/1", 1, "vr2", True),)


@pytest.mark.parametrize(
    ("idle_ms", "runtime_us", "held"),
    [
        (50, 950_000, True), (10, 990_000, True), (0, -1, True),
        (50, 990_000, False), (50, 1_000_000, False), (50, -1, False), (100, 950_000, False),
    ],
)  # fmt: skip
def test_a_cpu_that_idles_as_the_limit_makes_it_is_held(
    idle_ms: int, runtime_us: int, held: bool
) -> None:
    """Before 6.12 the limit stops all real-time threads of a CPU, and ktimers is one itself."""
    scene = Scene("vr1")
    host = replace(samples.snapshot().host, sched_rt_runtime_us=runtime_us)
    scene.state = replace(scene.state, snapshot=replace(samples.snapshot(*scene.guests), host=host))
    scene.step = idle_ms / 40
    scene.beside("ktimers/1")
    vcpu = scene.guests[0].by_role(Role.VCPU)[0]
    for n in range(1, 41):
        scene.root.thread(vcpu.key, "R", 1, n * 250_000_000)
        scene.update()
    assert [guest for guest, _, _ in scene.steps][:1] == ["vr1"] * held


def test_a_crowd_that_waits_hides_no_kernel_thread() -> None:
    scene = Scene("vr1")
    scene.full = True
    for n in range(MOST):
        scene.root.thread(ThreadKey(1000 + n, 1000 + n, 3), "R", 1, 1, name="loop", flags=0)
    vcpu = scene.guests[0].by_role(Role.VCPU)[0]
    for n in range(1, 61):
        if n == 20:
            scene.beside("ksoftirqd/1")
        scene.root.thread(vcpu.key, "R", 1, n * 250_000_000)
        scene.update()
    assert "ksoftirqd/1" in scene.steps[0][1]


def test_others_that_starve_are_told_and_nobody_is_stepped_down(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene("vr1")
    scene.full = True
    key = scene.beside("backup", flags=0)
    vcpu = scene.guests[0].by_role(Role.VCPU)[0]

    def run(trial_rounds: int) -> None:
        for _ in range(trial_rounds):
            scene.ran += 250_000_000
            scene.root.thread(vcpu.key, "R", 1, scene.ran)
            scene.update()

    run(60)
    assert scene.steps == []
    assert scene.starving == [(Starved(17, "backup", 1, "vr1"),)]
    told = [r.message for r in caplog.records if "backup" in r.message]
    assert len(told) == 1 and "CPU 1" in told[0] and "vr1" in told[0]
    scene.root.thread(key, "R", 1, 99, name="backup")
    run(4)
    assert scene.starving[-1] == ()


@pytest.mark.parametrize("what", ["idle", "elsewhere", "runs"])
def test_who_does_not_starve_is_not_told_of(what: str) -> None:
    scene = Scene("vr1")
    scene.full = what != "idle"
    key = scene.beside("ksoftirqd/1", cpu=0 if what == "elsewhere" else 1)
    for n in range(60):
        if what == "runs":
            scene.root.thread(key, "R", 1, n, name="ksoftirqd/1", flags=PF_KTHREAD)
        scene.update()
    assert scene.starving == [] and scene.steps == []
    if what == "idle":
        assert "/proc/17/stat" not in scene.root.reads, "nobody is looked for"


def test_the_walk_takes_small_steps_and_meets_everybody() -> None:
    root = Root()
    for pid in range(1, 121):
        root.thread(ThreadKey(pid, pid, 1), "R" if pid % 10 == 0 else "S", 1)
    root.thread(ThreadKey(130, 130, 1), "S", 0, threads=60)
    for tid in range(131, 190):
        root.thread(ThreadKey(130, tid, 1), "R", 1, threads=60)
    whole: Any = root
    walk = GuardSampler(whole).walk({1})
    found: set[int] = set()
    while True:
        before = len(root.reads)
        step = next(walk, None)
        if step is None:
            break
        assert len(root.reads) - before <= 2
        found |= {key.tid for key in step}
    assert found == {*range(10, 121, 10), *range(131, 190)}


def test_counters_are_those_of_the_guest_by_kind() -> None:
    root: Any = Root()
    rows = {
        "a": (100, 30, 40, 3), "b": (100, 30, 40, 3), "c": (100, 30, 40, 3),
    }  # fmt: skip
    lines = [
        f"  {name}: 0 {rx} 0 {lost} 0 0 0 0 0 {tx} 0 {txlost} 0 0 0 0"
        for name, (rx, lost, tx, txlost) in rows.items()
    ]
    root.files["/proc/net/dev"] = "\n".join(["h", "h", *lines])
    found = {}
    for kind, name in (
        (NicKind.MACVTAP, "a"), (NicKind.NAPI_MACVTAP, "b"), (NicKind.TAP, "c"),
    ):  # fmt: skip
        (sight,) = GuardSampler(root).sights([Subject("g", (), ((name, kind),))])
        assert sight.counters is not None
        c = sight.counters
        found[kind] = (c.arrived, c.dropped, c.sent)
    assert found == {
        NicKind.MACVTAP: (100, 30, 40),
        NicKind.NAPI_MACVTAP: (130, 30, 40),
        NicKind.TAP: (43, 3, 100),
    }
    (sight,) = GuardSampler(root).sights([Subject("g", (), (("gone", NicKind.MACVTAP),))])
    assert sight.counters is None


class TestThisHost:
    """On the host that the tests run on."""

    def key(self) -> ThreadKey:
        pid, tid = os.getpid(), threading.get_native_id()
        fields = LiveRoot().read(f"/proc/{pid}/task/{tid}/stat").rpartition(")")[2].split()
        return ThreadKey(pid, tid, int(fields[19]))

    def test_a_thread_that_runs(self) -> None:
        sampler, key = GuardSampler(LiveRoot()), self.key()
        first = sampler.thread(key)
        assert first is not None and first.runnable and first.ran_ns
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        second = sampler.thread(key)
        assert second is not None and second.ran_since(first)
        assert sampler.thread(replace(key, start_time=1)) is None

    def test_cpus_and_threads(self) -> None:
        sampler = GuardSampler(LiveRoot())
        idle = sampler.idle()
        assert set(idle) <= set(range(4096)) and 0 in idle
        found = {key.tid for step in sampler.walk(idle.keys()) for key in step}
        assert threading.get_native_id() in found
        sampled_guest = GuardedThread(self.key(), "x", Role.VHOST, True)
        (sight,) = sampler.sights([Subject("g", (sampled_guest,), (("lo", NicKind.MACVTAP),))])
        assert sight.threads and sight.counters is not None

    def test_the_thread_ends_when_it_is_asked_to_and_survives_a_failure(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        calls: list[int] = []

        def state() -> DaemonState:
            calls.append(1)
            if len(calls) < 3:
                raise RuntimeError("twice the same")
            return DaemonState()

        guard = StandstillGuard(LiveRoot(), state, lambda *_: None)
        guard.start()
        end = time.monotonic() + 10
        while len(calls) < 4 and time.monotonic() < end:
            time.sleep(0.02)
        guard.stop()
        guard.join(10)
        assert len(calls) >= 4 and not guard.is_alive()
        (told,) = [r.getMessage() for r in caplog.records if "check failed" in r.getMessage()]
        assert "is stepped down" in told
