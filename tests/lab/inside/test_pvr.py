"""Several guests are one router (Parallel Virtual Routers): all find every neighbour, and any
may go. Two by default; a lab with --guests 3 makes a group of three, LAB_NEIGHBOURS is how many
there are on each side.

    gen 10.10.1.10..25 = p0 - edge-in  - eth0 [vr1] eth1 - edge-out - p1 = sink 10.20.1.10..25
                                  '----- eth0 [vr2] eth1 -----'

The neighbours' addresses are all on g0 and s0: the routers have to resolve each of them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import hoststate
import kmodhelp
import labhelp
import pvrhelp
import pytest
from kmodhelp import check_sum, counters, drops
from labhelp import LabGuest
from test_attach import LEDGER, devices, forwards, kinds, picture

from vsrtune.execute.ledger import read_pending

NEIGHBOURS = int(os.environ.get("LAB_NEIGHBOURS") or 16)
SHARED = ("edge-in", "edge-out")
GROUPS = Path("/etc/vsrtune/groups")
GROUP = """\
group:
  name: edge
  kind: pvr
  members: [{members}]
  lower: {{in: p0, out: p1}}
"""


def group(*words: str, check: bool = True, fault: str = "") -> str:
    """``vsrtune group``: what it printed. With ``check`` it must succeed, else it must fail."""
    done = labhelp.vsrtune("group", *words, check=False, fault=fault)
    text = done.stdout + done.stderr
    assert (done.returncode == 0) == check, f"exit {done.returncode}\n{text}"
    return text


def roles(definition: str) -> list[str]:
    """The words of a lab router's kernel command line that configure its NICs by MAC."""
    found = re.search(r"<cmdline>(.*?)</cmdline>", definition)
    assert found is not None
    return [word for word in found[1].split() if word.startswith("nic=")]


def define(definition: str, path: Path) -> None:
    path.write_text(definition)
    labhelp.sh("virsh", "define", str(path))


@pytest.fixture(scope="module")
def routers(
    guests: list[LabGuest], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[LabGuest]]:
    """The routers; the others know what to be with the first one's MACs too, as members of a
    group are configured alike."""
    if len(guests) < 2 or any(g.kind != "libvirt" for g in guests):
        pytest.skip("needs two or more libvirt guests and no other")
    if labhelp.sh("modprobe", "-n", "napi_macvlan", check=False).returncode != 0:
        pytest.skip("this lab has no module napi_macvlan")
    path = tmp_path_factory.mktemp("pvr") / "domain.xml"
    definitions = [labhelp.sh("virsh", "dumpxml", "--inactive", g.name).stdout for g in guests]
    more = " ".join(roles(definitions[0]))
    for guest, definition in zip(guests[1:], definitions[1:], strict=True):
        labhelp.stop_guest(guest)
        define(definition.replace("<cmdline>", f"<cmdline>{more} "), path)
        labhelp.start_guest(guest)
    pvrhelp.add_neighbours(guests[0].index, NEIGHBOURS)
    (GROUPS / "edge.yaml").write_text(GROUP.format(members=", ".join(g.name for g in guests)))
    yield guests
    (GROUPS / "edge.yaml").unlink()
    pvrhelp.drop_neighbours(guests[0].index, NEIGHBOURS)
    for guest, definition in zip(guests[1:], definitions[1:], strict=True):
        labhelp.stop_guest(guest)
        define(definition, path)
        labhelp.start_guest(guest)


def pictures(guests: list[LabGuest]) -> list[str]:
    return [picture(guest) for guest in guests]


@pytest.fixture
def members(routers: list[LabGuest]) -> Iterator[list[LabGuest]]:
    """The test fails when a router is not what it was before."""
    for guest in routers:
        if not guest.runs:
            labhelp.start_guest(guest)
    before = pictures(routers)
    yield routers
    if LEDGER.exists() and LEDGER.stat().st_size:
        labhelp.vsrtune("attach", "--recover", check=False)
        labhelp.vsrtune("group", "delete", "edge", check=False)
    for guest in routers:
        if not guest.runs:
            labhelp.start_guest(guest)
        forwards(guest)
    assert pictures(routers) == before
    assert "napi_macvtap" not in kinds()


@pytest.fixture
def edge(members: list[LabGuest]) -> list[LabGuest]:
    """All of them as one router; plugged in and configured."""
    group("create", "edge")
    configured(members[0])
    return members


def configured(first: LabGuest) -> None:
    """A lab router looks for new NICs every second, and needs a while for both."""
    labhelp.wait_for(lambda: pvrhelp.all_forward(first.index), "all members forward", 60)


def alone_on(device: str) -> dict[int, dict[str, int]]:
    """Counters of each open queue of a device."""
    found: dict[int, dict[str, int]] = {}
    every = counters(device)
    for name, value in every.items():
        match = re.fullmatch(r"tapq(\d+)_(\w+)", name)
        if match and int(match[1]) < every["tap_queues"]:
            found.setdefault(int(match[1]), {})[match[2]] = value
    return found


def test_every_member_finds_every_neighbour(edge: list[LabGuest]) -> None:
    assert devices() == list(SHARED)
    assert kinds() == {"napi_macvtap"}
    before = {name: alone_on(name) for name in SHARED}
    first = pvrhelp.both_ways(edge[0].index, NEIGHBOURS, count=2400, rate=400, seed=1)
    then = pvrhelp.both_ways(edge[0].index, NEIGHBOURS, count=2400, rate=400, seed=1)
    for way, cold, warm in zip(("in to out", "out to in"), first, then, strict=True):
        print(f"{way}: first {cold}, then {warm}")
        assert len({to for _, to in warm.sent.values()}) == NEIGHBOURS
        assert pvrhelp.few_lost(cold)
        assert (cold.doubled, cold.strange) == ([], [])
        assert (warm.lost, warm.doubled, warm.strange) == ([], [], [])
    for name in SHARED:
        check_sum(counters(name))
        after = alone_on(name)
        assert set(after) == set(range(len(edge)))
        assert counters(name)["rx_copied"] > 0
        for number, now in after.items():
            received = now["received"] - before[name].get(number, {}).get("received", 0)
            sent = now["tx_packets"] - before[name].get(number, {}).get("tx_packets", 0)
            print(f"{name} queue {number}: received {received}, sent {sent}")
            # 400 flows by hash: of 4,800 frames each way at least half of an even share.
            assert received > 2400 / len(edge)
            assert sent > 2400 / len(edge)
            assert now["dropped_ring_full"] == 0
    # One number is one member on both sides, and its worker is known exactly.
    workers = {guest.name: set(guest.workers()) for guest in edge}
    numbers: dict[str, set[object]] = {}
    for place in pvrhelp.places():
        queue = place["queue"]
        assert isinstance(queue, dict), place
        assert queue["worker_tid"] in workers[str(place["member"])]
        numbers.setdefault(str(place["member"]), set()).add(queue["queue"])
    assert [len(found) for found in numbers.values()] == [1] * len(edge)
    assert set.union(*numbers.values()) == set(range(len(edge)))
    shown = json.loads(labhelp.vsrtune("show", "--json").stdout)
    for found in shown["guests"]:
        mapped = {
            t["interface"]: (t["confidence"], t["key"]["tid"])
            for t in found["threads"]
            if t["role"] == "vhost"
        }
        assert set(mapped) == set(SHARED), mapped
        assert {confidence for confidence, _ in mapped.values()} == {"exact"}
        assert {tid for _, tid in mapped.values()} == workers[found["name"]]


def test_a_flow_and_its_replies_take_one_member(edge: list[LabGuest]) -> None:
    """The kernel's hash is the same in both directions, and a number is one member."""
    index, count, taken = edge[0].index, 20, []
    pvrhelp.both_ways(index, NEIGHBOURS, count=800, rate=400, seed=41)
    for port in range(30000, 30000 + 6 * len(edge)):
        left, right = (f"10.10.{index}.{pvrhelp.FIRST}", port), (f"10.20.{index}.12", port + 99)
        ways = []
        for name, device, here, there in (
            ("gen", "edge-in", left, right), ("sink", "edge-out", right, left),
        ):  # fmt: skip
            before = alone_on(device)
            pvrhelp.one_flow(name, here, there, count)
            time.sleep(0.5)
            after = alone_on(device)
            ways += [n for n in after if after[n]["received"] - before[n]["received"] >= count]
        taken.append(tuple(ways))
    print("queues of each flow, there and back:", *taken)
    assert set(taken) == {(number, number) for number in range(len(edge))}


def test_without_the_flag_neighbours_are_lost(edge: list[LabGuest]) -> None:
    """Why there is the flag: all answers of ARP have one hash, so one member hears none."""
    for name in SHARED:
        kmodhelp.set_flag(name, "every-queue", on=False)
    results = pvrhelp.both_ways(edge[0].index, NEIGHBOURS, count=1600, rate=400, seed=3)
    for way, result in zip(("in to out", "out to in"), results, strict=True):
        lost = {result.sent[n][1] for n in result.lost}
        print(f"{way}: {result}, to {len(lost)} of {NEIGHBOURS} neighbours")
    assert sum(len(result.lost) for result in results) > 400
    assert not any(map(pvrhelp.few_lost, results))
    # Put on again, all are found.
    for name in SHARED:
        kmodhelp.set_flag(name, "every-queue", on=True)
    labhelp.wait_for(lambda: lost_nothing(edge[0]), "all neighbours are found", 60)


def test_a_member_that_is_killed_loses_its_flows_alone(edge: list[LabGuest]) -> None:
    first, second = edge[:2]
    assert lost_nothing(first)
    flows = pvrhelp.Flows(first.index, NEIGHBOURS, count=4000, rate=400, seed=11)
    time.sleep(4)
    os.kill(second.pid, signal.SIGKILL)
    result = flows.wait()
    print(f"kill -9 of {second.name}: {result}")
    # What waited in its rings, and what came before the kernel had closed them.
    assert len(result.lost) < 400
    assert result.lost_between() < 2
    assert lost_nothing(first)
    assert "does not run" in group("scale", "edge", str(len(edge)))
    assert {p["state"] for p in pvrhelp.places() if p["member"] == second.name} == {"stopped"}
    group("drain", "edge", second.name)
    # It comes again as a member. Its queues are open as soon as its QEMU runs, so its share
    # of the flows is lost until its kernel serves them.
    begin = time.monotonic()
    labhelp.sh("virsh", "start", second.name)
    labhelp.wait_for(
        lambda: len(alone_on("edge-in")) == len(edge), f"{second.name} opened its queue", 60
    )
    labhelp.wait_for(lambda: lost_nothing(first), f"{second.name} forwards", 180)
    print(f"start of {second.name}: all is forwarded after {time.monotonic() - begin:.0f} s")


def test_a_member_that_hangs_is_left_out(edge: list[LabGuest]) -> None:
    """What it had taken comes late or never; then its flows go to the other, until it reads
    again."""
    first, second = edge[:2]
    assert lost_nothing(first)
    flows = pvrhelp.Flows(first.index, NEIGHBOURS, count=6000, rate=400, seed=13)
    time.sleep(4)
    labhelp.sh("virsh", "suspend", second.name)
    result = flows.wait()
    print(f"{second.name} hangs: {result}")
    print({name: (counters(name)["rx_diverted"], alone_on(name)) for name in SHARED})
    assert counters("edge-in")["rx_diverted"] > 0
    assert not [n for n in result.lost if n > 4000]
    states = {p["device"]: p["state"] for p in pvrhelp.places() if p["member"] == second.name}
    assert states["edge-in"] == "stalled"
    labhelp.sh("virsh", "resume", second.name)
    labhelp.wait_for(lambda: lost_nothing(first), f"{second.name} forwards", 60)
    assert {p["state"] for p in pvrhelp.places()} == {"plugged"}


def lost_nothing(first: LabGuest) -> bool:
    """Whether all find all, and lose nothing once they have; what it found is printed."""
    cold, warm = (
        pvrhelp.both_ways(first.index, NEIGHBOURS, count=800, rate=400, seed=seed)
        for seed in (21, 21)
    )
    print("first:", *cold, "then:", *warm)
    if any(result.lost for result in warm):
        print({name: drops(counters(name)) for name in SHARED})
    return all(map(pvrhelp.few_lost, cold)) and not any(result.lost for result in warm)


def test_drain_and_scale_under_load(edge: list[LabGuest]) -> None:
    first, second = edge[:2]
    assert lost_nothing(first)
    # 2 is every one of them in most labs.
    counts = dict.fromkeys(("2", str(len(edge)), "1"))
    for words in (("drain", "edge", second.name), *(("scale", "edge", n) for n in counts)):
        flows = pvrhelp.Flows(first.index, NEIGHBOURS, count=9000, rate=400, seed=31)
        time.sleep(2)
        begin = time.monotonic()
        group(*words)
        took = time.monotonic() - begin
        result = flows.wait()
        print(f"{' '.join(words)}: took {took:.2f} s; {result}")
        configured(first)
        assert lost_nothing(first), words
    text = group("drain", "edge", first.name, check=False)
    assert "no running member would be left" in text
    # Delete gives the drained ones their interfaces too; the fixture looks.
    group("delete", "edge")
    assert read_pending(LEDGER) == []


def test_plan_changes_nothing_and_bad_input_neither(members: list[LabGuest]) -> None:
    before = pictures(members)
    told = group("create", "edge", "--dry-run")
    assert "make napi_macvtap edge-in on p0" in told
    assert "every-queue on" in told
    assert f"unplug {members[0].name}" in told
    assert "created groups: none" in group("delete", "edge", check=False)
    path = GROUPS / "bad.yaml"
    path.write_text(GROUP.format(members=members[0].name + ", nobody"))
    assert f"{path}:4: there is no libvirt guest nobody" in group("create", str(path), check=False)
    path.write_text(GROUP.format(members=members[0].name))
    text = group("create", str(path), check=False)
    assert f"{members[1].name} has a macvtap on it" in text
    path.write_text(GROUP.format(members=members[0].name).replace("pvr", "hub"))
    assert f"{path}:3: group.kind: 'hub' is not accepted" in group("create", str(path), check=False)
    path.unlink()
    assert pictures(members) == before
    assert not LEDGER.exists() or not LEDGER.stat().st_size


# Changes of a create: two devices, two flags, four unplugs, two ups, four plugs, four
# definitions. The fault hits the one after the first plug of the second guest, and the last.
@pytest.mark.parametrize("fault", labhelp.shared(["fail:13", "fail:4", "kill:18", "kill:13"]))
def test_an_interrupted_create_is_taken_back(members: list[LabGuest], fault: str) -> None:
    before = pictures(members)
    told = group("create", "edge", check=False, fault=fault)
    if fault.startswith("kill"):
        assert pictures(members) != before
        assert "was taken back" in labhelp.vsrtune("attach", "--recover").stdout
    else:
        assert "everything is as it was before" in told
    assert pictures(members) == before
    assert read_pending(LEDGER) == []
    for guest in members:
        forwards(guest)


def test_the_daemon_tunes_the_workers_of_all_members(
    edge: list[LabGuest], irq_cpus: set[int]
) -> None:
    labhelp.write_policies("auto")
    labhelp.start()

    def untuned() -> list[str]:
        wrong = []
        for guest in edge:
            assert len(guest.workers()) == len(SHARED)
            for tid in guest.data_plane():
                tuned = hoststate.sched(tid).startswith(labhelp.realtime_start())
                if labhelp.mask(tid) & irq_cpus or not tuned:
                    wrong.append(f"{guest.name} {tid}")
        return wrong

    labhelp.wait_for(lambda: untuned() == [], "all members are tuned", 60)
    # Somebody clears the flag: the daemon sets it again.
    kmodhelp.set_flag("edge-in", "every-queue", on=False)
    labhelp.wait_for(lambda: kmodhelp.flags("edge-in")["every-queue"], "the flag is back", 90)
    labhelp.stop()
    assert lost_nothing(edge[0])
