"""Pins of ours that a guest has brought along: given back before anything else is done.

Such a guest was saved, migrated or reverted while it was tuned. libvirt has started it with
our pins, and with its workers in their cgroups and on their CPUs. What it would have without
us its domain says (``carried``). These originals become entries of the journal, and undo
restores them; then the guest is planned for as one that was just started.

A guest of which the journal has entries for threads of its present process has brought
nothing: the journal knows more. (NAPI threads are their device's, which may outlive it.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import CarriedPin, Guest, Role, Thread, ThreadKey
from vsrtune.model.host import Host
from vsrtune.model.journal_records import Entry
from vsrtune.model.targets import EmulatorPin, Pin, Target, VcpuPin

REASON = "the guest has brought it along"


def entries(guests: Iterable[Guest], host: Host, journalled: Iterable[Entry]) -> tuple[Entry, ...]:
    """What guests have brought, as the journal would have it; none of guests with which
    libvirt is busy. ``journalled`` are the journal's entries."""
    tuned_here = {_thread(entry.target) for entry in journalled}
    return tuple(
        entry
        for guest in guests
        if guest.carried and not guest.busy and not _tuned_here(guest, tuned_here)
        for pin in guest.carried
        for entry in _entry(guest, host, pin)
    )


def _tuned_here(guest: Guest, tuned_here: Collection[ThreadKey | None]) -> bool:
    return any(t.key in tuned_here for t in guest.threads if t.role is not Role.NAPI)


def _thread(target: Target) -> ThreadKey | None:
    return getattr(target, "thread", None)


def _entry(guest: Guest, host: Host, carried: CarriedPin) -> tuple[Entry, ...]:
    role = Role.EMULATOR if carried.vcpu is None else Role.VCPU
    thread = next((t for t in guest.by_role(role) if t.index == carried.vcpu), None)
    if thread is None or thread.affinity != carried.cpus & host.online:
        return ()  # it was unplugged, or somebody has moved the thread
    now = Pin(thread.affinity, thread.cpuset_cpus)
    original = _original(thread, host, carried)
    if now == original:
        return ()
    target: Target
    if carried.vcpu is None:
        target = EmulatorPin(guest.ref, guest.uuid, thread.key)
    else:
        target = VcpuPin(guest.ref, guest.uuid, carried.vcpu, thread.key)
    return (Entry(target, original, now, "done", reason=REASON),)


def _original(thread: Thread, host: Host, carried: CarriedPin) -> Pin:
    """What libvirt gives a thread with that pin, or without one
    (qemuProcessGetAllCpuAffinity: all CPUs online but those isolated)."""
    if carried.original is not None:
        cpus, text = carried.original & host.online, str(carried.original)
    else:
        cpus, text = CpuSet(c.id for c in host.cpus if c.online and not c.isolated), ""
    return Pin(cpus or host.online, text if thread.cpuset_cpus is not None else None)
