# SPDX-License-Identifier: GPL-2.0-or-later
"""One pass over the host: observe, plan, apply, and remember how it went.

Between passes only steps down (``step_down``) change the host, and beside them switches of
attachments. A pass may be repeated at any time: it writes nothing on a host that matches the
policies.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from vsrtune.core.errors import (
    JournalError,
    ObserveError,
    UntriedError,
    VsrtuneError,
    WriteError,
)
from vsrtune.core.retry import Backoff, Pause, SaidOnce
from vsrtune.daemon.drift_tracker import DriftWatch, waiting
from vsrtune.daemon.load_tracker import LoadKeeper
from vsrtune.daemon.pass_result import ResultLog, guest_states, log_plan, merged, unmade
from vsrtune.daemon.scope import FULL, NOTHING, UNANNOUNCED, Scope
from vsrtune.daemon.systemd import LOGGER, fields
from vsrtune.daemon.trace_schedule import Tracing
from vsrtune.execute import executor
from vsrtune.execute.brought import adopt_brought
from vsrtune.execute.executor import Result
from vsrtune.execute.host_writer import LiveSysOps
from vsrtune.execute.journal import Journal
from vsrtune.execute.vanished import forget
from vsrtune.model.daemon_state import DaemonState, GuestState, PlanState, Unmade
from vsrtune.model.journal_records import undo_action, undo_order
from vsrtune.model.plan import Action, Culprit, Place, Plan
from vsrtune.model.snapshot import Snapshot, SnapshotSlice
from vsrtune.model.stepdown import UNTIL, Step, StepLevel, Steps
from vsrtune.model.targets import HOST_REF, Target, ThreadSched, Value
from vsrtune.observe import one_pass
from vsrtune.observe.load import LoadMeter
from vsrtune.observe.observer import Observer
from vsrtune.plan import planner
from vsrtune.plan.full_plan import plan_with_releases
from vsrtune.plan.incremental import Whole, plan_alone
from vsrtune.plan.interrupts import refused
from vsrtune.plan.phases import moves_work
from vsrtune.plan.safety.projection import project_actions
from vsrtune.plan.safety.starvation import unguarded
from vsrtune.policy.lowering import next_level
from vsrtune.policy.matching import assign, heeded, policies_of
from vsrtune.policy.model import WITHOUT_LIBVIRT, Policy

# Seconds until the next pass over threads that have to run before they can be DEADLINE, and at most
# while nothing changes: a worker without traffic does not run for days.
PENDING, PENDING_MOST = 1.0, 10.0

_HOST = frozenset([HOST_REF])
# What failed when a whole pass did, beside the names of guests.
_PASS = ""


class Reconciler:
    """Runs passes. ``policies`` may be replaced between two of them.

    ``trace`` is how long a pass traces transmissions while some worker's interface is
    known by order only, in seconds. ``meter`` measures loads while a policy places by
    load. ``pulse`` is called between the stages of a pass, to show that it moves on,
    ``remember`` with interrupts that the kernel refused to move.
    """

    def __init__(
        self,
        observer: Observer,
        ops: LiveSysOps,
        journal: Journal,
        policies: tuple[Policy, ...],
        *,
        trace: float = 0.0,
        meter: LoadMeter | None = None,
        pulse: Callable[[], None] = lambda: None,
        remember: Callable[[Iterable[tuple[int, str]]], None] = lambda _irqs: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._observer = observer
        self._ops = ops
        self._journal = journal
        self._trace = trace
        self._loads = LoadKeeper(meter)
        self._pulse = pulse
        self._remember = remember
        self._clock = clock
        self._backoff = Backoff()
        self._said = SaidOnce()
        self._drift = DriftWatch(clock)
        self._results = ResultLog(self._said)
        self._tracing = Tracing()
        # The last plan for all guests.
        self._whole: Whole | None = None
        # Guests that were written to since they were read.
        self._again: frozenset[str] = frozenset()
        # Settings that the kernel put off in this pass, by guest, and until when they wait.
        self._waiting: Counter[str] = Counter()
        self._put_off = Pause()
        # Guests that are stepped down, even where the journal could not record it.
        self._steps: Steps = journal.steps
        # The policy that each of them had when it was named by one alone.
        self._stepped: dict[str, Policy] = {}
        # Guests on which a reload overrules what was set by hand, until a pass has done so. A pin
        # that an operator sets after that pass is held again.
        self._overruled: frozenset[str] = frozenset()
        # Guests that were not tried because libvirt kept the pin of another one waiting, and guests
        # that failed meanwhile. While one of the former is due, the latter wait: otherwise each
        # retry would wait for the same guest first, and never reach the others.
        self._untried: frozenset[str] = frozenset()
        self._late: frozenset[str] = frozenset()
        # Changes that this pass planned and has not made.
        self._unmade: tuple[Unmade, ...] = ()
        self.policies = policies
        self.state = DaemonState(policies=len(policies))

    def recover(self) -> None:
        """Resolve what a crash left in the journal, before the first pass."""
        if self._journal.foreign is not None:
            LOGGER.error("%s", self._journal.foreign, extra=fields(error=self._journal.foreign))
        if self._journal.set_aside is not None:
            LOGGER.warning(
                "the journal was of another version of vsrtune and of before this host booted: "
                "nothing of it is needed, it is kept as %s",
                self._journal.set_aside,
            )
        if self._journal.discarded:
            LOGGER.info("forgot %d settings of before this host booted", self._journal.discarded)
        result = executor.recover(self._ops, self._journal)
        self._results.log(result, "finished after a crash")
        entries = self._journal.entries()
        if entries:
            LOGGER.info("adopted %d settings of an earlier run", len(entries))
        for guest, step in self._steps.items():
            LOGGER.warning("%s: still %s; %s", guest, step, UNTIL, extra=fields(guest=guest))

    def reload(self, policies: tuple[Policy, ...]) -> None:
        """Replace the policies, and have the next pass overrule what was set by hand until now.
        Guests whose policy has changed are no longer stepped down. Of one that does not run
        nobody can tell, because a policy may name its UUID: it begins anew with any change."""
        snapshot = self.state.snapshot
        guests = {g.ref: g for g in (snapshot.guests if snapshot is not None else ())}

        def changed(ref: str) -> bool:
            if ref not in guests:
                return policies != self.policies
            before, after = (policies_of(guests[ref], p) for p in (self.policies, policies))
            if len(before) == 1:
                self._stepped[ref] = before[0]
            return len(after) == 1 and after[0] != self._stepped.get(ref)

        self.forget_steps([ref for ref in self._steps if changed(ref)])
        self.policies = policies
        # Only settings that the journal knows are held for somebody.
        self._overruled = self._journal.guests()
        self._backoff.clear()
        self._results.clear()
        self._drift.clear()

    def run(self, scope: Scope = FULL) -> bool:
        """Run one pass: observe once, plan once, execute the plan. True when something was
        written.

        ``scope`` says what may have changed since the last pass. Guests that bring to the
        plan what they brought before are planned alone; otherwise all guests are planned.
        Later passes retry whatever failed. Failures are logged and counted, never raised.
        """
        begin = self._clock()
        LOGGER.debug("a pass over %s", scope)
        wrote, whole, failure = False, False, ""
        try:
            wrote, whole = self._run(scope)
            if whole:
                self._backoff.succeeded(_PASS)
        except VsrtuneError as error:
            failure = str(error)
            self._backoff.failed(_PASS, failure, [error], self._clock())
            self._count(pass_errors=1)
            if self._said.new(("pass", str(error))):
                LOGGER.error("this pass failed: %s", error, extra=fields(error=error))
        self._said.end_of_pass(whole=whole)
        self._time(self._clock() - begin, failure)
        return wrote

    def blame(self, where: Place, culprit: Culprit) -> None:
        """Note who has just changed something that a pass may have set."""
        self._drift.blame(where, culprit)

    def step_down(self, guest: str, why: str, seen: StepLevel) -> None:
        """Step a guest down by one level because of ``why``. Lower its classes at once, by the
        last snapshot; the next pass does the rest. Leave alone a guest without a policy or on
        the last level, and one that has another level than ``seen`` by now: the guard saw the
        sign while an earlier step was under way."""
        named = assign(self.state.snapshot.guests if self.state.snapshot else (), self.policies)
        policy = next((p for g, p in named.pairs if g.ref == guest), None)
        told = next((g for g in self.state.guests if g.ref == guest and g.policy), None)
        now = self._steps[guest].level if guest in self._steps else StepLevel.POLICY
        if told is None or now is not seen or now is StepLevel.UNDONE:
            return
        # A plan changes nothing of a guest that is refused or waits, but releases one without a
        # policy.
        level = StepLevel.UNDONE
        if policy is not None and not told.refused:
            level = next_level(policy, now)
        step = Step(level, why, time.time())
        with contextlib.suppress(JournalError):
            self._journal.renew()
        self._note_step(guest, step)
        try:
            self._journal.renew()
        except JournalError:
            # Without a journal only originals are written, and class rr is none.
            if level is StepLevel.RR:
                step = replace(step, level=StepLevel.OTHER)
                self._note_step(guest, step)
        self._count(step_downs=1)
        LOGGER.error(
            "%s: %s; %s",
            guest,
            step,
            UNTIL,
            extra=fields(guest=guest, policy=told.policy, step=step.level.value),
        )
        # A thread leaves class deadline within its root domain, which takes a whole plan.
        if policy is None or not policy.deadline:
            self._lower_at_once(guest)

    def forget_steps(self, guests: Iterable[str] | None = None) -> None:
        """Tune these guests, or all, by their policies again from the next pass on."""
        for guest in list(self._steps) if guests is None else guests:
            if guest in self._steps:
                LOGGER.info("%s: tuned by its policy again", guest, extra=fields(guest=guest))
                self._note_step(guest, None)

    def stop(self) -> bool:
        """Undo everything; True when none of our changes is left on the host."""
        self._pulse()
        if self._journal.foreign is not None:
            LOGGER.error("%s", self._journal.foreign, extra=fields(error=self._journal.foreign))
            return False
        with contextlib.suppress(JournalError):
            self._journal.renew()
        try:
            snapshot = self._observer.observe()
            adopt_brought(snapshot, snapshot.guests, self._journal)
            if any(guest.unconfirmed for guest in snapshot.guests):
                raise ObserveError("libvirt does not answer")
        except Exception as error:  # whatever it is, what the journal holds has to be put back
            LOGGER.warning(
                "guests that have just come were not observed, and keep the pins that they have "
                "brought along: %s; `vsrtune undo` restores them",
                error if isinstance(error, VsrtuneError) else repr(error),
                exc_info=not isinstance(error, VsrtuneError),
            )
        try:
            result = self._undo()
        except JournalError as error:
            LOGGER.error("%s", error, extra=fields(error=error))
            LOGGER.error(
                "what needs no record is put back; the journal still holds %d settings: once it "
                "can be written, `vsrtune undo` puts back the rest",
                len(self._journal.entries()),
            )
            return False
        self._results.log(result, "put back")
        return not result.failed

    def _undo(self) -> Result:
        try:
            return executor.undo(self._ops, self._journal)
        except JournalError:
            # The failure may concern this one file.
            self._journal.renew()
            return executor.undo(self._ops, self._journal)

    def next_try(self) -> float | None:
        """Seconds until the next retry: of a failed guest or pass, of a setting that others keep
        changing, or of a thread that has to run first. None when nothing waits."""
        due = [self._backoff.next_try(self._clock()), self._drift.next_try(self.state.drifts)]
        if self._pending():
            due.append(self._put_off.left(self._clock()))
        return min((seconds for seconds in due if seconds is not None), default=None)

    def again(self) -> Scope:
        """The scope of a pass that is due because of earlier ones: guests that the last one
        wrote to, and guests with something that waits."""
        names = self._again | self._backoff.waiting() | self._drift.waiting(self.state.drifts)
        return self._by_name(names | self._pending())

    def _pending(self) -> frozenset[str]:
        """The guests with settings that the kernel has put off."""
        guests = self.state.snapshot.guests if self.state.snapshot is not None else ()
        # An event tells when libvirt is no longer busy, the next pass whether it answers.
        busy = {guest.ref for guest in guests if guest.waits}
        return frozenset(g.ref for g in self.state.guests if g.pending and g.ref not in busy)

    def _by_name(self, names: frozenset[str]) -> Scope:
        if not names:
            return NOTHING
        # Only libvirt's guests can be re-read by name.
        plain = any(n in (HOST_REF, _PASS) or n.startswith(WITHOUT_LIBVIRT) for n in names)
        return FULL if plain or len(self.state.guests) <= one_pass.FEW else Scope(names)

    # -- guests that are stepped down

    def _lower_at_once(self, guest: str) -> None:
        snapshot = self.state.snapshot
        if snapshot is None:
            return
        undone = self._steps[guest].level is StepLevel.UNDONE
        alone = SnapshotSlice.of(snapshot, frozenset([guest]))
        applied = self._journal.applied(alone.names)
        try:
            plan = planner.plan(alone.alone(), self.policies, applied, steps=self._steps)
            classes = tuple(
                a
                for a in plan.actions
                if a.target.guest == guest and isinstance(a.target, ThreadSched)
            )
            # No plan is made for a guest that is refused, or that libvirt keeps waiting.
            loose = unguarded(alone.alone(), applied, frozenset([guest])) if undone else frozenset()
            back = undo_order(e for e in self._journal.entries(alone.names) if e.target in loose)
            classes += tuple(replace(undo_action(entry), release=True) for entry in back)
            result = executor.apply(Plan(actions=classes), self._ops, self._journal)
        except VsrtuneError as error:
            LOGGER.error(
                "%s: its classes are not lowered yet, the next pass tries again: %s",
                guest,
                error,
                extra=fields(guest=guest, error=error),
            )
            return
        self._results.log(result)
        self._again |= {a.target.guest for a in result.done}
        self._count(writes=len(result.done), write_errors=len(result.failed))
        guests = tuple(
            replace(g, step=self._steps[guest], tuned=False) if g.ref == guest else g
            for g in self.state.guests
        )
        self.state = replace(
            self.state, snapshot=project_actions(snapshot, result.done), guests=guests
        )

    def _note_step(self, guest: str, step: Step | None) -> None:
        steps = {ref: s for ref, s in self._steps.items() if ref != guest}
        if step is None:
            self._stepped.pop(guest, None)
        self._steps = steps if step is None else {**steps, guest: step}
        self._whole = None
        try:
            self._journal.step(guest, step)
        except VsrtuneError as error:
            # A step down helps, recorded or not.
            LOGGER.error("%s", error, extra=fields(guest=guest, error=error))

    # -- the stages of a pass

    def _run(self, scope: Scope) -> tuple[bool, bool]:
        """Whether something was written, and whether the pass was over all guests. A journal that
        cannot be written fails the pass at its end: until then it does what needs no record or has
        its room, and the guard learns what is on the host."""
        unrecorded: JournalError | None = None
        try:
            self._journal.renew()
        except JournalError as error:
            unrecorded = error
        observed = self._observe(scope)
        try:
            self._forget(observed)
            adopt_brought(observed.snapshot, observed.guests, self._journal)
        except JournalError as error:
            unrecorded = error
        observed = self._measured(observed)
        plan = self._plan_alone(observed)
        if plan is None:
            observed = SnapshotSlice(observed.snapshot)
            plan = self._plan(observed.snapshot)
        applied = self._journal.applied(observed.names)
        log_plan(plan, self._said)
        try:
            done, unsettled = self._apply(plan, observed)
        except JournalError:
            # Some of the plan may be on the host, and the guard watches what is there.
            observed = SnapshotSlice.of(self._observer.observe(), observed.names)
            self._publish(observed, plan, Counter(a.target.guest for a in plan.actions))
            raise
        for guest, count in waiting(plan).items():
            unsettled[guest] = unsettled.get(guest, 0) + count
        self._drift.learn(plan, done, observed)
        fresh = {a.target for a in done if a.release or a.target.guest in self._overruled}
        again = sum(applied.get(a.target) == a.after for a in done if a.target not in fresh)
        self._note_overruled(observed)
        self._count(writes=len(done), corrections=again)
        # The state shows the host as this pass leaves it. A pass that plans guests alone
        # writes to these guests only.
        left = observed.around(project_actions(observed.alone(), done))
        self._publish(replace(observed, snapshot=left), plan, unsettled)
        wrote_to = {a.target for a in done}
        drifts = tuple(d for d in plan.drift if d.left or d.target not in wrote_to)
        standing = PlanState.after(plan, self._unmade)
        drifts += tuple(d for d in self.state.drifts if not observed.covers(d.target.guest))
        if observed.names is not None:
            standing = self.state.plan.updated(standing, observed.names)
        self.state = replace(self.state, drifts=drifts, plan=standing)
        if self._waiting or any(skipped.pending for skipped in plan.skipped):
            pause = Pause() if done else self._put_off
            self._put_off = pause.longer(self._clock(), PENDING, PENDING_MOST)
        self._again = frozenset(g for g in self._again if not observed.covers(g))
        self._again |= {a.target.guest for a in done}
        self.state = self._loads.counted(observed.snapshot, self.state, done)
        if unrecorded is not None:
            raise unrecorded
        return bool(done), observed.names is None

    def _plan(self, snapshot: Snapshot) -> Plan:
        entries, memory = self._journal.entries(), self._drift.memory()
        judged = plan_with_releases(
            snapshot, self.policies, entries, self._overruled, memory, self._steps
        )
        self._whole = judged.whole
        return judged.plan

    def _plan_alone(self, observed: SnapshotSlice) -> Plan | None:
        """The plan for the observed guests alone; None when all guests have to be planned."""
        whole, names = self._whole, observed.names
        if whole is None or names is None or self._loads.due or names & self._overruled:
            return None
        alone = observed.alone()
        if names - {g.ref for g in alone.guests} and self._journal.entries(_HOST):
            return None  # settings of the host made for a guest that is gone may be obsolete
        if HOST_REF in self._backoff.waiting():
            return None  # only a plan for all shows the moves of interrupts that wait
        entries, memory = self._journal.entries(names), self._drift.memory(names)
        return plan_alone(whole, alone, self.policies, entries, memory, self._steps)

    def _observe(self, scope: Scope) -> SnapshotSlice:
        """Observe the host within ``scope``, and trace when a trace is worth it."""
        known = self.state.snapshot
        # Values that a pass wrote are known only once they are read again. Guests beside those of
        # the scope matter when all are planned.
        unread = self._again - scope.guests
        if unread:
            scope = scope.merge(self._by_name(unread))
        # After an event on a host with few guests, observing everything leaves no doubt.
        few = known is not None and len(known.guests) <= one_pass.FEW
        if known is None or scope.host or (few and scope != UNANNOUNCED and not scope.hurried):
            observed = SnapshotSlice(self._observer.observe(self._trace if known is None else 0.0))
        elif scope.unannounced:
            observed = self._observer.observe_unannounced(scope.guests)
        else:
            places = frozenset() if scope.guests & self._again else scope.places
            observed = self._observer.observe_some(scope.guests, places)
        if (
            known is not None
            and self._trace > 0
            and self._tracing.worth(observed.earlier(known), observed.guests)
        ):
            observed = SnapshotSlice(self._observer.observe(self._trace))
            self._tracing.traced(observed.guests)
        self._pulse()
        for problem in observed.snapshot.problems:
            if self._said.new(("problem", problem.reader, problem.what)):
                LOGGER.warning("%s: %s", problem.reader, problem.what)
        return observed

    def _forget(self, observed: SnapshotSlice) -> None:
        """Forget settings of what no longer exists."""
        for target, taken in forget(observed, self._ops, self._journal):
            if isinstance(taken, WriteError):
                LOGGER.error("%s", taken, extra=fields(guest=target.guest, error=taken))
                continue
            LOGGER.info("forgot %s: it no longer exists", target, extra=fields(guest=target.guest))
            if taken is not None:
                LOGGER.warning(
                    "%s: its process runs another program; vsrtune took %s back from it",
                    target,
                    taken,
                    extra=fields(guest=target.guest),
                )

    def _measured(self, observed: SnapshotSlice) -> SnapshotSlice:
        """``observed`` with loads, while a policy places by load."""
        snapshot = self._loads.measured(observed.snapshot, self.policies, self._clock())
        return replace(observed, snapshot=snapshot)

    def _apply(
        self, plan: Plan, observed: SnapshotSlice
    ) -> tuple[tuple[Action, ...], dict[str, int]]:
        """Execute the plan except for guests that must wait after a failure. Return the actions
        done, and for each guest how many settings still differ from its policy."""
        wanted: dict[str, set[tuple[Target, Value]]] = {}
        for action in plan.actions:
            wanted.setdefault(action.target.guest, set()).add((action.target, action.after))
        signatures = {guest: frozenset(changes) for guest, changes in wanted.items()}
        self._backoff.refreshed(observed.covers, signatures)
        now = self._clock()
        waiting = {g for g, s in signatures.items() if self._backoff.blocked(g, s, now)}
        if self._untried & (signatures.keys() - waiting):
            waiting |= self._late & signatures.keys()
        due = tuple(a for a in plan.actions if a.target.guest not in waiting)
        pending = {guest: len(signatures[guest]) for guest in waiting}
        moves = (a.target for a in plan.actions if moves_work(a.target))
        unmoved = next(moves, None) if HOST_REF in waiting else None
        self._pulse()
        result = Result()
        if due or plan.disowned:
            due_plan = replace(plan, actions=due)
            result = executor.apply(due_plan, self._ops, self._journal, unmoved)
        self._waiting = Counter(a.target.guest for a, _ in result.pending)
        self._unmade = unmade(plan, result)
        self._results.log(result)
        if result.fixed:
            self._remember(refused(result.fixed))
        errors: dict[str, list[VsrtuneError]] = {}
        for action, error in result.failed:
            errors.setdefault(action.target.guest, []).append(error)
        self._note_untried(signatures.keys() - waiting, errors)
        done = {(a.target, a.after) for a in result.done}
        for guest in {a.target.guest for a in due}:
            if guest in errors:
                # Releases are done even so, and no part of what is tried again.
                left = signatures[guest] - done
                self._backoff.failed(guest, left, errors[guest], self._clock())
                pending[guest] = len(left)
            else:
                self._succeeded(guest)
        self._count(write_errors=len(result.failed))
        return result.done, pending

    def _note_untried(
        self, tried: Collection[str], errors: Mapping[str, list[VsrtuneError]]
    ) -> None:
        """Note whom an attempt on the guests ``tried`` did not reach."""
        untried = {
            g for g, found in errors.items() if any(isinstance(e, UntriedError) for e in found)
        }
        self._untried = self._untried.difference(tried) | untried
        self._late = self._late | (errors.keys() - untried) if self._untried else frozenset()

    def _note_overruled(self, observed: SnapshotSlice) -> None:
        """Keep the guests on which the plan could not overrule what was set by hand: libvirt is
        busy with them, they could not be read, or an action is not done."""
        if not self._overruled:
            return
        left = {u.action.target.guest for u in self._unmade if not u.fixed}
        left |= {g.ref for g in observed.guests if g.waits}
        left |= self._overruled - {g.ref for g in observed.guests} - _HOST
        left |= {name for name in self._overruled if not observed.covers(name)}
        self._overruled &= left & self._journal.guests()

    def _heal(self, observed: SnapshotSlice, states: Iterable[GuestState]) -> None:
        """Clear the failures of guests that match their policies without a write, and of
        guests that are gone. A guest that is refused, held or busy is neither. A guest that
        is missing while something could not be read may still run."""
        failing = self._backoff.failing()
        if not failing:
            return
        healed = {s.ref for s in states if s.tuned and not s.drift}
        if not observed.snapshot.problems:
            covered = {name for name in failing if observed.covers(name)}
            healed |= covered - {g.ref for g in observed.guests} - {HOST_REF, _PASS}
        for guest in failing & healed:
            self._succeeded(guest)

    def _succeeded(self, guest: str) -> None:
        self._backoff.succeeded(guest)
        self._results.succeeded(guest)

    # -- counting and saying

    def _publish(self, observed: SnapshotSlice, plan: Plan, unsettled: Mapping[str, int]) -> None:
        new = guest_states(observed, plan, self.policies, unsettled, self._waiting, self._steps)
        snapshot = observed.snapshot
        snapshot = replace(snapshot, problems=heeded(snapshot, self.policies))
        self._heal(replace(observed, snapshot=snapshot), new)
        self.state = replace(
            self.state,
            snapshot=snapshot,
            guests=merged(self.state.guests, observed, new),
            policies=len(self.policies),
        )

    def _count(self, **increments: int) -> None:
        totals = self.state.totals
        values = {name: getattr(totals, name) + n for name, n in increments.items()}
        self.state = replace(self.state, totals=replace(totals, **values))

    def _time(self, seconds: float, failure: str) -> None:
        timed = self.state.totals.timed(seconds)
        self.state = replace(self.state, totals=timed, last_pass=time.time(), failure=failure)
