"""One pass over the host: observe, plan, apply, and remember how it went.

A pass is the only thing that changes the host while the daemon runs. It may be
repeated at any time: on a host that is as the policies say it writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from vsrtune import executor, planner, report
from vsrtune.actions import Action, CgroupDir, Plan, Target, TxQueueLen
from vsrtune.backoff import Backoff, SaidOnce
from vsrtune.errors import VanishedError, VsrtuneError
from vsrtune.executor import Result
from vsrtune.journal import Journal
from vsrtune.log import LOGGER, fields
from vsrtune.model import Snapshot
from vsrtune.policy import Policy
from vsrtune.rewind import rewind
from vsrtune.state import BUCKETS, GuestState, State, Totals
from vsrtune.sysops import SysOps


class Observing(Protocol):
    """What a pass needs of observe.Observer."""

    def observe(self, trace_seconds: float = 0.0) -> Snapshot: ...


class Reconciler:
    """Runs passes. ``policies`` may be replaced between two of them.

    ``trace`` is how long a pass watches transmissions while some worker's interface
    is known by order only, in seconds. ``pulse`` is called between the stages of a
    pass, to show that it moves on.
    """

    def __init__(
        self,
        observer: Observing,
        ops: SysOps,
        journal: Journal,
        policies: tuple[Policy, ...],
        *,
        trace: float = 0.0,
        pulse: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._observer = observer
        self._ops = ops
        self._journal = journal
        self._trace = trace
        self._pulse = pulse
        self._clock = clock
        self._backoff = Backoff()
        self._said = SaidOnce()
        self._snapshot: Snapshot | None = None
        self.policies = policies
        self.state = State(policies=len(policies))

    def recover(self) -> None:
        """Resolve what a crash left in the journal, before the first pass."""
        result = executor.recover(self._ops, self._journal)
        entries = self._journal.entries()
        if entries:
            LOGGER.info("adopted %d settings of an earlier run", len(entries))
        self._log_result(result, "put back after an unfinished write")

    def run(self, *, settle: bool = False, reassert: bool = False) -> bool:
        """One pass; True when something was written.

        ``settle`` also takes back what the policies no longer ask for (at start and
        after a reload), ``reassert`` overrules pins set by hand. Failures are logged
        and counted, never raised.
        """
        begin = self._clock()
        if reassert:
            self._backoff.clear()
        wrote = False
        try:
            wrote = self._run(settle, reassert)
        except VsrtuneError as error:
            self._count(pass_errors=1)
            if self._said.new(("pass", str(error))):
                LOGGER.error("this pass failed: %s", error, extra=fields(error=error))
        self._said.end_of_pass()
        self._time(self._clock() - begin)
        return wrote

    def stop(self) -> bool:
        """Undo everything; True when nothing of ours is left on the host."""
        self._pulse()
        result = executor.undo(self._ops, self._journal)
        self._log_result(result, "put back")
        return not result.failed

    def next_try(self) -> float | None:
        """Seconds until a failed guest is due again; None when none waits."""
        return self._backoff.next_try(self._clock())

    # -- the stages of a pass

    def _run(self, settle: bool, reassert: bool) -> bool:
        snapshot = self._observe()
        self._forget_gone(snapshot)
        wrote = False
        if settle and self._take_back_unwanted(snapshot):
            wrote = True
            snapshot = self._observe()
        ours = self._journal.ours()
        plan = planner.plan(snapshot, self.policies, ours, reassert)
        self._log_plan(plan)
        pending: dict[str, int] = {}
        for guest, actions in by_guest(plan).items():
            written, left_over = self._apply(guest, actions, ours)
            wrote = wrote or written
            pending[guest] = left_over
        self._snapshot = snapshot
        self._publish(snapshot, plan, pending)
        return wrote

    def _observe(self) -> Snapshot:
        known = self._snapshot
        weak = known is None or any(
            report.mapping_is_weak(t) for g in known.guests for t in g.threads
        )
        snapshot = self._observer.observe(self._trace if weak else 0.0)
        self._pulse()
        for problem in snapshot.problems:
            if self._said.new(("problem", problem.reader, problem.what)):
                LOGGER.warning("%s: %s", problem.reader, problem.what)
        return snapshot

    def _forget_gone(self, snapshot: Snapshot) -> None:
        """Drop journal entries whose thread, device or cgroup no longer exists.

        A guest missing from the snapshot is no proof, because its reader may have
        failed: the target itself is asked.
        """
        alive = {t.key for g in snapshot.guests for t in g.threads}
        devices = {i.ifindex for g in snapshot.guests for i in g.interfaces}
        for entry in self._journal.entries():
            target = entry.target
            if isinstance(target, TxQueueLen):
                if target.ifindex in devices:
                    continue
            elif not isinstance(target, CgroupDir) and target.thread in alive:
                continue
            try:
                gone = self._ops.read(target) is False
            except VanishedError:
                gone = True
            except VsrtuneError:
                gone = False
            if gone:
                self._journal.drop(target, "gone")
                LOGGER.info(
                    "forgot %s: it no longer exists", target, extra=fields(guest=target.guest)
                )

    def _take_back_unwanted(self, snapshot: Snapshot) -> bool:
        """Undo what no policy asks for now; True when there was such a thing."""
        entries = self._journal.entries()
        if not entries:
            return False
        untuned = rewind(snapshot, {e.target: e.original for e in entries})
        wanted = {a.target for a in planner.plan(untuned, self.policies, {}).actions}
        seen = {g.ref for g in snapshot.guests} | {g.name for g in snapshot.guests}
        unwanted = {e.target for e in entries if e.target not in wanted and e.target.guest in seen}
        if not unwanted:
            return False
        result = executor.undo(self._ops, self._journal, unwanted.__contains__)
        self._log_result(result, "put back, no policy asks for it")
        return True

    def _apply(
        self, guest: str, actions: tuple[Action, ...], ours: Mapping[Target, object]
    ) -> tuple[bool, int]:
        """Apply the changes of one guest: whether anything was written, and how many
        settings are still not as the policy says."""
        self._pulse()
        signature = frozenset((a.target, a.after) for a in actions)
        if self._backoff.blocked(guest, signature, self._clock()):
            return False, len(actions)
        try:
            result = executor.apply(Plan(actions=actions), self._ops, self._journal)
        except VsrtuneError as error:
            self._count(write_errors=1)
            self._backoff.failed(guest, signature, [error], self._clock())
            if self._said.new((guest, str(error))):
                LOGGER.error("%s: %s", guest, error, extra=fields(guest=guest, error=error))
            return False, len(actions)
        self._log_result(result, "")
        if result.failed:
            errors = [error for _, error in result.failed]
            self._backoff.failed(guest, signature, errors, self._clock())
            self._count(write_errors=len(errors))
            return bool(result.done), len(actions)
        self._backoff.succeeded(guest)
        again = sum(a.target in ours for a in result.done)
        self._count(writes=len(result.done), corrections=again)
        return bool(result.done), 0

    # -- counting and saying

    def _publish(self, snapshot: Snapshot, plan: Plan, pending: Mapping[str, int]) -> None:
        written = {e.target.guest for e in self._journal.entries()}
        refused = {r.guest for r in plan.refusals}
        guests = []
        for guest in snapshot.guests:
            names = {guest.ref, guest.name} if guest.source == "libvirt" else {guest.ref}
            held = sum(s.held for s in plan.skipped if s.guest in names)
            waiting = sum(n for name, n in pending.items() if name in names)
            guests.append(
                GuestState(
                    guest.ref,
                    guest.source,
                    tuned=bool(names & written) and not waiting and not names & refused,
                    drift=held + waiting,
                    held=held,
                )
            )
        self.state = replace(
            self.state, snapshot=snapshot, guests=tuple(guests), policies=len(self.policies)
        )

    def _count(self, **increments: int) -> None:
        totals = self.state.totals
        values = {name: getattr(totals, name) + n for name, n in increments.items()}
        self.state = replace(self.state, totals=replace(totals, **values))

    def _time(self, seconds: float) -> None:
        totals = self.state.totals
        slot = next((i for i, bound in enumerate(BUCKETS) if seconds <= bound), len(BUCKETS))
        durations = tuple(n + (i == slot) for i, n in enumerate(totals.durations))
        timed: Totals = replace(
            totals,
            passes=totals.passes + 1,
            duration_sum=totals.duration_sum + seconds,
            durations=durations,
        )
        self.state = replace(self.state, totals=timed, last_pass=time.time())

    def _log_plan(self, plan: Plan) -> None:
        for refusal in plan.refusals:
            if self._said.new(refusal):
                LOGGER.error(
                    "%s: policy %s refused: %s; %s",
                    refusal.guest,
                    refusal.policy,
                    refusal.reason,
                    refusal.hint,
                    extra=fields(guest=refusal.guest, policy=refusal.policy),
                )
        for warning in plan.warnings:
            if self._said.new(("warning", warning)):
                LOGGER.warning("%s", warning)
        for skipped in plan.skipped:
            if skipped.held and self._said.new(skipped):
                LOGGER.warning(
                    "%s: %s left alone: %s",
                    skipped.guest,
                    skipped.subject,
                    skipped.reason,
                    extra=fields(guest=skipped.guest),
                )

    def _log_result(self, result: Result, why: str) -> None:
        for action in result.done:
            LOGGER.info(
                "%s (%s)",
                report.action_line(action),
                why or action.reason,
                extra=fields(
                    guest=action.target.guest,
                    target=action.target.kind,
                    before=report.value_text(action.before),
                    after=report.value_text(action.after),
                ),
            )
        for action, error in result.failed:
            if self._said.new((action.target, str(error))):
                LOGGER.error(
                    "%s",
                    report.failure_line(action, error),
                    extra=fields(guest=action.target.guest, error=error.what),
                )
        for left in result.left:
            LOGGER.warning("left alone: %s", left)


def by_guest(plan: Plan) -> dict[str, tuple[Action, ...]]:
    """The plan's actions per guest, in order: one guest's failure is not another's."""
    groups: dict[str, list[Action]] = {}
    for action in plan.actions:
        groups.setdefault(action.target.guest, []).append(action)
    return {guest: tuple(actions) for guest, actions in groups.items()}
