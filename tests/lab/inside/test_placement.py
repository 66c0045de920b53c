"""placement: auto on a real host: threads part when one guest gets busy, and then they stay."""

from __future__ import annotations

from typing import Any

import labhelp
import pytest
from labhelp import LabGuest

INTERVAL = 2  # seconds; windows of load are as long
# More than a router forwards here, so that its vcpu is busy all the time; until it is stopped.
RATE, SECONDS = 40_000, 600
BUSY = 0.3

LISTED = 'guest: "{guest}"\nprofile: none\ncpus:\n  vcpu: {cpu}\n  vhost: {cpu}\n'
PLACED = 'guest: "{guest}"\nprofile: none\nplacement: auto\n'


def metric(name: str) -> float:
    """A metric without labels."""
    return labhelp.samples(name)[0]


def passes() -> int:
    return int(metric("vsrtune_reconcile_duration_seconds_count"))


def write(template: str, cpus: dict[LabGuest, int]) -> None:
    for number, (guest, cpu) in enumerate(cpus.items()):
        text = template.format(guest=guest.ref, cpu=cpu)
        (labhelp.POLICIES / f"test{number}.yaml").write_text(text)


def threads(guest: LabGuest) -> list[dict[str, Any]]:
    """The guest's data plane threads as `vsrtune show --json` has them."""
    found = labhelp.show("--guest", guest.ref)["guests"][0]["threads"]
    return [t for t in found if t["role"] in ("vcpu", "vhost")]


def load(thread: dict[str, Any]) -> float:
    """The least load of a thread in the windows that are known."""
    return float(min(thread["load"], default=0.0))


def stays_for(more: int) -> bool:
    """Whether nothing moves in so many passes."""
    moves, end = metric("vsrtune_placement_moves_total"), passes() + more
    labhelp.wait_for(lambda: passes() >= end, f"{more} passes")
    return metric("vsrtune_placement_moves_total") == moves


@labhelp.one_release("what is decided by measured load")
def test_busy_threads_part_and_then_stay(
    restored: None, guests: list[LabGuest], irq_cpus: set[int]
) -> None:
    if len(guests) < 2 or labhelp.lab_cpus() < 4:
        pytest.skip("needs two routers, a busy one and one that is not, and 4 CPUs (--cpus 4)")
    one, other = guests[:2]
    free = sorted(set(range(labhelp.lab_cpus())) - irq_cpus)
    # At first each guest is on a CPU, as an operator may have it.
    start = {one: free[0], other: free[1]}
    write(LISTED, start)
    labhelp.set_environment(VSRTUNE_INTERVAL=str(INTERVAL))
    labhelp.start()
    write(PLACED, start)
    labhelp.sh("systemctl", "reload", "vsrtune")
    for guest, cpu in start.items():
        assert {tuple(labhelp.mask(tid)) for tid in guest.data_plane()} == {(cpu,)}, "they stay"
    with labhelp.traffic(one, RATE, SECONDS) as traffic:
        labhelp.wait_for(lambda: metric("vsrtune_placement_moves_total") > 0, "threads move", 180)
        labhelp.wait_for(lambda: stays_for(5), "they come to rest", 180)
        writes = metric("vsrtune_writes_total")
        mine, others = threads(one), threads(other)
        assert stays_for(5)
        assert metric("vsrtune_writes_total") == writes, "the same load writes nothing"
        assert traffic.poll() is None, "the traffic has ended"
        shown = labhelp.vsrtune("plan", "-v").stdout
    for thread in [*mine, *others]:
        print(thread["role"], thread["affinity"], thread["load"])
    busiest = max(mine, key=load)
    assert load(busiest) > BUSY
    beside = [t for t in [*mine, *others] if t["affinity"] == busiest["affinity"]]
    assert beside == [busiest], "the busiest thread has a CPU of its own"
    idle = {t["affinity"] for t in others}
    assert len(idle) < len(others), "idle ones share"
    assert all(labhelp.cpu_list(t["affinity"]).isdisjoint(irq_cpus) for t in [*mine, *others])
    assert "a CPU of its own; load" in " ".join(shown.split())
    labhelp.stop()
