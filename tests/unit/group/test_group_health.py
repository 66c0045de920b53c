"""Which routers of a multistage router get frames, by sequences of what their devices count."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import pytest

from vsrtune.group.health import (
    CALM,
    LONGEST,
    SHY,
    Fault,
    Health,
    HealthCheck,
    Look,
    balancer_fault,
    remembered,
    update,
)

CHECK = HealthCheck(leave=2.0, back=10.0)
TICK = 0.25
# A second: what a router hears that gets no frames.
BROADCASTS = 8.0


@dataclass
class Router:
    """A guest with ``gets`` frames a second, of which it sends the share ``sends`` and loses the
    share ``loses``."""

    gets: float = 100.0
    sends: float = 1.0
    loses: float = 0.0
    plugged: bool = True
    stalled: bool = False
    look: Look = field(default_factory=lambda: Look(True, False, 0, 0))

    def tick(self, used: bool) -> Look:
        came = (self.gets if used else min(self.gets, BROADCASTS)) * TICK * self.plugged
        self.look = Look(
            self.plugged,
            self.stalled,
            self.look.arrived + int(came),
            self.look.sent + int(came * self.sends),
            self.look.lost + int(came * self.loses),
        )
        return self.look


class Group:
    """Routers a, b, ... and the decisions about them, one tick after the other."""

    def __init__(self, many: int = 2, check: HealthCheck = CHECK) -> None:
        self.routers = {chr(ord("a") + n): Router() for n in range(many)}
        self.check = check
        self.now = 1000.0
        self.health = Health()
        self.changes: list[tuple[float, tuple[str, ...]]] = []
        self.run(3)

    def tick(self) -> None:
        self.now += TICK
        before = self.health.used
        looks = {name: router.tick(name in before) for name, router in self.routers.items()}
        self.health = update(self.health, self.now, looks, self.check)
        assert self.health.used, "somebody is always left"
        if before and self.health.used != before:
            self.changes.append((self.now, self.health.used))

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK)):
            self.tick()

    def until(self, condition: Callable[[], bool], most: float) -> float:
        begin = self.now
        while not condition():
            assert self.now - begin <= most, f"not within {most} s"
            self.tick()
        return self.now - begin

    def fault(self, name: str) -> Fault | None:
        return self.health.routers[name].fault

    def is_in(self, *names: str) -> Callable[[], bool]:
        return lambda: self.health.used == names


def dead(router: Router) -> None:
    router.plugged = False


def hung(router: Router) -> None:
    router.stalled, router.sends = True, 0.0


def crashed(router: Router) -> None:
    """Its rings take frames still."""
    router.sends = 0.0


def slowed(router: Router) -> None:
    router.sends, router.loses = 0.3, 0.7


def alive(router: Router) -> None:
    router.plugged, router.stalled, router.sends, router.loses = True, False, 1.0, 0.0


FAULTS = [
    (dead, Fault.UNPLUGGED, TICK),
    (hung, Fault.STALLED, 1.0 + TICK),
    (crashed, Fault.SILENT, 1.0 + TICK),
    (slowed, Fault.SLOW, 1.0 + TICK),
]


@pytest.mark.parametrize(("happens", "fault", "within"), FAULTS)
@pytest.mark.parametrize("many", [2, 3, 5])
def test_a_router_that_forwards_nothing_leaves_soon_and_returns(
    many: int, happens: Callable[[Router], None], fault: Fault, within: float
) -> None:
    group = Group(many)
    others = tuple(name for name in group.routers if name != "b")
    happens(group.routers["b"])
    assert group.until(group.is_in(*others), CHECK.leave) <= within
    assert group.fault("b") is fault
    group.run(5)
    alive(group.routers["b"])
    took = group.until(group.is_in(*group.routers), 60)
    # A silent or slow one was plugged in and took what came all the time.
    expected = CHECK.back - (5 if fault in (Fault.SILENT, Fault.SLOW) else 0)
    assert took == pytest.approx(expected, abs=2 * TICK)
    group.run(300)
    assert len(group.changes) == 2, "nothing else changed"


def test_a_leave_of_another_length() -> None:
    group = Group(check=HealthCheck(leave=8.0, back=10.0))
    group.run(10)
    hung(group.routers["b"])
    assert 3.5 <= group.until(group.is_in("a"), 8) <= 4.5


@pytest.mark.parametrize("pause", [1.0, 2.5])
def test_seldom_samples_are_evidence_too(pause: float) -> None:
    """With many devices the daemon samples less often than every half of ``leave``."""
    routers, health = {"a": Router(), "b": Router()}, Health()
    crashed(routers["b"])
    for n in range(5):
        looks = {name: router.tick(True) for name, router in routers.items()}
        health = update(health, n * pause, looks, CHECK)
        ends = remembered(health.samples[:-1], n * pause, looks, CHECK)
        assert ends == health.samples
    assert health.used == ("a",)
    assert len(health.samples) == 3


def test_one_that_sends_nothing_of_its_own_returns_later() -> None:
    """It hears broadcasts, and answers none: perhaps it boots still, perhaps it never does."""
    group = Group()
    dead(group.routers["b"])
    group.run(5)
    alive(group.routers["b"])
    group.routers["b"].gets = 0.0
    took = group.until(group.is_in("a", "b"), 60)
    assert SHY * CHECK.back - TICK <= took <= SHY * CHECK.back + 2 * TICK


def test_the_time_begins_anew_with_every_fault() -> None:
    group = Group()
    dead(group.routers["b"])
    group.run(5)
    for _ in range(10):
        alive(group.routers["b"])
        group.run(CHECK.back - 1)
        hung(group.routers["b"])
        group.run(1)
    assert group.changes == [(group.changes[0][0], ("a",))]


@pytest.mark.parametrize("seconds", [0.25, 0.5, 0.75])
def test_what_lasts_for_less_is_no_evidence(seconds: float) -> None:
    """A frame lies in a ring at the moment of a sample; a guest is paused for a snapshot."""
    group = Group()
    for _ in range(20):
        hung(group.routers["b"])
        group.run(seconds)
        alive(group.routers["b"])
        group.run(seconds)
    assert group.changes == []


def test_a_firewall_that_drops_everything_comes_back_less_and_less_often() -> None:
    """Its siblings forward, so it is tried again and again, but not without a limit."""
    group = Group()
    crashed(group.routers["b"])
    group.run(3600)
    returns = [at for at, used in group.changes if used == ("a", "b")]
    leaves = [at for at, used in group.changes if used == ("a",)]
    apart = [late - early for early, late in zip(leaves, returns, strict=False)]
    assert apart[0] == pytest.approx(SHY * CHECK.back, abs=1)
    for early, late in itertools.pairwise(apart):
        assert late == pytest.approx(min(2 * early, SHY * LONGEST), abs=1)
    assert 4 <= len(returns) <= 8


def test_one_that_recovered_for_long_is_trusted_as_at_first() -> None:
    group = Group()
    for _ in range(3):
        dead(group.routers["b"])
        group.run(1)
        alive(group.routers["b"])
        assert group.until(group.is_in("a", "b"), 60) <= CHECK.back + 2 * TICK
        group.run(CALM + 1)
    for expected in (CHECK.back, 2 * CHECK.back, 4 * CHECK.back):
        dead(group.routers["b"])
        group.run(1)
        alive(group.routers["b"])
        took = group.until(group.is_in("a", "b"), 600)
        assert took == pytest.approx(expected, abs=3 * TICK)


@pytest.mark.parametrize(
    ("gets", "siblings", "sends"),
    [
        (100.0, 100.0, 0.0),  # nobody forwards: the network outside, or a rule in all of them
        (100.0, 100.0, 0.4),  # most of what comes is for no one
        (40.0, 100.0, 1.0),  # less than half of its share: one flow, or broadcasts
        (16.0, 16.0, 1.0),  # too few to tell
        (0.0, 100.0, 1.0),  # idle
    ],
)
def test_silence_alone_is_no_fault(gets: float, siblings: float, sends: float) -> None:
    group = Group(3)
    for router in group.routers.values():
        router.gets, router.sends = siblings, sends
    group.routers["b"].gets, group.routers["b"].sends = gets, 0.0
    group.run(600)
    assert group.changes == []


@pytest.mark.parametrize(
    ("gets", "loses", "others_lose"),
    [
        (100.0, 0.4, 0.0),  # a burst
        (200.0, 0.7, 0.0),  # one flow that is too much for any router
        (100.0, 0.7, 0.2),  # the host is overloaded
        (16.0, 1.0, 0.0),  # too few to tell
    ],
)
def test_loss_alone_is_no_fault(gets: float, loses: float, others_lose: float) -> None:
    group = Group(3)
    for router in group.routers.values():
        router.loses, router.sends = others_lose, 1 - others_lose
    group.routers["b"].gets, group.routers["b"].loses = gets, loses
    group.run(600)
    assert group.changes == []


def test_what_most_suffer_from_is_no_fault_of_theirs() -> None:
    """The host is overloaded: to concentrate its load would make it worse."""
    group = Group(4)
    for name in "abc":
        hung(group.routers[name])
    group.run(60)
    assert group.changes == []
    alive(group.routers["a"])
    group.run(2)
    assert group.health.used == ("a", "d")


def test_the_last_one_stays_whatever_it_does_until_another_is_well() -> None:
    group = Group()
    dead(group.routers["b"])
    group.run(5)
    hung(group.routers["a"])
    group.run(60)
    assert group.health.used == ("a",)
    dead(group.routers["a"])
    group.run(60)
    assert group.health.used == ("a",)
    # Anyone who might forward is better; it waits for nothing.
    alive(group.routers["b"])
    assert group.until(group.is_in("b"), 5) <= 2 * TICK


def test_returns_are_apart() -> None:
    group = Group(4)
    for name in "bcd":
        dead(group.routers[name])
    group.run(5)
    for name in "bcd":
        alive(group.routers[name])
    group.run(100)
    times = [at for at, _ in group.changes[1:]]
    assert len(times) == 3
    assert all(b - a >= CHECK.back for a, b in itertools.pairwise(times))


def test_a_drained_router_joins_when_it_is_plugged_in() -> None:
    group = Group(1)
    group.routers["b"] = Router(plugged=False)
    group.run(20)
    assert group.health.used == ("a",)
    alive(group.routers["b"])
    assert group.until(group.is_in("a", "b"), 60) == pytest.approx(CHECK.back, abs=2 * TICK)


def test_counters_that_begin_anew_are_no_fault() -> None:
    """A device was made again: its counters start at 0."""
    group = Group()
    for _ in range(50):
        group.routers["b"].look = replace(group.routers["b"].look, arrived=0, sent=0, lost=0)
        group.run(0.5)
    assert group.changes == []


def test_whatever_happens_somebody_is_left_and_nothing_flaps() -> None:
    """Random faults: the number of changes has a bound, and who is well for long is in."""
    rng = random.Random(7)
    for _ in range(4):
        group = Group(rng.randint(1, 5))
        begin = group.now
        for _ in range(40):
            router = rng.choice(list(group.routers.values()))
            rng.choice((dead, hung, crashed, slowed, alive))(router)
            router.gets = rng.choice((0.0, 1.0, 100.0))
            group.run(rng.choice((0.25, 1.0, 5.0, 30.0)))
        # Leaves are at most one more than returns, for each router.
        assert len(group.changes) <= 2 * len(group.routers) + 2 * (group.now - begin) / CHECK.back
        for router in group.routers.values():
            alive(router)
            router.gets = 100.0
        group.run(LONGEST * 2)
        assert group.health.used == tuple(group.routers)


def seen(looks: Iterable[Look]) -> Fault | None:
    samples: tuple[tuple[float, dict[str, Look]], ...] = ()
    for number, look in enumerate(looks):
        samples = remembered(samples, number * TICK, {"lb": look}, CHECK)  # type: ignore[assignment]
    return balancer_fault("lb", samples, CHECK)


def test_a_balancer_that_passes_nothing_on_is_told() -> None:
    def counted(arrived: int, sent: int, many: int = 10, stalled: bool = False) -> Fault | None:
        return seen(Look(True, stalled, arrived * n, sent * n) for n in range(many))

    assert counted(10, 0) is Fault.SILENT
    assert counted(10, 0, many=4) is None, "not for long enough"
    assert counted(10, 1) is None
    assert counted(1, 0) is None, "next to nothing comes"
    assert counted(10, 0, stalled=True) is Fault.STALLED
    assert counted(10, 0, many=4, stalled=True) is None
    assert seen(Look(True, False, 9999 * (n > 7), 0) for n in range(10)) is None, "became known"
    assert seen(Look(n < 9, False, 10 * n, 0) for n in range(10)) is Fault.UNPLUGGED
