"""Counters before and after become a trial whose frames add up."""

from __future__ import annotations

from dataclasses import replace

from vsrtune.bench.measure.counters import (
    MIGRATIONS,
    SWITCHES,
    Counts,
    Effort,
    Usage,
    Used,
    account,
    effort,
    total,
)
from vsrtune.bench.spec.model import Latency, Load, Trial
from vsrtune.bench.traffic.pktgen import Sent
from vsrtune.model.guest import ThreadKey


def lost(*counts: int) -> dict[str, int]:
    return dict(zip(("refused", "missed", "backlog", "ring"), counts or (0,) * 4, strict=True))


ZERO = Counts({("vr1/forth", 0): 100, ("vr2/forth", 0): 0}, lost(5, 6, 7, 8))
LOAD = Load({"vr1": 1000.0, "vr2": 500.0}, 2.0)
SENT = [Sent("vr1/forth", 2000, 2.0), Sent("vr2/forth", 1000, 1.9)]


def trial(after: Counts, *, probes: Latency | None = None, load: Load = LOAD) -> Trial:
    return account("c", load, 1, SENT, ZERO, after, Effort(), probes)


def adds_up(found: Trial) -> bool:
    return found.sent == found.forwarded + sum(found.drops.values())


def test_nothing_lost() -> None:
    found = trial(replace(ZERO, counted={("vr1/forth", 0): 2100, ("vr2/forth", 0): 1000}))
    assert (found.sent, found.forwarded, found.seconds, found.loss) == (3000, 3000, 2.0, 0.0)
    assert set(found.drops.values()) == {0}
    assert found.sent_by == {"vr1": 2000, "vr2": 1000}
    assert found.forwarded_by == {"vr1": 2000, "vr2": 1000}
    assert found.forwarded_by_flow == {"vr1/0": 2000, "vr2/0": 1000}
    assert found.notes == ()


def test_every_frame_has_a_place() -> None:
    found = trial(Counts({("vr1/forth", 0): 1600, ("vr2/forth", 0): 500}, lost(35, 16, 17, 508)))
    # 30 refused, of them 10 because of the backlog that counted them as well; 10 missed.
    assert found.drops == {
        "nic": 30, "softnet_backlog": 10, "macvtap_ring": 500, "elsewhere": 460,
    }  # fmt: skip
    assert adds_up(found)


def test_frames_that_nobody_sent_are_noted_not_hidden() -> None:
    found = trial(
        replace(
            ZERO,
            counted={("vr1/forth", 0): 2100, ("vr2/forth", 0): 1000},
            lost=lost(5, 6, 7, 28),
        )
    )
    assert found.drops["elsewhere"] == -20
    assert adds_up(found)
    assert "20 more frames were counted than sent" in found.notes[0]


def test_probes_are_frames_too() -> None:
    probes = Latency(100, 3, 0.001, 0.002, 0.003)
    after = Counts({("vr1/forth", 0): 2100, ("vr2/forth", 0): 1000}, lost(5, 6, 7, 11))
    found = trial(after, probes=probes)
    assert (found.sent, found.forwarded) == (3100, 3097)
    assert found.drops["macvtap_ring"] == 3
    assert found.drops["elsewhere"] == 0
    assert found.sent_by["vr1"] == 2000


def test_flows_of_the_way_back_are_numbered_on_and_slashes_in_names_are_kept() -> None:
    before = Counts({}, lost())
    frames = {(f"a/b/{way}", n): n + 1 for way in ("forth", "back") for n in (0, 1)}
    after = Counts(frames, lost())
    sent = [Sent("a/b/forth", 3, 1.0), Sent("a/b/back", 3, 1.0)]
    found = account("c", Load({"a/b": 6.0}, 1.0), 2, sent, before, after, Effort())
    assert found.forwarded_by == {"a/b": 6}
    assert found.forwarded_by_flow == {"a/b/0": 1, "a/b/1": 2, "a/b/2": 1, "a/b/3": 2}


def test_flows_that_are_many_are_summed() -> None:
    after = Counts({("vr1/forth", None): 2100}, lost(5, 6, 7, 8))
    before = replace(ZERO, counted={("vr1/forth", None): 100})
    found = account("c", LOAD, 1000, SENT, before, after, Effort())
    assert found.forwarded_by == {"vr1": 2000, "vr2": 0}
    assert found.forwarded_by_flow == {}


def test_threads_are_compared_with_themselves() -> None:
    (a, b, c) = (ThreadKey(1, tid, 5) for tid in (1, 2, 3))
    before = Usage({a: Used("vcpu", 1.0, 10, 1), b: Used("vcpu", 2.0, 20, 2)}, 1.0, 3.0, 2)
    after = Usage({a: Used("vcpu", 1.5, 15, 1), c: Used("vhost", 9.0, 90, 9)}, 1.25, 6.0, 2)
    # Both CPUs idled for a second before and after the traffic.
    found = effort(before, after, 1.0)
    assert found.cpu_seconds == {"vcpu": 0.5, "softirq": 0.25, "idle": 1.0}
    assert found.switches == {"vcpu": 5}
    assert found.migrations == {"vcpu": 0}
    assert found.missing == 2


def test_parsers() -> None:
    status = "Name:\tx\nvoluntary_ctxt_switches:\t12\nnonvoluntary_ctxt_switches:\t3\n"
    assert total(SWITCHES, status) == 15
    sched = "se.vruntime : 1.0\nse.nr_migrations   :    42\nnr_switches : 1\n"
    assert total(MIGRATIONS, sched) == 42
    assert total(MIGRATIONS, None) == 0
