# SPDX-License-Identifier: GPL-2.0-or-later
"""The rule of a trial of a policy, in turns, on a router's own traffic: counts and verdict. Pure.

Turns come in pairs, one tuned and one untuned. Each pair gives two ratios, tuned over untuned:

* the forwarded share: frames that the guests sent, of those that arrived for them. Frames that a
  NIC below them or a CPU's backlog dropped have arrived as well: otherwise a policy that starves
  the NIC would look good, because the few frames that are left are all forwarded;
* the forwarded rate: frames that the guests sent in a second.

The policy is better only if the lower end of the share's 95 % interval is above 1, and the
interval of the rate is not wholly below 1. A turn counts only if no setting changed within it
and at least ``LEAST_FRAMES`` frames arrived; a pair only if both its turns count. Fewer pairs than
an interval needs decide nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from vsrtune.bench.methods import compare
from vsrtune.core import stats
from vsrtune.model.guest import DATA_PLANE, Role
from vsrtune.model.host import Nic
from vsrtune.model.load import HostSample
from vsrtune.model.snapshot import Snapshot
from vsrtune.views.tables import Table

# Frames that must arrive in a turn for a share of them to be meaningful.
LEAST_FRAMES = 100
# Minimum number of pairs for an interval.
LEAST_PAIRS = stats.pairs_needed(1)
# Counters of a lower device for frames that never reached the guest.
_EARLY = ("rx_dropped", "rx_missed_errors", "rx_fifo_errors")


@dataclass(frozen=True, slots=True)
class TrialCounts:
    """The counters of some guests at one moment (``at_ns``), since their devices began.
    ``received`` counts frames for the guests, including those that their rings dropped,
    ``forwarded`` frames that they sent, ``early`` frames dropped on the way to them."""

    at_ns: int
    received: int
    forwarded: int
    early: int


@dataclass(frozen=True, slots=True)
class TrialTurn:
    """The counts of one turn, in frames. ``left_out`` says why the turn does not count, "" when it
    does."""

    pair: int
    tuned: bool
    seconds: float
    received: int
    forwarded: int
    early: int
    left_out: str = ""

    @property
    def arrived(self) -> int:
        return self.received + self.early

    @property
    def share(self) -> float:
        """The share of arrived frames that were forwarded; 0 when none arrived."""
        return self.forwarded / self.arrived if self.arrived else 0.0

    @property
    def rate(self) -> float:
        """Frames forwarded in a second."""
        return self.forwarded / self.seconds


@dataclass(frozen=True, slots=True)
class TrialVerdict:
    """``better`` is None when nothing was decided; there are no ratios then. ``text`` holds
    sentences for people."""

    better: bool | None
    text: tuple[str, ...]
    pairs: int
    share: Mapping[str, Any] | None = None
    rate: Mapping[str, Any] | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)


def counts(sample: HostSample) -> TrialCounts:
    """The counters of ``sample``, which holds the guests alone."""
    return TrialCounts(
        at_ns=sample.at_ns,
        received=sum(f.arrived for f in sample.frames.values()),
        forwarded=sum(f.sent for f in sample.frames.values()),
        early=sum(n for at, n in sample.drops.items() if not at.guest and at.place in _EARLY),
    )


def turn(
    before: TrialCounts, after: TrialCounts, pair: int, tuned: bool, left_out: str = ""
) -> TrialTurn:
    """The turn between two moments."""
    received = after.received - before.received
    forwarded = after.forwarded - before.forwarded
    early = after.early - before.early
    if not left_out and min(received, forwarded, early) < 0:
        left_out = "a counter began anew"
    if not left_out and received + early < LEAST_FRAMES:
        left_out = f"fewer than {LEAST_FRAMES} frames arrived"
    seconds = (after.at_ns - before.at_ns) / 1e9
    return TrialTurn(pair, tuned, seconds, received, forwarded, early, left_out)


def settings(snapshot: Snapshot) -> Hashable:
    """Everything that a policy or an operator can set for the guests. Turns with equal settings
    were measured alike."""
    lowers = {name for g in snapshot.guests for i in g.interfaces for name in i.lower}
    roles = (*DATA_PLANE, Role.EMULATOR)
    return (
        snapshot.host.online,
        (snapshot.host.rr_timeslice_ms, snapshot.host.sched_rt_runtime_us),
        frozenset((s.key, s.sched) for s in snapshot.host.softirq),
        frozenset(_nic(n) for n in snapshot.host.nics if n.name in lowers),
        frozenset(
            (t.key, t.sched, t.affinity, t.cgroup, t.pin)
            for g in snapshot.guests
            for t in g.threads
            if t.role in roles
        ),
        frozenset(
            (i.target, i.ifindex, i.txqueuelen, i.threaded, i.queues, i.lower)
            for g in snapshot.guests
            for i in g.interfaces
        ),
    )


def _nic(nic: Nic) -> Hashable:
    return (
        nic.name,
        nic.txqueuelen,
        nic.threaded_napi,
        nic.queues,
        tuple((i.number, i.affinity) for i in nic.irqs),
        tuple((t.key, t.affinity) for t in nic.napi),
    )


def judge(turns: Sequence[TrialTurn], name: str) -> TrialVerdict:
    """The verdict of the turns on the policy ``name``, by the rule above."""
    pairs = _pairs(turns)
    left_out = Counter(t.left_out for t in turns if t.left_out)
    told = tuple(
        f"{count} of {len(turns)} turns left out: {why}" for why, count in left_out.most_common()
    )
    if len(pairs) < LEAST_PAIRS:
        few = f"nothing decided: {len(pairs)} pairs of turns count, {LEAST_PAIRS} are needed"
        return TrialVerdict(None, (*told, few), len(pairs), left_out=left_out)
    # In frames of an equal load, because paired_ratio takes a base of no frames as one.
    share = stats.paired_ratio(
        [tuned.share * untuned.arrived for tuned, untuned in pairs],
        [float(untuned.forwarded) for _, untuned in pairs],
    )
    rate = stats.paired_ratio(
        [tuned.rate * untuned.seconds for tuned, untuned in pairs],
        [float(untuned.forwarded) for _, untuned in pairs],
    )
    shown = compare.verdict(share, True, name, "untuned", "forwarded share")
    also = compare.verdict(rate, True, name, "untuned", "forwarded rate")
    better = share.low > 1.0 and rate.high >= 1.0
    sentence = "better than untuned" if better else "not shown to be better than untuned"
    text = (*told, shown["text"], also["text"], f"{name}: {sentence}")
    return TrialVerdict(better, text, len(pairs), shown, also, left_out)


def _pairs(turns: Sequence[TrialTurn]) -> list[tuple[TrialTurn, TrialTurn]]:
    """Tuned and untuned turns of each pair that counts."""
    good = {(t.pair, t.tuned): t for t in turns if not t.left_out}
    numbers = sorted({t.pair for t in turns})
    return [
        (good[n, True], good[n, False]) for n in numbers if {(n, True), (n, False)} <= set(good)
    ]


def line(made: TrialTurn) -> str:
    """A turn in one line."""
    told = (
        f"pair {made.pair}, {'tuned' if made.tuned else 'untuned'}: {made.forwarded:,} of "
        f"{made.arrived:,} frames forwarded in {made.seconds:.1f} s"
    )
    return f"{told}, left out: {made.left_out}" if made.left_out else told


def table(turns: Sequence[TrialTurn]) -> Table:
    """Medians over the pairs that count."""
    pairs = _pairs(turns)
    sides = [[untuned for _, untuned in pairs], [tuned for tuned, _ in pairs]]
    rows = [
        _row("forwarded/s", [[t.rate for t in side] for side in sides]),
        _row("arrived/s", [[t.arrived / t.seconds for t in side] for side in sides]),
        _row("forwarded %", [[100 * t.share for t in side] for side in sides], 1),
    ]
    return Table(f"Medians of {len(pairs)} pairs", ("", "untuned", "tuned"), rows)


def _row(label: str, sides: Sequence[Sequence[float]], digits: int = 0) -> tuple[str, ...]:
    return (label, *(f"{median(side):,.{digits}f}" if side else "-" for side in sides))
