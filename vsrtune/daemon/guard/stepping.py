"""Base class of the reconciler: steps guests down, and tunes them by their policies again."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from vsrtune.core.errors import VsrtuneError
from vsrtune.daemon.journald import LOGGER, fields
from vsrtune.execute import executor
from vsrtune.execute.executor import Result
from vsrtune.execute.host_writer import SysOps
from vsrtune.execute.journal import Journal
from vsrtune.model.daemon_state import DaemonState
from vsrtune.model.plan import Plan
from vsrtune.model.snapshot import SnapshotSlice
from vsrtune.model.stepdown import UNTIL, Step, StepLevel, Steps
from vsrtune.model.targets import ThreadSched
from vsrtune.plan import planner
from vsrtune.plan.safety.projection import project_actions
from vsrtune.policy.lowering import next_level
from vsrtune.policy.matching import assign
from vsrtune.policy.model import Policy


class Stepping:
    """``_steps`` holds the guests that are stepped down, even where the journal could not
    record it."""

    _ops: SysOps
    _journal: Journal
    policies: tuple[Policy, ...]
    state: DaemonState
    _steps: Steps

    def step_down(self, guest: str, why: str) -> None:
        """Step a guest down by one level because of ``why``. Lower its classes at once, by the
        last snapshot; the next pass does the rest. Leave alone a guest without a policy or on
        the last level."""
        named = assign(self.state.snapshot.guests if self.state.snapshot else (), self.policies)
        policy = next((p for g, p in named.pairs if g.ref == guest), None)
        now = self._steps[guest].level if guest in self._steps else StepLevel.POLICY
        if policy is None or now is StepLevel.UNDONE:
            return
        step = Step(next_level(policy, now), why, time.time())
        self._note_step(guest, step)
        self._count(step_downs=1)
        LOGGER.error(
            "%s: %s; %s",
            guest,
            step,
            UNTIL,
            extra=fields(guest=guest, policy=policy.path, step=step.level.value),
        )
        self._lower_at_once(guest)

    def _lower_at_once(self, guest: str) -> None:
        snapshot = self.state.snapshot
        if snapshot is None:
            return
        alone = SnapshotSlice.of(snapshot, frozenset([guest]))
        applied = self._journal.applied(alone.names)
        try:
            plan = planner.plan(alone.alone(), self.policies, applied, steps=self._steps)
            classes = tuple(
                a
                for a in plan.actions
                if a.target.guest == guest and isinstance(a.target, ThreadSched)
            )
            result = executor.apply(Plan(actions=classes), self._ops, self._journal)
        except VsrtuneError as error:
            LOGGER.error("%s", error, extra=fields(guest=guest, error=error))
            return
        self._log_result(result, "")
        self._count(writes=len(result.done), write_errors=len(result.failed))
        guests = tuple(
            replace(g, step=self._steps[guest], tuned=False) if g.ref == guest else g
            for g in self.state.guests
        )
        self.state = replace(
            self.state, snapshot=project_actions(snapshot, result.done), guests=guests
        )

    def take(self, policies: tuple[Policy, ...]) -> None:
        """Replace the policies. Guests whose policy has changed are no longer stepped down."""
        guests = self.state.snapshot.guests if self.state.snapshot is not None else ()
        before = {g.ref: p for g, p in assign(guests, self.policies).pairs}
        after = {g.ref: p for g, p in assign(guests, policies).pairs}
        self.policies = policies
        self.forget_steps(ref for ref in after if after[ref] != before.get(ref))

    def forget_steps(self, guests: Iterable[str] | None = None) -> None:
        """Tune these guests, or all, by their policies again from the next pass on."""
        for guest in list(self._steps) if guests is None else guests:
            if guest in self._steps:
                LOGGER.info("%s: tuned by its policy again", guest, extra=fields(guest=guest))
                self._note_step(guest, None)

    def _note_step(self, guest: str, step: Step | None) -> None:
        steps = {ref: s for ref, s in self._steps.items() if ref != guest}
        self._steps = steps if step is None else {**steps, guest: step}
        self._plan_anew()
        try:
            self._journal.step(guest, step)
        except VsrtuneError as error:
            # A step down helps, recorded or not.
            LOGGER.error("%s", error, extra=fields(guest=guest, error=error))

    def _plan_anew(self) -> None:
        raise NotImplementedError

    def _log_result(self, result: Result, why: str) -> None:
        raise NotImplementedError

    def _count(self, **increments: int) -> None:
        raise NotImplementedError
