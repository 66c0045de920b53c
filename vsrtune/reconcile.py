"""One pass over the host: observe, plan, apply, and remember how it went.

A pass is the only thing that changes the host while the daemon runs. It may be
repeated at any time: on a host that is as the policies say it writes nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from vsrtune import executor, planner, report
from vsrtune.actions import (
    HOST_REF,
    Action,
    CgroupTarget,
    DeviceTarget,
    Partition,
    Plan,
    Target,
    Value,
)
from vsrtune.backoff import Backoff, SaidOnce
from vsrtune.deadline import used
from vsrtune.errors import VanishedError, VsrtuneError
from vsrtune.executor import Result
from vsrtune.journal import Journal
from vsrtune.log import LOGGER, fields
from vsrtune.model import Confidence, Role, SchedClass, Snapshot, ThreadKey
from vsrtune.moved_pins import MovedPins
from vsrtune.policy import Policy
from vsrtune.policy_match import assign
from vsrtune.projection import project_actions
from vsrtune.state import BUCKETS, GuestState, State, Totals
from vsrtune.sysops import SysOps

# How soon a thread that has to run before it can be DEADLINE is looked at again, or a pin
# that has moved, seconds.
PENDING = 1.0


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
        self._moved = MovedPins()
        # Failures already logged, by guest, until the guest succeeds.
        self._known: dict[str, set[tuple[Target, str]]] = {}
        self._snapshot: Snapshot | None = None
        self._seen_at = 0.0
        # Settings that the kernel put off in this pass, by guest.
        self._waiting: Counter[str] = Counter()
        self.policies = policies
        self.state = State(policies=len(policies))

    def recover(self) -> None:
        """Resolve what a crash left in the journal, before the first pass."""
        if self._journal.discarded:
            LOGGER.info("forgot %d settings of before this host booted", self._journal.discarded)
        result = executor.recover(self._ops, self._journal)
        self._log_result(result, "finished after a crash")
        entries = self._journal.entries()
        if entries:
            LOGGER.info("adopted %d settings of an earlier run", len(entries))

    def run(self, *, settle: bool = False, reassert: bool = False) -> bool:
        """One pass; True when something was written.

        ``settle`` also takes back what the policies no longer ask for (at start and
        after a reload), ``reassert`` overrules pins set by hand. Failures are logged
        and counted, never raised.
        """
        begin = self._clock()
        if reassert:
            self._backoff.clear()
            self._known.clear()
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
        """Seconds until a failed guest is due again, or a thread that has to run first is
        looked at again; None when none waits."""
        failed = self._backoff.next_try(self._clock())
        if not self._moved.waiting and not any(g.pending for g in self.state.guests):
            return failed
        return PENDING if failed is None else min(PENDING, failed)

    # -- the stages of a pass

    def _run(self, settle: bool, reassert: bool) -> bool:
        snapshot = self._observe()
        self._forget_gone(snapshot)
        wrote = False
        if self._release(snapshot, settle):
            wrote = True
            snapshot = self._observe()
        ours = self._journal.ours()
        plan = planner.plan(snapshot, self.policies, ours, reassert)
        self._log_plan(plan)
        plan, unsure = self._moved.sure(plan, {} if settle or reassert else ours)
        done, pending = self._apply(plan)
        pending |= unsure
        again = sum(ours.get(a.target) == a.after for a in done) if not settle else 0
        self._count(writes=len(done), corrections=again)
        budgets = self._budgets(snapshot)
        self._snapshot = snapshot
        # What is shown is the host as this pass leaves it.
        self._publish(project_actions(snapshot, done), plan, pending)
        self.state = replace(self.state, budgets=budgets)
        return wrote or bool(done)

    def _observe(self) -> Snapshot:
        known = self._snapshot
        snapshot = self._observer.observe(self._trace if known is None else 0.0)
        if known is not None and self._trace > 0 and worth_tracing(known, snapshot):
            snapshot = self._observer.observe(self._trace)
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
            if isinstance(target, DeviceTarget):
                if target.ifindex in devices:
                    continue
            elif not isinstance(target, CgroupTarget) and target.thread in alive:
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

    def _release(self, snapshot: Snapshot, settle: bool) -> bool:
        """Undo what no policy asks for any more; True when there was such a thing.

        Settings of a guest go with the guest, those of the host itself stay behind
        when the guest that needed them is gone: they are looked at in every pass.
        """
        ours = self._journal.ours()
        if not settle and not any(t.guest == HOST_REF or isinstance(t, Partition) for t in ours):
            return False
        released = planner.released(snapshot, self.policies, ours)
        if not settle:
            released = planner.pressing(released, snapshot)
        if not released:
            return False
        result = executor.undo(self._ops, self._journal, released.__contains__)
        self._log_result(result, "put back, no policy asks for it")
        return True

    def _apply(self, plan: Plan) -> tuple[tuple[Action, ...], dict[str, int]]:
        """Apply the plan but for guests that must wait after a failure: the actions
        done, and for each guest how many settings are still not as its policy says."""
        wanted: dict[str, set[tuple[Target, Value]]] = {}
        for action in plan.actions:
            wanted.setdefault(action.target.guest, set()).add((action.target, action.after))
        signatures = {guest: frozenset(changes) for guest, changes in wanted.items()}
        now = self._clock()
        waiting = {g for g, s in signatures.items() if self._backoff.blocked(g, s, now)}
        due = tuple(a for a in plan.actions if a.target.guest not in waiting)
        pending = {guest: len(signatures[guest]) for guest in waiting}
        self._waiting = Counter()
        if not due:
            return (), pending
        self._pulse()
        result = executor.apply(replace(plan, actions=due), self._ops, self._journal)
        self._waiting = Counter(a.target.guest for a, _ in result.pending)
        self._log_result(result, "")
        errors: dict[str, list[VsrtuneError]] = {}
        for action, error in result.failed:
            errors.setdefault(action.target.guest, []).append(error)
        for guest in {a.target.guest for a in due}:
            if guest in errors:
                self._backoff.failed(guest, signatures[guest], errors[guest], self._clock())
                pending[guest] = len(signatures[guest])
            else:
                self._backoff.succeeded(guest)
                self._known.pop(guest, None)
        self._count(write_errors=len(result.failed))
        return result.done, pending

    # -- counting and saying

    def _publish(self, snapshot: Snapshot, plan: Plan, pending: Mapping[str, int]) -> None:
        matched = {g.ref for g, _ in assign(snapshot.guests, self.policies).pairs}
        unable = {r.guest for r in plan.refusals} | set(pending)
        guests = []
        for guest in snapshot.guests:
            held = sum(s.held for s in plan.skipped if s.guest == guest.ref)
            waits = sum(s.pending for s in plan.skipped if s.guest == guest.ref)
            waits += self._waiting.get(guest.ref, 0)
            guests.append(
                GuestState(
                    guest.ref,
                    guest.source,
                    tuned=guest.ref in matched - unable and not waits,
                    drift=held + pending.get(guest.ref, 0) + waits,
                    held=held,
                    pending=waits,
                )
            )
        self.state = replace(
            self.state, snapshot=snapshot, guests=tuple(guests), policies=len(self.policies)
        )

    def _budgets(self, snapshot: Snapshot) -> tuple[tuple[ThreadKey, float], ...]:
        """How much of their budgets DEADLINE threads have used since the pass before."""
        now, before = self._clock(), self._seen_at
        self._seen_at = now
        ran = {t.key: t.cpu_ns for g in (self._snapshot or snapshot).guests for t in g.threads}
        elapsed = round((now - before) * 1e9)
        if elapsed <= 0 or self._snapshot is None:
            return ()
        return tuple(
            (t.key, used(t.sched, t.cpu_ns - ran[t.key], elapsed))
            for g in snapshot.guests
            for t in g.threads
            if t.sched.cls is SchedClass.DEADLINE and t.key in ran
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
            known = self._known.setdefault(action.target.guest, set())
            if (action.target, str(error)) not in known:
                known.add((action.target, str(error)))
                LOGGER.error(
                    "%s",
                    report.failure_line(action, error),
                    extra=fields(guest=action.target.guest, error=error.what),
                )
        for left in result.left:
            LOGGER.warning("left alone: %s", left)
        for action, error in result.pending:
            LOGGER.info(
                "pending: %s",
                report.failure_line(action, error),
                extra=fields(guest=action.target.guest),
            )


def worth_tracing(before: Snapshot, now: Snapshot) -> bool:
    """Whether watching transmissions can make the mapping of some worker surer: one that
    is of no use yet, or one known by order only that has worked since ``before``."""
    used = {t.key: t.cpu_ns for g in before.guests for t in g.threads}
    for guest in now.guests:
        for thread in guest.by_role(Role.VHOST):
            if thread.confidence is None or thread.confidence is Confidence.EXACT:
                continue
            if not thread.confidence.usable or thread.cpu_ns > used.get(thread.key, -1):
                return True
    return False
