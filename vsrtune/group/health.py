# SPDX-License-Identifier: GPL-2.0-or-later
"""Decides which routers of a multistage router get frames, by what their devices count. Pure.

A router leaves the balancers' rules when it is

- unplugged: nobody has one of its devices open, because its QEMU has ended or it is drained.
- stalled: frames wait at one of its devices, it took none and sent none, for half of ``leave``.
  It hangs, is paused, or boots.
- silent: for half of ``leave`` it sent nothing, while at least FEW frames came, at least half as
  many as its siblings got on average, and these sent at least half of what they got. Its kernel has
  crashed, or it has lost its routes.
- slow: for half of ``leave`` its full rings lost over half of at least FEW frames, and no more came
  for it than half as many again as for a sibling, on average, while these lost under a tenth. Its
  vcpu does not get its CPU time. One flow that is too much for one router is too much for another.

The other half of ``leave`` is for the balancers to load their rules.

It returns when it was plugged in and not stalled for ``back`` seconds, in which it sent something:
it hears broadcasts and ARP all the time, and a router that lives answers or asks. One that sends
nothing returns after SHY times as long. A router that soon leaves again is kept out twice as long
each time. Thus a firewall that drops all that comes to it, while its siblings forward, comes back.

Invariants:
- The rules name at least one router, whatever is wrong with it.
- At most half of the routers in the rules leave although they are plugged in: what most of them
  suffer from is no fault of theirs.
- Two returns are ``back`` seconds apart, unless no router that is well is in the rules.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from vsrtune.core.retry import Pause

# With fewer frames in half of ``leave``, chance decides whether one of them is to be forwarded.
FEW = 20
# Samples that evidence needs: one alone may fall between a frame's coming and its reading.
SAMPLES = 3
SHY = 3
# Seconds that a router is kept out at most.
LONGEST = 300.0
# A router that was in the rules for this long, and twice its last absence, has recovered.
CALM = 60.0


class Fault(enum.StrEnum):
    """Why a router gets no frames."""

    UNPLUGGED = "unplugged"
    STALLED = "stalled"
    SILENT = "silent"
    SLOW = "slow"


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """What a group file asks for, in seconds: a router leaves within ``leave``, and returns after
    it was well for ``back``."""

    leave: float
    back: float


@dataclass(frozen=True, slots=True)
class Look:
    """The devices of one guest at one moment. ``plugged``: it has all of them open. ``stalled``:
    frames wait at one, and none was taken of late. Frames that came for it, that it sent, and
    that came and were lost."""

    plugged: bool
    stalled: bool
    arrived: int
    sent: int
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """One router. ``fault`` is None while it is in the rules. ``changed``: when it left or
    returned; ``well``: since when it is plugged in and not stalled, None while it is not, and
    ``sent`` what it had sent by then. ``pause.delay`` is how long it must be well."""

    fault: Fault | None = None
    changed: float = -math.inf
    well: float | None = None
    sent: int = 0
    pause: Pause = field(default_factory=Pause)


Looks = Mapping[str, Look]
# The oldest first.
Samples = tuple[tuple[float, Looks], ...]


@dataclass(frozen=True, slots=True)
class Health:
    """The routers of a group by name, what is wrong with some of them, also with those that stay in
    the rules, the samples of late, and when a router last returned."""

    routers: Mapping[str, Record] = field(default_factory=dict)
    faults: Mapping[str, Fault] = field(default_factory=dict)
    samples: Samples = ()
    returned: float = -math.inf

    @property
    def used(self) -> tuple[str, ...]:
        """The routers that are to get frames."""
        return tuple(name for name, record in self.routers.items() if record.fault is None)


def update(before: Health, now: float, looks: Looks, check: HealthCheck) -> Health:
    """The group after one more sample, at ``now`` on a steady clock. A router that is new is in
    the rules if it is plugged in."""
    samples = remembered(before.samples, now, looks, check)
    routers = {
        name: _seen(before.routers.get(name) or _new(look), look, now)
        for name, look in looks.items()
    }
    used = [name for name, record in routers.items() if record.fault is None]
    faults = {n: fault for n in used if (fault := _fault(n, samples, used, check)) is not None}
    well = len(used) - len(faults)
    returned = before.returned
    for name, record in routers.items():
        if record.fault is None or record.well is None:
            continue
        if not well or (now - returned >= check.back and _ready(record, looks[name], now, check)):
            routers[name] = replace(record, fault=None, changed=now)
            well, returned = well + 1, now
    suspects = sum(fault is not Fault.UNPLUGGED for fault in faults.values())
    for name, fault in faults.items():
        if well and (fault is Fault.UNPLUGGED or suspects <= well):
            routers[name] = _left(routers[name], fault, now, check)
    faults |= {name: record.fault for name, record in routers.items() if record.fault is not None}
    return Health(routers, faults, samples, returned)


def remembered(before: Samples, now: float, looks: Looks, check: HealthCheck) -> Samples:
    """The samples with one more, as many as evidence needs, however long the pauses are."""
    alike = [(at, found) for at, found in before if found.keys() == looks.keys()]
    young = sum(now - at < check.leave / 2 for at, _ in alike)
    return (*alike[-max(young + 1, SAMPLES - 1) :], (now, looks))


def balancer_fault(name: str, samples: Samples, check: HealthCheck) -> Fault | None:
    """What is wrong with a balancer, whose Look has the frames from outside (0 while that is not
    known) and those that it sent inside. One that is silent has lost its rules, as after a boot of
    the guest."""
    if not samples[-1][1][name].plugged:
        return Fault.UNPLUGGED
    if not _lasting(samples, check):
        return None
    if _stalled(name, samples):
        return Fault.STALLED
    arrived, sent, _ = _passed(name, samples)
    known = samples[0][1][name].arrived > 0
    return Fault.SILENT if known and arrived >= FEW and sent == 0 else None


def _new(look: Look) -> Record:
    return Record(None if look.plugged else Fault.UNPLUGGED)


def _seen(record: Record, look: Look, now: float) -> Record:
    """The record with the time since which the router is well."""
    if not look.plugged or look.stalled:
        return replace(record, well=None)
    return replace(record, well=now, sent=look.sent) if record.well is None else record


def _passed(name: str, samples: Samples) -> tuple[int, int, int]:
    """The frames that came for a guest, that it sent, and that were lost, between the first sample
    and the last."""
    first, last = samples[0][1][name], samples[-1][1][name]
    return last.arrived - first.arrived, last.sent - first.sent, last.lost - first.lost


def _stalled(name: str, samples: Samples) -> bool:
    return all(found[name].stalled for _, found in samples[1:])


def _lasting(samples: Samples, check: HealthCheck) -> bool:
    """Whether the samples are evidence of anything."""
    return len(samples) >= SAMPLES and samples[-1][0] - samples[0][0] >= check.leave / 2


def _fault(name: str, samples: Samples, used: Collection[str], check: HealthCheck) -> Fault | None:
    """What speaks against a router that is in the rules with ``used``."""
    if not samples[-1][1][name].plugged:
        return Fault.UNPLUGGED
    if not _lasting(samples, check):
        return None
    arrived, sent, lost = _passed(name, samples)
    if not sent and _stalled(name, samples):
        return Fault.STALLED
    others = [_passed(other, samples) for other in used if other != name]
    sums = (sum(counts) for counts in zip(*others, strict=True))
    came, went, gone = sums if others else (0, 0, 0)
    # What came for each of the others, on average, times their number.
    alike = arrived * len(others)
    if arrived < FEW or not 2 * alike >= came > 0:
        return None
    if not sent and 2 * went >= came:
        # One that was paused a moment ago has not been stalled for as long.
        return Fault.STALLED if samples[-1][1][name].stalled else Fault.SILENT
    slow = 2 * lost > arrived and 10 * gone < came and 2 * alike <= 3 * came
    return Fault.SLOW if slow else None


def _ready(record: Record, look: Look, now: float, check: HealthCheck) -> bool:
    """Whether a router that is out may return."""
    if record.well is None:
        return False
    delay = max(check.back, record.pause.delay)
    return now - record.well >= delay * (SHY if look.sent == record.sent else 1)


def _left(record: Record, fault: Fault, now: float, check: HealthCheck) -> Record:
    """The record of a router that leaves. What it sends from now on shows that it lives."""
    calm = now - record.changed >= max(CALM, 2 * record.pause.delay)
    pause = Pause() if calm else record.pause
    longest = max(LONGEST, check.back)
    return Record(fault, now, None, 0, pause.longer(now, check.back, longest))
