"""The bottleneck that `vsrtune top` names, against the one that a trial made.

The vcpu has CPU 1, the vhost workers have CPU 2. Each kind of trial takes away what one stage needs.
What is found goes to bottleneck.jsonl of the share, from which docs/results/bottlenecks.md is made.
LAB_TRIALS: how many of each kind.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import labhelp
import pytest
from labhelp import LabGuest

from vsrtune.cli.top import TopHost
from vsrtune.model.load import Bottleneck
from vsrtune.views.top_frame import make_frame

TRIALS = int(os.environ.get("LAB_TRIALS") or 3)
TOLD = Path("/mnt/share/bottleneck.jsonl")
# Of a trial's interval.
SECONDS = 5.0
# Frames go by each of so many rules, of which none matches. Before the tap more of them, or the
# vcpu, which the workers join on its CPU, is as narrow a place on a slower kernel.
RULES, RULES_BEFORE = 2000, 5000
VCPU_CPU, VHOST_CPU = 1, 2


class Bed:
    """The guest, its threads where a trial wants them, and the rate that it forwards at its best."""

    def __init__(self, guest: LabGuest) -> None:
        self.guest = guest
        self.vcpu = guest.vcpus()[0]
        shown = labhelp.show("--trace", "2")
        (found,) = [g for g in shown["guests"] if g["name"] == guest.name]
        workers = {
            t["interface"]: t["key"]["tid"] for t in found["threads"] if t["role"] == "vhost"
        }
        self.left, self.right = guest.device(0), guest.device(1)
        self.receiver, self.sender = workers[self.left], workers[self.right]
        self.places = {
            guest.pid: 0,
            self.vcpu: VCPU_CPU,
            self.receiver: VHOST_CPU,
            self.sender: VHOST_CPU,
            # This test would wait beside a real-time process.
            os.getpid(): 0,
        }
        self.before = {tid: labhelp.mask(tid) for tid in self.places}
        self.place()
        self.peak = self.send(60000, 4.0)["forwarded_pps"]

    def place(self) -> None:
        """Where every trial begins."""
        for tid, cpu in self.places.items():
            os.sched_setaffinity(tid, {cpu})
            os.sched_setscheduler(tid, os.SCHED_OTHER, os.sched_param(0))

    def restore(self) -> None:
        self.place()
        for tid, cpus in self.before.items():
            os.sched_setaffinity(tid, cpus)

    def send(self, rate: float, seconds: float) -> dict[str, float]:
        """One stream; what lab-traffic tells of it."""
        with self.sending(rate, seconds) as child:
            text, _ = child.communicate(timeout=seconds + 60)
        assert child.returncode == 0, text
        found: dict[str, float] = json.loads(text)
        return found

    def sending(self, rate: float, seconds: float) -> AbstractContextManager[subprocess.Popen[str]]:
        return labhelp.traffic(self.guest, round(rate), seconds, stdout=subprocess.PIPE)


@contextmanager
def hog(cpu: int, *how: str) -> Iterator[None]:
    """A process that takes as much of a CPU as the kernel gives it."""
    code = "print(flush=True)\nwhile 1: pass"
    words = ("taskset", "-c", str(cpu), *how, "python3", "-Sc", code)
    child = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        child.stdout.readline()
        yield
    finally:
        child.kill()
        child.wait()


@contextmanager
def rules(hook: str, device: str, count: int = RULES) -> Iterator[None]:
    """Rules that every frame passes at a hook of a device."""
    lines = [
        f"table netdev hindrance {{ chain c {{ type filter hook {hook} device {device} priority 0;"
    ]
    lines += [f"udp dport {1000 + n} counter drop;" for n in range(count)]
    subprocess.run(["nft", "-f", "-"], input="\n".join([*lines, "}", "}"]), text=True, check=True)
    try:
        yield
    finally:
        labhelp.sh("nft", "delete", "table", "netdev", "hindrance")


@contextmanager
def file_says(path: str, text: str) -> Iterator[None]:
    before = labhelp.text(path)
    Path(path).write_text(text)
    try:
        yield
    finally:
        Path(path).write_text(before)


@contextmanager
def realtime(tid: int) -> Iterator[None]:
    os.sched_setscheduler(tid, os.SCHED_FIFO, os.sched_param(10))
    yield


# Kind -> (what makes it, offered rate in peaks, a pattern of "stage where: what helps").
Made = Callable[[Bed, ExitStack], None]


def interrupts(bed: Bed, stack: ExitStack) -> None:
    # A veth's backlog is worked off by the CPU that sends, unless RPS gives it to another one.
    stack.enter_context(file_says("/sys/class/net/p0/queues/rx-0/rps_cpus", f"{1 << VHOST_CPU:x}"))
    stack.enter_context(rules("ingress", "p0", RULES_BEFORE))
    for tid in (bed.receiver, bed.sender):
        os.sched_setaffinity(tid, {VCPU_CPU})


def short_ring(bed: Bed, stack: ExitStack) -> None:
    path = f"/sys/class/net/{bed.left}/tx_queue_len"
    stack.enter_context(file_says(path, "1"))


def receive_waits(bed: Bed, stack: ExitStack) -> None:
    stack.enter_context(realtime(bed.sender))
    stack.enter_context(hog(VHOST_CPU, "chrt", "-f", "5"))


def transmit_waits(bed: Bed, stack: ExitStack) -> None:
    stack.enter_context(realtime(bed.receiver))
    stack.enter_context(hog(VHOST_CPU, "chrt", "-f", "5"))


def transmit_full(bed: Bed, stack: ExitStack) -> None:
    stack.enter_context(rules("egress", "p1"))
    os.sched_setaffinity(bed.receiver, {VCPU_CPU})


def vcpu_waits(bed: Bed, stack: ExitStack) -> None:
    stack.enter_context(hog(VCPU_CPU, "nice", "-n", "-5"))


KINDS: dict[str, tuple[Made, float, str]] = {
    "interrupts: CPU full": (interrupts, 1.5, r"interrupts CPU 2: another CPU"),
    "tap ring: too short": (short_ring, 0.4, r"tap ring {left}: a longer queue"),
    "vhost receive: waits": (receive_waits, 0.5, r"vhost receive vhost {left}/0: a CPU of its own"),
    "vcpu: CPU full": (lambda bed, stack: None, 4.0, r"vcpu vcpu 0: nothing here"),
    "vcpu: waits": (vcpu_waits, 2.0, r"vcpu vcpu 0: a CPU of its own"),
    "vhost transmit: waits": (
        transmit_waits, 0.5, r"vhost transmit vhost {right}/0: a CPU of its own"
    ),
    "vhost transmit: CPU full": (transmit_full, 0.5, r"vhost transmit vhost {right}/0: more queues"),
    "outside": (lambda bed, stack: None, 0.4, r"outside : nothing"),
}  # fmt: skip


def trial(bed: Bed, kind: str) -> tuple[Bottleneck, dict[str, Any]]:
    """What the product names while the stage of this kind is the limit, and what it saw."""
    made, factor, _ = KINDS[kind]
    bed.place()
    with ExitStack() as stack:
        made(bed, stack)
        top = TopHost(None, "qemu:///system", (labhelp.POLICIES,))
        stack.enter_context(bed.sending(factor * bed.peak, 60.0))
        arrived = Path("/sys/class/net/p0/statistics/rx_packets")
        before = int(arrived.read_text())
        labhelp.wait_for(lambda: int(arrived.read_text()) > before + 100, "frames arrive")
        time.sleep(1.0)
        first = top.sample()
        time.sleep(SECONDS)
        frame = make_frame(first, top.sample())
    (found,) = [b for b in frame.bottlenecks if b.guest == bed.guest.ref]
    uses = {v.label: (v.use.load, v.use.wait) for v in frame.threads if v.guest == bed.guest.ref}
    cpus = {row.cpu: (row.busy, row.softirq) for row in frame.cpus}
    return found, {"seconds": frame.seconds, "threads": uses, "cpus": cpus}


@pytest.fixture
def bed(libvirt_guest: LabGuest) -> Iterator[Bed]:
    if labhelp.lab_cpus() < 3:
        pytest.skip("needs a CPU for each of NIC, vcpu and vhost")
    made = Bed(libvirt_guest)
    yield made
    made.restore()


def test_the_generator_keeps_to_its_cpu_after_a_partition(bed: Bed) -> None:
    """A kernel of 6.1 lets pktgen's threads run anywhere once one was made, and a generator beside
    a stage sends no more than that stage takes."""
    labhelp.partition_and_back(VHOST_CPU)
    bed.send(1000, 0.5)
    for pid in labhelp.sh("pgrep", "-x", "kpktgend_0").stdout.split():
        assert labhelp.mask(int(pid)) == {0}


def test_injected_bottlenecks_are_named(bed: Bed) -> None:
    """In at least nine of ten trials."""
    turns = [kind for kind in KINDS for _ in range(TRIALS)]
    random.Random(os.environ.get("LAB_SEED") or "1").shuffle(turns)
    wrong = []
    for kind in turns:
        found, seen = trial(bed, kind)
        text = f"{found.stage} {found.where}: {found.help}"
        wanted = KINDS[kind][2].format(left=re.escape(bed.left), right=re.escape(bed.right))
        right = re.match(wanted, text) is not None
        print(f"{kind}: {'' if right else 'NOT '}{text} ({found.why})", flush=True)
        with TOLD.open("a") as file:
            row = {"kind": kind, "right": right, "peak": bed.peak, **asdict(found), **seen}
            print(json.dumps(row), file=file)
        if not right:
            wrong.append(f"{kind}: {text}")
    assert len(wrong) <= len(turns) // 10, wrong


def test_show_names_it_too(bed: Bed) -> None:
    with bed.sending(4 * bed.peak, 60.0):
        time.sleep(2.0)
        told = labhelp.sh("vsrtune", "show", "--wide").stdout
    assert re.search(
        rf"^Bottlenecks\n.*\n +{re.escape(bed.guest.ref)} +vcpu 0", told, re.MULTILINE
    ), told
    assert "Bottlenecks" not in labhelp.sh("vsrtune", "show").stdout
