# SPDX-License-Identifier: GPL-2.0-or-later
"""The daemon's work on attachments: recover, keep the devices, follow the policies.

A switch belongs to whoever holds its ledger. When a free ledger holds a switch, the process
of the switch died, and the daemon takes the switch back.

Nothing flaps: the daemon switches a guest for its policy once. When the switch fails, or
somebody switches the guest by hand afterwards, the daemon leaves the guest alone until the
policies are loaded again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from vsrtune.attach.host import LiveHost
from vsrtune.attach.ledger import AttachLedger
from vsrtune.attach.plan.model import AttachHostState
from vsrtune.attach.plan.requests import Batch, batches, taken_back, wanted
from vsrtune.attach.survey import survey
from vsrtune.attach.sweep import Swept
from vsrtune.attach.transaction import Switcher
from vsrtune.core.errors import VsrtuneError
from vsrtune.core.retry import Pause, SaidOnce
from vsrtune.daemon.systemd import LOGGER, fields
from vsrtune.execute.jsonl_log import LockedError
from vsrtune.execute.ledger import read_pending
from vsrtune.policy.model import Policy

# A pass waits at most this many seconds for libvirt; the next one tries again.
PATIENCE = 2.0


class AttachKeeper:
    """Maintains the ledger at ``path``; ``journal`` tells which queues the daemon set."""

    def __init__(
        self,
        path: Path,
        journal: Path,
        host: LiveHost,
        boot: str,
    ) -> None:
        self._path = path
        self._journal = journal
        self._host = host
        self._boot = boot
        self._said = SaidOnce()
        self._policies: tuple[Policy, ...] | None = None
        # Guests that had their turn since the policies were loaded.
        self._settled: set[str] = set()
        # The same for guests for which no policy asks for a switch any more.
        self._returned: set[str] = set()
        # Without another try to take a switch back. Each takes a guest's interfaces away and
        # keeps others from the ledger.
        self._pause = Pause()

    def update(self, policies: tuple[Policy, ...]) -> None:
        """Run one pass. Log each failure once while it lasts; raise none."""
        if policies is not self._policies:
            self._policies = policies
            self._settled.clear()
            self._returned.clear()
        elif self._pause.left(self._host.clock()):
            return
        self._guarded(self._follow, _wait_for)
        self._said.end_of_pass()

    def stop(self) -> bool:
        """Switch back what policies had switched, guests included that a pass could not switch
        back. True when every such guest is known to be back. Log each failure, also one that a
        pass has logged; raise none."""
        self._said = SaidOnce()
        self._returned.clear()
        return self._guarded(self._stop, self._complain)

    def _guarded(
        self, work: Callable[[Switcher], bool], locked: Callable[[VsrtuneError], None]
    ) -> bool:
        """What ``work`` returns; True when there is nothing to do, False after a failure.
        ``locked`` is called when another process holds the ledger."""
        try:
            # Check without the lock first: on most hosts there is nothing to do, and the
            # pass costs nothing.
            wanted = any(p.attachment is not None for p in self._policies or ())
            if not wanted and not read_pending(self._path):
                return True
            with AttachLedger.open(self._path, wait=0) as ledger:
                switcher = Switcher(self._host, ledger, self._boot, PATIENCE, tries=1)
                return self._tidy(switcher) and work(switcher)
        except LockedError as error:
            locked(error)
        except VsrtuneError as error:
            self._complain(error)
        return False

    def _tidy(self, switcher: Switcher) -> bool:
        """Recover, or keep the devices; False when a switch is still unfinished."""
        if switcher.unfinished():
            failures = switcher.recover()
            if not failures:
                LOGGER.warning("an interrupted switch of attachments was taken back")
            # Several steps may fail for one reason.
            for error in {str(failure): failure for failure in failures}.values():
                self._complain(error)
        else:
            self._tell(switcher.sweep())
        left = switcher.unfinished()
        self._pause = self._pause.longer(self._host.clock()) if left else Pause()
        return not left

    def _follow(self, switcher: Switcher) -> bool:
        """Switch guests as the policies ask; True when every switch succeeded."""
        policies = self._policies or ()
        host = self._survey(switcher)
        back = self._due_back(switcher, host, policies)
        clean = self._take_back(switcher, back)
        if back:
            host = self._survey(switcher)
        found = batches(host, policies)
        there = set(wanted(host, policies)) - {name for b in found for name in b.guests}
        self._settled |= there
        for batch in found:
            names = ", ".join(batch.guests)
            if self._settled & set(batch.guests):
                if self._said.new(("held", batch.guests)):
                    LOGGER.warning(
                        "%s left alone: not on %s, and had its turn; a reload switches it",
                        names,
                        batch.to,
                    )
            else:
                self._settled |= set(batch.guests)
                clean &= self._carry_out(switcher, batch)
        return clean

    def _stop(self, switcher: Switcher) -> bool:
        if not any(o.by_policy for o in switcher.origins()):
            return True  # libvirt need not be asked
        return self._take_back(switcher, self._due_back(switcher, self._survey(switcher), ()))

    def _survey(self, switcher: Switcher) -> AttachHostState:
        return survey(self._host, switcher.origins(), self._journal)

    def _due_back(
        self, switcher: Switcher, host: AttachHostState, policies: Sequence[Policy]
    ) -> list[Batch]:
        found = taken_back(host, switcher.origins(), policies)
        return [batch for batch in found if not self._returned & set(batch.guests)]

    def _take_back(self, switcher: Switcher, due: Sequence[Batch]) -> bool:
        self._returned |= {name for batch in due for name in batch.guests}
        clean = [self._carry_out(switcher, batch) for batch in due]
        return all(clean)

    def _carry_out(self, switcher: Switcher, batch: Batch) -> bool:
        names = ", ".join(batch.guests)
        if batch.switch is None:
            if batch.error is not None:
                self._complain(batch.error)
            # Nothing was touched: every pass tries again.
            self._settled -= set(batch.guests)
            self._returned -= set(batch.guests)
            return False
        LOGGER.info("switching %s to %s (%s)", names, batch.to, batch.reason)
        try:
            self._tell(switcher.carry_out(batch.switch))
        except VsrtuneError as error:
            self._complain(error)
            return False
        LOGGER.info("%s: on %s now", names, batch.to)
        return True

    def _tell(self, swept: Swept) -> None:
        for text in swept.did:
            LOGGER.info("%s", text)
        for error in swept.failed:
            self._complain(error)

    def _complain(self, error: VsrtuneError) -> None:
        if self._said.new(("attachment", str(error))):
            LOGGER.error("attachments: %s", error, extra=fields(error=error))


def _wait_for(error: VsrtuneError) -> None:
    """What a pass does when another process holds the ledger: a switch is under way."""
    LOGGER.debug("attachments: %s", error)
