"""What a plan tells the operator through the log."""

from __future__ import annotations

from vsrtune.core.retry import SaidOnce
from vsrtune.log import LOGGER, fields
from vsrtune.model.plan import DriftRule, Plan


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
