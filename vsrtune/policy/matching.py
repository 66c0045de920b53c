# SPDX-License-Identifier: GPL-2.0-or-later
"""Which policy a guest gets: exact names win over globs, two equal matches are an error. Also,
which processes may be guests at all according to the policies."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase

from vsrtune.model.guest import Guest
from vsrtune.model.plan import Refusal, Skipped
from vsrtune.model.snapshot import Problem, Snapshot
from vsrtune.model.stepdown import NO_STEPS, UNTIL, StepLevel, Steps
from vsrtune.policy.guest_budget import divided
from vsrtune.policy.lowering import lowered
from vsrtune.policy.model import KUBEVIRT, PROXMOX, WITHOUT_LIBVIRT, Policy
from vsrtune.policy.parser import literal

# A pin would wait 30 s for libvirt's job, and everything else for the pin (virDomainObjBeginJob).
_BUSY = "libvirt is busy starting, restoring, saving or migrating it: tuned when that is done"
_FOREIGN = "another libvirt manages it: --connect says which one is asked"
_UNCONFIRMED = (
    "libvirt does not answer and has not confirmed that this process is its guest: what it has "
    "stays, nothing is added; see: systemctl status libvirtd virtqemud"
)
_LISTED = " (`vsrtune show` lists processes that are not believed)"
SCOPE = "/qemu.slice/VMID.scope"
# guest.ref of a plain QEMU that is not root's.
_OTHERS = re.compile(r"qemu:.*@([0-9]{1,10})", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True)
class QemuFilter:
    """Selects plain QEMUs. Those of ``users`` (user numbers) may be guests; those that
    ``policies`` name (None: all) are worth asking for their vcpus."""

    users: frozenset[int] = frozenset([0])
    policies: tuple[Policy, ...] | None = None

    def asks(self, uid: int, source: str, name: str, uuid: str) -> bool:
        """Whether the monitor of that plain QEMU may be asked."""
        if self.policies is None:
            return True
        return any(_plain(p, uid, source, name, uuid) is not Match.NONE for p in self.policies)


def qemu_filter(policies: Sequence[Policy], refs: Iterable[str] = ()) -> QemuFilter:
    """The filter for these policies. ``refs`` are guests with settings that vsrtune may have to
    restore, whatever the policies say now; their users are included."""
    users = {0, *(p.uid for p in policies if p.uid is not None)}
    users |= {int(found[1]) for ref in refs if (found := _OTHERS.fullmatch(ref))}
    return QemuFilter(frozenset(users), tuple(policies))


def needs_libvirt(guests: Iterable[Guest], policies: Iterable[Policy]) -> bool:
    """Whether one of the guests is libvirt's, or a policy can name one that is. Otherwise it does
    not matter that libvirt does not answer."""
    named = any(not p.guest.startswith(WITHOUT_LIBVIRT) for p in policies)
    return named or any(guest.source == "libvirt" for guest in guests)


def heeded(snapshot: Snapshot, policies: Iterable[Policy]) -> tuple[Problem, ...]:
    """The problems of a snapshot, without that of a libvirt that its host does not need."""
    if needs_libvirt(snapshot.guests, policies):
        return snapshot.problems
    return tuple(p for p in snapshot.problems if p.reader != "libvirt")


class Match(Enum):
    """How a policy names a guest."""

    NONE = 0
    GLOB = 1
    EXACT = 2


def match(policy: Policy, guest: Guest) -> Match:
    """How a policy names ``guest``.

    ``qemu:`` patterns name plain QEMU processes of the policy's user only, ``proxmox:`` patterns
    those of Proxmox VE, ``kubevirt:`` patterns those of KubeVirt, all others libvirt guests only,
    so that ``*`` does not reach beyond libvirt. A UUID is an exact name. No pattern names a guest
    of another libvirt, because its CPUs are for that libvirt to assign.
    """
    if guest.source == "foreign":
        return Match.NONE
    if guest.source != "libvirt":
        return _plain(policy, guest.uid, guest.source, guest.name, guest.uuid)
    if policy.guest.startswith(WITHOUT_LIBVIRT):
        return Match.NONE
    return _named(policy.guest, guest.name, guest.uuid)


def _plain(policy: Policy, uid: int, source: str, name: str, uuid: str) -> Match:
    kind, _, pattern = policy.guest.partition(":")
    return _named(pattern, name, uuid) if (kind, policy.uid) == (source, uid) else Match.NONE


def _named(pattern: str, name: str, uuid: str) -> Match:
    wanted = literal(pattern)
    if wanted is not None:
        exact = wanted == name or (uuid != "" and wanted.lower() == uuid.lower())
        return Match.EXACT if exact else Match.NONE
    return Match.GLOB if fnmatchcase(name, pattern) else Match.NONE


def policies_of(guest: Guest, policies: Sequence[Policy]) -> list[Policy]:
    """The policies that name the guest best; more than one is an error in the policies."""
    return _best([(match(p, guest), p) for p in policies])


def _best(ranked: Sequence[tuple[Match, Policy]]) -> list[Policy]:
    best = max((m.value for m, _ in ranked), default=0)
    return [p for m, p in ranked if m.value == best and best > 0]


@dataclass(slots=True)
class Assignment:
    """Guests with their policies, in the snapshot's order, and refusals, skips and notes about the
    rest. ``unmatched`` are the policies that name no running guest."""

    pairs: list[tuple[Guest, Policy]] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unmatched: list[Policy] = field(default_factory=list)


def assign(
    guests: Sequence[Guest], policies: Sequence[Policy], steps: Steps = NO_STEPS
) -> Assignment:
    """Give every guest the policy that names it, with its budget divided over the guest's threads,
    and lowered as far as the guest is stepped down. A guest that two policies name equally well is
    refused."""
    out = Assignment()
    used: set[str] = set()
    count = Counter(g.ref for g in guests)
    for guest in guests:
        ranked = [(match(p, guest), p) for p in policies]
        chosen = _best(ranked)
        used |= {p.path for m, p in ranked if m is not Match.NONE}
        if guest.source == "foreign":
            out.skipped.append(Skipped(guest.ref, "all settings", _FOREIGN))
        elif chosen and guest.waits:
            why = _UNCONFIRMED if guest.unconfirmed else _BUSY
            out.skipped.append(Skipped(guest.ref, "all settings", why, pending=True))
        elif not chosen:
            out.skipped.append(Skipped(guest.ref, "all settings", "no policy names this guest"))
        elif len(chosen) > 1:
            out.refusals.append(_ambiguous(guest, chosen))
        elif count[guest.ref] > 1:
            out.refusals.append(_twins([g for g in guests if g.ref == guest.ref], chosen[0]))
        else:
            _add(out, guest, divided(chosen[0], guest), steps)
            out.notes += [
                f"{guest.ref}: {chosen[0].path} names it exactly and wins over "
                f"{p.path} ({p.guest!r})"
                for m, p in ranked
                if m is Match.GLOB and p is not chosen[0]
            ]
    out.unmatched = [p for p in policies if p.path not in used]
    out.notes += [no_guest(p) for p in out.unmatched]
    return out


def _add(out: Assignment, guest: Guest, policy: Policy, steps: Steps) -> None:
    step = steps.get(guest.ref)
    if step is not None:
        everything = step.level is StepLevel.UNDONE
        subject = "all settings" if everything else "scheduling"
        out.skipped.append(Skipped(guest.ref, subject, f"{step}; {UNTIL}", stepped=True))
        if everything:
            return
        policy = lowered(policy, step.level)
    out.pairs.append((guest, policy))


def no_guest(policy: Policy) -> str:
    """The note about a policy that names no running guest."""
    return f"{policy.at('guest')}: no running guest matches {policy.guest!r}{_whose(policy)}"


def _whose(policy: Policy) -> str:
    if policy.guest.startswith(PROXMOX):
        return f": no QEMU of root runs in such a scope, {SCOPE}{_LISTED}"
    if policy.guest.startswith(KUBEVIRT):
        return f": no QEMU runs in such a pod's container compute{_LISTED}"
    if not policy.guest.startswith(WITHOUT_LIBVIRT):
        return ""
    user = "root" if policy.user is None else policy.user
    return f" of user {user}{_LISTED}"


def _twins(guests: Sequence[Guest], policy: Policy) -> Refusal:
    pids = " and ".join(str(g.pid) for g in guests)
    what = f"{len(guests)} processes have this name"
    hint = "end one of them, or start it with a name of its own (-name)"
    if guests[0].source == "proxmox":
        what = f"{len(guests)} processes run in {SCOPE.replace('VMID', guests[0].name)}"
        hint = "end the one that Proxmox VE did not start (qm list)"
    elif guests[0].source == "kubevirt":
        what = f"{len(guests)} processes run in pods of this machine"
        hint = "wait until the older pod has ended (kubectl get pods)"
    return Refusal(
        guests[0].ref,
        policy.at("guest"),
        f"{what}: {pids}; none of them is tuned",
        hint,
    )


def _ambiguous(guest: Guest, chosen: Sequence[Policy]) -> Refusal:
    places = " and ".join(f"{p.at('guest')} ({p.guest!r})" for p in chosen)
    return Refusal(
        guest.ref,
        chosen[0].at("guest"),
        f"{len(chosen)} policies name this guest: {places}",
        "keep one, or name the guest exactly in the one that shall win over a glob",
    )
