"""Bandwidths, as the kernel computes and books them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hosttree import HostTree
from planning_samples import budget, cpus, host, router, snapshot, with_cpusets

from vsrtune.cli.show import measure
from vsrtune.core.errors import VsrtuneError
from vsrtune.host.cpus import book_lines, parse_books, read_books
from vsrtune.model.deadline import (
    LEAVING,
    UNIT,
    bandwidth,
    lag_seconds,
    limit,
    limit_text,
    parse_overrun,
    parse_percent,
    percent,
    total,
    used,
)
from vsrtune.model.guest import Role, Sched, SchedClass
from vsrtune.model.host import DeadlineCpu
from vsrtune.model.root_domains import books, waits_for_domain
from vsrtune.views.tables import snapshot_tables


def test_bandwidth_is_rounded_down_as_the_kernel_does() -> None:
    # Booked by Linux 6.1 and 6.12 for 10 ms in 100 ms: 104857, seen in sched/debug.
    assert bandwidth(budget(1, 10)) == 104857
    assert bandwidth(Sched()) == 0
    assert total([budget(1, 10)] * 3) == 3 * 104857


def test_the_budget_of_a_thread_that_leaves_books_nothing() -> None:
    assert bandwidth(LEAVING) == 0


def test_the_limit_is_what_the_kernel_admits() -> None:
    plain = replace(host(3), kernel="6.1.0-50-amd64")
    assert limit(plain, cpus("1")) == 996147
    assert limit_text(plain, cpus("1")) == "95 %"
    served = replace(plain, deadline=tuple(DeadlineCpu(n, 157284, 52428) for n in range(3)))
    assert limit(served, cpus("1-2")) == 2 * (996147 - 52428)
    assert limit_text(served, cpus("1")) == "90 % (95 % less 5 % of the fair_server)"
    # Without debugfs the default of kernels since 6.12 is assumed.
    unseen = replace(plain, kernel="6.12.107+deb13-amd64")
    assert limit(unseen, cpus("1")) == limit(served, cpus("1"))
    off = host(3, rt_runtime=-1)
    assert limit(off, cpus("1")) is None
    assert limit_text(off, cpus("1")) == "anything (admission control is off)"


def test_percentages() -> None:
    assert parse_percent("85%") == Fraction(85, 100)
    assert parse_percent(" 12.5 % ") == Fraction(1, 8)
    with pytest.raises(VsrtuneError):
        parse_percent("0.85")
    assert [percent(UNIT), percent(UNIT // 3)] == ["100 %", "33.3 %"]


def test_used_share_of_a_budget() -> None:
    assert used(budget(4, 10), 200_000_000, 1_000_000_000) == pytest.approx(0.5)
    assert used(Sched(), 1, 1) == 0.0


def test_use_is_measured_over_a_whole_period() -> None:
    guest = router(online="0-2")
    threads = tuple(
        replace(t, sched=budget(80, 200)) if t.role is Role.VCPU else t for t in guest.threads
    )
    seen = snapshot(replace(guest, threads=threads), on=host(3))
    key = guest.by_role(Role.VCPU)[0].key
    tree = HostTree()
    path = f"/proc/{key.pid}/task/{key.tid}/schedstat"
    tree.file(path, "1000000 5 6\n")
    now = 10 * 10**9

    def sleep(seconds: float) -> None:
        nonlocal now
        now += round(2 * seconds * 1e9)
        tree.file(path, f"{1000000 + 160_000_000} 5 6\n")

    frame = measure(tree.root(), seen, frozenset([guest.ref]), 0.2, lambda: now, sleep)
    found = frame.budgets
    assert found == {key: pytest.approx(1.0)}
    (table,) = (t for t in snapshot_tables(seen, found) if t.title.startswith("Budgets"))
    assert table.rows == [
        ("vr1", "vcpu 0", "0-2", "80ms", "200ms", "200ms", "40 %", "100 %: throttled")
    ]


DEBUG = """\
Sched Debug Version: v0.11, 6.12.107
cpu#0, 2596.992 MHz
  .nr_running                    : 1
dl_rq[0]:
  .dl_nr_running                 : 0
  .dl_bw->bw                     : 996147
  .dl_bw->total_bw               : 104856
runnable tasks:
 S            task   PID
 S     secret-daemon   391

dl_rq[1]:
  .dl_nr_running                 : 1
  .dl_bw->bw                     : 996147
  .dl_bw->total_bw               : -1
"""


def test_books_are_read_and_nothing_else() -> None:
    assert parse_books(DEBUG) == {0: 104856, 1: -1}
    kept = "\n".join(book_lines(DEBUG))
    assert parse_books(kept) == parse_books(DEBUG)
    assert "secret" not in kept


def test_the_list_of_all_tasks_is_read_only_where_it_is_needed() -> None:
    tree = HostTree().file("/sys/kernel/debug/sched/debug", DEBUG)
    for cpu in (0, 1):
        base = f"/sys/kernel/debug/sched/fair_server/cpu{cpu}"
        tree.file(f"{base}/runtime", "50000000\n").file(f"{base}/period", "1000000000\n")
    fair = 52428
    quiet = read_books(tree.root(), cpus("0-1"), totals=False)
    assert quiet == (DeadlineCpu(0, None, fair), DeadlineCpu(1, None, fair))
    told = read_books(tree.root(), cpus("0-1"), totals=True)
    assert told == (DeadlineCpu(0, 104856, fair), DeadlineCpu(1, -1, fair))
    none = HostTree()
    assert read_books(none.root(), cpus("0"), totals=True) == ()


def test_root_domains_of_a_tuned_host() -> None:
    seen = with_cpusets(snapshot(router(online="0-2"), on=host(3)))
    scope = next(c.path for c in seen.host.cpusets if c.path.endswith("/vcpu0"))
    groups = tuple(
        replace(c, partition="root", exclusive="1", effective=cpus("1")) if c.path == scope else c
        for c in seen.host.cpusets
    )
    booked = (
        DeadlineCpu(0, 104856, 52428),
        DeadlineCpu(1, 471857, 52428),
        DeadlineCpu(2, 104856, 52428),
    )
    threads = tuple(
        replace(t, affinity=cpus("1"), last_cpu=0) if t.role is Role.VCPU else t
        for t in seen.guests[0].threads
    )
    seen = replace(
        seen,
        host=replace(seen.host, cpusets=groups, deadline=booked),
        guests=(replace(seen.guests[0], threads=threads),),
    )
    told = [(str(d.cpus), percent(d.booked), percent(d.admitted or 0)) for d in books(seen)]
    assert told == [("1", "40 %", "90 %"), ("0,2", "0 %", "180 %")]
    vcpu = seen.guests[0].by_role(Role.VCPU)[0]
    assert waits_for_domain(seen.host, vcpu)
    assert not waits_for_domain(seen.host, replace(vcpu, last_cpu=1))
    assert not waits_for_domain(seen.host, seen.guests[0].by_role(Role.VHOST)[0])


def test_a_thread_that_ran_over_stays_booked_for_more_periods() -> None:
    text = "policy  :  6\nprio    :  -1\ndl.runtime         :  -5000000\ndl.deadline  : 123\n"
    sched = Sched(
        SchedClass.DEADLINE, runtime_ns=2_000_000, deadline_ns=10_000_000, period_ns=10_000_000
    )
    assert parse_overrun(text) == 5_000_000
    assert parse_overrun(text.replace("-5000000", "1999999")) == 0
    assert parse_overrun("policy : 0\n") == 0
    later = lag_seconds(sched, parse_overrun(text)) - lag_seconds(sched)
    assert later == pytest.approx(0.025)
    assert lag_seconds(sched, 10**10) < 4.2
    assert lag_seconds(Sched()) == 0.0
