"""Whether the host has a value: of which kinds, and what counts as the same."""

from __future__ import annotations

import pytest
from fake_kernel import LIBVIRT, make_host
from planning_samples import cpus

from vsrtune.execute.comparison import between, cut, exactly, still_applied
from vsrtune.execute.host_writer import LiveSysOps
from vsrtune.model.deadline import LEAVING
from vsrtune.model.guest import Sched, SchedClass
from vsrtune.model.targets import CpusetList, PartitionState, Pin, TimeSlice, Value

FIFO = Sched(SchedClass.FIFO, 10)


def pin(mask: str, text: str | None = "1") -> Pin:
    return Pin(cpus(mask), text)


@pytest.fixture
def ops() -> LiveSysOps:
    """Of CPUs 0 to 3 the last is offline."""
    host = make_host("6.12")
    host.state["online"] = "0-2"
    return host.ops()


@pytest.fixture
def partitioned() -> LiveSysOps:
    """Of CPUs 0 to 3 the last is a partition's."""
    host = make_host("6.12")
    host.state["cgroups"][f"{LIBVIRT}/vcpu1"] |= {"exclusive": "3", "partition": "root"}
    return host.ops()


@pytest.mark.parametrize(
    ("wanted", "now", "same"),
    [
        (500, 500, True),
        (500, 501, False),
        (True, 1, False),
        (1, True, False),
        (FIFO, FIFO, True),
        (FIFO, Sched(SchedClass.FIFO, 9), False),
        (cpus("1-3"), cpus("1-2"), True),
        (cpus("1-2"), cpus("1-3"), True),
        (cpus("1-3"), cpus("1"), False),
        (cpus("1"), pin("1", None), False),
        (pin("1-3"), pin("1-2"), True),
        (pin("1-3"), pin("1"), False),
        (pin("1-2", "1-2"), pin("1-2", "1,2"), False),
        (pin("1"), cpus("1"), False),
        (CpusetList(""), CpusetList("0-2"), True),
        (CpusetList(""), CpusetList("0-1"), False),
        (CpusetList("0-2"), CpusetList(""), False),
        (CpusetList("0-1"), CpusetList("0-2"), False),
        (TimeSlice(8), TimeSlice(8), True),
        (TimeSlice(8), TimeSlice(10), False),
        (TimeSlice(8), 8, False),
    ],
)
def test_exactly(ops: LiveSysOps, wanted: Value, now: Value, same: bool) -> None:
    assert exactly(wanted, now, ops) is same


@pytest.mark.parametrize(
    ("wanted", "now", "found"),
    [
        (cpus("1-3"), cpus("1-2"), True),
        (cpus("1-3"), cpus("1-3"), False),
        (cpus("1-3"), cpus("1"), False),
        (cpus("1-2"), cpus("1-2"), True),
        (pin("1-3"), pin("1-2"), True),
        (pin("1-3"), pin("1-2", "2"), False),
        (pin("1-3"), pin("1"), False),
        (cpus("1-3"), pin("1-2"), False),
        (500, 500, False),
    ],
)
def test_cut(partitioned: LiveSysOps, wanted: Value, now: Value, found: bool) -> None:
    assert cut(wanted, now, partitioned) is found


@pytest.mark.parametrize(
    ("written", "now", "ours"),
    [
        (pin("1"), pin("1", "2"), True),
        (pin("1"), pin("2"), False),
        (pin("1-3"), pin("1-2", "2"), True),
        (cpus("1-3"), cpus("1-2"), True),
        (cpus("1-3"), cpus("1"), False),
        (PartitionState("root"), PartitionState("root invalid (why)"), True),
        (PartitionState("root"), PartitionState("member"), False),
        (500, 500, True),
        (500, 77, False),
    ],
)
def test_still_applied(partitioned: LiveSysOps, written: Value, now: Value, ours: bool) -> None:
    assert still_applied(written, now, partitioned) is ours


@pytest.mark.parametrize(
    ("before", "after", "now", "found"),
    [
        (pin("0-3", ""), pin("1"), pin("0-3"), True),  # the list alone
        (pin("0-3", ""), pin("1"), pin("1", ""), True),  # the mask alone
        (pin("0-3", ""), pin("1"), pin("0-3", "0-3"), True),  # libvirt's on the way to no list
        (pin("0-3", ""), pin("1"), pin("0-2"), True),  # what a partition leaves
        (pin("0-3", ""), pin("1"), pin("2"), False),
        (pin("0-3", ""), pin("1"), pin("1", "2"), False),
        (pin("0-1", "0-1"), pin("1-2", "1-2"), pin("1", "0-1"), True),  # cut to the new list
        (pin("0-1", "0-1"), pin("1-2", "1-2"), pin("0", "0-1"), False),
        (pin("1"), pin("2", "2"), cpus("1"), False),
        (500, 100, 500, True),
        (500, 100, 100, True),
        (500, 100, 77, False),
        (Sched(), FIFO, LEAVING, True),
        (Sched(), FIFO, Sched(SchedClass.BATCH), False),
    ],
)
def test_between(
    partitioned: LiveSysOps, before: Value, after: Value, now: Value, found: bool
) -> None:
    assert between(before, after, now, partitioned) is found
