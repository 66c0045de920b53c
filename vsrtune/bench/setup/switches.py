# SPDX-License-Identifier: GPL-2.0-or-later
"""Opens the host for the product's own switches of interfaces (vsrtune.attach).

The ledger is that of ``vsrtune attach`` and ``vsrtune group``: whoever switches next takes the
steps of an interrupted switch back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from vsrtune.attach import transaction
from vsrtune.attach.host import LiveHost
from vsrtune.attach.ledger import DEFAULT_PATH as LEDGER
from vsrtune.attach.plan.model import AttachHostState, Switch
from vsrtune.attach.survey import survey
from vsrtune.attach.transaction import Switcher
from vsrtune.execute.journal import DEFAULT_PATH as JOURNAL


@contextlib.contextmanager
def opened(uri: str) -> Iterator[tuple[Switcher, AttachHostState]]:
    """The host as it is, with no switch unfinished. Raises VsrtuneError."""
    live = LiveHost(uri)
    with transaction.opened(live, LEDGER) as switcher:
        switcher.take_back_unfinished()
        yield switcher, survey(live, switcher.origins(), JOURNAL)


def carry_out(switcher: Switcher, switch: Switch) -> None:
    """Carry out a switch that has steps. Raises VsrtuneError, also for what the sweep after it
    could not remove."""
    if switch.steps and (failed := switcher.carry_out(switch).failed):
        raise failed[0]
