"""A guest on a napi_macvtap: exact mapping, its NAPI thread tuned and undone, its counters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hoststate
import labhelp
import pytest
from labhelp import LabGuest
from napihelp import DEVICE, broadcast, forward, on_the_module

# Nothing but CPU 0 receives in a lab; two CPUs are left.
WORKER_CPU, NAPI_CPU = 1, 2
POLICY = f"""\
guest: "GUEST"
profile: none
cpus:
  irq: 0
  vhost:
    {DEVICE}: {WORKER_CPU}
  napi: {NAPI_CPU}
scheduler:
  napi:
    class: fifo
    priority: 7
napi:
  threaded: true
"""


@pytest.fixture(scope="module")
def attached(
    guests: list[LabGuest],
    libvirt_guest: LabGuest,
    irq_cpus: set[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LabGuest]:
    """The router with its second NIC on a device of the module, and a sibling of it."""
    if not libvirt_guest.runs:
        labhelp.start_guest(libvirt_guest)
    with on_the_module(libvirt_guest, tmp_path_factory.mktemp("napi") / "interface.xml"):
        yield libvirt_guest


@pytest.fixture
def kept(untuned: None, attached: LabGuest) -> Iterator[LabGuest]:
    """The test fails when the host is not byte for byte what it was."""
    before = hoststate.capture()
    yield attached
    labhelp.reset()
    changed = hoststate.differences(before, hoststate.capture())
    assert changed == [], "\n".join(["not restored:", *changed])


def write_policy(guest: LabGuest) -> None:
    (labhelp.POLICIES / "napi.yaml").write_text(POLICY.replace("GUEST", guest.name))


def worker_of_second_nic(guest: LabGuest) -> int:
    """The worker that sleeps while frames arrive at the first NIC only. A guest that has
    just been given the second one is busy with it for a moment."""

    def sleeper() -> int:
        before = {tid: labhelp.run_ns(tid) for tid in guest.workers()}
        labhelp.send_frames(0, guest.macs[0], 400)
        ran = {tid: labhelp.run_ns(tid) - ns for tid, ns in before.items()}
        assert len(ran) == 2, f"{guest.name} has workers {sorted(ran)}"
        (less, one), (more, _) = sorted((ns, tid) for tid, ns in ran.items())
        return one if more > 5 * less else 0

    found: int = labhelp.wait_for(sleeper, f"one worker of {guest.name} sleeps", 60)
    return found


def shown(guest: LabGuest) -> dict[str, Any]:
    found: dict[str, Any] = next(g for g in labhelp.show()["guests"] if g["name"] == guest.name)
    return found


def shown_device(guest: LabGuest) -> dict[str, Any]:
    found: dict[str, Any] = next(i for i in shown(guest)["interfaces"] if i["target"] == DEVICE)
    return found


def napi_threads() -> list[int]:
    """Kernel threads of the device's NAPI, by name."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/comm"):
        try:
            if re.fullmatch(rf"napi/{DEVICE}-\d+", entry.read_text().strip()):
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def threaded() -> str:
    return labhelp.text(f"/sys/class/net/{DEVICE}/threaded")


@labhelp.one_release("a counter of the module")
def test_the_worker_is_mapped_exactly_once_it_has_sent(kept: LabGuest) -> None:
    worker = worker_of_second_nic(kept)
    forward(kept)
    counters = shown_device(kept)["counters"]
    (queue,) = counters["queues"]
    assert None not in (*counters.values(), *queue.values()), "the module tells every counter"
    assert queue["worker_tid"] == worker
    assert queue["tx_packets"] > 0
    mapped = {t["key"]["tid"]: t for t in shown(kept)["threads"] if t["role"] == "vhost"}
    assert (mapped[worker]["interface"], mapped[worker]["confidence"]) == (DEVICE, "exact")


def test_the_napi_thread_is_made_pinned_and_taken_back(kept: LabGuest) -> None:
    forward(kept)
    assert threaded() == "0"
    write_policy(kept)
    labhelp.start()
    labhelp.wait_for(lambda: threaded() == "1", "the NAPI is threaded")
    (thread,) = napi_threads()
    wanted = "policy=1 flags=1 nice=0 priority=7 "
    labhelp.wait_for(lambda: hoststate.sched(thread).startswith(wanted), "the thread is FIFO")
    assert labhelp.mask(thread) == {NAPI_CPU}
    (napi,) = [t for t in shown(kept)["threads"] if t["role"] == "napi"]
    assert (napi["key"]["tid"], napi["interface"], napi["confidence"]) == (thread, DEVICE, "exact")
    # The policy names the device, so it needed the exact mapping of a plugged NIC.
    assert labhelp.mask(worker_of_second_nic(kept)) == {WORKER_CPU}
    assert labhelp.vsrtune("verify").stdout.startswith("no drift")

    ran = labhelp.run_ns(thread)
    broadcast(200)
    assert labhelp.run_ns(thread) > ran
    assert hoststate.last_cpu(thread) == NAPI_CPU

    labhelp.stop()
    assert threaded() == "0"
    for left in napi_threads():  # before 6.17 it sleeps on
        assert hoststate.sched(left).startswith("policy=0 flags=0 nice=0 priority=0 ")
        assert labhelp.mask(left) == set(range(labhelp.lab_cpus()))


@labhelp.one_release("drift, as of other settings")
def test_switched_off_by_hand_it_is_switched_on_again(kept: LabGuest) -> None:
    write_policy(kept)
    labhelp.start()
    labhelp.wait_for(lambda: threaded() == "1", "the NAPI is threaded")
    Path(f"/sys/class/net/{DEVICE}/threaded").write_text("0")
    labhelp.wait_for(lambda: threaded() == "1", "it is threaded again")
    labhelp.wait_for(
        lambda: any(labhelp.mask(tid) == {NAPI_CPU} for tid in napi_threads()),
        "its thread is pinned again",
    )


@labhelp.one_release("apply as the daemon does it", "trixie")
def test_apply_makes_the_thread_and_the_next_one_tunes_it(kept: LabGuest) -> None:
    forward(kept)
    write_policy(kept)
    plan = json.loads(labhelp.vsrtune("plan", "--json").stdout)
    assert [a["after"] for a in plan["actions"] if a["target"]["kind"] == "napi-threaded"] == [1]
    assert [s["subject"] for s in plan["skipped"] if s["pending"]] == [
        f"napi {DEVICE} CPUs",
        f"napi {DEVICE} scheduling",
    ]
    labhelp.vsrtune("apply")
    (thread,) = napi_threads()
    drift = labhelp.vsrtune("verify", check=False)
    assert drift.returncode != 0 and f"napi {DEVICE}" in drift.stdout
    labhelp.vsrtune("apply")
    assert labhelp.mask(thread) == {NAPI_CPU}
    assert labhelp.vsrtune("verify").stdout.startswith("no drift")
    labhelp.vsrtune("undo")
    assert threaded() == "0"
