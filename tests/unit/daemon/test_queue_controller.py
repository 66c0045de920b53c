"""queue_controller.py with the real reconciler, executor and journal, on a host in memory whose
rings drop; its samples on files; its status."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import shell_samples as samples
from fake_host import FakeHost

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import WriteError
from vsrtune.daemon.queue_controller import GLANCE, TICK, QueueKeeper, read_status, write_status
from vsrtune.daemon.reconciler import Reconciler
from vsrtune.execute.journal import Journal
from vsrtune.model.daemon_state import QueueState
from vsrtune.model.guest import NicKind, Role, Sched, SchedClass
from vsrtune.model.load import Crew, QueueSample
from vsrtune.model.targets import TxQueueLen
from vsrtune.observe.samples import SampledGuests, Sampler, crews, sampled_guest
from vsrtune.policy.parser import parse

POLICY = 'guest: "*"\ncpus: {vcpu: 1, vhost: 1}\nqueue: {macvtap: adaptive, min: 20, max: 400}\n'


@dataclass
class Load(Sampler):
    """Counters of a guest that is offered ``load`` times what it can forward; all lengths
    forward the same."""

    host: FakeHost
    load: float = 0.5
    now: float = 1000.0
    looks: int = 0
    received: int = 0
    dropped: int = 0
    ran: int = 0

    def __call__(self) -> float:
        return self.now

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.received += round(20000 * self.load * seconds)
        self.dropped += round(20000 * max(self.load - 1, 0) * seconds)
        self.ran += round(1e9 * min(self.load, 1) * seconds)

    def drops(self, where: SampledGuests) -> int:
        return self.dropped

    def sample(self, where: SampledGuests, at: float) -> QueueSample:
        self.looks += 1
        ran = tuple((tid, self.ran) for _, tid in where.threads)
        return QueueSample(at, self.received, self.dropped, self.received - self.dropped, ran)


@dataclass
class Setting:
    host: FakeHost
    load: Load
    passes: Reconciler
    journal: Journal
    keeper: QueueKeeper
    told: list[tuple[QueueState, ...]]

    @property
    def length(self) -> int:
        return self.host.snapshot.guests[0].interfaces[0].txqueuelen

    def run(self, seconds: float) -> list[int]:
        """Lengths seen, as the daemon's loop would call the keeper."""
        seen = []
        end = self.load.now + seconds
        while self.load.now < end:
            pause = self.keeper.update()
            seen.append(self.length)
            self.load.pass_time(TICK if pause is None else max(pause, 0.01))
        return seen


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    host = FakeHost(samples.guest())
    load = Load(host)
    told: list[tuple[QueueState, ...]] = []
    with Journal.open(tmp_path / "journal.jsonl", samples.BOOT) as journal:
        passes = Reconciler(host, host, journal, (parse(POLICY, "test.yaml"),), clock=load)
        yield Setting(
            host, load, passes, journal, QueueKeeper(passes, load, load, told.append), told
        )


def test_without_an_adaptive_policy_there_is_nothing_to_do(setting: Setting) -> None:
    setting.passes.policies = (parse('guest: "*"\nqueue: {macvtap: 300}\n', "test.yaml"),)
    setting.passes.run()
    assert setting.keeper.update() is None
    assert setting.length == 300


def test_long_and_hardly_looking_while_nothing_is_dropped(setting: Setting) -> None:
    before = setting.host.snapshot
    setting.passes.run()
    assert setting.length == 400
    setting.run(60)
    assert (setting.length, setting.load.looks) == (400, 0)
    assert setting.keeper.update() == pytest.approx(GLANCE, abs=GLANCE)
    assert setting.passes.stop()
    assert setting.host.snapshot == before


def test_short_in_overload_long_after_it_and_the_original_at_the_end(setting: Setting) -> None:
    before = setting.host.snapshot
    setting.passes.run()
    setting.load.load = 3.0
    seen = setting.run(60)
    assert min(seen) < 100 and set(seen) <= {400, 200, 100, 50, 25, 20}
    (state,) = setting.passes.state.queues
    assert state.phase in ("short", "trial")
    assert state.length == setting.length
    assert setting.told[-1] == (state,)
    interface = setting.passes.state.snapshot.guests[0].interfaces[0]  # type: ignore[union-attr]
    assert interface.txqueuelen == setting.length
    # A pass in between finds nothing to put right.
    length = setting.length
    assert not setting.passes.run()
    assert setting.length == length
    setting.load.load = 0.4
    setting.run(5)
    assert setting.length == 400
    assert setting.passes.stop()
    assert setting.host.snapshot == before


def test_a_change_by_someone_else_is_put_right_and_then_goes_on(setting: Setting) -> None:
    setting.passes.run()
    setting.load.load = 3.0
    setting.run(30)
    (guest,) = setting.host.snapshot.guests
    (tap,) = guest.interfaces
    changed = replace(guest, interfaces=(replace(tap, txqueuelen=77),))
    setting.host.snapshot = replace(setting.host.snapshot, guests=(changed,))
    setting.load.load = 0.4
    # The keeper wants it long again, and leaves a value that is not its own to the pass.
    assert set(setting.run(10)) == {77}
    setting.passes.run()
    assert setting.length == 400
    setting.load.load = 3.0
    assert min(setting.run(30)) < 400


def test_after_a_crash_the_next_daemon_goes_on_and_still_restores(
    setting: Setting, tmp_path: Path
) -> None:
    before = setting.host.snapshot
    setting.passes.run()
    setting.load.load = 3.0
    setting.run(30)
    assert setting.length < 400
    setting.journal.close()
    with Journal.open(tmp_path / "journal.jsonl", samples.BOOT) as journal:
        policies = (parse(POLICY, "test.yaml"),)
        passes = Reconciler(setting.host, setting.host, journal, policies, clock=setting.load)
        passes.recover()
        passes.run(settle=True)
        keeper = QueueKeeper(passes, setting.load, setting.load, setting.told.append)
        keeper.update()
        assert setting.length == 400
        assert passes.stop()
    assert setting.host.snapshot == before


def test_an_original_that_is_one_of_the_lengths_is_no_reason_to_begin_anew(
    setting: Setting,
) -> None:
    (guest,) = setting.host.snapshot.guests
    (tap,) = guest.interfaces
    changed = replace(guest, interfaces=(replace(tap, txqueuelen=20),))
    setting.host.snapshot = replace(setting.host.snapshot, guests=(changed,))
    setting.passes.run()
    assert setting.length == 400
    setting.load.load = 3.0
    setting.run(90)
    assert setting.length == 20
    target = TxQueueLen(guest.ref, tap.target, tap.ifindex)
    assert target not in setting.journal.applied()
    assert not setting.passes.run()
    assert setting.length == 20


SECOND = POLICY.replace('"*"', "v*")
FAILING = POLICY + "scheduler: {vcpu: {class: rr, priority: 7}}\n"


@pytest.mark.parametrize("why", ["refused", "failing"])
def test_a_guest_that_is_kept_no_more_has_a_long_queue(setting: Setting, why: str) -> None:
    before = setting.host.snapshot
    setting.passes.run()
    setting.load.load = 3.0
    setting.run(30)
    assert setting.length < 400
    texts = {"refused": (POLICY, SECOND), "failing": (FAILING,)}[why]
    setting.host.fail["thread-sched"] = WriteError("not permitted")
    setting.passes.policies = tuple(parse(text, f"{n}.yaml") for n, text in enumerate(texts))
    setting.passes.run(settle=True, reassert=True)
    assert setting.passes.state.tuned == 0
    assert set(setting.run(30)) == {400}
    setting.passes.run()
    assert setting.length == 400
    assert setting.passes.state.queues == setting.told[-1] == ()
    assert setting.passes.stop()
    assert setting.host.snapshot == before


def test_a_guest_with_which_libvirt_is_busy_is_left_and_kept_on(setting: Setting) -> None:
    setting.passes.run()
    setting.load.load = 3.0
    setting.run(90)
    short = setting.length
    assert short < 400
    (guest,) = setting.host.snapshot.guests
    setting.host.snapshot = replace(setting.host.snapshot, guests=(replace(guest, busy=True),))
    setting.passes.run()
    assert set(setting.run(5)) == {short}
    setting.host.snapshot = replace(setting.host.snapshot, guests=(guest,))
    setting.passes.run()
    setting.keeper.update()
    assert setting.length == short
    setting.load.load = 0.4
    setting.run(5)
    assert setting.length == 400


def test_a_length_that_a_new_policy_asks_for_stays(setting: Setting) -> None:
    setting.passes.run()
    setting.load.load = 3.0
    setting.run(30)
    short = setting.length
    assert short < 400
    fixed = POLICY.replace("adaptive, min: 20, max: 400", str(short))
    setting.passes.policies = (parse(fixed, "test.yaml"),)
    setting.passes.run(settle=True, reassert=True)
    assert setting.keeper.update() is None
    assert setting.length == short


def test_queues_are_long_when_nobody_keeps_them_and_the_host_stays_tuned(
    setting: Setting,
) -> None:
    setting.passes.run()
    setting.load.load = 3.0
    setting.run(30)
    assert setting.length < 400
    setting.keeper.leave()
    setting.keeper.close()
    assert setting.length == 400


def test_crews_by_cpus_and_budgets() -> None:
    _, vcpu, worker = samples.guest().threads
    pinned = [replace(t, affinity=CpuSet([1])) for t in (vcpu, worker)]
    tids = [t.key.tid for t in pinned]
    assert Crew(frozenset(tids), 1.0) in crews(pinned)
    budget = Sched(SchedClass.DEADLINE, runtime_ns=40, deadline_ns=100, period_ns=100)
    found = crews([replace(t, sched=budget) for t in pinned])
    assert Crew(frozenset(tids), 0.8) in found
    assert Crew(frozenset(tids[:1]), 0.4) in found


@pytest.mark.parametrize("lost", [{}, {"schedstat": ""}, {"schedstat": "x"}])
def test_a_guest_whose_counters_cannot_be_read_is_left_alone(
    setting: Setting, lost: dict[str, str]
) -> None:
    """An empty schedstat is that of a kernel without CONFIG_SCHED_INFO."""
    (guest,) = setting.host.snapshot.guests
    where, files = sampled_guest(guest), Files({})
    for name in ("rx_packets", "rx_dropped", "tx_packets"):
        files.files[f"/sys/class/net/{where.devices[0]}/statistics/{name}"] = "5\n"
    for pid, tid in where.threads:
        files.files |= {f"/proc/{pid}/task/{tid}/{name}": text for name, text in lost.items()}
    sampler = Sampler(files)  # type: ignore[arg-type]
    keeper = QueueKeeper(setting.passes, sampler, setting.load, setting.told.append)
    setting.passes.run()
    keeper.update()
    files.files = {f: "9\n" if f.endswith("rx_dropped") else t for f, t in files.files.items()}
    setting.load.now += GLANCE
    assert keeper.update() == GLANCE
    assert setting.length == 400


class Files:
    """A root of given files."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files

    def read(self, path: str) -> str:
        try:
            return self.files[path]
        except KeyError:
            raise FileNotFoundError(path) from None


def test_samples_are_sums_over_the_devices_with_rings() -> None:
    guest = samples.guest()
    (tap,) = guest.interfaces
    bridge = replace(tap, target="vnet7", kind=NicKind.BRIDGE)
    second = replace(tap, target="macvtap9", ifindex=9)
    where = sampled_guest(replace(guest, interfaces=(tap, bridge, second)))
    files = {f"/proc/{pid}/task/{tid}/schedstat": f"{tid}000 5 6\n" for pid, tid in where.threads}
    for device, base in ((tap.target, 100), ("macvtap9", 1)):
        for name, value in (("rx_packets", 7), ("rx_dropped", 2), ("tx_packets", 4)):
            files[f"/sys/class/net/{device}/statistics/{name}"] = f"{base * value}\n"
    sampler = Sampler(Files(files))  # type: ignore[arg-type]
    assert sampler.drops(where) == 202
    sample = sampler.sample(where, 3.5)
    assert (sample.at, sample.received, sample.dropped, sample.sent) == (3.5, 707, 202, 404)
    worker = guest.by_role(Role.VHOST)[0].key.tid
    assert (worker, worker * 1000) in sample.ran_ns
    with pytest.raises(OSError, match="statistics"):
        Sampler(Files({})).drops(where)  # type: ignore[arg-type]


def test_status_is_told_while_its_writer_lives(tmp_path: Path) -> None:
    path = tmp_path / "run" / "queues.json"
    states = (QueueState("vr 2.ü", 250, "trial", "overload, 250 is tried beside 500", 3),)
    write_status(states, path)
    assert read_status(path) == states
    text = path.read_text()
    path.write_text(text.replace('"start_time": ', '"start_time": 1'))
    assert read_status(path) == ()
    path.write_text(text.replace(f'"pid": {os.getpid()}', '"pid": 4194305'))
    assert read_status(path) == ()
    for damaged in ("", "[]", "{", text[:-9], "[" * 100_000):
        path.write_text(damaged)
        assert read_status(path) == ()
    write_status((), path)
    assert not path.exists()
