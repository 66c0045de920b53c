"""What the operator is told of what was done to the host."""

from __future__ import annotations

from vsrtune.core.retry import SaidOnce
from vsrtune.execute.executor import Result
from vsrtune.log import LOGGER, fields
from vsrtune.model.targets import Target
from vsrtune.views import tables


class ResultLog:
    """Logs results of the executor; a failure once, until its guest has succeeded."""

    def __init__(self, said: SaidOnce) -> None:
        self._said = said
        # Failures already logged, by guest.
        self._known: dict[str, set[tuple[Target, str]]] = {}

    def succeeded(self, guest: str) -> None:
        """What fails from now on is to be said again."""
        self._known.pop(guest, None)

    def clear(self) -> None:
        """As ``succeeded``, for all guests."""
        self._known.clear()

    def log(self, result: Result, why: str = "") -> None:
        """Log a result; ``why`` stands for the reasons of the actions."""
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
