"""The rule for the length of a guest's macvtap rings under `queue: {macvtap: adaptive}`.

A short ring drops early what would be dropped later, after work was spent on it, and keeps
waiting times short; but where vhost moves frames in batches it starves the guest, and below
saturation it loses bursts (docs/policy.md, section 4.3 and Fig. 15 of the paper, and what
docs/results measured against it). Which of these holds depends on the kernel and the load,
so the rule tries instead of believing:

1. Without overload the rings are as long as allowed.
2. Overload is a window in which rings dropped frames and the guest's threads used the CPU
   they have. After some such windows on end half the length is tried beside the best known
   one: they take turns, and what the guest sent on is compared by pairs of turns.
3. The shorter one stays only where it surely sends SAME of the best; otherwise the rings
   are at once what they were, and the next trial waits, each time twice as long. One that
   leaves the guest's threads idle and sends less is not waited for: bursts do not fit in it.
4. What stays is compared again from time to time. When overload ends rings are long again;
   for MEMORY seconds the rule knows what it had found.

``step`` is pure: (state, bounds, window) to a state whose ``length`` is to be set. Lengths
stay within the bounds, changes are SPACING seconds apart; only the way back to a longer one
that is no turn of a trial may be half of that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from math import exp, log, sqrt
from statistics import fmean, stdev

from vsrtune.model.load import Window
from vsrtune.policy.model import QueueBounds

# Seconds between two changes, half of which the rings have to settle.
SPACING = 1.0
# So many changes may come in a row, then one in REFILL seconds; the rings only leave their
# full length with changes for the way there and back, and for a trial with those for it.
CHANGES, REFILL = 40, 10.0
VISIT, TRIAL = 2, 10
# Windows on end: of overload until something is done, without until it is over. Both grow up
# to the last, the first while overload keeps ending within BRIEF seconds, the second while it
# is back within SOON: then it was the short ring that had ended it.
ENTER, LEAVE, MOST = 2, 2, 256
BRIEF, SOON = 3.0, 6.0
# A shorter ring stays when it sends at least this much of the best one.
SAME = 0.98
# One pair of turns with less ends a trial.
HOPELESS = 0.85
# A ring in which frames are dropped has no room when the threads use less than this of the
# CPU time that they use beside the best one.
IDLE = 0.95
# A length that sends so much more becomes the best one.
BETTER = 1.02
# Pairs of turns in a trial.
FEWEST, LEAST, ENOUGH = 2, 4, 8
# So many standard errors above, fewer than LEAST pairs will do.
CLEARLY = 4
# No mean of few pairs is surer than this, as a share.
NOISE = 0.02
# Seconds: from one that stays to the next trial; first and longest wait after one that
# failed, and between looks at what stays; how long findings outlive overload.
DWELL = 5.0
PAUSE, MOST_PAUSE = 30.0, 1800.0
MEMORY = 60.0
# A guest that sends less than this share of what it gets is no router.
ROUTES = 0.1


class QueuePhase(Enum):
    """What the rule is doing."""

    LONG = "long"
    TRIAL = "trial"
    SHORT = "short"


@dataclass(frozen=True, slots=True)
class QueueTurn:
    """One side of a pair: its length, what was sent in the settled part of it, the CPU time
    that its windows' most loaded threads used, as a share of what they can have, times
    seconds, and whether there was no overload in it."""

    length: int
    sent: int = 0
    seconds: float = 0.0
    used: float = 0.0
    calm: bool = False

    @property
    def rate(self) -> float:
        return self.sent / self.seconds if self.seconds > 0 else 0.0

    def starves(self, window: Window) -> bool:
        """Whether the length of ``window`` has no room for what this one's had room for."""
        if not window.drops or self.seconds <= 0:
            return False
        idler = window.busy < IDLE * self.used / self.seconds
        return idler and window.sent / window.seconds < SAME * self.rate


@dataclass(frozen=True, slots=True)
class QueueRuleState:
    """``length`` is what the rings shall have, ``why`` says so to people. ``best`` sent
    most, ``held`` is the shortest that stays under overload. ``pairs`` are logarithms of
    ``tried`` over the best, one for each pair of turns; ``first`` is the side of a pair
    that has had its turn. Times are those of the samples."""

    length: int
    best: int
    held: int
    phase: QueuePhase = QueuePhase.LONG
    why: str = "no overload"
    tried: int = 0
    against: int = 0
    pairs: tuple[float, ...] = ()
    first: QueueTurn | None = None
    turn: QueueTurn | None = None
    overloaded: int = 0
    calm: int = 0
    enter: int = ENTER
    leave: int = LEAVE
    entered_at: float = 0.0
    left_at: float = 0.0
    changed_at: float = float("-inf")
    # No trial of a shorter one before, no look at what stays before; and the next waits.
    try_at: float = 0.0
    look_at: float = 0.0
    pause: float = PAUSE
    look_pause: float = PAUSE
    changes: int = 0
    allowance: float = CHANGES

    def idle(self, bounds: QueueBounds) -> bool:
        """True while only a drop in a ring could make a difference."""
        return self.phase is QueuePhase.LONG and not self.overloaded and self.length == bounds.high


def begin(bounds: QueueBounds) -> QueueRuleState:
    """The rings are long and nothing is known."""
    return QueueRuleState(bounds.high, bounds.high, bounds.high)


def step(state: QueueRuleState, bounds: QueueBounds, window: Window) -> QueueRuleState:
    """The state after one more window of about half a second."""
    now = window.end
    after = _counted(state, window)
    if after.phase is QueuePhase.LONG:
        after = _from_long(after, bounds, window)
    elif after.calm >= (LEAVE if after.held == bounds.high else after.leave):
        after = _leave(after, bounds, now)
    elif after.phase is QueuePhase.TRIAL and after.calm >= LEAVE:
        # The length that stays has ended overload; nothing can be compared now.
        why = f"{after.held} has ended overload"
        after = replace(
            after, phase=QueuePhase.SHORT, length=after.held, try_at=now + PAUSE, why=why
        )
    elif after.phase is QueuePhase.TRIAL:
        after = _trial(after, bounds, window)
    elif window.drops:
        after = _look_or_try(after, bounds, window)
    return _spaced(state, after, now)


def _spaced(state: QueueRuleState, after: QueueRuleState, now: float) -> QueueRuleState:
    """Changes stay apart; what cannot be changed yet is asked for again."""
    if after.length == state.length:
        return after
    back = after.length > state.length and after.phase is not QueuePhase.TRIAL
    spacing = SPACING / 2 if back else SPACING
    if now - state.changed_at < spacing - 1e-3:
        # Nothing of a turn is measured on a length that is not there.
        return replace(after, length=state.length, turn=None)
    return replace(after, changed_at=now, changes=state.changes + 1, allowance=after.allowance - 1)


def _counted(state: QueueRuleState, window: Window) -> QueueRuleState:
    allowance = min(state.allowance + window.seconds / REFILL, CHANGES)
    state = replace(state, allowance=allowance)
    if window.overloaded:
        return replace(state, overloaded=min(state.overloaded + 1, MOST), calm=0)
    # What a length on trial ends may come back without it.
    tried = state.phase is QueuePhase.TRIAL and state.length == state.tried
    return replace(state, overloaded=0, calm=state.calm if tried else min(state.calm + 1, MOST))


# -- no overload


def _from_long(state: QueueRuleState, bounds: QueueBounds, window: Window) -> QueueRuleState:
    now = window.end
    # A length could not be set at once (``_spaced``).
    state = replace(state, length=bounds.high)
    if state.overloaded < state.enter:
        why = "no overload" if not state.overloaded else "overload has just begun"
        return replace(state, why=why)
    if window.sent < ROUTES * window.received:
        return replace(state, why="the guest sends hardly any of what it gets on")
    known = state.held < bounds.high or state.pairs
    away = now - state.left_at
    if known and away > MEMORY:
        state = replace(state, best=bounds.high, held=bounds.high, pairs=(), leave=LEAVE)
    elif known and away < SOON:
        state = replace(state, leave=min(2 * state.leave, MOST))
    state = replace(state, entered_at=now)
    if state.allowance < VISIT:
        return replace(state, why="overload comes and goes")
    if state.held < bounds.high:
        why = f"overload, {state.held} did not forward less before"
        return replace(state, phase=QueuePhase.SHORT, length=state.held, why=why)
    return _try_shorter(state, bounds, now)


def _leave(state: QueueRuleState, bounds: QueueBounds, now: float) -> QueueRuleState:
    """Overload is over. Findings and pairs are kept for a while."""
    brief = now - state.entered_at < BRIEF
    enter = min(2 * state.enter, MOST) if brief else max(state.enter // 2, ENTER)
    return replace(
        state,
        phase=QueuePhase.LONG,
        length=bounds.high,
        why="overload has ended",
        first=None,
        turn=None,
        overloaded=0,
        enter=enter,
        left_at=now,
    )


# -- overload


def _look_or_try(state: QueueRuleState, bounds: QueueBounds, window: Window) -> QueueRuleState:
    """A ring that stays short; one that bursts do not fit in is looked at early."""
    now = window.end
    due = state.changed_at + DWELL if window.starved else state.look_at
    if now >= due and state.allowance >= TRIAL:
        against = state.best if state.best != state.held else bounds.high
        return _begin_trial(state, state.held, against)
    return state if window.starved else _try_shorter(state, bounds, now)


def _try_shorter(state: QueueRuleState, bounds: QueueBounds, now: float) -> QueueRuleState:
    shorter = max(state.held // 2, bounds.low)
    if shorter == state.held or now < state.try_at or state.allowance < TRIAL:
        return _hold(state, bounds)
    return _begin_trial(state, shorter, state.best)


def _hold(state: QueueRuleState, bounds: QueueBounds) -> QueueRuleState:
    """Overload, and for now nothing is tried."""
    if state.held == bounds.high:
        why = "overload, but no shorter queue forwards as much"
        return replace(state, phase=QueuePhase.LONG, length=bounds.high, why=why)
    why = f"overload, {state.held} forwards as much as {state.best}"
    if state.best == state.held:
        why = f"overload, {state.held} forwards most"
    return replace(state, phase=QueuePhase.SHORT, length=state.held, why=why)


def _begin_trial(state: QueueRuleState, tried: int, against: int) -> QueueRuleState:
    same = (state.tried, state.against) == (tried, against)
    pairs = state.pairs if same else ()
    state = replace(
        state, phase=QueuePhase.TRIAL, tried=tried, against=against, pairs=pairs, first=None
    )
    return _next_turn(state)


def _next_turn(state: QueueRuleState) -> QueueRuleState:
    """Whose turn it is: best, tried, tried, best, best, tried..., so that what drifts with
    time falls on both, and every second turn needs no change."""
    swapped = len(state.pairs) % 2 == 1
    length = state.tried if swapped is (state.first is None) else state.against
    why = f"overload, {state.tried} is tried beside {state.against}"
    return replace(state, length=length, turn=None, why=why)


def _trial(state: QueueRuleState, bounds: QueueBounds, window: Window) -> QueueRuleState:
    now = window.end
    first, calm = state.first, not window.overloaded
    if state.length == state.tried and first is not None and first.starves(window):
        share = window.sent / window.seconds / first.rate
        return _fails(replace(state, pairs=(*state.pairs, log(max(share, 0.01)))), bounds, now)
    if calm and state.length != state.tried:
        # What is offered limits both sides alike; such a turn says nothing.
        return replace(state, turn=None, first=None)
    if state.turn is None:
        # The window in which it was set, or in which load came back: rings settle.
        begun = _next_turn(state)
        there = begun.length == state.length
        return replace(begun, turn=QueueTurn(begun.length)) if there else begun
    turn = replace(
        state.turn,
        sent=state.turn.sent + window.sent,
        seconds=state.turn.seconds + window.seconds,
        used=state.turn.used + window.busy * window.seconds,
        calm=state.turn.calm or (calm and not window.starved),
    )
    if now - state.changed_at < SPACING - 1e-3:
        return replace(state, turn=turn)
    if state.first is None:
        return _next_turn(replace(state, first=turn))
    sides = {state.first.length: state.first.rate, turn.length: turn.rate}
    alone = replace(state, first=None)
    if min(sides.values()) <= 0:
        return _next_turn(alone)
    pair = log(sides[state.tried] / sides[state.against])
    if pair < 0 and (turn.calm or state.first.calm):
        # Less was offered meanwhile.
        return _next_turn(alone)
    measured = replace(alone, pairs=(*state.pairs, pair))
    verdict = judge(measured.pairs)
    if verdict is None:
        return _next_turn(measured)
    return _stays(measured, now) if verdict else _fails(measured, bounds, now)


def judge(pairs: tuple[float, ...]) -> bool | None:
    """Whether a length stays, by its pairs; None while that is not clear."""
    if pairs and pairs[-1] < log(HOPELESS):
        return False
    if len(pairs) < FEWEST:
        return None
    mean, error = _mean(pairs)
    if mean + error < log(SAME):
        return False
    if mean - (error if len(pairs) >= LEAST else CLEARLY * error) >= log(SAME):
        return True
    return False if len(pairs) >= ENOUGH else None


def _mean(pairs: tuple[float, ...]) -> tuple[float, float]:
    """Mean and its standard error."""
    return fmean(pairs), max(stdev(pairs), NOISE) / sqrt(len(pairs))


def _stays(state: QueueRuleState, now: float) -> QueueRuleState:
    mean, error = _mean(state.pairs)
    refreshed = state.tried == state.held
    best = state.tried if mean - 2 * error > log(BETTER) else state.best
    why = f"overload, {state.tried} forwards {exp(mean):.2f} of {state.against}"
    return replace(
        state,
        phase=QueuePhase.SHORT,
        length=state.tried,
        held=state.tried,
        best=best,
        pairs=(),
        why=why,
        try_at=max(now + DWELL, state.try_at) if refreshed else now + DWELL,
        look_at=now + state.look_pause,
        look_pause=min(2 * state.look_pause, MOST_PAUSE) if refreshed else PAUSE,
    )


def _fails(state: QueueRuleState, bounds: QueueBounds, now: float) -> QueueRuleState:
    """Back at once. A length that had stayed and fails now is forgotten."""
    refreshed = state.tried == state.held
    held = state.against if refreshed else state.held
    best = state.against if refreshed else state.best
    failed = replace(
        state,
        held=held,
        best=best,
        pairs=(),
        try_at=now + state.pause,
        look_at=now + state.look_pause,
        pause=min(2 * state.pause, MOST_PAUSE),
    )
    why = f"overload, {state.tried} forwards {exp(fmean(state.pairs)):.2f} of {state.against}"
    return replace(_hold(failed, bounds), why=why)
