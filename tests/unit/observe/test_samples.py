"""What top reads of recorded and hand-written hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import recorded_hosts
from advanced_root import AdvancedRoot, proc_stat, softnet
from hosttree import HostTree
from top_samples import SECOND

from vsrtune.host.cpus import parse_cpu_times
from vsrtune.host.interrupts import parse_counts
from vsrtune.model.load import CpuTimes, DropPlace, GuestFrames, data_plane
from vsrtune.model.snapshot import Snapshot
from vsrtune.observe import samples
from vsrtune.observe.recording import replay
from vsrtune.views.top_frame import make_frame


def test_proc_stat() -> None:
    text = (
        "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 10 1 20 300 5 2 40 7 6 0\ncpu11 1 0 0 0 0 0 1\nintr 5 0\n"
    )
    assert parse_cpu_times(text) == {
        0: CpuTimes(385, 305, 40),
        11: CpuTimes(2, 0, 1),
    }


def test_interrupts_over_all_cpus() -> None:
    text = "     CPU0  CPU1\n 24:  10  32  IO-APIC 1-edge  p0-rx-0\n 25:  0  0  x  p1\nERR:  7\n"
    assert parse_counts(text) == {24: 42, 25: 0}


@pytest.mark.parametrize("host", recorded_hosts.FILES, ids=lambda host: host.stem)
def test_a_recorded_host(host: Path) -> None:
    """It has the times of every thread, and not what a recording does not need."""
    root = AdvancedRoot(host)
    seen = replay(host)
    sample = samples.take(root, seen, root.clock)
    assert {t.key for t in data_plane(seen)} <= set(sample.threads)
    assert {r.at_ns for r in sample.threads.values()} == {sample.at_ns} == {1000 * SECOND}
    by_key = {t.key: t.cpu_ns for t in data_plane(seen)}
    assert {k: sample.threads[k].run_ns for k in by_key} == by_key
    assert sample.cpus == {}
    rings = {(s.guest, s.where): n for s, n in sample.drops.items() if s.place == "ring"}
    assert rings == {
        (g.ref, i.target): i.ring_drops
        for g in seen.guests
        for i in g.interfaces
        if i.counters is None
    }


def test_drops_of_the_module_by_place() -> None:
    root = AdvancedRoot(recorded_hosts.file("trixie-napi"))
    sample = samples.take(root, replay(root.path), root.clock)
    drops = {s.place: n for s, n in sample.drops.items() if s.where == "nvt0"}
    assert drops == {
        "ring_full": 0, "queue_full": 0, "no_queue": 1, "down": 0, "shrink": 0, "other": 0,
        "tx_dropped": 0,
    }  # fmt: skip


def test_cpus_backlogs_and_interrupts_where_the_host_has_them() -> None:
    root = AdvancedRoot(recorded_hosts.file("trixie-e1000e"))
    root.set("/proc/stat", proc_stat({0: (50, 40, 950), 1: (4, 0, 996)}))
    root.set("/proc/net/softnet_stat", softnet({0: 0x11, 2: 3}))
    sample = samples.take(root, replay(root.path), root.clock)
    assert sample.cpus == {0: CpuTimes(1000, 950, 40), 1: CpuTimes(1000, 996, 0)}
    assert sample.drops[DropPlace("CPU 0", "backlog")] == 17
    assert sample.drops[DropPlace("CPU 2", "backlog")] == 3
    assert {41, 42, 44, 45} <= set(sample.interrupts)


def test_a_tap_counts_the_other_way_round_and_lower_devices_by_counter() -> None:
    tree = HostTree().host()
    tree.device("tap0", 7, has="tun_flags brport lower_br0").device("p0", 2)
    # rx_dropped is 7 and tx_dropped 9 in such a tree.
    tree.file("/sys/devices/virtual/net/p0/statistics/rx_missed_errors", "5\n")
    tree.file("/sys/devices/virtual/net/p0/statistics/rx_fifo_errors", "6\n")
    seen = replay(recorded_hosts.file("bookworm-veth-plain"))
    (guest, *_) = seen.guests
    taps = (replace(guest.interfaces[0], target="tap0", lower=("p0", "gone")),)
    seen = Snapshot(seen.host, (replace(guest, interfaces=taps),))
    sample = samples.take(tree.root(), seen)
    assert sample.drops == {
        DropPlace("tap0", "ring", "vr1"): 9,
        DropPlace("tap0", "rx_dropped", "vr1"): 7,
        DropPlace("p0", "rx_dropped"): 7,
        DropPlace("p0", "tx_dropped"): 9,
        DropPlace("p0", "rx_missed_errors"): 5,
        DropPlace("p0", "rx_fifo_errors"): 6,
    }
    assert sample.threads == {}


def test_a_bond_counts_without_its_ports() -> None:
    """What they dropped before they joined it, the kernel does not add. It keeps what they dropped
    in it when they leave, which is no rate of the bond."""
    tree = HostTree().host().device("p0", 2).device("p1", 3)
    tree.device("bond0", 4, devtype="bond", has="lower_p0 lower_p1")
    tree.device("v5", 5, devtype="vlan", has="lower_bond0")
    tree.file("/sys/devices/virtual/net/bond0/statistics/rx_dropped", "5\n")
    tree.file("/sys/devices/virtual/net/bond0/statistics/tx_dropped", "21\n")
    seen = replay(recorded_hosts.file("bookworm-veth-plain"))
    (guest, *_) = seen.guests
    taps = (replace(guest.interfaces[0], target="gone", lower=("v5", "bond0", "p0", "p1")),)
    bonded = Snapshot(seen.host, (replace(guest, interfaces=taps),))
    sample = samples.take(tree.root(), bonded)
    found = {(spot.where, spot.place): count for spot, count in sample.drops.items()}
    assert found.pop(("bond0", "rx_dropped")) == 0
    assert found.pop(("bond0", "tx_dropped")) == 21 - 9 - 9
    assert found == {
        (name, place): count
        for name in ("v5", "p0", "p1")
        for place, count in (("rx_dropped", 7), ("tx_dropped", 9))
    }
    tree.remove("/sys/devices/virtual/net/bond0/lower_p1")
    told = []
    for later in (samples.take(tree.root(), bonded) for _ in range(2)):
        drops = make_frame(sample, later).drops
        told += [(d.total, d.rate) for d in drops if (d.where, d.place) == ("bond0", "tx_dropped")]
        sample = later
    assert told == [(21 - 9, None), (21 - 9, 0.0)]


def net_dev(**rows: tuple[int, int, int, int]) -> str:
    """/proc/net/dev of devices with frames received, dropped of them, sent, and dropped."""
    lines = [
        f"  {name}: 0 {rx} 0 {rx_lost} 0 0 0 0 0 {tx} 0 {tx_lost} 0 0 0 0"
        for name, (rx, rx_lost, tx, tx_lost) in rows.items()
    ]
    return "\n".join(["h", "h", *lines, ""])


def test_frames_that_came_for_guests_and_that_they_sent() -> None:
    tree = HostTree().host()
    tree.file("/proc/net/dev", net_dev(tap0=(700, 7, 701, 9), mvt0=(800, 7, 801, 9)))
    for number, (name, has) in enumerate({"tap0": "tun_flags", "mvt0": "macvtap"}.items(), 7):
        tree.device(name, number, has=has)
    seen = replay(recorded_hosts.file("bookworm-veth-plain"))
    (guest, *_) = seen.guests

    def frames(*names: str) -> list[GuestFrames]:
        taps = tuple(replace(guest.interfaces[0], target=name) for name in names)
        one = replace(guest, interfaces=taps)
        # Members of a group stand on the same device.
        return [*samples.take(tree.root(), Snapshot(seen.host, (one, one))).frames.values()]

    # tx_dropped is 9: these had come for the guest, too.
    assert frames("tap0") == [GuestFrames(701 + 9, 9, 700)]
    assert frames("mvt0", "gone") == [GuestFrames(800, 7, 801)]


def test_frames_of_the_module_count_before_its_rings() -> None:
    """The module counts as received what it delivered (kmod/stats.c)."""
    root = AdvancedRoot(recorded_hosts.file("trixie-napi"))
    seen = replay(root.path)
    counters = {i.target: i.counters for g in seen.guests for i in g.interfaces}
    (name,) = [name for name, found in counters.items() if found is not None]
    root.set("/proc/net/dev", net_dev(**{name: (100, 30, 40, 3)}))
    assert samples.take(root, seen).frames == {name: GuestFrames(130, 30, 40)}
