"""The bench's own hands: frames add up, and a kill at any moment leaves nothing."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hoststate
import labhelp
import pytest
from labhelp import LabGuest

from vsrtune.bench.cleanup.cleaners import CLEANERS, DEFAULT_PATH, BenchLedger
from vsrtune.bench.measure import tester
from vsrtune.bench.spec.model import Endpoint, Leg, Load, Router, Spec, Traffic, Trial
from vsrtune.core.errors import VsrtuneError
from vsrtune.observe.observer import live_observer

OBSERVER = live_observer()
# Far below what a router of the lab forwards, and far above.
SLOW = 500.0
FAST = 40000.0


@pytest.fixture(scope="session")
def spec(guests: list[LabGuest]) -> Spec:
    """Every router of the lab, both ways."""
    return make_spec(guests)


def make_spec(guests: list[LabGuest]) -> Spec:
    return labhelp.bench_spec(guests, warmup=0.3)


@pytest.fixture
def ledger() -> Iterator[BenchLedger]:
    with BenchLedger.open(DEFAULT_PATH) as opened:
        assert opened.resolve(CLEANERS) == []
        yield opened
        assert opened.pending() == []
    assert leftovers() == []


def measure(spec: Spec, ledger: BenchLedger, load: Load) -> Trial:
    with tester.Tester(spec, ledger, OBSERVER.observe) as running:
        trial = running.trial(load, "untuned")
    print(trial)
    assert trial.sent == trial.forwarded + sum(trial.drops.values())
    assert set(trial.drops) == {"nic", "softnet_backlog", "macvtap_ring", "elsewhere"}
    assert sum(trial.forwarded_by.values()) <= trial.forwarded
    return trial


def inside(space: str, *words: str) -> str:
    return labhelp.sh("nsenter", f"--net=/run/netns/{space}", *words).stdout


def agents() -> list[int]:
    """Processes of a bench, but this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if (
                state != "Z"
                and b"-m" in words
                and any(w.startswith(b"vsrtune.bench.") for w in words)
            ):
                found.append(int(entry.name))
    return found


def leftovers() -> list[str]:
    """What a bench may never leave: processes, generators, tables."""
    found = [f"process {pid}" for pid in agents()]
    for space in ("gen", "sink"):
        if "vsrtune" in inside(space, "nft", "list", "tables"):
            found.append(f"table in {space}")
        for line in inside(space, "sh", "-c", "cat /proc/net/pktgen/kpktgend_*").splitlines():
            if line.startswith(("Running:", "Stopped:")) and line.split()[1:]:
                found.append(f"generator in {space}: {line}")
    return found


def frames_at(space: str, device: str, column: int) -> int:
    """Frames a device received (1) or sent (9) so far."""
    text = inside(space, "cat", "/proc/net/dev")
    line = next(row for row in text.splitlines() if row.strip().startswith(f"{device}:"))
    return int(line.partition(":")[2].split()[column])


def flowing() -> bool:
    """Whether g0 or s0 sends more than a few stray frames."""
    before = [frames_at("gen", "g0", 9), frames_at("sink", "s0", 9)]
    time.sleep(0.5)
    after = [frames_at("gen", "g0", 9), frames_at("sink", "s0", 9)]
    return any(b - a > 20 for a, b in zip(before, after, strict=True))


@labhelp.core("trixie")
@labhelp.one_release("the bench's own traffic", "trixie")
def test_a_slow_stream_is_forwarded_whole(spec: Spec, ledger: BenchLedger) -> None:
    name = spec.routers[0].name
    trial = measure(spec, ledger, Load({name: SLOW}, 2.0))
    assert trial.sent == 1000
    assert trial.forwarded == 1000
    assert trial.forwarded_by[name] == 1000
    assert 1.9 < trial.seconds < 2.3
    assert {"vcpu", "vhost", "emulator", "ksoftirqd", "softirq", "idle"} <= set(trial.cpu_seconds)
    assert trial.cpu_seconds["vcpu"] > 0.01
    assert trial.cpu_seconds["vhost"] > 0.01
    assert trial.cpu_seconds["idle"] <= labhelp.lab_cpus() * trial.seconds + 0.1
    assert trial.switches["vhost"] > 10


def test_overload_is_lost_where_the_kernel_says(spec: Spec, ledger: BenchLedger) -> None:
    name = spec.routers[0].name
    trial = measure(spec, ledger, Load({name: FAST}, 2.0))
    assert trial.loss > 0.05
    known = sum(count for place, count in trial.drops.items() if place != "elsewhere")
    assert known > 0.5 * (trial.sent - trial.forwarded)
    assert abs(trial.drops["elsewhere"]) < 0.1 * trial.sent


@labhelp.one_release("the bench's own traffic")
def test_routers_are_told_apart(spec: Spec, ledger: BenchLedger) -> None:
    if len(spec.routers) < 2:
        pytest.skip("needs two routers")
    (a, b) = (router.name for router in spec.routers[:2])
    trial = measure(spec, ledger, Load({a: SLOW, b: SLOW / 5}, 2.0))
    assert trial.forwarded_by == {a: 1000, b: 200}
    assert trial.sent_by == {a: 1000, b: 200}


KINDS_OF_TRAFFIC: list[tuple[Traffic, dict[int, int]]] = [
    (Traffic(flows=1_000_000), {}),
    (Traffic(size="imix"), {0: 500}),
    (Traffic(bidirectional=True, flows=2), {0: 125, 1: 125, 2: 125, 3: 125}),
    (Traffic(flows=4), {0: 125, 1: 125, 2: 125, 3: 125}),
    (Traffic(size=1514), {0: 500}),
]


@labhelp.one_release("the bench's own traffic")
@pytest.mark.parametrize(
    ("traffic", "by_flow"),
    KINDS_OF_TRAFFIC,
    ids=str,
)
def test_every_kind_of_traffic(
    spec: Spec, ledger: BenchLedger, traffic: Traffic, by_flow: dict[int, int]
) -> None:
    name = spec.routers[0].name
    trial = measure(replace(spec, traffic=traffic), ledger, Load({name: SLOW}, 1.0))
    assert (trial.sent, trial.forwarded) == (500, 500)
    found = {k: v for k, v in trial.forwarded_by_flow.items() if k.startswith(f"{name}/")}
    assert found == {f"{name}/{flow}": count for flow, count in by_flow.items()}


@labhelp.one_release("the bench's own traffic", "trixie")
def test_latency_is_measured_at_low_load_and_grows_with_it(spec: Spec, ledger: BenchLedger) -> None:
    name = spec.routers[0].name
    low = measure(spec, ledger, Load({name: SLOW}, 2.0, latency=True)).latency
    high = measure(spec, ledger, Load({name: FAST}, 2.0, latency=True)).latency
    assert low is not None and high is not None
    assert low.sent > 50
    assert low.lost == 0
    assert 0 < low.p50 <= low.p90 <= low.p99 < 1.0
    assert high.p50 > low.p50


@labhelp.one_release("the bench's own traffic")
def test_the_host_itself_is_measured_like_a_router(spec: Spec, ledger: BenchLedger) -> None:
    config = dict(
        line.split("=", 1)
        for line in Path("/run/lab/config").read_text().splitlines()
        if "=" in line
    )
    if "LAB_NATIVE_INDEX" not in config:
        pytest.skip("this lab's host does not forward")
    index = config["LAB_NATIVE_INDEX"].strip("'\"")
    leg = Leg(labhelp.text("/sys/class/net/p0/address"), f"10.10.{index}.2", f"10.20.{index}.100")
    native = replace(
        spec,
        routers=(Router("host", leg, native=True),),
        # Twenty neighbours' worth of routing, five flows to each.
        traffic=Traffic(flows=100, destinations=20),
    )
    trial = measure(native, ledger, Load({"host": SLOW}, 1.0, latency=True))
    assert trial.forwarded_by == {"host": 500}
    assert trial.latency is not None and trial.latency.lost == 0
    assert "vcpu" not in trial.cpu_seconds


def test_an_end_may_be_reached_over_ssh(
    spec: Spec, ledger: BenchLedger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A stand-in that logs in nowhere: what it is given runs as a login shell would run it.
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\ncd / && exec sh -c "$3"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    far = replace(spec, left=Endpoint("g0", "gen", host="far"))
    trial = measure(far, ledger, Load({spec.routers[0].name: SLOW}, 1.0))
    assert trial.forwarded == 500
    ssh.write_text("#!/bin/sh\necho Permission denied >&2\nexit 255\n")
    with pytest.raises(VsrtuneError, match="far: the agent ended: Permission denied"):
        measure(far, ledger, Load({spec.routers[0].name: SLOW}, 1.0))


@labhelp.one_release("the bench's own traffic")
def test_ready_says_whether_the_router_forwards(
    spec: Spec, ledger: BenchLedger, libvirt_guest: LabGuest
) -> None:
    with tester.Tester(spec, ledger, OBSERVER.observe) as running:
        assert running.ready(libvirt_guest.ref)
        labhelp.sh("virsh", "suspend", libvirt_guest.name)
        try:
            assert not running.ready(libvirt_guest.ref, 0.5)
        finally:
            labhelp.sh("virsh", "resume", libvirt_guest.name)
        labhelp.wait_for(lambda: running.ready(libvirt_guest.ref), "it forwards again")


def test_its_generator_keeps_to_its_cpus_after_a_partition(spec: Spec, ledger: BenchLedger) -> None:
    """A kernel of 6.1 lets pktgen's threads run anywhere then, and would measure them too."""

    def bound() -> bool:
        # Each network namespace has its own.
        found = [int(pid) for pid in labhelp.sh("pgrep", "kpktgend_").stdout.split()]
        assert len(found) >= labhelp.lab_cpus()
        own = {pid: hoststate.comm(pid).removeprefix("kpktgend_") for pid in found}
        return all(labhelp.mask(pid) == {int(cpu)} for pid, cpu in own.items())

    load = Load({spec.routers[0].name: SLOW}, 0.5)
    try:
        labhelp.sh("modprobe", "-r", "pktgen")
        with tester.Tester(spec, ledger, OBSERVER.observe) as running:
            labhelp.partition_and_back(1)
            assert running.trial(load, "untuned").forwarded > 0
            assert bound()
        labhelp.sh("modprobe", "pktgen")
        with tester.Tester(spec, ledger, OBSERVER.observe) as running:
            labhelp.partition_and_back(1)
            if not bound():
                with pytest.raises(VsrtuneError, match="may run on other CPUs, and this bench did"):
                    running.trial(load, "untuned")
    finally:
        labhelp.sh("modprobe", "-r", "pktgen")
        labhelp.sh("modprobe", "pktgen")


def test_what_must_not_be_is_refused(spec: Spec, ledger: BenchLedger) -> None:
    name = spec.routers[0].name
    for left, what in (
        (Endpoint("g9", "gen"), "there is no such device"),
        (Endpoint("lo", "gen"), "it is the loopback device"),
        (Endpoint("g0", "nowhere"), "there is no network namespace"),
        (Endpoint("g0", "gen", cpu=99), "CPU 99 has no thread"),
    ):
        with pytest.raises(VsrtuneError, match=what):
            measure(replace(spec, left=left), ledger, Load({name: SLOW}, 0.5))


@labhelp.one_release("what a specification may not say")
def test_a_device_of_the_default_route_is_refused(spec: Spec, ledger: BenchLedger) -> None:
    labhelp.sh("ip", "-n", "gen", "route", "add", "default", "dev", "g0")
    try:
        with pytest.raises(VsrtuneError, match="it carries the default route"):
            measure(spec, ledger, Load({spec.routers[0].name: SLOW}, 0.5))
    finally:
        labhelp.sh("ip", "-n", "gen", "route", "del", "default", "dev", "g0")
    assert not flowing()


@labhelp.one_release("processes and pipes of the bench")
def test_a_killed_agent_ends_its_traffic_and_is_an_error(spec: Spec, ledger: BenchLedger) -> None:
    with tester.Tester(spec, ledger, OBSERVER.observe) as running:
        killer = subprocess.Popen(["sh", "-c", f"sleep 2; kill -9 {' '.join(map(str, agents()))}"])
        with pytest.raises(VsrtuneError, match="the agent ended"):
            running.trial(Load({spec.routers[0].name: FAST}, 20.0), "untuned")
        killer.wait()
        assert not flowing()
    # The killed ones could not remove what they had configured; the cleaner does.
    assert ledger.resolve(CLEANERS) == []
    measure(spec, ledger, Load({spec.routers[0].name: SLOW}, 0.5))


def test_an_interrupted_trial_leaves_the_tester_usable(
    spec: Spec, ledger: BenchLedger, libvirt_guest: LabGuest
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with tester.Tester(spec, ledger, OBSERVER.observe) as running:
            signal.setitimer(signal.ITIMER_REAL, 4.0)
            with pytest.raises(KeyboardInterrupt):
                running.trial(Load({libvirt_guest.ref: SLOW}, 30.0), "untuned")
            # As when the host is restored: routers are asked whether they forward.
            assert running.ready(libvirt_guest.ref)
            assert not flowing()
            trial = running.trial(Load({libvirt_guest.ref: SLOW}, 1.0), "untuned")
            assert (trial.sent, trial.forwarded) == (500, 500)
    finally:
        signal.signal(signal.SIGALRM, before)


CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
import labhelp, test_bench
from dataclasses import replace
from vsrtune.bench.cleanup.cleaners import DEFAULT_PATH, BenchLedger, RunGuard
from vsrtune.bench.spec.model import Load, Traffic
from vsrtune.bench.measure.tester import Tester
spec = replace(test_bench.make_spec(labhelp.lab_guests()), traffic=Traffic(bidirectional=True))
with BenchLedger.open(DEFAULT_PATH) as ledger, RunGuard(ledger) as watch:
    print(["guarded", watch.pid], flush=True)
    with Tester(spec, ledger, test_bench.OBSERVER.observe) as tester:
        print(["opened", *test_bench.agents()], flush=True)
        while True:
            tester.trial(Load({spec.routers[0].name: 20000.0}, 3.0), "untuned")
            print(["trial"], flush=True)
"""


def start_child(until: str) -> tuple[subprocess.Popen[str], dict[str, list[int]]]:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    said: dict[str, Any] = {}
    while until not in said:
        line = child.stdout.readline()
        assert line, f"ended after {said}"
        (word, *numbers) = ast.literal_eval(line)
        said[word] = numbers
    return child, said


@pytest.mark.parametrize(
    ("until", "delay"),
    labhelp.shared([
        ("guarded", 0.0), ("guarded", 0.4), ("guarded", 0.8), ("opened", 0.1), ("opened", 1.5),
        ("opened", 2.5), ("opened", 4.4), ("trial", 0.2),
    ]),
)  # fmt: skip
def test_a_killed_bench_leaves_nothing(until: str, delay: float) -> None:
    (child, said) = start_child(until)
    time.sleep(delay)
    child.kill()
    child.wait()
    ended = time.monotonic()
    # The guard lets go of the lock when it is done.
    with BenchLedger.open(DEFAULT_PATH, wait=30.0) as ledger:
        print(f"cleaned within {time.monotonic() - ended:.1f} s")
        assert ledger.pending() == []
    labhelp.wait_for(lambda: not os.path.exists(f"/proc/{said['guarded'][0]}"), "the guard ended")
    # An agent that was only just started ends when it finds its bench gone.
    labhelp.wait_for(lambda: leftovers() == [], "nothing is left")
    assert not flowing()


def test_when_all_of_it_is_killed_nothing_flows_and_the_next_start_cleans(spec: Spec) -> None:
    (child, said) = start_child("trial")
    time.sleep(1.5)
    for pid in (said["guarded"][0], child.pid, *agents()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    child.wait()
    labhelp.wait_for(lambda: not flowing(), "the traffic ended with its agents")
    for space in ("gen", "sink"):
        assert "vsrtune" not in inside(space, "nft", "list", "tables")
    with BenchLedger.open(DEFAULT_PATH, wait=5.0) as ledger:
        assert ledger.resolve(CLEANERS) == []
        assert ledger.pending() == []
    assert leftovers() == []


@labhelp.one_release("processes and pipes of the bench")
def test_one_bench_at_a_time() -> None:
    with (
        BenchLedger.open(DEFAULT_PATH),
        pytest.raises(VsrtuneError, match="another bench is running"),
    ):
        BenchLedger.open(DEFAULT_PATH, wait=0.3)
