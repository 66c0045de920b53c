"""A run of the bench, on hosts and routers that are made up."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import bench_samples as samples
import pytest
import shell_samples
from bench_router import FakeRouter
from fake_host import FakeHost

from vsrtune.attach.errors import SwitchError
from vsrtune.bench import session
from vsrtune.bench.cleanup import cleaners
from vsrtune.bench.cleanup.cleaners import BenchLedger
from vsrtune.bench.progress import ProgressWatch
from vsrtune.bench.session import _Session
from vsrtune.bench.setup import tuning
from vsrtune.bench.setup.configurator import Configurator
from vsrtune.bench.spec.model import Load
from vsrtune.core.errors import VsrtuneError

TUNED = replace(samples.TUNED, policy=shell_samples.POLICY)
LOAD = Load({"vr1": 1000.0}, 1.0)
LEFT = "is 222 now, vsrtune had written 300 in place of 500; left alone"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    fake = FakeHost()
    monkeypatch.setattr(tuning, "live_observer", lambda *_: fake)
    for module in (tuning, cleaners):
        monkeypatch.setattr(module, "LiveSysOps", lambda *_, **_more: fake)
    monkeypatch.setattr(session, "environment", lambda *_: {})
    return fake


@contextlib.contextmanager
def running(host: FakeHost, place: Path) -> Iterator[_Session]:
    """A run of two configurations on this host, which is put back."""
    tester = SimpleNamespace(devices=dict, trial=FakeRouter(1e9).trial)
    with BenchLedger.open(place / "ledger") as ledger, ProgressWatch() as watch:
        made = _Session(samples.SPEC, (samples.UNTUNED, TUNED), watch, "", 1)
        made.observe, made.tester = host.observe, tester
        with Configurator(
            samples.SPEC, ledger, say=made._say, uri="", journal=place / "journal"
        ) as made.configurator:
            yield made
        assert ledger.pending() == []


def test_a_guest_that_starts_anew_ends_the_run_unless_it_is_tuned_again(
    host: FakeHost, tmp_path: Path
) -> None:
    with running(host, tmp_path) as made:
        for index in (0, 1, 1):
            made._trial((index, LOAD))
        again(host, 300)
        with pytest.raises(VsrtuneError, match="vr1: started anew: the trials of tuned"):
            made._trial((1, LOAD))
        assert [trial.configuration for trial in made.trials] == ["untuned", "tuned", "tuned"]
        made._trial((0, LOAD))
        again(host, 400)
        made._trial((1, LOAD))


def again(host: FakeHost, pid: int) -> None:
    host.destroy("vr1")
    host.start(shell_samples.guest("vr1", pid))


def test_what_others_changed_during_a_configuration_is_said_and_kept(
    host: FakeHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(host, tmp_path) as made:
        for index in (1, 0, 1):
            made._trial((index, LOAD))
            host.set_queue(222 if index else 500)
    (tuned,) = [note for note in made.environment["tuned"]["notes"] if LEFT in note]
    assert made.environment["untuned"]["notes"] == []
    assert capsys.readouterr().err.count(f"tuned: {tuned}") == 1


def test_a_cleaner_says_what_others_changed(
    host: FakeHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "journal"
    with BenchLedger.open(tmp_path / "ledger") as ledger:
        killed = Configurator(samples.SPEC, ledger, uri="", journal=path).__enter__()
        killed.apply(TUNED)
        killed._journal.close()
        host.set_queue(222)
        assert ledger.resolve(cleaners.CLEANERS) == []
    assert LEFT in capsys.readouterr().err


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_interruption_while_the_kit_is_tried_is_no_reason_to_leave_it_out(
    interrupted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def apply(_configuration: object) -> None:
        raise SwitchError(VsrtuneError("no module"), [], interrupted=interrupted)

    with ProgressWatch() as watch:
        made = _Session(samples.SPEC, (samples.UNTUNED,), watch, "", 1)
        made.configurator = SimpleNamespace(apply=apply)
        if interrupted:
            with pytest.raises(SwitchError):
                made._fits(samples.UNTUNED)
        else:
            assert not made._fits(samples.UNTUNED)
    assert ("is left out: no module" in capsys.readouterr().err) != interrupted


def test_a_guest_that_came_tuned_is_refused(
    host: FakeHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.start(shell_samples.travelled("vr2", 200))
    monkeypatch.setattr(session, "DEFAULT_PATH", tmp_path / "ledger")
    monkeypatch.setattr(session, "RunGuard", contextlib.nullcontext)
    monkeypatch.setattr(session, "live_observer", lambda *_: host)
    with ProgressWatch() as watch, pytest.raises(VsrtuneError, match=r"vr2: .* has brought"):
        session.measure([samples.SPEC], None, seed=1, watch=watch, uri="")


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.SIG_DFL])
def test_nohup_is_kept(before: signal.Handlers, monkeypatch: pytest.MonkeyPatch) -> None:
    """nohup has a process ignore SIGHUP, and then nothing may end the run at logout."""
    during: list[object] = []

    def opened(_path: Path) -> BenchLedger:
        during.extend(map(signal.getsignal, (signal.SIGHUP, signal.SIGTERM)))
        raise VsrtuneError("no further")

    monkeypatch.setattr(BenchLedger, "open", opened)
    restored = signal.signal(signal.SIGHUP, before)
    try:
        with ProgressWatch() as watch, pytest.raises(VsrtuneError, match="no further"):
            session.measure([samples.SPEC], None, seed=1, watch=watch, uri="")
        assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, restored)
    ended = signal.default_int_handler
    assert during == [before if before is signal.SIG_IGN else ended, ended]
