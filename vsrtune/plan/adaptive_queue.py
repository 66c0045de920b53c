"""The rule for the length of a guest's macvtap rings under `queue: {macvtap: adaptive}`.

A short ring drops frames before work is spent on them, and keeps waiting times short. But
where vhost moves frames in batches it starves the guest, and below saturation it loses bursts
(docs/policy.md, section 4.3 and Fig. 15 of the paper, and the measurements in docs/results).
Which effect prevails depends on the kernel and the load, so the rule tries lengths:

1. Without overload the rings are as long as allowed.
2. Overload is a window in which rings dropped frames and the guest's threads used the CPU
   they have. After some consecutive windows of overload the rule tries half the length beside
   the best known one: the two take turns, and the rule compares what the guest sent by pairs
   of turns.
3. The shorter length stays only if it surely sends SAME of the best. Otherwise the rings get
   their previous length back at once, and the wait before the next trial doubles each time. A
   length that leaves the guest's threads idle and sends less fails at once: bursts do not fit
   in it.
4. The rule compares a length that stays again from time to time. When overload ends, the rings
   are long again; the rule remembers its findings for MEMORY seconds.

``step`` is pure: it maps (state, bounds, window) to a state whose ``length`` the caller sets.
Lengths stay within the bounds. Changes are at least SPACING seconds apart; only a change back
to a longer length that is no turn of a trial may come after half of that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from math import exp, log, sqrt
from statistics import fmean, stdev

from vsrtune.model.load import Window
from vsrtune.policy.model import QueueBounds

# Seconds between two changes; the rings settle in half of them.
SPACING = 1.0
# CHANGES changes may come in a row, then one in REFILL seconds. The rings leave their full
# length only if VISIT changes (there and back) are left, and a trial begins only if TRIAL are.
CHANGES, REFILL = 40, 10.0
VISIT, TRIAL = 2, 10
# Consecutive windows: ENTER of overload before the rule acts, LEAVE without before overload is
# over. Both grow, to MOST at most: ENTER while overload keeps ending within BRIEF seconds, LEAVE
# while overload returns within SOON seconds, because the short ring had ended it then.
ENTER, LEAVE, MOST = 2, 2, 256
BRIEF, SOON = 3.0, 6.0
# A shorter ring stays if it sends at least this share of what the best one sends.
SAME = 0.98
# One pair of turns below this share ends a trial.
HOPELESS = 0.85
# A ring that drops frames is too short if the threads use less than this share of the CPU time
# that they use with the best one.
IDLE = 0.95
# A length that sends more than this share of the best one becomes the best one.
BETTER = 1.02
# Pairs of turns in a trial.
FEWEST, LEAST, ENOUGH = 2, 4, 8
# Fewer than LEAST pairs suffice if their mean is this many standard errors above SAME.
CLEARLY = 4
# The least standard deviation of pairs, as a share: few pairs are no surer.
NOISE = 0.02
# Seconds: DWELL from a length that stays to the next trial; PAUSE and MOST_PAUSE are the first
# and the longest wait after a failed trial and between comparisons of a length that stays;
# MEMORY is how long findings outlive overload.
DWELL = 5.0
PAUSE, MOST_PAUSE = 30.0, 1800.0
MEMORY = 60.0
# A guest that sends less than this share of what it receives is no router.
ROUTES = 0.1


class QueuePhase(Enum):
    """What the rule is doing."""

    LONG = "long"
    TRIAL = "trial"
    SHORT = "short"


@dataclass(frozen=True, slots=True)
class QueueTurn:
    """One side of a pair. ``sent``: frames in its settled part of ``seconds``. ``used``: the
    share that the most loaded threads used of the CPU time they can have, times seconds, summed
    over the windows. ``calm``: in one of its windows the rings did not drop."""

    length: int
    sent: int = 0
    seconds: float = 0.0
    used: float = 0.0
    calm: bool = False

    @property
    def rate(self) -> float:
        return self.sent / self.seconds if self.seconds > 0 else 0.0

    def starves(self, window: Window) -> bool:
        """Whether the rings of ``window`` are too short for what this turn's length holds."""
        if not window.drops or self.seconds <= 0:
            return False
        idler = window.busy < IDLE * self.used / self.seconds
        return idler and window.sent / window.seconds < SAME * self.rate


@dataclass(frozen=True, slots=True)
class QueueRuleState:
    """``length`` is the length to set, ``why`` the reason for people. ``best`` is the length
    that sent most, ``held`` the shortest that stays under overload. ``pairs`` holds a logarithm
    for each pair of turns: the rate of ``tried`` over that of ``against``. ``first`` is the side
    of a pair that has had its turn. Times are those of the samples."""

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
    # The earliest time of a trial, and of a comparison of ``held``; and the next wait for each.
    try_at: float = 0.0
    look_at: float = 0.0
    pause: float = PAUSE
    look_pause: float = PAUSE
    changes: int = 0
    allowance: float = CHANGES

    def idle(self, bounds: QueueBounds) -> bool:
        """True while only a drop in a ring can change the state."""
        return self.phase is QueuePhase.LONG and not self.overloaded and self.length == bounds.high


def begin(bounds: QueueBounds) -> QueueRuleState:
    """The first state: the rings are long and nothing is known."""
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
        # The held length has ended overload, so nothing can be compared now.
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
    """Put off a change that comes too soon after the last one; later windows ask again."""
    if after.length == state.length:
        return after
    back = after.length > state.length and after.phase is not QueuePhase.TRIAL
    spacing = SPACING / 2 if back else SPACING
    if now - state.changed_at < spacing - 1e-3:
        # A turn is not measured before its length is set.
        return replace(after, length=state.length, turn=None)
    return replace(after, changed_at=now, changes=state.changes + 1, allowance=after.allowance - 1)


def _counted(state: QueueRuleState, window: Window) -> QueueRuleState:
    allowance = min(state.allowance + window.seconds / REFILL, CHANGES)
    state = replace(state, allowance=allowance)
    if window.overloaded:
        return replace(state, overloaded=min(state.overloaded + 1, MOST), calm=0)
    # Overload that the tried length ends may return without it.
    tried = state.phase is QueuePhase.TRIAL and state.length == state.tried
    return replace(state, overloaded=0, calm=state.calm if tried else min(state.calm + 1, MOST))


# -- no overload


def _from_long(state: QueueRuleState, bounds: QueueBounds, window: Window) -> QueueRuleState:
    now = window.end
    # ``_spaced`` may have put off the full length.
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
    """End overload, and keep findings and pairs for a while."""
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
    """Compare a short ring again when that is due, otherwise try a shorter one. The comparison
    is due early for a ring in which bursts do not fit."""
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
    """Keep the held length under overload, without a trial for now."""
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
    """Begin a turn. The order is best, tried, tried, best, best, tried...: a drift over time
    falls on both lengths, and every second turn needs no change."""
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
        # The offered load limits both lengths alike, so this turn tells nothing.
        return replace(state, turn=None, first=None)
    if state.turn is None:
        # The length was set, or load came back, in this window: the rings settle.
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
        # The offered load fell meanwhile.
        return _next_turn(alone)
    measured = replace(alone, pairs=(*state.pairs, pair))
    verdict = judge(measured.pairs)
    if verdict is None:
        return _next_turn(measured)
    return _stays(measured, now) if verdict else _fails(measured, bounds, now)


def judge(pairs: tuple[float, ...]) -> bool | None:
    """Whether its pairs let a length stay; None while that is unclear."""
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
    """Go back at once. A held length that fails now is forgotten."""
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
