"""Base class of the reconciler: sets adaptive queues between two passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from vsrtune.core.errors import VsrtuneError
from vsrtune.core.retry import SaidOnce
from vsrtune.daemon.drift_tracker import DriftWatch
from vsrtune.daemon.journald import LOGGER, fields
from vsrtune.daemon.scope import Scope
from vsrtune.execute import executor
from vsrtune.execute.executor import Result
from vsrtune.execute.host_writer import SysOps
from vsrtune.execute.journal import Journal
from vsrtune.model.daemon_state import DaemonState, QueueState
from vsrtune.model.plan import Action, Plan
from vsrtune.model.targets import DeviceTarget, Target, Value
from vsrtune.plan.safety.projection import project_actions


class Adjusting:
    """``_queues`` holds the lengths that adaptive queues were last set to, also original
    lengths, for which the journal has no entry. ``_adjusted`` holds the guests adjusted since
    the last pass over them."""

    _ops: SysOps
    _journal: Journal
    _said: SaidOnce
    _drift: DriftWatch
    state: DaemonState
    # Replaced, never changed in place: another thread reads it.
    _queues: Mapping[Target, Value] = MappingProxyType({})
    _adjusted: frozenset[str] = frozenset()

    def own_queue(self, ifindex: int) -> int | None:
        """The length that an adaptive queue was last set to; callable from any thread."""
        for target, length in self._queues.items():
            if isinstance(target, DeviceTarget) and target.ifindex == ifindex:
                return length if isinstance(length, int) else None
        return None

    def adjust(self, actions: Sequence[Action], queues: tuple[QueueState, ...]) -> bool:
        """Set lengths of adaptive queues between two passes, and publish ``queues``. False
        when a length could not be set; the next pass corrects it."""
        self.state = replace(self.state, queues=queues)
        if not actions:
            return True
        self._queues = {**self._queues, **{a.target: a.after for a in actions}}
        try:
            result = executor.apply(Plan(actions=tuple(actions)), self._ops, self._journal)
        except VsrtuneError as error:
            if self._said.new(("adjust", str(error))):
                LOGGER.error("%s", error, extra=fields(error=error))
            return False
        self._log_result(result, "")
        self._drift.expect({a.target: a.after for a in result.done})
        self._count(writes=len(result.done), write_errors=len(result.failed))
        self._adjusted |= {a.target.guest for a in result.done}
        if self.state.snapshot is not None:
            left = project_actions(self.state.snapshot, result.done)
            self.state = replace(self.state, snapshot=left)
        return len(result.done) == len(actions)

    def _scope_too(self, scope: Scope, settle: bool) -> Scope:
        """``scope`` and the guests adjusted since the last pass. A pass that settles forgets
        the lengths set before."""
        if settle:
            self._queues = {}
        if self._adjusted:
            scope = scope.merge(self._by_name(self._adjusted))
            self._adjusted = frozenset()
        return scope

    def _applied(self, guests: frozenset[str] | None = None) -> dict[Target, Value]:
        """The values written last, for all guests or some."""
        queues = {t: v for t, v in self._queues.items() if guests is None or t.guest in guests}
        return {**self._journal.applied(guests), **queues}

    def _rewritten(self, done: Iterable[Action]) -> None:
        """Note the queue lengths that a pass wrote."""
        again = {a.target: a.after for a in done if a.target in self._queues}
        self._queues = {**self._queues, **again}

    def _by_name(self, names: frozenset[str]) -> Scope:
        raise NotImplementedError

    def _log_result(self, result: Result, why: str) -> None:
        raise NotImplementedError

    def _count(self, **increments: int) -> None:
        raise NotImplementedError
