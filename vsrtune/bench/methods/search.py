# SPDX-License-Identifier: GPL-2.0-or-later
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

from dataclasses import dataclass, replace

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
class Bounds:
    """``lower`` passed, None when even the lowest value failed; ``upper`` failed, None
    when the highest passed. ``by_generator``: the generator did not reach the upper bound, so
    nothing is known about the router there."""

    lower: float | None
    upper: float | None
    by_generator: bool = False


class BoundsSearch:
    """Searches the highest value from ``low`` to ``high`` that passes, until the bounds are
    ``precision`` (a share) apart or neighbours. ``coarse`` makes the coarse pass first. No value
    outside the bounds is ever asked for."""

    def __init__(self, low: int, high: int, precision: float, *, coarse: bool = True) -> None:
        self._low, self._high = max(1, low), high
        self._precision = precision
        first = min(0.5, 2 * precision) if coarse else precision
        self._begin([high], COARSE_WIDTH, first, short=coarse)

    def _begin(self, guesses: list[float], width: float, precision: float, *, short: bool) -> None:
        """Begin a pass, of which nothing is known but guesses."""
        self.bounds = Bounds(None, None)
        self._guesses, self._more_guesses, self._guessed = guesses, GUESSES, False
        self._width, self._goal, self._stride = width, precision, precision
        self._ask = Ask(0, short)

    def next(self) -> Ask | None:
        """What to try next; None when the bounds are narrow enough."""
        value = self._value()
        if value is None and self._ask.short:
            known = [b for b in (self.bounds.lower, self.bounds.upper) if b is not None]
            self._begin(known, self._precision, self._precision, short=False)
            value = self._value()
        if value is None:
            return None
        self._ask = Ask(value, self._ask.short)
        return self._ask

    def note(self, passed: bool, reached: float, guess: float | None = None) -> None:
        """The answer to what ``next`` asked for last. ``reached`` is the value really tried, less
        than asked for when the generator fell short; ``guess`` is a value that might pass where
        this did not."""
        value, known = self._ask.value, self.bounds
        if not passed:
            self.bounds = replace(known, upper=value, by_generator=False)
            if guess is not None and self._more_guesses > 0:
                self._more_guesses -= 1
                self._guesses.append(guess)
            return
        if known.lower is None or reached > known.lower:
            self.bounds = replace(known, lower=min(float(value), reached))
        if reached < value:
            self.bounds = replace(self.bounds, upper=value, by_generator=True)
        elif self._guessed:
            # The edge is likely just above a good guess, so bound it from there.
            self._guesses.append(value * (1.0 + self._stride))
            self._stride *= 2.0

    def _value(self) -> int | None:
        lower, upper = self.bounds.lower, self.bounds.upper
        self._guessed = True
        while self._guesses:
            guess = round(self._guesses.pop(0))
            if self._inside(guess):
                return guess
        self._guessed = False
        if lower is None and upper is None:
            return self._high
        if upper is None or lower is None:
            # An open side: each step is twice as wide as the one before.
            step = 1.0 + self._width
            self._width *= 2.0
            if lower is not None:
                up = min(self._high, max(int(lower) + 1, round(lower * step)))
                return None if lower >= self._high else up
            assert upper is not None
            down = max(self._low, min(int(upper) - 1, round(upper / step)))
            return None if upper <= self._low else down
        middle = round((lower * upper) ** 0.5)
        wide = upper > lower * (1.0 + self._goal)
        return middle if wide and self._inside(middle) else None

    def _inside(self, value: int) -> bool:
        """True for a value that the bounds leave open."""
        lower, upper = self.bounds.lower, self.bounds.upper
        above = value >= self._low if lower is None else value > lower
        return above and (value <= self._high if upper is None else value < upper)
