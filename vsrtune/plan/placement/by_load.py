"""The placement of ``placement: auto``: by the load of every thread, and stable.

1. A thread keeps the CPU it had if that CPU is still allowed.
2. Threads that are new, or must leave, take the places that cost least beside those.
3. Then at most ``MOVES`` threads move, of those measured in all windows. The moves must save
   ``FEE`` of a CPU for each thread and ``GAIN`` of the present cost of the CPUs they leave: by
   the mean, and in every window. A move merges the windows (load.merged), so no thread moves
   again before there are as many windows again.

costs.py has the costs, docs/placement.md the rule for operators. The result depends on the
arguments, not on their order: equal costs go to the seat that comes first (``Seat.order``) and
to the lowest CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.deadline import percent
from vsrtune.model.guest import ThreadKey
from vsrtune.model.host import Host
from vsrtune.model.load import WINDOWS, mean
from vsrtune.plan.placement.board import Board, Placement
from vsrtune.plan.placement.costs import MIXED, PRIOR, Costs
from vsrtune.plan.placement.ranked import Occupant, Placed, Seat
from vsrtune.plan.placement.search import search

MOVES = 4
FEE = 0.05
GAIN = 0.1
# With more threads than this, reasons do not tell the cost of the next best CPU.
_COMPARED = 256
_NAMED = 3


def balance(
    host: Host, irq: CpuSet, seats: Sequence[Seat], occupants: Sequence[Occupant]
) -> dict[ThreadKey, Placed]:
    """Place every seat; ``occupants`` stay where they are, ``irq`` are interrupt CPUs."""
    if not seats:
        return {}
    ordered = sorted(seats, key=lambda s: s.order)
    fixed = sorted(occupants, key=lambda o: (o.guest, o.role.value, tuple(o.cpus), o.load))
    costs = Costs(host, irq, ordered, fixed)
    kept = _kept(costs)
    placed = search(costs, kept, [n for n in range(len(ordered)) if n not in kept])
    moving = [n for n in kept if len(ordered[n].load) >= WINDOWS and not ordered[n].booked]
    better, saves = _moved(host, irq, costs, fixed, placed, moving)
    board = Board(costs, better)
    told = _Telling(costs, board, fixed)
    return {
        seat.thread: Placed(
            costs.cpus[better[n]],
            told.why(n, costs.cpus[placed[n]] if better[n] != placed[n] else None, saves),
        )
        for n, seat in enumerate(ordered)
    }


def _kept(costs: Costs) -> Placement:
    """Seats that stay where they were. A seat leaves if the kernel would not admit its budget
    there, or if several guests would share its root domain."""
    board = Board(costs, {})
    for n, seat in enumerate(costs.seats):
        if seat.previous is not None and seat.previous in seat.allowed:
            at = costs.position[seat.previous]
            if not costs.budgets or board.price(n, at) < MIXED:
                board.put(n, at)
    return board.placed


def _moved(
    host: Host,
    irq: CpuSet,
    costs: Costs,
    occupants: Sequence[Occupant],
    placed: Placement,
    moving: Sequence[int],
) -> tuple[Placement, float]:
    """The placement after the moves that pay, and the least that they save."""
    if not moving:
        return placed, 0.0
    before = {n: placed[n] for n in moving}
    staying = {n: at for n, at in placed.items() if n not in before}
    windows: list[Costs] = []
    for changes in (MOVES, 2, 1):
        found = search(costs, staying, moving, before=before, fee=FEE, changes=changes)
        if found == placed:
            break
        windows = windows or [
            Costs(host, irq, costs.seats, occupants, window) for window in range(WINDOWS)
        ]
        saves = [_saves(one, placed, found) for one in (costs, *windows)]
        if all(saved >= least for saved, least in saves):
            return found, min(saved for saved, _ in saves)
    return placed, 0.0


def _saves(costs: Costs, old: Placement, new: Placement) -> tuple[float, float]:
    """What the new places save, and the least that they have to save."""
    changed = [n for n in sorted(old) if old[n] != new[n]]
    board = Board(costs, old)
    least = max(FEE * len(changed), GAIN * board.attributed({old[n] for n in changed}))
    saved = 0.0
    for n in changed:
        board.take(n)
        saved += board.price(n, old[n])
    for n in changed:
        saved -= board.price(n, new[n])
        board.put(n, new[n])
    return saved, least


class _Telling:
    """Explains for each seat why it is where it is."""

    def __init__(self, costs: Costs, board: Board, occupants: Sequence[Occupant]) -> None:
        self.costs = costs
        self.board = board
        self.compare = len(costs.seats) <= _COMPARED
        self.here: Mapping[int, list[int]] = {}
        here: dict[int, list[int]] = {}
        for seat, at in sorted(board.placed.items()):
            here.setdefault(at, []).append(seat)
        self.here = here
        self.fixed: dict[int, list[str]] = {}
        for one in occupants:
            for cpu in one.cpus:
                self.fixed.setdefault(cpu, []).append(f"{one.guest} {one.role.value}")

    def why(self, seat: int, left: int | None, saves: float) -> str:
        """``left`` is the CPU it leaves, ``saves`` what all moves together save."""
        parts = [self._company(seat)]
        if left is not None:
            parts = [f"moved from CPU {left}, which saves {saves:.2f} of a CPU", *parts]
        parts.append(_asks(self.costs.seats[seat]))
        if self.compare:
            parts += self._compared(seat)
        return "; ".join(parts)

    def _company(self, seat: int) -> str:
        at = self.board.placed[seat]
        here, fixed = self.here[at], self.fixed.get(self.costs.cpus[at], [])
        names = [self.costs.seats[s].label for s in here[: _NAMED + 1] if s != seat][:_NAMED]
        names += fixed[: _NAMED - len(names)]
        left = len(here) - 1 + len(fixed) - len(names)
        more = f" and {left} more" if left else ""
        return f"with {', '.join(names)}{more}" if names else "a CPU of its own"

    def _compared(self, seat: int) -> list[str]:
        costs, board = self.costs, self.board
        at = board.take(seat)
        others = [p for c in costs.seats[seat].allowed if (p := costs.position[c]) != at]
        here = board.price(seat, at)
        found = board.cheapest(seat, others) if others else None
        board.put(seat, at)
        if found is None:
            return ["no other CPU is allowed"]
        difference, cpu = found[0] - here, costs.cpus[found[1]]
        if abs(difference) < 0.005:
            return [f"CPU {cpu} would cost the same"]
        if difference > 0:
            return [f"CPU {cpu} would cost {difference:.2f} more"]
        return [f"CPU {cpu} would save {-difference:.2f}, too little or not for long enough"]


def _asks(seat: Seat) -> str:
    if seat.booked:
        return f"budget {percent(seat.booked)}"
    if not seat.load:
        return f"not measured yet, taken for {100 * PRIOR:.0f} %"
    return f"load {100 * mean(seat.load):.0f} %"
