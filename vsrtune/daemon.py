"""The daemon's loop: things get dirty, a pass cleans up; stop undoes everything.

Signal handlers and libvirt's event thread only set flags and wake the loop. The
loop is the only place where work is done, and the only one that pings the
watchdog, so a pass that hangs is noticed.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType

from vsrtune import report
from vsrtune.errors import VsrtuneError
from vsrtune.log import LOGGER, fields
from vsrtune.policy import Policy
from vsrtune.reconcile import Reconciler
from vsrtune.sdnotify import Notifier
from vsrtune.state import State
from vsrtune.wakeup import Wakeup

# Events come in bursts (a starting guest gives several); wait until they pause.
DEBOUNCE = 0.3
# A pass begins at the earliest this long after the last one, so that software which
# keeps changing our settings back costs a bounded share of a CPU.
GAP = 1.0


@dataclass(frozen=True)
class Timing:
    """Seconds: rescan at least every ``interval``; see DEBOUNCE and GAP."""

    interval: float = 10.0
    debounce: float = DEBOUNCE
    gap: float = GAP


class Daemon:
    """Runs passes until told to stop.

    ``load`` reads the policies afresh and raises PolicyError; ``publish`` receives
    the state after every pass; ``prepare`` is called before each, with the policies,
    and ``finish`` before everything is undone, True when it could do its part.
    """

    def __init__(
        self,
        reconciler: Reconciler,
        load: Callable[[], tuple[Policy, ...]],
        notifier: Notifier,
        *,
        publish: Callable[[State], None] = lambda _state: None,
        prepare: Callable[[tuple[Policy, ...]], None] = lambda _policies: None,
        finish: Callable[[], bool] = lambda: True,
        timing: Timing | None = None,
        keep: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reconciler = reconciler
        self._load = load
        self._notifier = notifier
        self._publish = publish
        self._prepare = prepare
        self._finish = finish
        self._timing = timing or Timing()
        self._keep = keep
        self._clock = clock
        self._wake = Wakeup()
        self._stop_asked = False
        self._reload_asked = False
        self._dirty = False
        self._reload_success = True
        self._confirm = False

    # -- flags, set from anywhere

    def mark_dirty(self, reason: str) -> None:
        """Something may have changed; callable from any thread."""
        LOGGER.debug("dirty: %s", reason)
        self._dirty = True
        self._wake.set()

    def ask_stop(self, _signal: int = 0, _frame: FrameType | None = None) -> None:
        """Stop after the current pass; also the handler of SIGTERM and SIGINT."""
        self._stop_asked = True
        self._wake.set()

    def ask_reload(self, _signal: int = 0, _frame: FrameType | None = None) -> None:
        """Read the policies again; also the handler of SIGHUP."""
        self._reload_asked = True
        self._wake.set()

    def install_signals(self) -> None:
        """Route SIGTERM, SIGINT and SIGHUP to the flags.

        The wake-up descriptor closes a gap: a signal between the last look at the flags
        and select(2) would else be handled only when select times out.
        """
        signal.set_wakeup_fd(self._wake.fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self.ask_stop)
        signal.signal(signal.SIGINT, self.ask_stop)
        signal.signal(signal.SIGHUP, self.ask_reload)

    # -- the loop

    def run(self) -> int:
        """Run until asked to stop; the exit code (1 when something could not be undone)."""
        self._reconciler.recover()
        self._pass(settle=True)
        self._notifier.ready()
        LOGGER.info("ready: %s", self._status())
        while not self._stop_asked:
            self._sleep()
            if self._stop_asked:
                break
            if self._reload_asked:
                self._reload()
            else:
                self._pass()
        return self._end()

    def _pass(self, *, settle: bool = False, reassert: bool = False) -> None:
        self._dirty = False
        self._prepare(self._reconciler.policies)
        wrote = self._reconciler.run(settle=settle, reassert=reassert)
        # One more look after a pass that wrote: the state then shows what is, not what
        # was. Not after that look, or two rivals would keep each other busy.
        self._confirm = wrote and not self._confirm
        state = replace(self._reconciler.state, reload_success=self._reload_success)
        self._publish(state)
        self._notifier.status(self._status())
        self._notifier.ping()

    def _status(self) -> str:
        state = self._reconciler.state
        extra = []
        if not self._reload_success:
            extra.append("the last reload failed, older policies are kept")
        elif not state.policies:
            extra.append("no policy")
        return report.status_line(state.tuned, state.drift, extra)

    def _reload(self) -> None:
        self._reload_asked = False
        self._notifier.reloading()
        LOGGER.info("reading the policies again")
        try:
            self._reconciler.policies = self._load()
            self._reload_success = True
        except (VsrtuneError, OSError) as error:
            self._reload_success = False
            for one in getattr(error, "errors", None) or (error,):
                LOGGER.error("%s", one, extra=fields(error=one))
            LOGGER.error("the policies were not reloaded; the older ones stay in force")
        # A reload asks for the policies: pins set by hand in the meantime give way,
        # unless there is nothing valid to ask for.
        self._pass(settle=self._reload_success, reassert=self._reload_success)
        self._notifier.ready()

    def _sleep(self) -> None:
        """Until a flag, the interval, or a retry; pings the watchdog meanwhile."""
        begin = self._clock()
        earliest = begin + self._timing.gap
        latest = begin + self._timing.interval
        retry = self._reconciler.next_try()
        if retry is not None:
            latest = min(latest, begin + retry)
        if self._confirm:
            latest = earliest
        slice_ = (self._notifier.watchdog_seconds or 90.0) / 3
        while not (self._stop_asked or self._reload_asked):
            now = self._clock()
            due = earliest if self._dirty else max(earliest, latest)
            if now >= due:
                return
            woken = self._wake.wait(min(due - now, slice_))
            self._notifier.ping()
            if woken and self._dirty:
                self._settle_burst()

    def _settle_burst(self) -> None:
        """Wait until events pause, ten times the debounce at most."""
        for _ in range(10):
            if self._stop_asked or self._reload_asked:
                return
            if not self._wake.wait(self._timing.debounce):
                return

    def _end(self) -> int:
        self._notifier.stopping()
        if self._keep:
            LOGGER.info("stopping; the host stays tuned, `vsrtune undo` puts it back")
            return 0
        LOGGER.info("stopping: putting the host back")
        clean = self._finish()
        clean = self._reconciler.stop() and clean
        if not clean:
            LOGGER.error("not everything could be put back; `vsrtune undo` tries again")
        return 0 if clean else 1
