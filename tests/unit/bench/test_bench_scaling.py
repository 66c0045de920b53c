"""Members of a group come and go with the configurations of a bench, and all is as before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import bench_samples as samples
import pytest
from attach_host import FakeAttachHost
from pvr_group import create, fresh
from switch_faults import do

from vsrtune.bench.cleanup.cleaners import CLEANERS, BenchLedger
from vsrtune.bench.setup import attachments
from vsrtune.bench.setup.configurator import Configurator
from vsrtune.bench.spec.model import Configuration
from vsrtune.cli.options import ATTACH_LEDGER
from vsrtune.core.errors import VsrtuneError
from vsrtune.group import scale as group_scale
from vsrtune.group.members import of_group

AS_IS = Configuration("as is")
ONE, TWO = (Configuration(f"{n}", scale={"edge": n}) for n in (1, 2))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeAttachHost:
    """Two guests in a group, where the bench finds them."""
    fake = fresh()
    monkeypatch.setattr(FakeAttachHost, "close", lambda _: None, raising=False)
    monkeypatch.setattr(attachments, "LiveHost", lambda _: fake)
    monkeypatch.setattr(attachments, "LEDGER", tmp_path / "attach.jsonl")
    monkeypatch.setattr(attachments, "JOURNAL", tmp_path / "journal")
    do(fake, tmp_path / "attach.jsonl", create)
    return fake


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[BenchLedger]:
    with BenchLedger.open(tmp_path / "bench.jsonl") as opened:
        yield opened


@pytest.fixture
def configurator(
    host: FakeAttachHost, ledger: BenchLedger, tmp_path: Path
) -> Iterator[Configurator]:
    with Configurator(samples.SPEC, ledger, uri="test:///", journal=tmp_path / "journal") as made:
        yield made


def plugged() -> list[str]:
    with attachments.opened("") as (_, seen):
        return group_scale.plugged(of_group("edge", seen), seen)


def test_each_configuration_has_its_members(
    host: FakeAttachHost, configurator: Configurator, ledger: BenchLedger, tmp_path: Path
) -> None:
    before = host.picture()
    configurator.check([AS_IS, ONE, TWO])
    configurator.apply(TWO)
    # As it was: nothing is owed.
    assert ledger.pending() == []
    configurator.apply(ONE)
    assert plugged() == ["a"]
    changes = host.changes
    configurator.apply(Configuration("again", scale={"edge": 1}))
    assert host.changes == changes
    configurator.apply(AS_IS)
    assert plugged() == ["a", "b"]
    configurator.apply(ONE)
    assert [e.kind for e in ledger.pending()] == ["scale"]
    configurator.restore()
    assert host.picture() == before
    assert ledger.pending() == []


def test_readiness_is_waited_for_after_a_change_alone(
    host: FakeAttachHost, ledger: BenchLedger, tmp_path: Path
) -> None:
    waits: list[list[str]] = []
    with Configurator(
        samples.SPEC, ledger, uri="test:///", journal=tmp_path / "journal",
        ready=lambda: waits.append(plugged()),
    ) as made:  # fmt: skip
        made.check([ONE, TWO])
        for configuration in (TWO, ONE, ONE, TWO):
            made.apply(configuration)
    assert waits == [["a"], ["a", "b"]]


def test_what_a_killed_bench_owes_is_put_back(
    host: FakeAttachHost, configurator: Configurator, ledger: BenchLedger, tmp_path: Path
) -> None:
    before = host.picture()
    configurator.check([ONE])
    configurator.apply(ONE)
    (entry,) = ledger.pending()
    for _ in range(2):
        CLEANERS[entry.kind](entry.data)
        assert host.picture() == before
    CLEANERS[entry.kind]({"uri": "", "members": {"gone": 2}})


def test_refusals(host: FakeAttachHost, configurator: Configurator) -> None:
    for count, what in ((3, "not 3 of them"), (1, "can only put back")):
        with pytest.raises(VsrtuneError, match=what):
            configurator.check([Configuration("x", scale={"edge": count})])
        # What no number tells is not what a bench begins with.
        with attachments.opened("") as (switcher, seen):
            switcher.carry_out(group_scale.drain("edge", "a", seen))
    with pytest.raises(VsrtuneError, match="no such group"):
        configurator.check([Configuration("x", scale={"other": 1})])


def test_groups_are_looked_for_where_the_commands_write_them_down() -> None:
    assert attachments.LEDGER == ATTACH_LEDGER
