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

from collections.abc import Callable, Mapping
from typing import Any

from vsrtune.bench.cleanup import put_back
from vsrtune.bench.setup import attachments, scaling

CLEANERS: dict[str, Callable[[Mapping[str, Any]], None]] = {
    attachments.Attachments.kind: attachments.put_back,
    put_back.TUNING: put_back.undo_journal,
    put_back.COMMAND: put_back.revert_command,
    scaling.Members.kind: scaling.put_back,
}
