# SPDX-License-Identifier: GPL-2.0-or-later
"""Pins of ours that a guest has brought along: they are put back before anything else.

Such a guest was saved, migrated or reverted while it was tuned. libvirt has started it with
our pins, and its workers in the cgroups and on the CPUs of these pins. So it starts a vcpu that is
unplugged and plugged again, also of a guest that is tuned here. The domain records what
the guest would have without us (``carried``). These originals become journal entries, and undo
restores them. Then the planner treats the guest as one that has just started.

A pin has come along only if another thread than the present one had it from us. Of the present
thread the journal knows all that we did: what it does not hold is put back, and the pin is somebody
else's if it is not as undo left it. (Undo pins a thread that had no pin to all CPUs, unsets its
cpuset and leaves the note. ``virsh vcpupin`` to all CPUs then sets the cpuset, and nothing else.)

A note of an earlier version does not name the thread. Its guest has brought nothing if the journal
has entries for threads of its present process, because the journal knows more. (NAPI threads belong
to a device, which may outlive the process.)
"""

from __future__ import annotations

from collections.abc import Iterable

from vsrtune.model.guest import CarriedPin, Guest, Role, Thread
from vsrtune.model.host import Host
from vsrtune.model.journal_records import Entry
from vsrtune.model.targets import EmulatorPin, Pin, Target, VcpuPin

REASON = "the guest has brought it along"


def entries(guests: Iterable[Guest], host: Host, journalled: Iterable[Entry]) -> tuple[Entry, ...]:
    """Journal entries for the pins that guests have brought, except guests with which libvirt
    is busy. ``journalled`` are the journal's entries."""
    carrying = [guest for guest in guests if guest.carried and not guest.busy]
    if not carrying:
        return ()  # as nearly always: the journal of a large host need not be gone through
    known = {entry.target for entry in journalled}
    tuned = {getattr(target, "thread", None) for target in known}
    here = {
        g.ref for g in carrying for t in g.threads if t.role is not Role.NAPI and t.key in tuned
    }
    return tuple(
        entry
        for guest in carrying
        for pin in guest.carried
        if pin.thread is not None or guest.ref not in here
        for entry in _entry(guest, host, pin)
        if entry.target not in known
    )


def brought(journalled: Iterable[Entry]) -> frozenset[Target]:
    """The targets of these entries that guests have brought and that are not put back yet."""
    return frozenset(e.target for e in journalled if (e.committed or e).reason == REASON)


def _entry(guest: Guest, host: Host, carried: CarriedPin) -> tuple[Entry, ...]:
    role = Role.EMULATOR if carried.vcpu is None else Role.VCPU
    thread = next((t for t in guest.by_role(role) if t.index == carried.vcpu), None)
    if thread is None or thread.affinity != carried.cpus & host.online:
        return ()  # it was unplugged, or somebody has moved the thread
    if thread.key == carried.thread:
        return ()
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
    """The pin that libvirt gives a thread for ``carried.original``. Without one these are all
    online CPUs that are not isolated (qemuProcessGetAllCpuAffinity), as far as the cgroup above
    leaves them."""
    if carried.original is not None:
        cpus, text = carried.original & host.online, str(carried.original)
    else:
        cpus, text = host.online - host.isolated, ""
        cpus = cpus & (thread.cpuset_limit or cpus) or cpus
    return Pin(cpus or host.online, text if thread.cpuset_cpus is not None else None)
