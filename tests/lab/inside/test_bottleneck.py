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
from contextlib import ExitStack, contextmanager
from pathlib import Path

import labhelp
import pytest
from labhelp import LabGuest

from vsrtune.cli.options import JOURNAL
from vsrtune.cli.top_source import TopHost
from vsrtune.model.load import Bottleneck
from vsrtune.views.top_frame import make_frame

TRIALS = int(os.environ.get("LAB_TRIALS") or 3)
TOLD = Path("/mnt/share/bottleneck.jsonl")
# Of a trial's interval.
SECONDS = 3.0
# Frames go by each of so many rules, of which none matches.
RULES = 600
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
        self.place()
        self.peak = self.send(60000, 4.0)["forwarded_pps"]

    def place(self) -> None:
        """Where every trial begins."""
        for tid, cpu in (
            (self.vcpu, VCPU_CPU),
            (self.receiver, VHOST_CPU),
            (self.sender, VHOST_CPU),
        ):
            labhelp.sh("taskset", "-pc", str(cpu), str(tid))
            labhelp.sh("chrt", "-o", "-p", "0", str(tid))

    def send(self, rate: float, seconds: float) -> dict[str, float]:
        """One stream; what lab-traffic tells of it."""
        with self.sending(rate, seconds) as child:
            text, _ = child.communicate(timeout=seconds + 60)
        assert child.returncode == 0, text
        found: dict[str, float] = json.loads(text)
        return found

    @contextmanager
    def sending(self, rate: float, seconds: float) -> Iterator[subprocess.Popen[str]]:
        child = subprocess.Popen(
            ["lab-traffic", "--guest", self.guest.name, "--rate", str(round(rate)),
             "--seconds", str(seconds)],
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        try:
            yield child
        finally:
            child.terminate()
            child.wait()


@contextmanager
def hog(cpu: int, nice: int) -> Iterator[None]:
    """A process that takes a CPU, as much of it as its nice value gives."""
    words = ("taskset", "-c", str(cpu), "nice", "-n", str(nice), "python3", "-Sc", "while 1: pass")
    child = subprocess.Popen(words)
    try:
        yield
    finally:
        child.kill()
        child.wait()


@contextmanager
def rules(hook: str, device: str) -> Iterator[None]:
    """Rules that every frame passes at a hook of a device."""
    lines = [
        f"table netdev hindrance {{ chain c {{ type filter hook {hook} device {device} priority 0;"
    ]
    lines += [f"udp dport {1000 + n} counter drop;" for n in range(RULES)]
    subprocess.run(["nft", "-f", "-"], input="\n".join([*lines, "} }"]), text=True, check=True)
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
    labhelp.sh("chrt", "-f", "-p", "10", str(tid))
    yield


# Kind -> (what makes it, offered rate in peaks, a pattern of "stage where: what helps").
Made = Callable[[Bed, ExitStack], None]


def interrupts(bed: Bed, stack: ExitStack) -> None:
    # A veth's backlog is worked off by the CPU that sends, unless RPS gives it to another one.
    stack.enter_context(file_says("/sys/class/net/p0/queues/rx-0/rps_cpus", f"{1 << VHOST_CPU:x}"))
    stack.enter_context(rules("ingress", "p0"))
    for tid in (bed.receiver, bed.sender):
        labhelp.sh("taskset", "-pc", str(VCPU_CPU), str(tid))


def short_ring(bed: Bed, stack: ExitStack) -> None:
    path = f"/sys/class/net/{bed.left}/tx_queue_len"
    stack.enter_context(file_says(path, "1"))


def receive_waits(bed: Bed, stack: ExitStack) -> None:
    stack.enter_context(realtime(bed.sender))
    stack.enter_context(hog(VHOST_CPU, -20))


def transmit_waits(bed: Bed, stack: ExitStack) -> None:
    stack.enter_context(realtime(bed.receiver))
    stack.enter_context(hog(VHOST_CPU, -20))


def transmit_full(bed: Bed, stack: ExitStack) -> None:
    stack.enter_context(rules("egress", "p1"))
    labhelp.sh("taskset", "-pc", str(VCPU_CPU), str(bed.receiver))
    stack.enter_context(realtime(bed.receiver))


def vcpu_waits(bed: Bed, stack: ExitStack) -> None:
    stack.enter_context(hog(VCPU_CPU, -5))


KINDS: dict[str, tuple[Made, float, str]] = {
    "interrupts: CPU full": (interrupts, 2.0, r"interrupts CPU 2: another CPU"),
    "tap ring: too short": (short_ring, 0.4, r"tap ring {left}: a longer queue"),
    "vhost receive: waits": (receive_waits, 1.0, r"vhost receive vhost {left}/0: a CPU of its own"),
    "vcpu: CPU full": (lambda bed, stack: None, 4.0, r"vcpu vcpu 0: nothing here"),
    "vcpu: waits": (vcpu_waits, 2.0, r"vcpu vcpu 0: a CPU of its own"),
    "vhost transmit: waits": (
        transmit_waits, 1.0, r"vhost transmit vhost {right}/0: a CPU of its own"
    ),
    "vhost transmit: CPU full": (transmit_full, 1.0, r"vhost transmit vhost {right}/0: more queues"),
    "outside": (lambda bed, stack: None, 0.4, r"outside : nothing"),
}  # fmt: skip


def trial(bed: Bed, top: TopHost, kind: str) -> Bottleneck:
    """What the product names while the stage of this kind is the limit."""
    made, factor, _ = KINDS[kind]
    bed.place()
    with ExitStack() as stack:
        made(bed, stack)
        stack.enter_context(bed.sending(factor * bed.peak, 60.0))
        time.sleep(1.5)
        first = top.sample()
        time.sleep(SECONDS)
        frame = make_frame(first, top.sample())
    (found,) = [b for b in frame.bottlenecks if b.guest == bed.guest.ref]
    return found


@pytest.mark.skipif(labhelp.lab_cpus() < 3, reason="needs a CPU for each of NIC, vcpu and vhost")
def test_injected_bottlenecks_are_named(libvirt_guest: LabGuest) -> None:
    """In at least nine of ten trials."""
    bed = Bed(libvirt_guest)
    top = TopHost(None, "qemu:///system", (labhelp.POLICIES,), JOURNAL)
    top.sample()
    turns = [kind for kind in KINDS for _ in range(TRIALS)]
    random.Random(f"{os.environ.get('LAB_SEED')}").shuffle(turns)
    wrong = []
    for kind in turns:
        found = trial(bed, top, kind)
        text = f"{found.stage} {found.where}: {found.help}"
        wanted = KINDS[kind][2].format(left=re.escape(bed.left), right=re.escape(bed.right))
        right = re.match(wanted, text) is not None
        print(
            f"{kind}: {'' if right else 'NOT '}{text} ({found.why}; sure: {found.sure})", flush=True
        )
        with TOLD.open("a") as file:
            row = {"kind": kind, "right": right, "stage": found.stage, "where": found.where}
            row |= {"help": found.help, "why": found.why, "sure": found.sure, "peak": bed.peak}
            print(json.dumps(row), file=file)
        if not right:
            wrong.append(f"{kind}: {text}")
    bed.place()
    assert len(wrong) <= len(turns) // 10, wrong
