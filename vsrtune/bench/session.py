# SPDX-License-Identifier: GPL-2.0-or-later
"""Runs a bench from specification to outcome.

Contexts are left in reverse order: the routers get their configuration back while the tester
still runs, then the tester removes its counters, then the guard finds nothing to do. After a
kill the guard does all of this from the ledger.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from vsrtune import __version__
from vsrtune.bench import paper
from vsrtune.bench.cleanup.cleaners import CLEANERS, DEFAULT_PATH, BenchLedger, RunGuard
from vsrtune.bench.measure.counters import guests_of
from vsrtune.bench.measure.tester import Tester
from vsrtune.bench.methods import compare, methods
from vsrtune.bench.methods.compare import CompareRun
from vsrtune.bench.methods.methods import run
from vsrtune.bench.progress import ProgressWatch
from vsrtune.bench.report.files import environment
from vsrtune.bench.setup.configurator import Configurator
from vsrtune.bench.spec.model import Configuration, Load, Outcome, Router, Spec, Trial
from vsrtune.bench.spec.parser import policies
from vsrtune.core.errors import VsrtuneError
from vsrtune.core.exit_codes import ExitCode
from vsrtune.execute.brought import refuse_brought
from vsrtune.execute.ledger import Failure
from vsrtune.model.snapshot import Snapshot
from vsrtune.observe.observer import live_observer
from vsrtune.policy.matching import qemu_filter

# A guest needs a moment after its interface was plugged in again, an emulated one longer.
READY_SECONDS = 90.0


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


def measure(
    specs: Sequence[Spec], pairs: int | None, *, seed: int, watch: ProgressWatch, uri: str,
    save: Callable[[Outcome], None] | None = None, earlier: Outcome | None = None,
) -> Outcome:  # fmt: skip
    """Measure a specification by its method, or with ``pairs`` the configurations of several in
    turn. The first is the baseline and defines the measurement. The host is restored in any case.
    With ``save``, which gets the trials made so far before every change of configuration, the
    loads are the papers' (bench/paper.py), and go on from those of ``earlier``.
    Raises VsrtuneError, or Unfinished when some trials were made."""
    first, configurations = specs[0], tuple(spec.configuration for spec in specs)
    session = _Session(first, configurations, watch, uri, seed, save, earlier)
    if save is not None and pairs is not None:
        session.method, left = "paper", session.left
        return session.run(
            lambda whole: paper.method(whole, session.configurations, pairs, session.seed, left),
            None,
        )
    if pairs is None:
        session.method = first.method.kind
        return session.run(
            lambda whole: compare.tagged(0, methods.start(whole, seed)),
            methods.trials(first, first.method.repeats),
        )
    return session.run(
        lambda whole: compare.compare(whole, configurations, pairs, seed),
        methods.trials(first, len(specs) * pairs),
    )


def clean() -> list[str]:
    """Take back what a killed run left, and return a line for each thing taken back. Raises
    VsrtuneError that names what could not be taken back."""
    with BenchLedger.open(DEFAULT_PATH) as ledger:
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
    legs: dict[str, Any] = {}
    for index, (way, leg) in enumerate((("forth", router.forth), ("back", router.back))):
        if leg is None or leg.mac:
            continue
        if index >= len(macs):
            raise VsrtuneError(
                f"has {len(macs)} network interfaces, so no MAC can be taken for this direction",
                where=router.name,
                hint="write `mac:` in the specification",
            )
        legs[way] = replace(leg, mac=macs[index])
    return replace(router, **legs)


@dataclass(slots=True)
class _Session:
    """A run. ``spec`` is complete once the run began."""

    spec: Spec
    configurations: tuple[Configuration, ...]
    watch: ProgressWatch
    uri: str
    seed: int
    save: Callable[[Outcome], None] | None = None
    earlier: Outcome | None = None
    # Trials of ``earlier`` that are not asked for yet.
    left: list[Trial] = field(default_factory=list)
    method: str = "compare"
    environment: dict[str, Any] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    # The processes (and start times) of the guests in the present configuration.
    running: dict[str, tuple[int, int]] = field(default_factory=dict)
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    observe: Callable[[], Snapshot] = field(init=False)
    tester: Tester = field(init=False)
    configurator: Configurator = field(init=False)

    def run(self, start: Callable[[Spec], CompareRun], trials: int | None) -> Outcome:
        """Run the method that ``start`` gives for the complete specification to its end."""
        summary: dict[str, Any] = {}
        try:
            with self._opened():
                self.watch.expect(trials)
                summary, _ = run(start(self.spec), self._trial)
        except (VsrtuneError, KeyboardInterrupt) as error:
            # An error must not lose hours of trials.
            if not self.trials:
                raise
            why = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
            raise Unfinished(self._outcome(summary, why), error) from error
        return self._outcome(summary)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            # SIGTERM and SIGHUP (not with nohup) end the run as Ctrl-C does, the host restored.
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before = signal.signal(number, signal.default_int_handler)
                    stack.callback(signal.signal, number, before)
            ledger = stack.enter_context(BenchLedger.open(DEFAULT_PATH))
            _fail(ledger.resolve(CLEANERS))
            stack.enter_context(RunGuard(ledger))
            seen = qemu_filter([p for c in self.configurations if c.policy for p in policies(c)])
            self.observe = live_observer(self.uri, lambda: seen).observe
            snapshot = self.observe()
            refuse_brought(snapshot)
            self.spec = with_macs(self.spec, snapshot)
            if self.earlier is not None:
                self._go_on(self.earlier, snapshot.host.kernel)
            self.tester = stack.enter_context(Tester(self.spec, ledger, self.observe))
            self.configurator = stack.enter_context(
                Configurator(self.spec, ledger, ready=self._wait_ready, say=self._say, uri=self.uri)
            )
            self.configurator.check(self.configurations)
            self.watch.doing("waiting for the routers to forward")
            self._wait_ready()
            if self.save is not None and self.earlier is None:
                self.configurations = tuple(filter(self._fits, self.configurations))
            stack.callback(self.watch.doing, "restoring the host")
            yield

    def _trial(self, order: tuple[int, Load]) -> Trial:
        """The trial in the configuration of that index, of an earlier run where it is known."""
        index, load = order
        configuration = self.configurations[index]
        trial = self.left[0] if self.left else self._made(configuration, load)
        if (trial.configuration, trial.load) != (configuration.name, load):
            hint = "give the same --pairs as then, or name another file with --json"
            raise VsrtuneError("the file for the result holds trials of another order", hint=hint)
        del self.left[:1]
        self.trials.append(trial)
        self.watch.made(trial)
        return trial

    def _made(self, configuration: Configuration, load: Load) -> Trial:
        if self.trials and self.trials[-1].configuration != configuration.name:
            self.running = {}
            if self.save:
                self.save(self._outcome({}, "killed, or still running"))
        notes = self.configurator.apply(configuration)
        snapshot = self.observe()
        for guest in (g for r in self.spec.routers for g in guests_of(r, snapshot)):
            process = (guest.pid, guest.start_time)
            if self.running.setdefault(guest.ref, process) != process:
                what = f"started anew: the trials of {configuration.name} would not be alike"
                raise VsrtuneError(what, where=guest.ref, hint="measure again")
        if configuration.name not in self.environment:
            described = (snapshot, self.spec, configuration, self.tester.devices())
            self.environment[configuration.name] = environment(*described)
            self._say(configuration.name, notes)
        return self.tester.trial(load, configuration.name)

    def _fits(self, configuration: Configuration) -> bool:
        """Whether the kit's configuration can be applied on this host."""
        try:
            self.configurator.apply(configuration)
        except VsrtuneError as error:
            if error.exit_code is ExitCode.INTERRUPTED:
                raise
            self.watch.say(f"{configuration.name} is left out: {error}")
            return False
        return True

    def _go_on(self, earlier: Outcome, kernel: str) -> None:
        """Take the trials of an unfinished run over. Raises VsrtuneError when it was another."""
        kernels = {block["kernel"] for block in earlier.environment.values()}
        theirs = (earlier.spec, earlier.version, kernels, bool(earlier.unfinished))
        known = all(one in self.configurations for one in earlier.configurations)
        if not known or theirs != (self.spec, __version__, {kernel}, True):
            raise VsrtuneError(
                "the file for the result holds another one, complete or not measured in this way",
                hint="give the options of then, or name another file with --json",
            )
        self.seed, self.started = earlier.seed or 0, earlier.started
        self.configurations = earlier.configurations
        self.environment.update(earlier.environment)
        self.left.extend(earlier.trials)

    def _outcome(self, summary: dict[str, Any], unfinished: str = "") -> Outcome:
        """The outcome of all trials made so far."""
        names = [c.name for c in self.configurations if c.name in self.environment]
        return Outcome(
            spec=self.spec,
            method=self.method,
            configurations=self.configurations,
            trials=(*self.trials, *self.left),
            summary=summary,
            environment={name: self.environment[name] for name in names},
            seed=self.seed,
            started=self.started,
            version=__version__,
            unfinished=unfinished,
        )

    def _say(self, name: str, notes: Sequence[str]) -> None:
        """Say notes on a configuration once, and keep them in its block, if it has one by now."""
        kept = self.environment.get(name, {}).setdefault("notes", [])
        for note in notes:
            if note not in kept:
                kept.append(note)
                self.watch.say(f"{name}: {note}")

    def _wait_ready(self) -> None:
        """Return once every router forwards. Raises VsrtuneError when one does not in time."""
        end = time.monotonic() + READY_SECONDS
        for router in self.spec.routers:
            while not self.tester.ready(router.name):
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
