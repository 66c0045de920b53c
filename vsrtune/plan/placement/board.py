"""A placement that changes step by step, with the cost of each step."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from vsrtune.plan.placement.costs import OTHERS, SMT, Costs

Placement = dict[int, int]


class Board:
    """Positions of seats at positions of CPUs (in Costs).

    The board keeps sums for every CPU. Without budgets, the time of a step therefore depends only
    on the number of threads of its guest and of guests linked to it."""

    def __init__(self, costs: Costs, placed: Mapping[int, int]) -> None:
        self.costs = costs
        self.placed: Placement = {}
        self._load = [0.0] * len(costs.cpus)
        self._booked = [0] * len(costs.cpus)
        self._members: dict[str, set[int]] = {}
        for seat in sorted(placed):
            self.put(seat, placed[seat])

    def put(self, seat: int, at: int) -> None:
        """Place a seat that is not on the board."""
        self.placed[seat] = at
        one = self.costs.asking[seat]
        self._load[at] += one.demand
        self._booked[at] += one.booked
        self._members.setdefault(one.guest, set()).add(seat)

    def take(self, seat: int) -> int:
        """Take a seat off the board. Returns its position."""
        at = self.placed.pop(seat)
        one = self.costs.asking[seat]
        self._load[at] -= one.demand
        self._booked[at] -= one.booked
        self._members[one.guest].remove(seat)
        return at

    def price(self, seat: int, at: int) -> float:
        """The cost that a seat which is not on the board would add to the total."""
        costs, one = self.costs, self.costs.asking[seat]
        load, booked = self._load[at], self._booked[at]
        price = costs.own(seat, at)
        price += costs.over(at, load + one.demand, booked + one.booked)
        price -= costs.over(at, load, booked)
        if costs.budgets:
            # Budgets weigh other than by demand.
            return price + sum(costs.pair(seat, at, o, p) for o, p in self.placed.items())
        others, beside = load, sum(self._load[s] for s in costs.siblings[at])
        near = (s for g in costs.near[one.guest] for s in self._members.get(g, ()))
        for other in sorted(near):
            there = self.placed[other]
            price += costs.pair(seat, at, other, there)
            asks = costs.asking[other].demand
            if there == at:
                others -= asks
            elif there in costs.siblings[at]:
                beside -= asks
        return price + one.demand * (OTHERS * others + SMT * beside)

    def cheapest(self, seat: int, among: Collection[int]) -> tuple[float, int]:
        """The lowest price of a seat, and the position that has it."""
        return min((round(self.price(seat, at), 9), at) for at in among)

    def attributed(self, at: Collection[int]) -> float:
        """The cost that the removal of the seats on these CPUs would save."""
        here = sorted(s for s, p in self.placed.items() if p in at)
        saved, back = 0.0, []
        for seat in here:
            where = self.take(seat)
            saved += self.price(seat, where)
            back.append((seat, where))
        for seat, where in back:
            self.put(seat, where)
        return saved
