"""The search for the highest value (a rate, a burst) that still passes.

It keeps two bounds: ``lower`` has passed, ``upper`` has failed. The first guess is the
highest value, because the frames forwarded under overload give a good second guess. Then the
bounds move apart in growing steps until one has passed and one has failed, and are halved on
a logarithmic scale, because the precision is a share. As in MLRsearch there are two passes: a
coarse one of short trials finds the region, and a fine one of full trials takes only its first
guesses from it, so that the answer rests on full trials alone.

The search assumes that every value greater than a failing one fails. A router that passes
again above (its load may make it poll) is described by the lowest such edge found.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

# Width by which an open side is widened; a fine pass after a coarse one uses the precision.
COARSE_WIDTH = 1.0
# How often the part of a failing value that got through is the next guess.
GUESSES = 2


@dataclass(frozen=True, slots=True)
class Ask:
    """Try ``value``; ``short`` allows a shorter and single trial."""

    value: int
    short: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of an Ask. ``reached`` is the value really tried, less than asked for when
    the generator fell short; ``guess`` is a value that might pass where this did not."""

    passed: bool
    reached: float
    guess: float | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """``lower`` passed, None when even the lowest value failed; ``upper`` failed, None
    when the highest passed. ``by_generator``: the generator did not reach the upper bound, so
    nothing is known about the router there."""

    lower: float | None
    upper: float | None
    by_generator: bool = False


Search = Generator[Ask, Answer, Bounds]


def highest(low: int, high: int, precision: float, *, coarse: bool = True) -> Search:
    """Search the highest value from ``low`` to ``high`` that passes, until the bounds are
    ``precision`` (a share) apart or neighbours. ``coarse`` makes the coarse pass first."""
    low = max(1, low)
    guesses: Sequence[float] = (high,)
    width = COARSE_WIDTH
    if coarse:
        found = yield from _pass(low, high, min(0.5, 2 * precision), guesses, width, short=True)
        guesses = tuple(bound for bound in (found.lower, found.upper) if bound is not None)
        width = precision
    return (yield from _pass(low, high, precision, guesses, width, short=False))


def _pass(
    low: int, high: int, precision: float, guesses: Sequence[float], width: float, *, short: bool
) -> Search:
    state = _State(low, high, precision, list(guesses), width, precision, GUESSES)
    value = state.next()
    while value is not None:
        state.note(value, (yield Ask(value, short)))
        value = state.next()
    return state.bounds()


@dataclass(slots=True)
class _State:
    """The bounds of one pass. Invariant: no value outside the bounds is ever asked for."""

    low: int
    high: int
    precision: float
    guesses: list[float]
    width: float
    stride: float
    more_guesses: int
    lower: float | None = None
    upper: int | None = None
    by_generator: bool = False
    guessed: bool = False

    def note(self, value: int, answer: Answer) -> None:
        if answer.passed:
            if self.lower is None or answer.reached > self.lower:
                self.lower = min(float(value), answer.reached)
            if answer.reached < value:
                self.upper, self.by_generator = value, True
            elif self.guessed:
                # The edge is likely just above a good guess, so bound it from there.
                self.guesses.append(value * (1.0 + self.stride))
                self.stride *= 2.0
        else:
            self.upper, self.by_generator = value, False
            if answer.guess is not None and self.more_guesses > 0:
                self.more_guesses -= 1
                self.guesses.append(answer.guess)

    def next(self) -> int | None:
        """The next value to try; None when the bounds are narrow enough."""
        while self.guesses:
            guess = round(self.guesses.pop(0))
            if self.inside(guess):
                self.guessed = True
                return guess
        self.guessed = False
        if self.upper is None:
            if self.lower is None:
                return self.high
            return None if self.lower >= self.high else self.wider(self.lower, up=True)
        if self.lower is None:
            return None if self.upper <= self.low else self.wider(self.upper, up=False)
        if self.upper <= self.lower * (1.0 + self.precision):
            return None
        middle = round((self.lower * self.upper) ** 0.5)
        return middle if self.inside(middle) else None

    def inside(self, value: int) -> bool:
        """True for a value that the bounds leave open."""
        above = value >= self.low if self.lower is None else value > self.lower
        return above and (value <= self.high if self.upper is None else value < self.upper)

    def wider(self, bound: float, *, up: bool) -> int:
        """The next value beyond ``bound``; each step is twice as wide as the one before."""
        step = 1.0 + self.width
        self.width *= 2.0
        if up:
            return min(self.high, max(int(bound) + 1, round(bound * step)))
        return max(self.low, min(int(bound) - 1, round(bound / step)))

    def bounds(self) -> Bounds:
        return Bounds(self.lower, self.upper, self.by_generator)
