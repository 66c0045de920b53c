"""`vsrtune show` against what QEMU says and what traffic does."""

from __future__ import annotations

import labhelp
import pytest
from labhelp import LabGuest

FRAMES = 3000


def test_names_every_vcpu_as_qemu_does(guests: list[LabGuest]) -> None:
    shown = {g["name"]: g for g in labhelp.show()["guests"]}
    assert set(shown) == {g.name for g in guests}
    for guest in guests:
        vcpus = {
            t["index"]: t["key"]["tid"] for t in shown[guest.name]["threads"] if t["role"] == "vcpu"
        }
        assert vcpus == guest.vcpus()


def test_lists_every_worker_with_an_interface_and_queue(guests: list[LabGuest]) -> None:
    for shown in labhelp.show()["guests"]:
        guest = next(g for g in guests if g.name == shown["name"])
        workers = [t for t in shown["threads"] if t["role"] == "vhost"]
        assert sorted(t["key"]["tid"] for t in workers) == guest.workers()
        queues = {(i["target"], q) for i in shown["interfaces"] for q in range(i["queues"])}
        assert {(t["interface"], t["queue"]) for t in workers} == queues
        assert {t["confidence"] for t in workers} <= {"order", "exact"}


@pytest.mark.parametrize("nic", [0, 1])
def test_traffic_on_one_interface_moves_its_worker_and_no_other(
    guests: list[LabGuest], nic: int
) -> None:
    shown = {g["name"]: g for g in labhelp.show()["guests"]}
    workers = {
        t["key"]["tid"]: (name, t["interface"])
        for name, g in shown.items()
        for t in g["threads"]
        if t["role"] == "vhost"
    }
    for guest in guests:
        device = guest.device(nic)
        before = {tid: labhelp.run_ns(tid) for tid in workers}
        labhelp.send_frames(nic, guest.macs[nic], FRAMES)
        moved = {tid: labhelp.run_ns(tid) - before[tid] for tid in workers}
        own = sum(ns for tid, ns in moved.items() if workers[tid] == (guest.name, device))
        others = max(
            (ns for tid, ns in moved.items() if workers[tid] != (guest.name, device)), default=0
        )
        assert own > 20 * max(others, 1), f"{guest.name} {device}: {own} ns, another {others} ns"


@labhelp.one_release("tracepoints that both have", "trixie")
def test_a_trace_confirms_the_order(libvirt_guest: LabGuest) -> None:
    """While traffic passes, --trace makes the mapping of a sending worker exact."""
    with labhelp.traffic(libvirt_guest, 2000, 30):
        by_order = {
            t["key"]["tid"]: t["interface"]
            for g in labhelp.show()["guests"]
            for t in g["threads"]
            if t["role"] == "vhost"
        }
        seen = [
            t
            for g in labhelp.show("--trace", "2")["guests"]
            for t in g["threads"]
            if t["role"] == "vhost" and t["confidence"] == "exact"
        ]
    assert libvirt_guest.device(1) in {t["interface"] for t in seen}
    assert all(by_order[t["key"]["tid"]] == t["interface"] for t in seen)


def test_plain_output_has_a_row_for_every_thread(guests: list[LabGuest]) -> None:
    lines = labhelp.vsrtune("show").stdout.splitlines()
    first = {line.split()[0] for line in lines if line.strip()}
    for guest in guests:
        assert {str(tid) for tid in guest.data_plane()} <= first
        assert any(guest.name in line for line in lines)
