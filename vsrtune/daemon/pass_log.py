# SPDX-License-Identifier: GPL-2.0-or-later
"""Logs plans and their results for the operator."""

from __future__ import annotations

from vsrtune.core.retry import SaidOnce
from vsrtune.daemon.journald import LOGGER, fields
from vsrtune.execute.executor import Result
from vsrtune.model.plan import DriftRule, Plan
from vsrtune.model.targets import Target
from vsrtune.views import tables


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
        if drift.rule is DriftRule.ADOPT and drift.left and said.new(drift):
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
