"""Runs a bench from specification to outcome.

Contexts are left in reverse order: the routers get their configuration back while the tester
still runs, then the tester removes its counters, then the guard finds nothing to do. After a
kill the guard does all of this from the ledger.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

from vsrtune import __version__
from vsrtune.bench.cleanup.cleaners import CLEANERS
from vsrtune.bench.cleanup.guard import RunGuard
from vsrtune.bench.cleanup.ledger import BenchLedger
from vsrtune.bench.measure.counters import guests_of
from vsrtune.bench.measure.tester import Tester
from vsrtune.bench.methods import compare, methods
from vsrtune.bench.methods.schedule import run
from vsrtune.bench.progress import ProgressWatch
from vsrtune.bench.report.environment import environment
from vsrtune.bench.setup.configurator import Configurator
from vsrtune.bench.spec.model import Configuration, Leg, Load, Outcome, Router, Spec, Trial
from vsrtune.core.errors import VsrtuneError
from vsrtune.core.exit_codes import ExitCode
from vsrtune.execute.ledger import Failure
from vsrtune.model.snapshot import Snapshot
from vsrtune.observe.observer import live_observer

# A guest needs a moment after its interface was plugged in again, an emulated one longer.
READY_SECONDS = 90.0

Order = TypeVar("Order")


class Unfinished(VsrtuneError):
    """The run ended early. ``outcome`` holds the trials made until then, without a summary."""

    def __init__(self, outcome: Outcome, cause: BaseException) -> None:
        if isinstance(cause, VsrtuneError):
            super().__init__(cause.what, where=cause.where, hint=cause.hint)
            self.exit_code = cause.exit_code
        else:
            super().__init__(outcome.unfinished)
            self.exit_code = ExitCode.INTERRUPTED
        self.outcome = outcome


def run_spec(spec: Spec, *, seed: int, watch: ProgressWatch, uri: str) -> Outcome:
    """Measure one specification by its method. The host is restored in any case. Raises
    VsrtuneError, or Unfinished when some trials were made."""
    session = _Session(spec, (spec.configuration,), watch, uri)
    with session.keeping(spec.method.kind, seed), session:
        summary = session.drive(
            methods.start(session.spec, seed),
            lambda load: session.trial(0, load),
            methods.trials(session.spec),
        )
    return session.outcome(spec.method.kind, summary, seed)


def compare_specs(
    specs: Sequence[Spec], *, pairs: int, seed: int, watch: ProgressWatch, uri: str
) -> Outcome:
    """Measure the configurations of ``specs`` in turn. The first is the baseline and defines
    the measurement. The host is restored in any case. Raises as ``run_spec`` does."""
    configurations = tuple(spec.configuration for spec in specs)
    session = _Session(specs[0], configurations, watch, uri)
    with session.keeping("compare", seed), session:
        summary = session.drive(
            compare.compare(session.spec, configurations, pairs, seed),
            lambda order: session.trial(*order),
            compare.trials(session.spec, len(specs), pairs),
        )
    return session.outcome("compare", summary, seed)


def clean() -> list[str]:
    """Take back what a killed run left, and return a line for each thing taken back. Raises
    VsrtuneError that names what could not be taken back."""
    with BenchLedger.open() as ledger:
        pending = ledger.pending()
        _fail(ledger.resolve(CLEANERS))
        return [f"cleaned: {entry.kind}" for entry in pending]


def with_macs(spec: Spec, snapshot: Snapshot) -> Spec:
    """The specification with the MACs that it leaves out: that of the guest's first interface
    for ``forth``, of its second for ``back``; of several guests, the first counts. Raises
    VsrtuneError for a guest that does not run or has too few interfaces."""
    return replace(spec, routers=tuple(_router(r, snapshot) for r in spec.routers))


def _router(router: Router, snapshot: Snapshot) -> Router:
    if router.native:
        return router
    macs = [interface.mac for interface in guests_of(router, snapshot)[0].interfaces]

    def known(leg: Leg, index: int) -> Leg:
        if leg.mac:
            return leg
        if index >= len(macs):
            raise VsrtuneError(
                f"has {len(macs)} network interfaces, so no MAC can be taken for this direction",
                where=router.name,
                hint="write `mac:` in the specification",
            )
        return replace(leg, mac=macs[index])

    back = None if router.back is None else known(router.back, 1)
    return replace(router, forth=known(router.forth, 0), back=back)


class _Session:
    """An open run. ``spec`` is complete once entered; ``trial`` measures."""

    def __init__(
        self, spec: Spec, configurations: tuple[Configuration, ...], watch: ProgressWatch, uri: str
    ) -> None:
        self.spec = spec
        self._configurations = configurations
        self._watch = watch
        self._uri = uri
        self._environment: dict[str, Any] = {}
        self._present: int | None = None
        self._trials: list[Trial] = []
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_signals())
            ledger = stack.enter_context(BenchLedger.open())
            _fail(ledger.resolve(CLEANERS))
            stack.enter_context(RunGuard(ledger))
            observer = live_observer(self._uri)
            self._observe: Callable[[], Snapshot] = observer.observe
            self.spec = with_macs(self.spec, self._observe())
            self._tester = stack.enter_context(Tester(self.spec, ledger, self._observe))
            self._configurator = stack.enter_context(
                Configurator(self.spec, ledger, ready=self._wait_ready, uri=self._uri)
            )
            self._configurator.check(self._configurations)
            self._watch.doing("waiting for the routers to forward")
            self._wait_ready()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watch.doing("restoring the host")
        self._stack.__exit__(kind, error, trace)

    @contextlib.contextmanager
    def keeping(self, method: str, seed: int) -> Iterator[None]:
        """Raise Unfinished with the trials made so far: an error must not lose hours of trials."""
        try:
            yield
        except (VsrtuneError, KeyboardInterrupt) as error:
            if not self._trials:
                raise
            why = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
            outcome = replace(self.outcome(method, {}, seed), unfinished=why)
            raise Unfinished(outcome, error) from error

    def drive(
        self,
        method: Generator[Order, Trial, dict[str, Any]],
        do_trial: Callable[[Order], Trial],
        trials: int | None,
    ) -> dict[str, Any]:
        """Run the method to its end, and return its summary."""
        self._watch.expect(trials)
        summary, _ = run(method, do_trial)
        return summary

    def trial(self, index: int, load: Load) -> Trial:
        """Make one trial in the configuration of that index."""
        configuration = self._configurations[index]
        if index != self._present:
            self._present = None
            notes = self._configurator.apply(configuration)
            self._present = index
            if configuration.name not in self._environment:
                self._describe(configuration, notes)
        trial = self._tester.trial(load, configuration.name)
        self._trials.append(trial)
        self._watch.made(trial)
        return trial

    def outcome(self, method: str, summary: dict[str, Any], seed: int) -> Outcome:
        """The outcome of all trials made so far."""
        return Outcome(
            spec=self.spec,
            method=method,
            configurations=self._configurations,
            trials=tuple(self._trials),
            summary=summary,
            environment={
                c.name: self._environment[c.name]
                for c in self._configurations
                if c.name in self._environment
            },
            seed=seed,
            started=self._started,
            version=__version__,
        )

    def _describe(self, configuration: Configuration, notes: Sequence[str]) -> None:
        block = environment(self._observe(), self.spec, configuration, self._tester.devices())
        block["notes"] = list(notes)
        self._environment[configuration.name] = block
        for note in notes:
            self._watch.say(f"{configuration.name}: {note}")

    def _wait_ready(self) -> None:
        """Return once every router forwards. Raises VsrtuneError when one does not in time."""
        end = time.monotonic() + READY_SECONDS
        for router in self.spec.routers:
            while not self._tester.ready(router.name):
                if time.monotonic() > end:
                    raise VsrtuneError(
                        f"no frame from {self.spec.left} came through to {self.spec.right} "
                        f"within {READY_SECONDS:.0f} s",
                        where=router.name,
                        hint="check the MAC and addresses of its legs, and that it knows the "
                        "way and the neighbour (static) of the destination",
                    )


def _fail(failures: Sequence[Failure]) -> None:
    """Refuse to continue on a host that an earlier run has left changed."""
    if failures:
        raise VsrtuneError(
            "an earlier run left what cannot be taken back: " + "; ".join(map(str, failures)),
            hint="put it right by hand, then run `vsrtune bench clean`",
        )


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the run as Ctrl-C does, after restoring the host."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {s: signal.signal(s, interrupt) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
