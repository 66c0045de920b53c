"""What `virsh vcpupin` and `virsh emulatorpin` do, as a plan: the peer in comparisons."""

from __future__ import annotations

from collections.abc import Collection

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import VsrtuneError
from vsrtune.model.guest import Guest, Role, Thread
from vsrtune.model.plan import Action, Plan
from vsrtune.model.snapshot import Snapshot
from vsrtune.model.targets import EmulatorPin, VcpuPin
from vsrtune.plan.actions import pin_values
from vsrtune.plan.requirements import main_thread, pin_target

_REASON = "libvirt pins only"


def libvirt_pins(snapshot: Snapshot, names: Collection[str], cpus: CpuSet) -> Plan:
    """Pin every vcpu and the emulator (with it the vhost workers) of the guests to ``cpus``.

    Vhost workers stay where libvirt keeps them, in the emulator's cgroup, and follow its
    pin. Raises VsrtuneError for a guest that libvirt does not run.
    """
    actions: list[Action] = []
    for name in names:
        guest = next((g for g in snapshot.guests if g.name == name), None)
        if guest is None or guest.source != "libvirt":
            raise VsrtuneError(
                "is no running libvirt guest, so libvirt cannot pin it",
                where=name,
                hint="see: virsh list",
            )
        actions += _guest(guest, cpus)
    return Plan(actions=tuple(actions))


def _guest(guest: Guest, cpus: CpuSet) -> list[Action]:
    threads: list[Thread] = list(guest.by_role(Role.VCPU))
    emulator = main_thread(guest)
    if emulator is not None:
        threads.append(emulator)
    found = []
    for thread in threads:
        target = pin_target(guest, thread)
        if not isinstance(target, VcpuPin | EmulatorPin):
            continue
        before, after = pin_values(thread, target, cpus)
        if before != after:
            found.append(Action(target, before, after, _REASON))
    return found
