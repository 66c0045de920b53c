"""Branch and bound over all bindings of few threads, depth first, the cheapest first.

The search leaves a branch that cannot beat the best known binding by ``SLACK``, so the result
costs at most that much more than the best binding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vsrtune.plan.placement.board import Board, Placement
from vsrtune.plan.placement.costs import Costs

SLACK = 0.04
_EPSILON = 1e-9


class Exact:
    """One search over the places of ``order``; search.search explains the other arguments."""

    def __init__(
        self,
        costs: Costs,
        placed: Mapping[int, int],
        order: Sequence[int],
        options: Mapping[int, list[int]],
        before: Mapping[int, int],
        fee: float,
        changes: int | None,
    ) -> None:
        self.costs = costs
        self.order = order
        self.before = before
        self.changes = len(order) if changes is None else changes
        self.size = len(costs.cpus)
        board = Board(costs, placed)
        self.load = [0.0] * self.size
        self.booked = [0] * self.size
        for seat, at in placed.items():
            self.load[at] += costs.asking[seat].demand
            self.booked[at] += costs.asking[seat].booked
        self.empty = [not any(p == at for p in placed.values()) for at in range(self.size)]
        self.options = [options[seat] for seat in order]
        # The cost of each seat at each CPU beside all placed ones, without that of ``over``.
        self.rows: list[list[float]] = []
        for seat in order:
            one, row = costs.asking[seat], [0.0] * self.size
            for at in options[seat]:
                full, booked = self.load[at], self.booked[at]
                row[at] = board.price(seat, at) + fee * (seat in before and before[seat] != at)
                row[at] -= costs.over(at, full + one.demand, booked + one.booked)
                row[at] += costs.over(at, full, booked)
            self.rows.append(row)
        self.pairs = self._pairs()

    def _pairs(self) -> dict[tuple[int, int], list[list[float]]]:
        """By seat (its depth) and CPU: the costs to add to the rows of the seats after it."""
        return {
            (depth, at): [
                [self.costs.pair(seat, at, other, p) for p in range(self.size)]
                for other in self.order[depth + 1 :]
            ]
            for depth, seat in enumerate(self.order)
            for at in self.options[depth]
        }

    def run(self, known: Placement) -> Placement:
        """The best binding, or ``known`` if none beats it by ``SLACK``."""
        self.best = dict(known)
        self.bound = self._cost(known)
        self.here: Placement = {}
        self._go(0, 0.0, self.rows, 0)
        return self.best

    def _cost(self, found: Placement) -> float:
        """The cost of a binding, as ``_go`` adds it up."""
        cost, rows, load, booked = 0.0, self.rows, list(self.load), list(self.booked)
        for depth, seat in enumerate(self.order):
            at, one = found[seat], self.costs.asking[seat]
            cost += rows[0][at] + self._over(at, load[at], booked[at], one.demand, one.booked)
            load[at] += one.demand
            booked[at] += one.booked
            rows = _added(rows[1:], self.pairs[depth, at])
        return cost

    def _over(self, at: int, load: float, booked: int, more: float, book: int) -> float:
        over = self.costs.over
        return over(at, load + more, booked + book) - over(at, load, booked)

    def _go(self, depth: int, cost: float, rows: list[list[float]], changed: int) -> None:
        if depth == len(self.order):
            if cost < self.bound - _EPSILON:
                self.bound, self.best = cost, dict(self.here)
            return
        rest = sum(
            min(row[at] for at in options)
            for row, options in zip(rows[1:], self.options[depth + 1 :], strict=True)
        )
        seat = self.order[depth]
        one = self.costs.asking[seat]
        tried: list[int] = []
        steps = []
        for at in self.options[depth]:
            new = changed + (seat in self.before and self.before[seat] != at)
            if new > self.changes or any(self._same(at, o, rows) for o in tried):
                continue
            tried.append(at)
            more = self._over(at, self.load[at], self.booked[at], one.demand, one.booked)
            steps.append((rows[0][at] + more, at, new))
        for price, at, new in sorted(steps):
            if (cost + price + rest) * (1 + SLACK) >= self.bound - _EPSILON:
                continue
            self.load[at] += one.demand
            self.booked[at] += one.booked
            was, self.empty[at], self.here[seat] = self.empty[at], False, at
            self._go(depth + 1, cost + price, _added(rows[1:], self.pairs[depth, at]), new)
            self.load[at] -= one.demand
            self.booked[at] -= one.booked
            self.empty[at] = was
            del self.here[seat]

    def _same(self, at: int, other: int, rows: list[list[float]]) -> bool:
        """Whether two CPUs are interchangeable for all remaining seats."""
        return (
            self.empty[at]
            and self.empty[other]
            and self.costs.alike(at, other)
            and all(row[at] == row[other] for row in rows)
            and all((at in o) == (other in o) for o in self.options)
        )


def _added(rows: list[list[float]], more: list[list[float]]) -> list[list[float]]:
    return [[a + b for a, b in zip(r, m, strict=True)] for r, m in zip(rows, more, strict=True)]
