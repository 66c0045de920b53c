"""A multistage router: guests that balance in front of guests that route, as one router.

            10.10.1.10..25                                  10.20.1.10..25
    gen g0 = p0 - ext [lb1] int - bridge, hubs or VLANs - eth0 [vr1] eth1 - ... - [lb1] - p1 = s0 sink
                                          '- - - - - - -  eth0 [vr2] eth1 - ... - [lb2] - p1

With one router in the lab it is one balancer, for both sides, and one router; with two it is also
a balancer for each side and two routers. The routers' addresses are the same, their MACs not,
and neighbours have to ask for them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import labhelp
import msrhelp
import pvrhelp
import pytest
from labhelp import LabGuest
from pvrhelp import Result
from test_attach import LEDGER, kinds
from test_pvr import GROUPS, NEIGHBOURS, define, group, pictures, roles

from vsrtune.execute.ledger import read_pending

# Each way, in frames a second: what four guests of an emulated host carry without loss.
RATE, COUNT = 150, 900
# Of a CPU, in 0.1 s (libvirt's vcpu_quota).
SLOW, UNLIMITED = 1000, -1
LINKS = ("bridge", "hub", "vlan")
GROUP = """\
group:
  name: edge
  kind: msr
  lower: {{in: p0, out: p1}}
  balancers: {{{balancers}}}
  routers: [{routers}]
  links: {links}
"""


@dataclass(frozen=True)
class Stage:
    """The guests of a multistage router. ``outside`` is the balancer of each side, by number."""

    balancers: tuple[int, ...]
    outside: tuple[int, int]
    routers: tuple[LabGuest, ...]

    @property
    def index(self) -> int:
        """Of the router that neighbours see."""
        return self.routers[0].index

    @property
    def guests(self) -> list[LabGuest]:
        return [*map(msrhelp.balancer, self.balancers), *self.routers]

    @property
    def macs(self) -> tuple[str, str]:
        """Of the router that neighbours see."""
        left, right = (msrhelp.balancer(n).macs[side] for side, n in enumerate(self.outside))
        return left, right

    def write(self, links: str) -> None:
        served = {
            n: [s for s, by in zip(("in", "out"), self.outside, strict=True) if by == n]
            for n in self.balancers
        }
        balancers = ", ".join(f"lb{n}: [{', '.join(sides)}]" for n, sides in served.items())
        routers = ", ".join(guest.name for guest in self.routers)
        text = GROUP.format(balancers=balancers, routers=routers, links=links)
        (GROUPS / "edge.yaml").write_text(text)

    def load(self, *more: str) -> None:
        """Have every balancer load the rules that vsrtune gives for it."""
        for number in self.balancers:
            rules = labhelp.vsrtune("group", "rules", "edge", f"lb{number}", *more)
            msrhelp.ask(number, "load", rules.stdout)


@pytest.fixture(scope="module")
def single(guests: list[LabGuest]) -> Iterator[Stage]:
    """One balancer for both sides, and one router; the neighbours are there."""
    if any(g.kind != "libvirt" for g in guests):
        pytest.skip("a plain QEMU guest keeps its macvtaps on the lower devices")
    if labhelp.sh("modprobe", "-n", "napi_macvlan", check=False).returncode != 0:
        pytest.skip("this lab has no module napi_macvlan")
    pvrhelp.add_neighbours(guests[0].index, NEIGHBOURS)
    begin = time.monotonic()
    msrhelp.start(1, 0, 1)
    print(f"lb1 runs after {time.monotonic() - begin:.0f} s")
    yield Stage((1,), (1, 1), (guests[0],))
    msrhelp.stop(1)
    pvrhelp.drop_neighbours(guests[0].index, NEIGHBOURS)


@pytest.fixture(scope="module")
def double(
    single: Stage, guests: list[LabGuest], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    """A balancer for each side, and all routers, which have the first one's addresses too."""
    if len(guests) < 2:
        pytest.skip("needs two routers")
    path = tmp_path_factory.mktemp("msr") / "domain.xml"
    first, *others = guests
    theirs = roles(labhelp.sh("virsh", "dumpxml", "--inactive", first.name).stdout)
    definitions = {g: labhelp.sh("virsh", "dumpxml", "--inactive", g.name).stdout for g in others}
    for guest, definition in definitions.items():
        alike = " ".join(theirs)
        for mac, own in zip(first.macs, guest.macs, strict=True):
            alike = alike.replace(mac, own)
        labhelp.stop_guest(guest)
        define(definition.replace("<cmdline>", f"<cmdline>{alike} "), path)
    msrhelp.unplug(1, side=1)
    msrhelp.start(2, 1)
    for guest in others:
        labhelp.start_guest(guest)
    yield Stage((1, 2), (1, 2), tuple(guests))
    msrhelp.stop(2)
    for guest, definition in definitions.items():
        labhelp.stop_guest(guest)
        define(definition, path)
        labhelp.start_guest(guest)


@contextmanager
def made(stage: Stage, links: str) -> Iterator[None]:
    """The guests as one router that forwards; afterwards all is as it was before."""
    before = pictures(stage.guests)
    stage.write(links)
    with ExitStack() as stack:
        stack.callback(restored, stage, before)
        stack.enter_context(msrhelp.unknown(stage.routers[0]))
        begin = time.monotonic()
        group("create", "edge")
        created = time.monotonic() - begin
        stage.load()
        loaded = time.monotonic() - begin
        msrhelp.forwards(stage.index)
        ready = time.monotonic() - begin
        print(f"{links}: created in {created:.1f} s, rules {loaded:.1f} s, forwards {ready:.1f} s")
        yield


def restored(stage: Stage, before: list[str]) -> None:
    """End the group and look whether anything of it is left."""
    labhelp.reset()
    if LEDGER.exists() and LEDGER.stat().st_size:
        labhelp.vsrtune("attach", "--recover", check=False)
        told = labhelp.vsrtune("group", "delete", "edge", check=False)
        print(told.stdout, told.stderr)
    (GROUPS / "edge.yaml").unlink()
    for guest in stage.routers:
        labhelp.sh("lab-wait-forward", guest.name, "60")
    assert pictures(stage.guests) == before
    assert read_pending(LEDGER) == []
    assert "napi_macvtap" not in kinds()
    left = [e.name for e in Path("/sys/class/net").iterdir() if e.name.startswith("edge")]
    assert left == []


def forwards_everything(stage: Stage) -> None:
    """Between all neighbours, both ways, each frame once, by every router, and out of the
    balancers alone."""
    took = msrhelp.taken(stage.routers)
    outside = msrhelp.Watched(stage.macs)
    settled(stage)
    cost = msrhelp.cpu_seconds(stage.guests)
    results = both_ways(stage, seed=1)
    after = msrhelp.cpu_seconds(stage.guests)
    frames, strangers = outside.end()
    print("in to out, out to in:", *results)
    print("frames outside, of them from a strange MAC:", *frames, strangers)
    received = msrhelp.taken(stage.routers)
    shares = {
        who: [b - a for a, b in zip(took[who], now, strict=True)] for who, now in received.items()
    }
    print("received on each side:", shares)
    for name, (vcpus, workers) in after.items():
        print(f"{name}: vcpu {vcpus - cost[name][0]:.2f} s, vhost {workers - cost[name][1]:.2f} s")
    for result in results:
        assert pvrhelp.few_lost(result)
        assert (result.doubled, result.strange) == ([], [])
    for count, strange in frames:
        assert count > COUNT
        assert strange == 0, strangers
    assert msrhelp.known_as(stage.routers[0]) == list(stage.macs)
    for side in (0, 1):
        # 400 flows by hash: at least half of an even share.
        total = sum(share[side] for share in shares.values())
        assert all(share[side] > total / len(shares) / 2 for share in shares.values())


def flows_keep_their_router(stage: Stage) -> None:
    """A flow and its replies take one router, although two balancers choose it."""
    count, ways = 20, []
    for port in range(30000, 30010):
        left = (f"10.10.{stage.index}.{pvrhelp.FIRST}", port)
        right = (f"10.20.{stage.index}.12", port + 99)
        way = []
        for side, (name, here, there) in enumerate((("gen", left, right), ("sink", right, left))):
            before = msrhelp.taken(stage.routers)
            pvrhelp.one_flow(name, here, there, count)
            time.sleep(0.5)
            after = msrhelp.taken(stage.routers)
            way += [who for who in after if after[who][side] - before[who][side] >= count]
        ways.append(tuple(way))
    print("routers of each flow, there and back:", *ways)
    assert set(ways) == {(guest.name, guest.name) for guest in stage.routers}


def both_ways(stage: Stage, seed: int) -> tuple[Result, Result]:
    return pvrhelp.both_ways(stage.index, NEIGHBOURS, count=COUNT, rate=RATE, seed=seed)


def lost_nothing(stage: Stage) -> bool:
    """Whether a pass loses nothing; routers that have just come find their neighbours in
    it."""
    results = both_ways(stage, seed=21)
    print("in to out, out to in:", *results)
    for result in results:
        assert (result.doubled, result.strange) == ([], [])
    return not any(result.lost for result in results)


def settled(stage: Stage) -> None:
    labhelp.wait_for(lambda: lost_nothing(stage), "nothing is lost", 120)


@pytest.mark.parametrize("links", LINKS)
def test_one_balancer_in_front_of_one_router(single: Stage, links: str) -> None:
    with made(single, links):
        forwards_everything(single)
        group("delete", "edge")


@pytest.mark.parametrize("links", LINKS)
def test_two_balancers_in_front_of_two_routers(double: Stage, links: str) -> None:
    with made(double, links):
        forwards_everything(double)
        flows_keep_their_router(double)
        group("delete", "edge")


@pytest.mark.parametrize("links", ["bridge", "vlan"])
def test_drain_and_scale_under_load(double: Stage, links: str) -> None:
    """A router that is to go gets no frames any more before it goes, and one that comes gets
    none before it is there."""
    second = double.routers[1].name
    console = labhelp.console(double.routers[1].index)

    def configured() -> int:
        """How often it has said that it configured an interface."""
        return console.read_text(errors="replace").count("router: ")

    def lose(*words: str) -> None:
        double.load("--without", second)
        group(*words)

    def gain() -> None:
        before = configured()
        group("scale", "edge", "2")
        labhelp.wait_for(lambda: configured() >= before + 2, "it has configured both", 60)
        double.load()

    steps = (
        ("scale edge 1", lambda: lose("scale", "edge", "1"), 1),
        ("scale edge 2", gain, 2),
        (f"drain edge {second}", lambda: lose("drain", "edge", second), 1),
        ("scale edge 2", gain, 2),
    )
    with made(double, links):
        settled(double)
        for name, change, many in steps:
            flows = pvrhelp.Flows(double.index, NEIGHBOURS, count=9000, rate=RATE, seed=31)
            time.sleep(2)
            begin = time.monotonic()
            change()
            seconds = time.monotonic() - begin
            result = flows.wait()
            print(f"{name}: took {seconds:.1f} s; {result}")
            assert seconds < 57, "the flows ended before"
            # Only frames that wait for a neighbour to be resolved may be lost, as anywhere.
            assert pvrhelp.few_lost(result)
            assert (result.doubled, result.strange) == ([], [])
            states = [p["state"] for p in pvrhelp.places() if p["member"] == second]
            assert set(states) == {"plugged" if many == 2 else "drained"}
            settled(double)
        group("delete", "edge")


def test_the_daemon_tunes_balancers_and_routers(double: Stage, irq_cpus: set[int]) -> None:
    with made(double, "bridge"):
        labhelp.write_policies("auto")
        labhelp.start()

        def untuned() -> list[str]:
            return [
                f"{guest.name} {tid}: {how}"
                for guest in double.guests
                for tid, how in msrhelp.data_plane(guest).items()
                if labhelp.mask(tid) & irq_cpus or not how.startswith(labhelp.realtime_start())
            ]

        labhelp.wait_for(lambda: untuned() == [], "all threads are tuned", 90)
        workers = [len(guest.workers()) for guest in double.guests]
        assert workers == [2, 2, 2, 2]
        settled(double)
        labhelp.stop()
        group("delete", "edge")


@contextmanager
def watched(stage: Stage) -> Iterator[None]:
    """A group whose file asks for health checks, and a daemon that has given its balancers
    rules."""
    with made(stage, "bridge"), ExitStack() as stack:
        for number in stage.balancers:
            msrhelp.ask(number, "run", "nft flush ruleset")
        path = GROUPS / "edge.yaml"
        path.write_text(f"{path.read_text()}  health: {{leave: 2s, return: 10s}}\n")
        labhelp.clear_policies()
        labhelp.start()
        stack.callback(labhelp.stop)
        stack.callback(revived, stage.routers[1])
        labhelp.wait_for(lambda: set(faults().values()) == {"good"}, "all is well", 90)
        settled(stage)
        yield
        group("delete", "edge")


def revived(router: LabGuest) -> None:
    """Whatever a test did to it, it runs."""
    if not router.runs:
        labhelp.sh("virsh", "start", router.name)
    labhelp.sh("virsh", "resume", router.name, check=False)
    slowed(router, UNLIMITED)


def slowed(router: LabGuest, quota: int) -> None:
    """Let its vcpus run for ``quota`` microseconds in 0.1 s."""
    labhelp.sh("virsh", "schedinfo", router.name, "--live", "--set", f"vcpu_quota={quota}")


def faults() -> dict[str, str]:
    """What the daemon says of each guest of the group: "good", or what is wrong."""
    return {str(p["member"]): str(p["health"]) for p in pvrhelp.places()}


def began(guest: str) -> int:
    """How often something was wrong with a guest since the daemon started."""
    return int(labhelp.samples("vsrtune_group_guest_faults_total", domain=guest)[0])


def under_load(stage: Stage, change: Callable[[], object]) -> Result:
    """What becomes of 40 s of frames when something happens to the group after 2 s."""
    flows = pvrhelp.Flows(stage.index, NEIGHBOURS, count=40 * RATE, rate=RATE, seed=41)
    time.sleep(2)
    change()
    return flows.wait()


def test_a_router_that_dies_leaves_and_returns(double: Stage) -> None:
    """The daemon gives the balancers rules without it, and with it again once it forwards: after a
    kill, a hang, and too little CPU time."""
    second = double.routers[1]
    with watched(double):
        result = under_load(double, lambda: os.kill(second.pid, signal.SIGKILL))
        print(f"kill -9 of {second.name}: {result}")
        assert faults()[second.name] == "unplugged"
        assert result.lost and result.lost_between() < 10
        result = under_load(double, lambda: labhelp.sh("virsh", "start", second.name))
        print(f"start of {second.name}: {result}")
        labhelp.wait_for(lambda: faults()[second.name] == "good", "it is back", 120)
        settled(double)
        before = msrhelp.taken(double.routers)[second.name]
        assert lost_nothing(double)
        took = msrhelp.taken(double.routers)[second.name]
        assert all(b - a > COUNT / 4 for a, b in zip(before, took, strict=True))

        result = under_load(double, lambda: labhelp.sh("virsh", "suspend", second.name))
        print(f"{second.name} hangs: {result}")
        assert faults()[second.name] == "stalled"
        assert result.lost and result.lost_between() < 10
        result = under_load(double, lambda: labhelp.sh("virsh", "resume", second.name))
        print(f"{second.name} runs again: {result}")
        labhelp.wait_for(lambda: faults()[second.name] == "good", "it is back", 120)

        result = under_load(double, lambda: slowed(second, SLOW))
        print(f"{second.name} gets 1 % of a CPU: {result}")
        # Where its rings hold what comes, nothing is lost.
        assert not result.lost or (began(second.name) > 2 and result.lost_between() < 25)
        result = under_load(double, lambda: slowed(second, UNLIMITED))
        print(f"{second.name} gets its CPU again: {result}")
        labhelp.wait_for(lambda: faults()[second.name] == "good", "it is back", 150)
        settled(double)
        print(labhelp.daemon_log(60))
        assert 2 <= began(second.name) <= 4
        assert began(double.routers[0].name) == 0


def test_an_agent_that_hangs_delays_nobody(double: Stage) -> None:
    """The other balancer loads its rules, passes go on, the log says what to load; and when the
    agent answers again, it loads them."""
    second = double.routers[1].name
    with watched(double):
        msrhelp.ask(2, "run", "kill -STOP $(cat /agent.pid)")
        labhelp.sh("virsh", "suspend", second)
        both_ways(double, seed=43)
        labhelp.wait_for(lambda: faults()["lb2"].startswith("rules due; "), "it is due", 60)
        assert faults()["lb1"] == "good"
        passes = {labhelp.last_pass()}
        labhelp.wait_for(
            lambda: passes.add(labhelp.last_pass()) or len(passes) > 3, "three more passes", 45
        )
        assert f"vsrtune group rules edge lb2 --without {second}" in labhelp.daemon_log(60)
        msrhelp.ask(2, "run", "kill -CONT $(cat /agent.pid)")
        labhelp.wait_for(lambda: faults()["lb2"] == "good", "it has loaded them", 120)
        assert lost_nothing(double)
        labhelp.sh("virsh", "resume", second)
