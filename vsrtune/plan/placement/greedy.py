# SPDX-License-Identifier: GPL-2.0-or-later
"""Which thread runs on which CPU when a policy says ``auto``.

Pins are tight, one thread on one CPU, because threads that may move bounce between CPUs in
overload (Abeni et al., section 3.2). Every step takes the CPU that costs least (costs.py):

1. A thread keeps the CPU that it had if that is still allowed.
2. Every other thread takes a CPU, the most demanding first, then vcpus first.
3. Threads move, the one that costs most first, until no move pays. A move pays if it saves
   ``FEE`` of a CPU and ``GAIN`` of what the thread costs where it is. New threads move for less,
   and threads that may not stay (costs.CLASH) in any case. Where loads are not measured, a thread
   with no other bound to its CPU stays, so that guests that come and go move nobody else. Where
   they are, a move must pay by the mean and in every window, and at most ``MOVES`` threads move.
   A move merges the windows (load.merged), so no thread moves again before there are as many.

Planning again changes nothing, because a thread stays where no move pays. The result depends on
the arguments, not on their order. docs/placement.md has the rule for operators.
"""

from __future__ import annotations

from collections.abc import Sequence

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.deadline import percent
from vsrtune.model.guest import ThreadKey
from vsrtune.model.host import Host
from vsrtune.model.load import WINDOWS, mean
from vsrtune.plan.placement.costs import CLASH, UNKNOWN, Board, Chosen, Occupant, Seat, demand

MOVES = 4
FEE = 0.05
GAIN = 0.1
_EPSILON = 1e-6
# A bound on the work. In the first rounds new threads move for any gain.
_ROUNDS = 64
_FINE_ROUNDS = 2
# With more threads than this, reasons do not tell the cost of the next best CPU.
_COMPARED = 256
_NAMED = 3


def place(
    host: Host, irq: CpuSet, seats: Sequence[Seat], occupants: Sequence[Occupant]
) -> dict[ThreadKey, Chosen]:
    """Place every seat; ``occupants`` stay where they are, ``irq`` are interrupt CPUs."""
    if not seats:
        return {}
    ordered = sorted(seats, key=lambda s: s.order)
    fixed = sorted(occupants, key=lambda o: (o.guest, o.role.value, tuple(o.cpus), o.load))
    placing = _Placing(host, irq, ordered, fixed)
    placing.run()
    reasons = _Reasons(placing, fixed)
    return {
        seat.thread: Chosen(CpuSet.single(placing.board.cpu_of[n]), reasons.why(n))
        for n, seat in enumerate(ordered)
    }


class _Placing:
    """One placement in progress. ``saved`` is what each seat that moved has saved."""

    def __init__(
        self, host: Host, irq: CpuSet, seats: Sequence[Seat], occupants: Sequence[Occupant]
    ) -> None:
        self.seats = seats
        self.board = Board(host, irq, seats, occupants)
        self.saved: dict[int, float] = {}
        self._inputs = (host, irq, seats, occupants)
        # One board for each window, made when a measured thread is about to move.
        self._windows: list[Board] = []
        self._kept = {n for n, s in enumerate(seats) if s.previous in s.allowed}
        self._moves = MOVES
        self._fine = True

    def run(self) -> None:
        """Keep seats, place the others, and let them move until no move pays."""
        for n, seat in enumerate(self.seats):
            if n in self._kept and seat.previous is not None:
                self._put(n, seat.previous)
        for n in sorted(set(range(len(self.seats))) - self._kept, key=self._urgency):
            self._put(n, self.board.cheapest(n, self.seats[n].allowed)[1])
        for number in range(_ROUNDS):
            self._fine = number < _FINE_ROUNDS
            if not self._round():
                return

    def _urgency(self, n: int) -> tuple[float, int, int]:
        seat = self.seats[n]
        return (-demand(seat.load or (), seat.booked), len(seat.allowed), n)

    def _put(self, n: int, cpu: int) -> None:
        for board in (self.board, *self._windows):
            board.put(n, cpu)

    def _round(self) -> bool:
        """Let every seat move once; True when one did."""
        quotes = {n: self.board.quote(n) for n in range(len(self.seats))}
        moved = False
        for n in sorted(quotes, key=lambda n: (-round(quotes[n][0], 9), -n)):
            # The quotes hold until a seat moves.
            here, least = self.board.quote(n) if moved else quotes[n]
            cpu = self._better(n, here) if self._hopes(n, here, here - least) else None
            if cpu is not None:
                for board in (self.board, *self._windows):
                    board.take(n)
                self._put(n, cpu)
                moved = True
        return moved

    def _hopes(self, n: int, here: float, saved: float) -> bool:
        """Whether a seat may move where it saves this. Most seats stay, and the bound tells it
        without a look at every CPU."""
        return saved >= _EPSILON if n not in self._kept and self._fine else _pays(here, saved)

    def _better(self, n: int, here: float) -> int | None:
        """The CPU to which a seat moves, None when it stays where it costs ``here``."""
        board, seat = self.board, self.seats[n]
        at = board.take(n)
        price, cpu = board.cheapest(n, seat.allowed)
        board.put(n, at)
        saved = here - price
        if cpu == at or saved < _EPSILON:
            return None
        free = n not in self._kept
        if saved > CLASH / 2 or (free and self._fine):
            return cpu
        if not _pays(here, saved):
            return None
        if free:
            return cpu
        if seat.load is None:
            return None if board.alone(n) else cpu
        if seat.booked or len(seat.load) < WINDOWS or not self._moves:
            return None
        for window in self._by_window():
            window.take(n)
            here, there = window.price(n, at), window.price(n, cpu)
            window.put(n, at)
            if not _pays(here, here - there):
                return None
            saved = min(saved, here - there)
        self._moves -= 1
        self.saved[n] = saved
        return cpu

    def _by_window(self) -> list[Board]:
        if not self._windows:
            self._windows = [Board(*self._inputs, window) for window in range(WINDOWS)]
            for window in self._windows:
                for n, cpu in self.board.cpu_of.items():
                    window.put(n, cpu)
        return self._windows


def _pays(here: float, saved: float) -> bool:
    return saved >= max(FEE, GAIN * here)


class _Reasons:
    """Explains for each seat why it is where it is."""

    def __init__(self, placing: _Placing, occupants: Sequence[Occupant]) -> None:
        self._placing = placing
        self._labels: dict[int, list[str]] = {}
        for seat, cpu in sorted(placing.board.cpu_of.items()):
            self._labels.setdefault(cpu, []).append(placing.seats[seat].label)
        for occupant in occupants:
            for cpu in occupant.cpus:
                name = f"{occupant.guest} {occupant.role.value}"
                self._labels.setdefault(cpu, []).append(name)

    def why(self, n: int) -> str:
        """The reason: who shares the CPU and, where loads count, what the next best one costs."""
        seat, cpu = self._placing.seats[n], self._placing.board.cpu_of[n]
        parts = [self._company(seat, cpu)]
        if seat.load is None:
            return parts[0]
        if n in self._placing.saved and cpu != seat.previous:
            saved = self._placing.saved[n]
            parts = [f"moved from CPU {seat.previous}, which saves {saved:.2f} of a CPU", *parts]
        parts.append(_asks(seat))
        if len(self._placing.seats) <= _COMPARED:
            parts.append(self._compared(n, seat))
        return "; ".join(parts)

    def _company(self, seat: Seat, cpu: int) -> str:
        labels = self._labels[cpu]
        if len(labels) == 1:
            return "a CPU of its own"
        first = labels[: _NAMED + 1]
        names = [name for name in first if name != seat.label][:_NAMED]
        more = len(labels) - 1 - len(names)
        return f"shared with {', '.join(names)}{f' and {more} more' if more else ''}"

    def _compared(self, n: int, seat: Seat) -> str:
        board = self._placing.board
        at = board.take(n)
        others = [cpu for cpu in seat.allowed if cpu != at]
        here = board.price(n, at)
        found = board.cheapest(n, others) if others else None
        board.put(n, at)
        if found is None:
            return "no other CPU is allowed"
        difference, cpu = found[0] - here, found[1]
        if abs(difference) < 0.005:
            return f"CPU {cpu} would cost the same"
        if difference > CLASH / 2:
            return "no other CPU may be shared"
        if difference > 0:
            return f"CPU {cpu} would cost {difference:.2f} more"
        return f"CPU {cpu} would save {-difference:.2f}, too little or not for long enough"


def _asks(seat: Seat) -> str:
    if seat.booked:
        return f"budget {percent(seat.booked)}"
    if not seat.load:
        return f"not measured yet, taken for {100 * UNKNOWN:.0f} %"
    return f"load {100 * mean(seat.load):.0f} %"
