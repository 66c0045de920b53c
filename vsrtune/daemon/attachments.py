# SPDX-License-Identifier: GPL-2.0-or-later
"""The daemon's work on attachments: recover, keep the devices, follow the policies.

A switch belongs to whoever holds its ledger. When a free ledger holds a switch, the process
of the switch died, and the daemon takes the switch back.

Nothing flaps: the daemon switches a guest for its policy once. When the switch fails, or
somebody switches the guest by hand afterwards, the daemon leaves the guest alone until the
policies are loaded again. So does the next daemon after an upgrade or a crash.

This runs in a thread of its own. A switch takes as long as its guests like, and a QEMU need not
answer at all; the loop tunes the others meanwhile.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from vsrtune.attach.errors import SwitchError
from vsrtune.attach.host import LiveHost
from vsrtune.attach.ledger import AttachLedger
from vsrtune.attach.plan.model import Switch
from vsrtune.attach.plan.requests import Batch, batches, wanted
from vsrtune.attach.plan.steps import Card
from vsrtune.attach.signals import Interrupted
from vsrtune.attach.survey import survey
from vsrtune.attach.sweep import Swept
from vsrtune.attach.transaction import Switcher
from vsrtune.core.codec import decode, encode
from vsrtune.core.errors import VsrtuneError
from vsrtune.core.retry import Pause, SaidOnce
from vsrtune.core.untrusted import json_value
from vsrtune.daemon.events.thread import survive
from vsrtune.daemon.systemd import LOGGER, fields
from vsrtune.execute.jsonl_log import LockedError
from vsrtune.execute.ledger import read_pending
from vsrtune.host.state_files import read_file, replace_volatile
from vsrtune.model.guest import Attachment
from vsrtune.policy.model import Policy

SETTLED_PATH = Path("/run/vsrtune/settled.json")
# A pass waits at most this many seconds for libvirt; the next one tries again.
PATIENCE = 2.0
# A stop waits this many seconds for a switch to succeed. A guest that releases nothing has 30 s to
# do so when it is switched, and once more when that is taken back.
END_SECONDS = 90.0
# The loop pings this often while it waits.
_PULSE = 1.0


class AttachKeeper:
    """Maintains the ledger at ``path``; ``journal`` tells which queues the daemon set. ``kept`` is
    the file of what the next daemon has to know."""

    def __init__(
        self,
        path: Path,
        journal: Path,
        host: LiveHost,
        boot: str,
        kept: Path,
    ) -> None:
        self._path = path
        self._journal = journal
        self._host = host
        self._boot = boot
        self._said = SaidOnce()
        self._policies: tuple[Policy, ...] = ()
        self._kept = kept
        # The guests (UUIDs) that had their turn since the policies were loaded, and what was asked
        # for. Another guest may get the name of one that is gone.
        self._settled: Mapping[str, Attachment] = {}
        with suppress(OSError, ValueError, VsrtuneError):
            self._settled = decode(dict[str, Attachment], json_value(read_file(kept)))
        # Without another try to take a switch back. Each takes a guest's interfaces away and
        # keeps others from the ledger.
        self._pause = Pause()
        # What guests got back of a switch that is not all taken back.
        self._given: set[Card] = set()
        self._interrupted = False
        # How many switches were carried out or taken back.
        self.succeeded = 0

    def update(self, policies: tuple[Policy, ...], *, anew: bool = False) -> None:
        """Run one pass. ``anew``: the policies were loaded again, which gives each guest another
        turn. Log each failure once while it lasts; raise none."""
        self._policies = policies
        if anew:
            self.forget()
        elif self._pause.left(self._host.clock()):
            return
        self._guarded(self._follow, _wait_for)
        self._said.end_of_pass()

    def interrupt(self) -> None:
        """Have a switch that is under way taken back, and begin none until ``stop`` does; callable
        from any thread."""
        self._interrupted = True

    def forget(self) -> None:
        """Have each guest switched for its policy once more."""
        self._settle({})

    def stop(self) -> bool:
        """Switch back what policies had switched, guests included that a pass could not switch
        back. True when every such guest is known to be back. Log each failure, also one that a
        pass has logged; raise none."""
        self._said = SaidOnce()
        self.forget()
        self._interrupted = False
        try:
            return self._guarded(self._stop, self._complain)
        finally:
            self.forget()

    def _settle(self, settled: Mapping[str, Attachment]) -> None:
        if settled != self._settled:
            self._settled = settled
            with suppress(OSError):
                replace_volatile(self._kept, json.dumps(encode(settled)).encode(), 0o600)

    def _guarded(
        self, work: Callable[[Switcher], bool], locked: Callable[[VsrtuneError], None]
    ) -> bool:
        """What ``work`` returns; True when there is nothing to do, False after a failure.
        ``locked`` is called when another process holds the ledger."""
        try:
            # Check without the lock first: on most hosts there is nothing to do, and the
            # pass costs nothing.
            wanted = any(p.attachment is not None for p in self._policies)
            if not wanted and not read_pending(self._path):
                return True
            with AttachLedger.open(self._path, wait=0) as ledger:
                switcher = Switcher(
                    self._host,
                    ledger,
                    self._boot,
                    PATIENCE,
                    tries=1,
                    check=self._check,
                    given=self._given,
                )
                return self._tidy(switcher) and work(switcher)
        except LockedError as error:
            locked(error)
        except Interrupted as error:
            LOGGER.info("attachments: %s", error)
        except VsrtuneError as error:
            self._complain(error)
        return False

    def _tidy(self, switcher: Switcher) -> bool:
        """Recover, or keep the devices; False when a switch is still unfinished."""
        if switcher.unfinished():
            failures = switcher.recover()
            if not failures:
                self.succeeded += 1
                LOGGER.warning("an interrupted switch of attachments was taken back")
            # Several steps may fail for one reason.
            for error in {str(failure): failure for failure in failures}.values():
                self._complain(error)
        else:
            self._tell(switcher.sweep())
        left = switcher.unfinished()
        if not left:
            self._given.clear()
        self._pause = self._pause.longer(self._host.clock()) if left else Pause()
        return not left

    def _check(self) -> None:
        if self._interrupted:
            raise Interrupted("interrupted, because the daemon stops")

    def _follow(self, switcher: Switcher) -> bool:
        """Switch guests as the policies ask; True when every switch succeeded."""
        return self._switch(switcher, self._policies)

    def _stop(self, switcher: Switcher) -> bool:
        if not any(o.by_policy for o in switcher.origins()):
            return True  # libvirt need not be asked
        return self._switch(switcher, ())

    def _switch(self, switcher: Switcher, policies: Sequence[Policy]) -> bool:
        origins = switcher.origins()
        host = survey(self._host, origins, self._journal)
        asked = wanted(host, origins, policies)
        found = batches(host, asked)
        moving = {name for batch in found for name in batch.guests}
        still = [g for g in host.guests if g.name in asked.keys() - moving]
        there = {guest.uuid: asked[guest.name][0] for guest in still}
        self._settle({**self._settled, **there})
        clean = True
        for batch in found:
            names = ", ".join(batch.guests)
            if batch.switch is None:
                # Nothing was touched: every pass tries again.
                if batch.error is not None:
                    self._complain(batch.error)
                clean = False
            elif any(self._settled.get(m.uuid) is batch.to for m in batch.switch.moves):
                if self._said.new(("held", batch.guests)):
                    LOGGER.warning(
                        "%s left alone: not on %s, and had its turn; a reload switches it",
                        names,
                        batch.to,
                    )
            else:
                clean &= self._carry_out(switcher, batch, batch.switch)
        return clean

    def _carry_out(self, switcher: Switcher, batch: Batch, switch: Switch) -> bool:
        self._check()
        names = ", ".join(batch.guests)
        self._settle({**self._settled, **{move.uuid: batch.to for move in switch.moves}})
        LOGGER.info("switching %s to %s (%s)", names, batch.to, batch.reason)
        for note in switch.notes:
            LOGGER.warning("%s", note)
        try:
            self._tell(switcher.carry_out(switch))
        except VsrtuneError as error:
            if isinstance(error, SwitchError) and error.interrupted and error.put_back:
                LOGGER.info("%s: %s", names, error)
            else:
                self._complain(error)
            return False
        self.succeeded += 1
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


class AttachThread:
    """Has an AttachKeeper work beside the loop, which calls these methods. ``pulse`` is called
    while they wait."""

    def __init__(self, keeper: AttachKeeper, pulse: Callable[[], None]) -> None:
        self._keeper = keeper
        self._pulse = pulse
        self._policies: tuple[Policy, ...] = ()
        self._anew = False
        self._due = threading.Event()
        self._finish = False
        self._finished = threading.Event()
        # Whether the guests are to be switched back, and then whether they are.
        self._back = False
        self._clean = False
        self._thread = threading.Thread(target=self._run, name="attachments", daemon=True)
        self._thread.start()

    def update(self, policies: tuple[Policy, ...], *, anew: bool = False) -> None:
        """Have the keeper run a pass. While one runs, the next one follows it."""
        self._policies = policies
        if anew:
            self._anew = True
        self._due.set()

    def finish(self, *, forget: bool) -> None:
        """Begin nothing more, and wait for the end of what is under way. ``forget``: the next
        daemon begins anew, not where this one ends."""
        self._finish = True
        self._due.set()
        if not self._wait(self._finished.wait):
            LOGGER.warning(
                "a switch of attachments is still under way; the next daemon takes it back, or "
                "`vsrtune attach --recover`"
            )
        if forget:
            self._keeper.forget()

    def stop(self) -> bool:
        """Have a switch that is under way taken back, and guests switched back as the keeper does.
        False when that has failed, or takes too long because of a guest."""
        # Not after the keeper has begun to switch back, which would end that too.
        self._keeper.interrupt()
        self._back = True
        self._due.set()
        if self._wait(self._ended):
            return self._clean
        # It goes on until this process ends, and begins nothing more.
        self._keeper.interrupt()
        LOGGER.error(
            "attachments: guests are not switched back, because none of them has let itself be "
            "switched for %g s; the settings are put back even so, and `vsrtune undo` tries the "
            "guests again",
            END_SECONDS,
        )
        return False

    def _ended(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _wait(self, over: Callable[[float], bool]) -> bool:
        """Wait until ``over``, which waits for so many seconds, is true. False when that takes too
        long, and meanwhile no switch has succeeded."""
        succeeded, waited = self._keeper.succeeded, 0.0
        while not over(_PULSE):
            self._pulse()
            waited += _PULSE
            if self._keeper.succeeded != succeeded:
                succeeded, waited = self._keeper.succeeded, 0.0
            elif waited >= END_SECONDS:
                return False
        return True

    def _run(self) -> None:
        said = SaidOnce()
        while not self._back:
            if self._finish:
                self._finished.set()
            self._due.wait()
            self._due.clear()
            if self._finish or self._back:
                continue
            # Read before the policies, because it is set after them.
            anew = self._anew
            if anew:
                self._anew = False
            # The guests are to be switched back in the end.
            survive(
                partial(self._keeper.update, self._policies, anew=anew),
                "attachments are not kept up",
                said,
            )
        try:
            self._clean = self._keeper.stop()
        except Exception:
            LOGGER.exception("guests may still be on the attachment of a policy")
