"""What a pass forgets of a guest that is gone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import shell_samples as samples
from fake_kernel import BOOT, KERNELS, FakeKernel, key, make_host, make_plan

from vsrtune.execute.executor import apply
from vsrtune.execute.journal import Journal, read_entries
from vsrtune.execute.vanished import forget
from vsrtune.model.guest import Sched, SchedClass
from vsrtune.model.snapshot import SnapshotSlice
from vsrtune.model.targets import ThreadSched

GONE = SnapshotSlice(samples.snapshot())


@pytest.fixture(params=KERNELS)
def host(request: pytest.FixtureRequest) -> FakeKernel:
    return make_host(request.param)


def test_a_vcpu_that_becomes_another_program_keeps_no_class(
    host: FakeKernel, tmp_path: Path
) -> None:
    with Journal.open(tmp_path / "journal.jsonl", BOOT) as journal:
        apply(make_plan(host), host.ops(), journal)
        target = ThreadSched("qemu:vr2", key(host, 2010), "vcpu 0")
        main = ThreadSched("qemu:vr2", key(host, 2000), "vcpu 0")
        host.execve(2010)
        now = host.ops().read(main)
        assert isinstance(now, Sched) and now.cls is SchedClass.FIFO
        assert (target, now) in forget(GONE, host.ops(), journal)
        assert host.ops().read(main) == Sched()
        assert journal.entry(target) is None


def test_a_guest_that_ended_keeps_a_pass_waiting_for_the_disk_once(
    host: FakeKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has an entry for each of its threads, and a host may lose all its guests at once."""
    path = tmp_path / "journal.jsonl"
    with Journal.open(path, BOOT) as journal:
        apply(make_plan(host), host.ops(), journal)
        before = journal.entries()
        host.end_guest(1000)
        waits: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", waits.append)
            gone = {target for target, _ in forget(GONE, host.ops(), journal)}
        left = tuple(e for e in before if e.target not in gone)
        assert left and len(gone) > 1
        assert journal.entries() == read_entries(path, BOOT) == left
        assert len(waits) == 1


def test_who_cannot_be_reached_is_not_forgotten(host: FakeKernel, tmp_path: Path) -> None:
    with Journal.open(tmp_path / "journal.jsonl", BOOT) as journal:
        apply(make_plan(host), host.ops(), journal)
        target = ThreadSched("qemu:vr2", key(host, 2010), "vcpu 0")
        host.execve(2010)

        def refuse(what: str) -> None:
            if what.startswith("sched 2000 "):
                raise PermissionError(1, "not permitted")

        host.ahead = refuse
        forget(GONE, host.ops(), journal)
        assert journal.entry(target) is not None
        host.ahead = lambda _what: None
        forget(GONE, host.ops(), journal)
        assert journal.entry(target) is None
        assert host.state["threads"]["2000"]["sched"]["cls"] == "other"
