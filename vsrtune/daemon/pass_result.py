# SPDX-License-Identifier: GPL-2.0-or-later
"""The state of each guest after a pass: tuned or not, and how much differs from its policy; and
the log of plans and their results for the operator."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.retry import SaidOnce
from vsrtune.daemon.systemd import LOGGER, fields
from vsrtune.execute.executor import Result
from vsrtune.model.daemon_state import GuestState, Unmade
from vsrtune.model.plan import DriftRule, Plan
from vsrtune.model.snapshot import SnapshotSlice
from vsrtune.model.stepdown import NO_STEPS, Steps
from vsrtune.model.targets import Target
from vsrtune.policy.matching import assign, policies_of
from vsrtune.policy.model import Policy, irq_lists
from vsrtune.views import tables


def guest_states(
    observed: SnapshotSlice,
    plan: Plan,
    policies: Sequence[Policy],
    unsettled: Mapping[str, int],
    pending: Mapping[str, int],
    steps: Steps = NO_STEPS,
) -> tuple[GuestState, ...]:
    """The states of the observed guests after a pass. For each guest, ``unsettled`` counts the
    settings that could not be made or that wait, ``pending`` those that the kernel put off.
    ``steps`` tells which are stepped down."""
    guests = observed.guests
    planned = {g.ref for g, _ in assign(guests, policies).pairs}
    # Also of guests that two policies name, that are not alone or wait: they keep what they have.
    named = {g.ref: found[0] for g in guests if (found := policies_of(g, policies))}
    stepped = Counter(s.guest for s in plan.skipped if s.stepped)
    refused = {r.guest for r in plan.refusals}
    unable = refused | set(unsettled)
    held = Counter(s.guest for s in plan.skipped if s.held)
    left = (d for d in plan.drift if d.left and d.rule is not DriftRule.ENFORCE)
    overrides = Counter(d.target.guest for d in left)
    waits = Counter(s.guest for s in plan.skipped if s.pending) + Counter(pending)
    return tuple(
        GuestState(
            guest.ref,
            guest.source,
            tuned=guest.ref in planned
            and guest.ref not in unable
            and not waits[guest.ref]
            and not stepped[guest.ref],
            drift=held[guest.ref]
            + unsettled.get(guest.ref, 0)
            + waits[guest.ref]
            + stepped[guest.ref],
            held=held[guest.ref],
            pending=waits[guest.ref],
            overrides=overrides[guest.ref],
            policy=named[guest.ref].path if guest.ref in named else "",
            irq=_irq(named.get(guest.ref)),
            step=steps.get(guest.ref),
            refused=guest.ref in refused,
        )
        for guest in guests
    )


def _irq(policy: Policy | None) -> CpuSet:
    """The interrupt CPUs that a policy names."""
    return CpuSet.union(c for _, c in irq_lists(policy)) if policy is not None else CpuSet()


def merged(
    before: tuple[GuestState, ...], observed: SnapshotSlice, new: tuple[GuestState, ...]
) -> tuple[GuestState, ...]:
    """The states of all guests in the snapshot's order: ``new`` for the guests of
    ``observed``, ``before`` for the others."""
    if observed.names is None:
        return new
    placed = list(zip(observed.places, new, strict=True))
    same = len(before) == len(observed.snapshot.guests)
    # As many guests as before, and these in their old places: the others have not moved either.
    if same and all(before[place].ref == state.ref for place, state in placed):
        found = list(before)
        for place, state in placed:
            found[place] = state
        return tuple(found)
    states = {s.ref: s for s in (*before, *new)}
    return tuple(states[g.ref] for g in observed.snapshot.guests if g.ref in states)


WAITING = "it failed before, and is tried again less and less often"
WITH_ANOTHER = "taken back, because another change of the guest failed"


def unmade(plan: Plan, result: Result) -> tuple[Unmade, ...]:
    """Every action of the plan that the pass with this result has not done, except those on
    threads and devices that are gone or that somebody else has set meanwhile."""
    done = {(a.target, a.after) for a in result.done}
    over = {*result.vanished, *(left.target for left in result.left)}
    told: dict[Target, str] = {a.target: WITH_ANOTHER for a in result.skipped}
    told |= {a.target: f"failed: {error}" for a, error in result.failed}
    told |= {a.target: f"pending: {error}" for a, error in result.pending}
    told |= {a.target: f"the kernel refuses it: {error}" for a, error in result.fixed}
    failed = {a.target.guest for a, _ in result.failed}
    fixed = {a.target for a, _ in result.fixed}
    left = []
    for action in plan.actions:
        target = action.target
        if (target, action.after) in done or target in over:
            continue
        why = WITH_ANOTHER if target.guest in failed else WAITING
        left.append(Unmade(action, told.get(target, why), target in fixed))
    return tuple(left)


def log_plan(plan: Plan, said: SaidOnce) -> None:
    """Log what a plan refuses, warns of and leaves alone, each once while it lasts."""
    for refusal in plan.refusals:
        if said.new(refusal):
            LOGGER.error(
                "%s: policy %s refused: %s; %s",
                refusal.guest,
                refusal.policy,
                refusal.reason,
                refusal.hint,
                extra=fields(guest=refusal.guest, policy=refusal.policy),
            )
    for warning in plan.warnings:
        if said.new(("warning", warning)):
            LOGGER.warning("%s", warning)
    for drift in plan.drift:
        if drift.culprit is not None and said.new(drift):
            # A setting that is left alone has a line of its own below.
            then = f"; {drift.left or f'{drift.desired} is put back'}"
            LOGGER.info(
                "%s: %s has changed it to %s%s",
                drift.target,
                drift.culprit,
                drift.found,
                "" if drift.rule is DriftRule.REPORT else then,
                extra=fields(
                    guest=drift.target.guest,
                    by=drift.by,
                    culprit=drift.culprit.pid,
                    seconds=round(time.monotonic() - drift.culprit.when, 3),
                ),
            )
        elif drift.rule is DriftRule.ADOPT and drift.left and said.new(drift):
            LOGGER.info("%s: %s", drift.target, drift.left)
    for skipped in plan.skipped:
        if skipped.held and said.new(skipped):
            LOGGER.warning(
                "%s: %s left alone: %s",
                skipped.guest,
                skipped.subject,
                skipped.reason,
                extra=fields(guest=skipped.guest),
            )


class ResultLog:
    """Logs results of the executor; each failure once until its guest has succeeded."""

    def __init__(self, said: SaidOnce) -> None:
        self._said = said
        # Failures already logged, by guest.
        self._known: dict[str, set[tuple[Target, str]]] = {}

    def succeeded(self, guest: str) -> None:
        """Log the next failures of ``guest`` again."""
        self._known.pop(guest, None)

    def clear(self) -> None:
        """As ``succeeded``, for all guests."""
        self._known.clear()

    def log(self, result: Result, why: str = "") -> None:
        """Log a result; ``why`` replaces the reasons of the actions."""
        for action in result.done:
            LOGGER.info(
                "%s (%s)",
                tables.action_line(action),
                why or action.reason,
                extra=fields(
                    guest=action.target.guest,
                    target=action.target.kind,
                    before=tables.value_text(action.before),
                    after=tables.value_text(action.after),
                ),
            )
        for action, error in result.failed:
            known = self._known.setdefault(action.target.guest, set())
            if (action.target, str(error)) not in known:
                known.add((action.target, str(error)))
                LOGGER.error(
                    "%s",
                    tables.failure_line(action, error),
                    extra=fields(guest=action.target.guest, error=error.what),
                )
        for left in result.left:
            LOGGER.warning("left alone: %s", left)
        for action, error in result.pending:
            LOGGER.info(
                "pending: %s",
                tables.failure_line(action, error),
                extra=fields(guest=action.target.guest),
            )
        for action, error in result.fixed:
            if self._said.new(("fixed", action.target)):
                LOGGER.warning(
                    "left alone: %s",
                    tables.failure_line(action, error),
                    extra=fields(guest=action.target.guest),
                )
