"""The cleaners, each of which takes back one kind of change that a bench makes to the host.

A bench writes every change into its ledger before making it. Whoever resolves the
ledger (the bench itself, its guard after a kill, ``vsrtune bench clean``) calls the
cleaner of the entry's kind with the entry's data, the latest entry first, and marks the
entry done when the cleaner returns.

A cleaner may be called at any time and any number of times: for a change that was never
made, was made in part, or is taken back already. It raises VsrtuneError when something
could not be taken back; the entry then stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vsrtune.bench.cleanup import edge_cleaners
from vsrtune.bench.setup import attachments, scaling
from vsrtune.bench.setup.commands import run
from vsrtune.core.errors import VsrtuneError, WriteError
from vsrtune.execute import executor
from vsrtune.execute.executor import Result
from vsrtune.execute.host_writer import LiveSysOps
from vsrtune.execute.journal import Journal
from vsrtune.execute.ledger import Cleaner
from vsrtune.host.filesystem import boot_id

TUNING = "tuning"
COMMAND = "command"


def undo_journal(data: Mapping[str, Any]) -> None:
    """Put back every setting of the journal that a ``tuning`` entry names. Raises
    VsrtuneError."""
    with Journal.open(Path(data["journal"]), boot_id()) as journal:
        settle(
            executor.undo(
                LiveSysOps(data["uri"], budgets_end=journal.budgets_end, original=journal.original),
                journal,
            )
        )


def revert_command(data: Mapping[str, Any]) -> None:
    """Run the command that takes back the command of a ``command`` entry. Raises WriteError."""
    run(data["revert"])


def settle(result: Result) -> tuple[str, ...]:
    """Notes for people on settings that others changed meanwhile. Raises WriteError when
    something could not be put back."""
    if result.failed:
        raise failure(result)
    return tuple(str(left) for left in result.left)


def failure(result: Result) -> VsrtuneError:
    """The first error of a result that has errors, because it says most."""
    action, error = result.failed[0]
    more = f" (and {len(result.failed) - 1} more)" if len(result.failed) > 1 else ""
    return WriteError(
        f"{error.what}{more}", where=str(action.target), hint=error.hint, lasting=error.lasting
    )


CLEANERS: dict[str, Cleaner] = {
    edge_cleaners.KIND: edge_cleaners.clean_agent,
    attachments.Attachments.kind: attachments.put_back,
    scaling.Members.kind: scaling.put_back,
    TUNING: undo_journal,
    COMMAND: revert_command,
}
