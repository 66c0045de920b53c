"""Which policy a guest gets: exact names win over globs, two equals are an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase

from vsrtune.actions import Refusal, Skipped
from vsrtune.model import Guest
from vsrtune.policy import Policy, literal
from vsrtune.stepdown import NO_STEPS, UNTIL, Level, Steps, lowered

PLAIN_QEMU = "qemu:"

# A pin would wait for libvirt's job, 30 s, and everything else for the pin (virDomainObjBeginJob).
_BUSY = "libvirt is busy starting, restoring, saving or migrating it: tuned when that is done"
_FOREIGN = "another libvirt manages it: --connect says which one is asked"


class Match(Enum):
    """How a policy names a guest."""

    NONE = 0
    GLOB = 1
    EXACT = 2


def match(pattern: str, guest: Guest) -> Match:
    """How ``pattern`` names ``guest``.

    ``qemu:`` patterns name plain QEMU processes only, all others libvirt guests
    only, so that ``*`` does not reach beyond libvirt. A UUID is an exact name. No pattern
    names a guest of another libvirt, whose CPUs are that one's to give.
    """
    if guest.source == "foreign":
        return Match.NONE
    if pattern.startswith(PLAIN_QEMU) != (guest.source == "qemu"):
        return Match.NONE
    pattern = pattern.removeprefix(PLAIN_QEMU)
    name = literal(pattern)
    if name is not None:
        exact = name == guest.name or (guest.uuid != "" and name.lower() == guest.uuid.lower())
        return Match.EXACT if exact else Match.NONE
    return Match.GLOB if fnmatchcase(guest.name, pattern) else Match.NONE


def policies_of(guest: Guest, policies: Sequence[Policy]) -> list[Policy]:
    """The policies that name the guest best: more than one is an error in them."""
    return _best([(match(p.guest, guest), p) for p in policies])


def _best(ranked: Sequence[tuple[Match, Policy]]) -> list[Policy]:
    best = max((m.value for m, _ in ranked), default=0)
    return [p for m, p in ranked if m.value == best and best > 0]


@dataclass(slots=True)
class Assignment:
    """Guests with their policy, in the snapshot's order, and what to say of the rest.
    ``unmatched`` are the policies that name no running guest."""

    pairs: list[tuple[Guest, Policy]] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unmatched: list[Policy] = field(default_factory=list)


def assign(
    guests: Sequence[Guest], policies: Sequence[Policy], steps: Steps = NO_STEPS
) -> Assignment:
    """Give every guest the policy that names it, lowered as far as the guest is stepped down;
    two that name it equally well refuse it."""
    out = Assignment()
    used: set[str] = set()
    for guest in guests:
        ranked = [(match(p.guest, guest), p) for p in policies]
        chosen = _best(ranked)
        used |= {p.path for m, p in ranked if m is not Match.NONE}
        if guest.source == "foreign":
            out.skipped.append(Skipped(guest.ref, "all settings", _FOREIGN))
        elif chosen and guest.busy:
            out.skipped.append(Skipped(guest.ref, "all settings", _BUSY, pending=True))
        elif not chosen:
            out.skipped.append(Skipped(guest.ref, "all settings", "no policy names this guest"))
        elif len(chosen) > 1:
            out.refusals.append(_ambiguous(guest, chosen))
        else:
            _add(out, guest, chosen[0], steps)
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
        everything = step.level is Level.UNDONE
        subject = "all settings" if everything else "scheduling"
        out.skipped.append(Skipped(guest.ref, subject, f"{step}; {UNTIL}", stepped=True))
        if everything:
            return
        policy = lowered(policy, step.level)
    out.pairs.append((guest, policy))


def no_guest(policy: Policy) -> str:
    """What is said of a policy that names no running guest."""
    return f"{policy.at('guest')}: no running guest matches {policy.guest!r}"


def _ambiguous(guest: Guest, chosen: Sequence[Policy]) -> Refusal:
    places = " and ".join(f"{p.at('guest')} ({p.guest!r})" for p in chosen)
    return Refusal(
        guest.ref,
        chosen[0].at("guest"),
        f"{len(chosen)} policies name this guest: {places}",
        "keep one, or name the guest exactly in the one that shall win over a glob",
    )
