"""`vsrtune top` beside a daemon at work, against what the kernel says of the same threads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import hoststate
import labhelp
import pytest
from labhelp import LabGuest

RATE, SECONDS = 5000, 300
# A share of a CPU.
BUSY = 0.005


@pytest.fixture
def traffic(libvirt_guest: LabGuest) -> Iterator[None]:
    """Frames through the first router, until the test ends."""
    with labhelp.traffic(libvirt_guest, RATE, SECONDS):
        yield


@labhelp.one_release("files of /proc that both have", "trixie")
def test_every_thread_of_every_guest_with_its_cpu(
    restored: None, guests: list[LabGuest], irq_cpus: set[int], traffic: None
) -> None:
    """Tuned threads are on the CPUs they were given, and who forwards has a load."""
    irq = ",".join(map(str, sorted(irq_cpus)))
    labhelp.write_policies(irq)
    labhelp.start()
    frame = json.loads(labhelp.vsrtune("top", "--json", "--interval", "3").stdout)
    assert 3 <= frame["seconds"] < 60
    serving = {c["cpu"] for c in frame["cpus"] if c["use"].startswith("interrupts")}
    assert irq_cpus <= serving
    assert all(c["busy"] is not None for c in frame["cpus"])
    rows = {t["tid"]: t for t in frame["threads"]}
    for guest in guests:
        for tid in guest.data_plane():
            row = rows[tid]
            assert row["guest"] == guest.ref
            assert is_there(tid, row["cpu"], ran=row["load"] > BUSY), row
            assert row["beside_interrupts"] == (row["cpu"] in serving), row
        for number, tid in guest.vcpus().items():
            assert rows[tid]["thread"] == f"vcpu {number}"
        assert {rows[tid]["role"] for tid in guest.workers()} == {"vhost"}
    # The vcpu forwards, and the worker of the second NIC sends.
    forwarding = {t["role"] for t in rows.values() if t["load"] > BUSY}
    assert {"vcpu", "vhost"} <= forwarding

    lines = labhelp.vsrtune("top", "--once", "--interval", "1").stdout.splitlines()
    assert lines[0].startswith(f"vsrtune top: {len(guests)} guest")
    table = lines[lines.index("Threads") + 1 :]
    cells = [re.split(r"  +", line.strip()) for line in table[: table.index("")]]
    cpu, tid_at = cells[0].index("CPU"), cells[0].index("tid")
    told = {int(row[tid_at]): int(row[cpu]) for row in cells[1:]}
    for guest in guests:
        for tid in guest.data_plane():
            assert is_there(tid, told[tid])


def is_there(tid: int, cpu: int, *, ran: bool = False) -> bool:
    """Whether a thread can be on that CPU: one that has not run since it was pinned is still
    where it slept."""
    return cpu in labhelp.mask(tid) or (not ran and cpu == hoststate.last_cpu(tid))
