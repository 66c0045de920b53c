"""starvation.py on sequences of samples: what is a standstill, and what only looks like one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import shell_samples as samples

from vsrtune.model.guest import Role, Sched, SchedClass, ThreadKey
from vsrtune.model.load import GuestFrames
from vsrtune.plan.safety.starvation import (
    STARVED,
    SURE,
    GuardedThread,
    Rule,
    Sight,
    Sign,
    Subject,
    ThreadSample,
    Waiting,
    subject,
    vital,
)

TICK = 0.25
MS = 1_000_000


@dataclass
class Router:
    """A guest with two vcpus and two workers on one CPU, and what its threads do: each plays
    a part, a share of the CPU (None: it sleeps) and whether it waits for the rest."""

    ref: str = "vr1"
    base: int = 100
    timed: bool = True
    cpu: int = 1
    period: float = SURE

    def __post_init__(self) -> None:
        self.threads = tuple(
            GuardedThread(
                ThreadKey(self.base, self.base + n, 5), label, role, self.timed, self.period
            )
            for n, (label, role) in enumerate(
                [("vcpu 0", Role.VCPU), ("vcpu 1", Role.VCPU)]
                + [("vhost a/0", Role.VHOST), ("vhost b/0", Role.VHOST)]
            )
        )
        self.subject = Subject(self.ref, self.threads)
        self.ran = [0.0] * 4
        self.waited = [0.0] * 4
        self.states = ["S"] * 4
        self.came = self.lost = self.went = 0

    def go(
        self,
        seconds: float,
        run: tuple[float | None, ...] = (None,) * 4,
        rates: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """Let time pass. ``run``: the share of a CPU of each thread, None for asleep;
        ``rates``: frames a second that arrive, are dropped, are sent."""
        for n, share in enumerate(run):
            self.states[n] = "S" if share is None else "R"
            self.ran[n] += (share or 0.0) * seconds
            self.waited[n] += 0.0 if share is None else (1 - share) * seconds if share else 0.0
        self.came += int(rates[0] * seconds)
        self.lost += int(rates[1] * seconds)
        self.went += int(rates[2] * seconds)

    def sight(self) -> Sight:
        found = {
            t.key: ThreadSample(
                self.states[n],
                self.cpu,
                int(self.ran[n] * 100),
                int(self.ran[n] * 1e9),
                int(self.waited[n] * 1e9),
            )
            for n, t in enumerate(self.threads)
        }
        return Sight(self.subject, found, GuestFrames(self.came, self.lost, self.went))


def watch(
    seconds: float, *going: Callable[[float], None], routers: list[Router], rule: Rule | None = None
) -> tuple[float, list[Sign]]:
    """Samples every TICK: when there was the first sign, and what; no sign is (0, [])."""
    rule = rule or Rule()
    at = 100.0
    begin = at
    signs = rule.update(at, [r.sight() for r in routers])
    assert signs == []
    while at < begin + seconds:
        at += TICK
        for step in going:
            step(TICK)
        signs = rule.update(at, [r.sight() for r in routers])
        if signs:
            return at - begin, signs
    return 0.0, []


def test_spinning_is_seen_within_a_second_and_a_half() -> None:
    """One vcpu runs, the other waits, and so do the workers: nothing is sent."""
    router = Router()
    when, signs = watch(
        5, lambda t: router.go(t, (1.0, 0.0, 0.0, 0.0), (300, 0, 0)), routers=[router]
    )
    assert SURE <= when <= 1.5
    (sign,) = signs
    assert sign.guest == "vr1"
    assert "vcpu 1 (tid 101) has waited" in sign.why and "CPU 1" in sign.why


def test_a_busy_vcpu_that_starves_its_worker() -> None:
    router = Router()
    when, signs = watch(5, lambda t: router.go(t, (1.0, None, 0.0, None)), routers=[router])
    assert when and "vhost a/0" in signs[0].why


def test_the_next_level_is_judged_by_what_is_seen_there() -> None:
    router, rule = Router(), Rule()
    spin = (1.0, 0.0, 0.0, 0.0)
    when, _ = watch(5, lambda t: router.go(t, spin), routers=[router], rule=rule)
    rule.begin_anew()
    again, _ = watch(5, lambda t: router.go(t, spin), routers=[router], rule=rule)
    assert when and SURE <= again <= 1.5
    rule.begin_anew()
    shares = (0.4, 0.4, 0.1, 0.1)
    assert watch(5, lambda t: router.go(t, shares, (300, 0, 300)), routers=[router], rule=rule) == (
        0.0,
        [],
    )


def test_a_livelock_in_which_all_get_their_turn_is_a_standstill() -> None:
    """Round-robin: everybody runs, the ring stays full, and nothing comes out."""
    router = Router()
    when, signs = watch(
        5, lambda t: router.go(t, (0.5, 0.5, None, None), (9000, 9000, 0)), routers=[router]
    )
    assert SURE <= when <= 1.75
    assert "none was taken or sent" in signs[0].why


@pytest.mark.parametrize(("share", "waits"), [(0.72, True), (0.78, False)])
def test_a_vcpu_that_waits_for_less_than_a_quarter_of_the_time_is_merely_busy(
    share: float, waits: bool
) -> None:
    router = Router()
    flood = (9000, 9000, 0)
    when, _ = watch(5, lambda t: router.go(t, (share, None, None, None), flood), routers=[router])
    assert bool(when) is waits


def test_frames_that_stop_coming_out_count_after_forwarding_only() -> None:
    def run(forwarded: int) -> float:
        router, rule = Router(), Rule()
        watch(
            2,
            lambda t: router.go(t, (0.3, 0.3, 0.1, 0.1), (300, 0, forwarded)),
            routers=[router],
            rule=rule,
        )
        # The rings take these frames without a drop, and no worker runs.
        when, _ = watch(
            4,
            lambda t: router.go(t, (0.5, 0.5, None, None), (300, 0, 0)),
            routers=[router],
            rule=rule,
        )
        return when

    assert run(300) >= SURE
    assert run(100) == 0.0, "at a far lower rate"
    # Half the rate, give or take a frame.
    assert run(152) >= SURE
    assert run(148) == 0.0


@pytest.mark.parametrize(("quiet", "stands"), [(57, True), (63, False)])
def test_what_was_sent_is_remembered_for_a_minute(quiet: int, stands: bool) -> None:
    router, rule = Router(), Rule()
    at, signs = 100.0, list[Sign]()
    for seconds, run, rates in (
        (2, (0.3, 0.3, 0.1, 0.1), (300, 0, 300)),
        (quiet, (None, None, None, None), (0, 0, 0)),
        (2, (0.5, 0.5, None, None), (300, 0, 0)),
    ):
        for _ in range(int(seconds / TICK)):
            at += TICK
            router.go(TICK, run, rates)
            signs += rule.update(at, [router.sight()])
    assert bool(signs) is stands


@pytest.mark.parametrize(
    ("what", "run", "rates"),
    [
        ("a firewall that drops all", (0.3, 0.2, 0.2, 0.1), (20000, 0, 0)),
        ("a firewall in overload", (0.4, 0.4, 0.1, 0.1), (40000, 15000, 0)),
        ("paused", (None, None, None, None), (20000, 20000, 0)),
        ("a paused guest, whose kernel thread still copies", (None, None, 0.1, None), (900, 0, 0)),
        ("it boots: one vcpu is busy and waits for nobody", (1.0, None, None, None), (900, 900, 0)),
        ("broadcasts to an idle router", (None, None, None, None), (5, 0, 0)),
        ("busy by itself on a CPU of its own", (1.0, 1.0, None, None), (0, 0, 0)),
        ("overload", (0.4, 0.4, 0.1, 0.1), (60000, 40000, 20000)),
    ],
)
def test_what_is_no_standstill(
    what: str, run: tuple[float | None, ...], rates: tuple[int, int, int]
) -> None:
    router, rule = Router(), Rule()
    # It has forwarded before, as much as it could.
    watch(
        2,
        lambda t: router.go(t, (0.4, 0.4, 0.1, 0.1), (20000, 0, 20000)),
        routers=[router],
        rule=rule,
    )
    found = watch(10, lambda t: router.go(t, run, rates), routers=[router], rule=rule)
    assert found == (0.0, []), what


def test_stopped_threads_do_not_starve() -> None:
    router = Router()
    rule = Rule()

    def stopped(seconds: float) -> None:
        router.go(seconds, (0.0, 0.0, 0.0, 0.0), (9000, 9000, 0))
        router.states = ["T"] * 4

    assert watch(5, stopped, routers=[router], rule=rule) == (0.0, [])


def test_a_burst_is_over_before_it_counts() -> None:
    router = Router()
    elapsed = [0.0]

    def burst(seconds: float) -> None:
        elapsed[0] += seconds
        full = elapsed[0] % 2.0 < 0.75
        shares = (1.0, 0.0, 0.0, 0.0) if full else (0.4, 0.4, 0.1, 0.1)
        router.go(seconds, shares, (9000, 9000, 0) if full else (300, 0, 300))

    assert watch(12, burst, routers=[router]) == (0.0, [])


def test_a_reset_router_that_boots_under_a_flood() -> None:
    router, rule = Router(), Rule()
    watch(
        2,
        lambda t: router.go(t, (0.4, 0.4, 0.1, 0.1), (20000, 0, 20000)),
        routers=[router],
        rule=rule,
    )
    for run in ((1.0, None, None, None), (None, None, None, None), (0.3, 0.1, None, None)):
        found = watch(
            3,
            lambda t, run=run: router.go(t, run, (20000, 20000, 0)),  # type: ignore[misc]
            routers=[router],
            rule=rule,
        )
        if run[1] is None:
            assert found == (0.0, [])


def test_a_thread_without_ticks_that_runs_alone_is_not_taken_for_a_starving_one() -> None:
    """nohz_full: its run time stands still for a second, its ticks do not."""
    router = Router()

    def alone(seconds: float) -> None:
        router.go(seconds, (1.0, None, None, None))
        router.frozen = getattr(router, "frozen", router.sight().threads[router.threads[0].key])

    rule = Rule()
    for n in range(12):
        alone(TICK)
        sight = router.sight()
        first = router.threads[0].key
        stale = replace(sight.threads[first], ran_ns=1)
        assert rule.update(100 + n * TICK, [replace(sight, threads={first: stale})]) == []


def test_whoever_holds_the_cpu_is_stepped_down() -> None:
    loud, quiet = Router("loud", 100), Router("quiet", 200)

    def both(seconds: float) -> None:
        loud.go(seconds, (1.0, None, None, None))
        quiet.go(seconds, (0.0, 0.0, None, None))

    when, signs = watch(5, both, routers=[quiet, loud])
    assert when
    assert [s.guest for s in signs] == ["loud"]
    assert "vcpu 0 of quiet" in signs[0].why


def test_nobody_has_another_stepped_down_by_a_thread_that_he_moved() -> None:
    loud, quiet = Router("loud", 100), Router("quiet", 200)

    def both(seconds: float) -> None:
        loud.go(seconds, (1.0, None, None, None))
        quiet.go(seconds, (0.0, None, None, None))

    quiet.subject = Subject("quiet", tuple(replace(t, placed=False) for t in quiet.threads))
    assert watch(5, both, routers=[quiet, loud]) == (0.0, [])
    guest = samples.guest("vr1", 100)
    vcpu, emulator = guest.by_role(Role.VCPU)[0], guest.by_role(Role.EMULATOR)[0]
    pinned, loose = replace(emulator, pin=emulator.affinity), replace(emulator, pin=None)
    for threads, moved, placed in (
        ((vcpu,), (), True),
        ((vcpu,), (vcpu.key,), False),
        ((loose,), (), False),
        ((pinned,), (), True),
    ):
        seen = subject(replace(guest, threads=threads), moved=moved)
        assert [t.placed for t in seen.threads] == [placed]


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("first", ["loud", "soft"])
def test_of_several_that_hold_the_cpu_the_one_that_ran_most(first: str, measured: bool) -> None:
    loud, soft, quiet = Router("loud", 100), Router("soft", 200), Router("quiet", 300, timed=False)
    routers = [loud, soft, quiet] if first == "loud" else [soft, loud, quiet]
    rule, signs = Rule(), list[Sign]()
    for n in range(8):
        loud.go(TICK, (0.7, None, None, None))
        soft.go(TICK, (0.2, None, None, None))
        quiet.go(TICK, (0.0, None, None, None))
        sights = [r.sight() for r in routers]
        if not measured:
            # Its ticks alone are known.
            sights = [
                replace(s, threads={k: replace(t, ran_ns=None) for k, t in s.threads.items()})
                for s in sights
            ]
        signs += rule.update(100 + n * TICK, sights)
    assert {s.guest for s in signs} == {"loud"}
    assert (rule.holder(1), rule.holder(1, "soft"), rule.holder(2)) == ("loud", "soft", "")


def test_where_nobody_tuned_holds_the_cpu_the_starved_guest_gives_way() -> None:
    router = Router(timed=False)
    when, signs = watch(5, lambda t: router.go(t, (0.0, None, None, None)), routers=[router])
    assert when and signs[0].guest == "vr1"


def test_a_budget_with_a_long_period_may_wait_for_it() -> None:
    router = Router(period=4.0)
    when, _ = watch(8, lambda t: router.go(t, (0.0, 0.5, None, None)), routers=[router])
    assert when >= 4.0


def test_seldom_samples_need_three() -> None:
    """A guard that did not get to run for long has seen nothing in between."""
    router, rule = Router(), Rule()
    router.go(TICK, (1.0, 0.0, 0.0, 0.0))
    assert rule.update(100.0, [router.sight()]) == []
    router.go(5, (1.0, 0.0, 0.0, 0.0))
    assert rule.update(105.0, [router.sight()]) == []
    router.go(TICK, (1.0, 0.0, 0.0, 0.0))
    assert rule.update(105.25, [router.sight()])


def test_what_is_looked_at_of_a_guest() -> None:
    guest = samples.guest()
    fifo = Sched(SchedClass.FIFO, 7)
    threads = tuple(replace(t, sched=fifo) if t.role is Role.VCPU else t for t in guest.threads)
    seen = subject(replace(guest, threads=threads))
    assert [(t.label, t.timed) for t in seen.threads] == [
        ("vcpu 0", True), ("vhost macvtap100/0", False), ("emulator", False),
    ]  # fmt: skip
    assert [name for name, _ in seen.devices] == ["macvtap100"]
    assert subject(guest, {100}).devices == (), "counters of a shared device tell of others too"
    slow = Sched(SchedClass.DEADLINE, runtime_ns=MS, deadline_ns=MS, period_ns=3000 * MS)
    threads = tuple(replace(t, sched=slow) for t in guest.threads)
    assert {t.patience for t in subject(replace(guest, threads=threads)).threads} == {6.0}


def test_waiting_for_long() -> None:
    waiting, key = Waiting(), ThreadKey(7, 7, 1)
    still = ThreadSample("R", 1, 3, 5)
    found = [waiting.update(float(n), {key: still}) for n in range(6)]
    assert found[1] == {} and found[2] == {key: 2.0}
    assert found[5] == {key: 5.0} and STARVED < 5
    assert waiting.update(6.0, {key: replace(still, ran_ns=6)}) == {}


@pytest.mark.parametrize(
    ("name", "kernel", "found"),
    [
        ("ksoftirqd/1", True, True),
        ("kworker/1:2-events", True, True),
        ("kworker/1:0H", True, True),
        ("rcuc/1", True, True),
        ("rcu_preempt", True, True),
        ("irq/45-ahci[000", True, True),
        ("irq_work/1", True, True),
        ("backlog_napi/1", True, True),
        ("cpuhp/1", True, True),
        ("irqbalance", True, False),
        ("kworker/u8:1", True, False),
        ("kcompactd0", True, False),
        ("ksoftirqd/1", False, False),
    ],
)
def test_threads_without_which_the_host_hangs(name: str, kernel: bool, found: bool) -> None:
    assert vital(name, kernel) is found
