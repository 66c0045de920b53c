"""A pass for one guest reads and plans that guest only. Of the others it makes a list, which takes
3 ms for 1,000 of them.

Work is counted, not timed: the instructions that Python executes during a pass. The hosts
are those of `make bench-scale` (tests/scale): real files, looked at, planned and put back
through the journal as the daemon does it.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hostroot import TreeRoot, TreeVirt
from synthetic import CPUS, Names, Synthetic
from treeops import TreeOps

from vsrtune.daemon.reconciler import Reconciler
from vsrtune.daemon.scope import Scope
from vsrtune.daemon.systemd import LOGGER
from vsrtune.execute.journal import Journal
from vsrtune.host.libvirt import DomainText
from vsrtune.model.guest import Role, Thread
from vsrtune.model.plan import Place
from vsrtune.observe.observer import Observer
from vsrtune.observe.trust import PID_FILES
from vsrtune.policy.parser import parse

FEW, MANY = 20, 200
POLICY = """\
guest: "*"
cpus: {irq: "0", vcpu: auto, vhost: auto}
scheduler: {vcpu: {class: rr, priority: 7}, vhost: {class: rr, priority: 7}}
queue: {macvtap: 300}
profile: none
"""


class Tuned:
    """A synthetic host that is tuned, and the passes that tuned it."""

    def __init__(self, place: Path, guests: int, policy: str = POLICY) -> None:
        self.host = Synthetic(place, guests)
        self.root = TreeRoot(str(place))
        self.journal = Journal.open(place / "journal.jsonl", "boot")
        self.now = 0.0
        observer = Observer(self.root, TreeVirt(self.host, self.root))
        self.passes = Reconciler(
            observer,
            TreeOps(self.host, self.root),
            self.journal,
            (parse(policy, "test.yaml"),),
            trace=1.0,
            clock=lambda: self.now,
        )
        self.passes.run()
        self.passes.run()
        assert self.passes.state.tuned == guests

    def changed(self, number: int, change: Callable[[Tuned, Names], None]) -> tuple[int, int]:
        """How many instructions a pass takes after a change to one guest, and how much it
        writes."""
        names = self.host.guests[number]
        change(self, names)
        self.now += 10.0
        wrote = self.passes.state.totals.writes
        count = instructions(lambda: self.passes.run(Scope(frozenset([names.name]))))
        assert self.passes.state.tuned == len(self.host.guests)
        wrote = self.passes.state.totals.writes - wrote
        self.passes.run(self.passes.again())  # as the daemon does after one that wrote
        return count, wrote


def instructions(work: Callable[[], object]) -> int:
    """How many bytecode instructions the work executes."""
    count = 0

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    gc.collect()
    gc.disable()  # hypothesis times collections, with instructions of its own
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
        gc.enable()
    return count


def worker(tuned: Tuned, names: Names) -> Thread:
    """The first vhost worker of a guest, as the last pass left it."""
    snapshot = tuned.passes.state.snapshot
    assert snapshot is not None
    return next(g for g in snapshot.guests if g.name == names.name).by_role(Role.VHOST)[0]


def hurried(tuned: Tuned, names: Names) -> Scope:
    """What the kernel tells of after ``vhost``."""
    tid = worker(tuned, names).key.tid
    places: frozenset[Place] = frozenset([("cpus", tid), ("scheduler", tid)])
    return Scope(frozenset([names.name]), hurried=True, places=places)


def nothing(_tuned: Tuned, _names: Names) -> None:
    """An event that was about nothing."""


def queue(tuned: Tuned, names: Names) -> None:
    """Something changed a queue's length."""
    tuned.host.file(f"/sys/devices/virtual/net/{names.device(0)}/tx_queue_len", "77\n")


def vhost(tuned: Tuned, names: Names) -> None:
    """Something moved a worker, and took its class away."""
    moved(tuned, names, CPUS)
    lowered(tuned, names)


def moved(tuned: Tuned, names: Names, cpus: str) -> None:
    key = worker(tuned, names).key
    path = f"/proc/{key.pid}/task/{key.tid}/status"
    text = re.sub(r"Cpus_allowed_list:.*", f"Cpus_allowed_list:\t{cpus}", tuned.root.read(path))
    tuned.host.file(path, text)


def lowered(tuned: Tuned, names: Names) -> None:
    tid = worker(tuned, names).key.tid
    tuned.host.file(f"/sched_attr/{tid}.json", json.dumps({"cls": "other"}))


def cpuset(tuned: Tuned, names: Names) -> None:
    """Something wrote the list of a cgroup of the guest, which no thread is in."""
    home = worker(tuned, names).cgroup.partition("/libvirt")[0]
    tuned.host.cgroup(f"{home}/libvirt/other", "1-3")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tuned, Tuned]]:
    level = LOGGER.level
    LOGGER.setLevel(logging.ERROR)
    made = [Tuned(tmp_path_factory.mktemp("scale") / "host", n) for n in (FEW, MANY)]
    yield made[0], made[1]
    for one in made:
        one.journal.close()
    LOGGER.setLevel(level)


@pytest.mark.parametrize(("change", "writes"), [(nothing, 0), (queue, 1), (vhost, 2), (cpuset, 0)])
def test_a_pass_for_one_guest_neither_reads_nor_plans_the_others(
    hosts: tuple[Tuned, Tuned], change: Callable[[Tuned, Names], None], writes: int
) -> None:
    few, many = hosts
    for number in (3, 4):  # the first fills what is kept between passes
        counts = few.changed(number, change), many.changed(number, change)
    (in_few, wrote_few), (in_many, wrote_many) = counts
    assert wrote_few == wrote_many == writes
    # Reading or planning a guest takes thousands of instructions.
    assert in_many - in_few < 100 * (MANY - FEW)
    whole = Observer(few.root, TreeVirt(few.host, few.root)).observe()
    assert few.passes.state.snapshot == whole


@pytest.mark.parametrize("user", [0, 64055], ids=["root's pid files", "QEMU's pid files"])
def test_a_whole_look_reads_the_cgroup_of_a_guest_as_often_however_many_there_are(
    tmp_path: Path, user: int
) -> None:
    """Where the pid files are not root's, as on Debian 13, the scopes tell whose a QEMU is."""
    host = Synthetic(tmp_path / "host", FEW)
    os.chown(f"{host.place}{PID_FILES}", user, user)
    read: Counter[str] = Counter()

    class Counting(TreeRoot):
        def read(self, path: str) -> str:
            read[path] += 1
            return super().read(path)

    root = Counting(str(host.place))
    seen = Observer(root, TreeVirt(host, root)).observe()
    assert {g.ref: g.pid for g in seen.guests} == {n.name: n.pid for n in host.guests}
    # Once to decide on the process, once with its threads.
    assert {read[f"/proc/{n.pid}/task/{n.pid}/cgroup"] for n in host.guests} == {2}


def test_libvirt_is_asked_after_a_write_and_not_about_a_change_of_a_thread_alone(
    hosts: tuple[Tuned, Tuned], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned, _ = hosts
    names, domain = tuned.host.guests[5], TreeVirt.domain
    asked: list[str] = []

    def answer(virt: TreeVirt, name: str) -> DomainText | None:
        asked.append(name)
        return domain(virt, name)

    monkeypatch.setattr(TreeVirt, "domain", answer)
    scope = hurried(tuned, names)
    for questions in (0, 1, 0):
        vhost(tuned, names)
        tuned.now += 1000.0
        asked.clear()
        wrote = tuned.passes.state.totals.writes
        tuned.passes.run(scope)
        assert (len(asked), tuned.passes.state.totals.writes - wrote) == (questions, 2)
        if questions:
            tuned.passes.run(tuned.passes.again())
    assert tuned.passes.again().guests == {names.name}


def test_guests_that_were_written_to_are_read_before_all_are_planned(tmp_path: Path) -> None:
    """A thread that somebody moves, and that stays there, has all guests planned."""
    tuned = Tuned(tmp_path / "host", FEW, f"{POLICY}drift: {{cpus: report}}\n")
    first, second = tuned.host.guests[3:5]
    lowered(tuned, first)
    before = tuned.passes.state.totals.writes
    tuned.passes.run(hurried(tuned, first))
    assert tuned.passes.state.totals.writes == before + 1
    moved(tuned, second, "1")
    tuned.passes.run(hurried(tuned, second))
    assert tuned.passes.state.totals.writes == before + 1
    (drift,) = tuned.passes.state.drifts
    assert (drift.target.guest, drift.setting) == (second.name, "cpus.vhost")
    tuned.journal.close()
