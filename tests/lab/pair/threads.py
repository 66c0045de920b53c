"""In a lab: its guests' threads that carry packets, its NICs' interrupts and its daemon, as
JSON. Of the package under test it uses nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "inside"))

import hoststate


def data_plane(pid: int) -> list[dict[str, Any]]:
    found = []
    for tid in hoststate.threads(pid):
        comm = hoststate.comm(tid)
        if comm.startswith(("CPU ", "vhost-")):
            sched = dict(word.split("=") for word in hoststate.sched(tid).split())
            cpus = hoststate.status_field(tid, "Cpus_allowed_list")
            found.append({"comm": comm, "cpus": cpus, "last": hoststate.last_cpu(tid), **sched})
    return found


def interrupts() -> dict[str, str]:
    return {
        f"{nic} {irq.name}": Path(f"/proc/irq/{irq.name}/smp_affinity_list").read_text().strip()
        for nic in ("p0", "p1")
        for irq in Path(f"/sys/class/net/{nic}/device/msi_irqs").iterdir()
    }


def daemon() -> str:
    words = ["systemctl", "show", "-P", "MainPID", "vsrtune.service"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


print(
    json.dumps(
        {
            "guests": {name: data_plane(pid) for pid, name in hoststate.qemus().items()},
            "interrupts": interrupts(),
            "daemon": daemon(),
        }
    )
)
