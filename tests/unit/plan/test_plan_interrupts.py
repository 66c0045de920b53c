"""Interrupts that belong to the host and are asked for by guests: kept, released, found
anew, left to the kernel. With the real planner, executor and journal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import shell_samples as samples
from fake_host import FakeHost

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import FixedError
from vsrtune.daemon.reconciler import Reconciler
from vsrtune.execute.journal import Journal
from vsrtune.model.guest import Irq
from vsrtune.model.host import Nic, NicQueue
from vsrtune.model.targets import HOST_REF, IrqAffinity
from vsrtune.policy.model import Policy
from vsrtune.policy.parser import parse

RX = IrqAffinity(HOST_REF, 24, "p0-rx-0")
SET = 'guest: "{}"\ncpus: {{irq: 0}}\nirq: {{set: true}}\nprofile: none\n'
ZERO = CpuSet([0])


def policies(*names: str) -> tuple[Policy, ...]:
    return tuple(parse(SET.format(name), f"{name}.yaml") for name in names)


def nic(host: FakeHost, name: str = "p0") -> Nic:
    found = host.snapshot.host.nic(name)
    assert found is not None
    return found


def with_nic(host: FakeHost, changed: Nic) -> None:
    others = tuple(n for n in host.snapshot.host.nics if n.name != changed.name)
    machine = replace(host.snapshot.host, nics=(changed, *others))
    host.snapshot = replace(host.snapshot, host=machine)


@pytest.fixture
def host() -> FakeHost:
    made = FakeHost(samples.guest("vr1", 100), samples.guest("vr2", 200))
    rps = (NicQueue("rx-0", CpuSet([1, 2])), NicQueue("tx-0", None))
    with_nic(made, replace(nic(made), queues=rps, rps_cpus=CpuSet([1, 2])))
    return made


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal.open(tmp_path / "journal.jsonl", samples.BOOT) as opened:
        yield opened


def test_the_last_guest_that_asks_takes_it_away(host: FakeHost, journal: Journal) -> None:
    before = host.snapshot.host.nics
    passes = Reconciler(host, host, journal, policies("vr1", "vr2"))
    passes.run()
    assert (nic(host).irqs[0].affinity, nic(host).rps_cpus) == (ZERO, ZERO)
    host.destroy("vr1")
    assert not passes.run()
    assert nic(host).irqs[0].affinity == ZERO
    host.destroy("vr2")
    assert passes.run()
    assert host.snapshot.host.nics == before
    assert journal.entries() == ()


def test_a_policy_that_no_longer_asks_is_released_on_reload(
    host: FakeHost, journal: Journal
) -> None:
    before = host.snapshot.host.nics
    passes = Reconciler(host, host, journal, policies("vr1"))
    passes.run()
    passes.reload((parse("guest: vr1\ncpus: {irq: 0}\nprofile: none\n", "vr1.yaml"),))
    passes.run()
    assert host.snapshot.host.nics == before


def test_a_nic_that_is_down_keeps_its_place_in_the_journal(
    host: FakeHost, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many drivers give their interrupts back while the link is down, and come back with them."""
    before = host.snapshot.host.nics
    passes = Reconciler(host, host, journal, policies("vr1"))
    passes.run()
    up, read = nic(host), host.read
    with_nic(host, replace(up, irqs=()))
    # Its file is there.
    monkeypatch.setattr(host, "read", lambda target: ZERO if target == RX else read(target))
    writes = host.writes
    passes.run()
    assert host.writes == writes
    assert journal.entry(RX) is not None
    monkeypatch.undo()
    with_nic(host, up)
    assert not passes.run()
    assert passes.stop()
    assert host.snapshot.host.nics == before


@pytest.mark.parametrize("how", ["refused", "busy"])
def test_a_guest_that_is_spared_keeps_only_what_its_own_policy_needs_of_the_host(
    host: FakeHost, journal: Journal, how: str
) -> None:
    before = host.snapshot.host.nics
    other = "guest: vr2\nqueue: {macvtap: 300}\nprofile: none\n"
    refused = ", vcpu: 9" if how == "refused" else ""
    if how == "busy":
        first, second = host.snapshot.guests
        host.snapshot = replace(host.snapshot, guests=(first, replace(second, busy=True)))
    needs = parse(f"{other}cpus: {{irq: 0{refused}}}\nirq: {{set: true}}\n", "vr2.yaml")
    passes = Reconciler(host, host, journal, (*policies("vr1"), needs))
    passes.run()
    passes.policies = (needs,)
    passes.run()
    assert nic(host).irqs[0].affinity == ZERO
    passes.policies = (parse(f"{other}cpus: {{irq: 0{refused}}}\n", "vr2.yaml"),)
    passes.run()
    assert host.snapshot.host.nics == before


def test_each_nic_goes_to_its_own_cpus_and_back_when_its_key_goes(
    host: FakeHost, journal: Journal
) -> None:
    below = replace(host.snapshot.guests[0].interfaces[0], ifindex=77, lower=("p1",))
    guest = host.snapshot.guests[0]
    guest = replace(guest, interfaces=(*guest.interfaces, below))
    host.snapshot = replace(host.snapshot, guests=(guest,))
    second = Irq(25, "p1-rx-0", CpuSet(range(4)), CpuSet([1]))
    with_nic(host, replace(nic(host, "p1"), irqs=(second,)))
    keys = "guest: vr1\ncpus: {{irq: {{{}}}}}\nirq: {{set: true}}\nprofile: none\n"
    both = parse(keys.format("p0: 0, p1: 3"), "vr1.yaml")
    passes = Reconciler(host, host, journal, (both,))
    passes.run()
    assert nic(host).irqs[0].affinity == nic(host).rps_cpus == ZERO
    assert nic(host, "p1").irqs[0].affinity == CpuSet([3])
    assert passes.state.guests[0].irq == CpuSet([0, 3])
    passes.reload((parse(keys.format("p0: 0"), "vr1.yaml"),))
    passes.run()
    assert nic(host).irqs[0].affinity == ZERO
    assert nic(host, "p1").irqs[0].affinity == CpuSet(range(4))
    assert passes.state.guests[0].irq == ZERO


def test_what_irqbalance_moved_is_set_again_and_it_is_named(
    host: FakeHost, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vsrtune")
    passes = Reconciler(host, host, journal, policies("vr1"))
    passes.run()
    with_nic(host, replace(nic(host), irqs=(Irq(24, "p0-rx-0", CpuSet([2]), CpuSet([2])),)))
    passes.run()
    assert nic(host).irqs[0].affinity == ZERO
    assert passes.state.totals.corrections == 1
    named = [r.getMessage() for r in caplog.records if "irqbalance (pid 77)" in r.getMessage()]
    assert len(named) == 1
    assert "--banirq=24" in named[0]


def test_vectors_that_the_driver_made_anew_are_moved_again(
    host: FakeHost, journal: Journal
) -> None:
    """Another number: the first one's entry goes, the new one is ours and undone."""
    passes = Reconciler(host, host, journal, policies("vr1"))
    passes.run()
    all_cpus = CpuSet(range(4))
    with_nic(host, replace(nic(host), irqs=(Irq(31, "p0-rx-0", all_cpus, CpuSet([2])),)))
    passes.run()
    assert nic(host).irqs[0].affinity == ZERO
    assert RX not in {e.target for e in journal.entries()}
    passes.stop()
    assert nic(host).irqs[0].affinity == all_cpus
    assert journal.entries() == ()


def test_an_interrupt_that_the_kernel_keeps_is_told_once_and_remembered(
    host: FakeHost, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vsrtune")
    host.fail[IrqAffinity.kind] = FixedError("kernel-managed", hint="name its CPU")
    seen: list[tuple[int, str]] = []
    passes = Reconciler(host, host, journal, policies("vr1"), remember=seen.extend)
    passes.run()
    passes.run()
    assert set(seen) == {(24, "p0-rx-0")}
    assert nic(host).rps_cpus == ZERO
    assert passes.state.totals.write_errors == 0
    told = [r for r in caplog.records if "kernel-managed" in r.getMessage()]
    assert len(told) == 1
    managed = tuple(replace(i, managed=True) for i in nic(host).irqs)
    with_nic(host, replace(nic(host), irqs=managed))
    assert not passes.run()
