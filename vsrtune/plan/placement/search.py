"""Searches for the placement that costs least (costs.Costs).

The search places threads one after the other, the most demanding first, then moves and swaps
them while that helps. If there are few bindings, it searches all of them for a better one
(exact.py).

Placements map the position of a seat to the position of a CPU (in Costs). Results depend on the
costs alone: among equal costs the first seat wins, then the first CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from vsrtune.plan.placement.board import Board, Placement
from vsrtune.plan.placement.costs import Costs
from vsrtune.plan.placement.exact import Exact

# As many bindings as 8 threads have on 4 CPUs.
EXACT = 4**8
_ROUNDS = 64
_EPSILON = 1e-9
# The most prices computed while moving and swapping: a second or two of a CPU.
_PRICES = 200_000
# How many seats to try when there are too many to try all.
_SEATS = 64


def search(
    costs: Costs,
    placed: Mapping[int, int],
    free: Sequence[int],
    *,
    before: Mapping[int, int] | None = None,
    fee: float = 0.0,
    changes: int | None = None,
) -> Placement:
    """The best places for the ``free`` seats beside those already placed.

    With ``before``, every free seat that leaves its place costs ``fee``, and at most ``changes``
    of them leave. Returns all places, those of ``placed`` included.
    """
    before = {} if before is None else before
    lists = {c: [costs.position[n] for n in c] for c in {costs.seats[s].allowed for s in free}}
    options = {seat: lists[costs.seats[seat].allowed] for seat in free}
    bindings = 1
    for seat in free:
        bindings *= len(options[seat])
    board = Board(costs, {**placed, **{s: before[s] for s in free if s in before}})
    if before:
        _few_moves(board, free, options, before, fee, len(free) if changes is None else changes)
    else:
        for seat in _order(costs, free):
            board.put(seat, board.cheapest(seat, options[seat])[1])
        _descend(board, free, options)
    if bindings > EXACT:
        return board.placed
    best = {seat: board.placed[seat] for seat in free}
    found = Exact(costs, placed, _order(costs, free), options, before, fee, changes).run(best)
    return {**placed, **found}


def _order(costs: Costs, seats: Sequence[int]) -> list[int]:
    """The most demanding seat first; of equal ones the seat with fewer allowed CPUs first."""
    return sorted(
        seats,
        key=lambda s: (-costs.asking[s].demand, len(costs.seats[s].allowed), costs.seats[s].order),
    )


def _descend(board: Board, free: Sequence[int], options: Mapping[int, list[int]]) -> None:
    """Move seats, and swap two, while that helps."""
    prices = sum(len(options[seat]) for seat in free)
    for _ in range(min(_ROUNDS, _PRICES // max(prices, 1))):
        if not _moved(board, free, options) and not _swapped(board, free, options):
            return


def _moved(board: Board, free: Sequence[int], options: Mapping[int, list[int]]) -> bool:
    any_moved = False
    for seat in free:
        at = board.take(seat)
        price, best = board.cheapest(seat, options[seat])
        if price < board.price(seat, at) - _EPSILON:
            any_moved = True
            at = best
        board.put(seat, at)
    return any_moved


def _swapped(board: Board, free: Sequence[int], options: Mapping[int, list[int]]) -> bool:
    """Swap the first two seats for which that helps; of very many seats, try only the first."""
    some = _order(board.costs, free)[:_SEATS]
    for n, one in enumerate(some):
        for two in some[:n]:
            here, there = board.placed[one], board.placed[two]
            if here == there or there not in options[one] or here not in options[two]:
                continue
            if _exchange(board, one, two) < -_EPSILON:
                return True
            _exchange(board, one, two)
    return False


def _exchange(board: Board, one: int, two: int) -> float:
    """Swap two seats. Returns the change of the total."""
    here, there = board.take(one), board.placed[two]
    change = -board.price(one, here)
    board.take(two)
    change -= board.price(two, there)
    change += board.price(two, here)
    board.put(two, here)
    change += board.price(one, there)
    board.put(one, there)
    return change


def _few_moves(
    board: Board,
    free: Sequence[int],
    options: Mapping[int, list[int]],
    before: Mapping[int, int],
    fee: float,
    changes: int,
) -> None:
    """Take the steps that save most, one after the other. Each is a move or a swap that saves
    more than its fee."""
    while True:
        left = changes - sum(board.placed[s] != before[s] for s in free)
        step = min(_steps(board, free, options, before, fee, left), default=None)
        if step is None or step[0] > -_EPSILON:
            return
        for seat, _ in step[1]:
            board.take(seat)
        for seat, at in step[1]:
            board.put(seat, at)


def _steps(
    board: Board,
    free: Sequence[int],
    options: Mapping[int, list[int]],
    before: Mapping[int, int],
    fee: float,
    left: int,
) -> Iterator[tuple[float, tuple[tuple[int, int], ...]]]:
    """Moves and swaps, each with its change of the total, fees included."""

    def fees(seat: int, at: int) -> float:
        return fee * ((at != before[seat]) - (board.placed[seat] != before[seat]))

    worst: list[tuple[float, int]] = []
    for seat in free:
        at = board.take(seat)
        worst.append((-board.price(seat, at), seat))
        board.put(seat, at)
    some = [seat for _, seat in sorted(worst)[:_SEATS]]
    for seat in some:
        if left < 1 and board.placed[seat] == before[seat]:
            continue
        at = board.take(seat)
        price = board.price(seat, at)
        found = [(board.price(seat, p) - price, p) for p in options[seat] if p != at]
        board.put(seat, at)
        yield from ((change + fees(seat, p), ((seat, p),)) for change, p in found)
    for n, one in enumerate(some):
        for two in some[:n]:
            here, there = board.placed[one], board.placed[two]
            news = (here == before[one]) + (there == before[two])
            if (
                here == there
                or news > left
                or there not in options[one]
                or here not in options[two]
            ):
                continue
            charged = fees(one, there) + fees(two, here)
            change = _exchange(board, one, two)
            _exchange(board, one, two)
            yield change + charged, ((one, there), (two, here))
