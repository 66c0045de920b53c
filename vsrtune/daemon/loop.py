# SPDX-License-Identifier: GPL-2.0-or-later
"""The daemon's loop: things get dirty, a pass cleans up; stop undoes everything.

Signal handlers and event threads only set flags and wake the loop. Only the loop's
thread does the work and pings the watchdog, so a pass that hangs is noticed. Switches of
attachments, which wait for guests, have a thread of their own.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType

from vsrtune.core.errors import VsrtuneError
from vsrtune.core.exit_codes import ExitCode
from vsrtune.daemon.attachments import AttachThread
from vsrtune.daemon.events.changes import Change
from vsrtune.daemon.reconciler import Reconciler
from vsrtune.daemon.scope import FULL, NOTHING, UNANNOUNCED, Scope
from vsrtune.daemon.systemd import LOGGER, Notifier, log_each
from vsrtune.model.daemon_state import DaemonState, GroupGuest, Starved
from vsrtune.model.stepdown import StepLevel
from vsrtune.policy.model import WITHOUT_LIBVIRT, Policy
from vsrtune.views import tables

# Events come in bursts (a starting guest gives several); wait until they pause.
DEBOUNCE = 0.3
# Minimum pause between two passes: software that keeps changing our settings back costs
# a bounded share of a CPU.
GAP = 1.0
# A setting that another program changes is looked at once its changes pause for this long.
HURRY = 0.01
# The most changes that wait for a pass.
CHANGES = 4096
# The services that set what a pass asks libvirt for.
LIBVIRT = ("libvirtd.service", "virtqemud.service")
# Policy files are read once none has changed for this long, because several may change at once.
POLICY_PAUSE = 1.0


@dataclass(frozen=True)
class Timing:
    """Seconds: rescan at least every ``interval``; see DEBOUNCE, GAP and POLICY_PAUSE."""

    interval: float = 10.0
    debounce: float = DEBOUNCE
    gap: float = GAP
    policy_pause: float = POLICY_PAUSE


class Daemon:
    """Runs passes until told to stop.

    ``load`` reads the policies afresh and raises PolicyError. ``attachments`` switches
    attachments beside the passes, and back before everything is undone. ``publish``
    receives the state after every pass, and when other threads starve or cease to.
    """

    def __init__(
        self,
        reconciler: Reconciler,
        load: Callable[[], tuple[Policy, ...]],
        notifier: Notifier,
        *,
        attachments: AttachThread | None = None,
        publish: Callable[[DaemonState], None] = lambda _state: None,
        timing: Timing | None = None,
        keep: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reconciler = reconciler
        self._load = load
        self._notifier = notifier
        self._attachments = attachments
        self._publish = publish
        self._timing = timing or Timing()
        self._keep = keep
        self._clock = clock
        self._wake = Wakeup()
        self._stop_requested = False
        # Whether the host is to be put back; otherwise the stop is a handover.
        self._restore = False
        self._reload_requested = False
        self._files_changed = False
        # Other threads append, the loop empties: deque does both atomically.
        self._dirty: deque[Scope] = deque()
        # Guests that the guard wants stepped down, and why.
        self._steps: deque[tuple[str, str, StepLevel]] = deque()
        # Starving threads of others, and those last published.
        self._starved: tuple[Starved, ...] = ()
        self._told: tuple[Starved, ...] = ()
        # The guests of watched groups.
        self._groups: tuple[GroupGuest, ...] = ()
        self._groups_told: tuple[GroupGuest, ...] = ()
        # When the next pass for changes without events is due.
        self._turn = 0.0
        # When what passes for events come before is due.
        self._put_off = math.inf
        self._reload_success = True
        self._confirm = False
        # Changes by other programs, as for _dirty; the scope of the hurried pass that they ask for,
        # and when it and when any other pass may begin; and when the last pass that wrote began
        # and ended.
        self._changes: deque[Change] = deque(maxlen=CHANGES)
        self._hurried = NOTHING
        self._hurry_from = 0.0
        self._from = 0.0
        self._wrote = 0.0, 0.0

    # -- flags, set from anywhere

    def mark_dirty(self, reason: str, guest: str | None = None) -> None:
        """Note that something may have changed; callable from any thread. ``guest`` is the
        libvirt name of the guest concerned, None the host or something unknown."""
        LOGGER.debug("dirty: %s", reason)
        self._dirty.append(Scope.of(guest))
        self._wake.set()

    def changed(self, change: Change) -> None:
        """Note a change by another program; callable from any thread."""
        self._changes.append(change)
        self._wake.set()

    def step_down(self, guest: str, why: str, seen: StepLevel) -> None:
        """Ask to step a guest down by one level at once; callable from any thread.
        ``guest`` is the name its policy uses, ``seen`` as in Reconciler.step_down."""
        self._steps.append((guest, why, seen))
        self._wake.set()

    def starving(self, starved: tuple[Starved, ...]) -> None:
        """Note which threads of others starve; callable from any thread."""
        self._starved = starved
        self._wake.set()

    def watched(self, guests: tuple[GroupGuest, ...]) -> None:
        """Note how the guests of watched groups are; callable from any thread."""
        self._groups = guests
        self._wake.set()

    def policies_changed(self, reason: str) -> None:
        """Note that policy files may have changed; callable from any thread."""
        LOGGER.debug("policies: %s", reason)
        self._files_changed = True
        self._wake.set()

    def ask_stop(self, _signal: int = 0, _frame: FrameType | None = None) -> None:
        """Stop after the current pass, and put the host back; also the handler of SIGTERM and
        SIGINT. A handover that is asked for before or after changes nothing about that."""
        self._restore = self._stop_requested = True
        self._wake.set()

    def ask_handover(self, _signal: int = 0, _frame: FrameType | None = None) -> None:
        """Stop, and leave the host and the journal to the next daemon; also the handler of
        SIGUSR2, which an upgrade of the package sends."""
        self._stop_requested = True
        self._wake.set()

    def ask_reload(self, _signal: int = 0, _frame: FrameType | None = None) -> None:
        """Read the policies again; also the handler of SIGHUP."""
        self._reload_requested = True
        self._wake.set()

    def install_signals(self) -> None:
        """Route SIGTERM, SIGINT, SIGHUP and SIGUSR2 to the flags.

        The wake-up descriptor closes a gap: otherwise a signal between the last check of
        the flags and select(2) is handled only when select times out.
        """
        signal.set_wakeup_fd(self._wake.fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self.ask_stop)
        signal.signal(signal.SIGINT, self.ask_stop)
        signal.signal(signal.SIGHUP, self.ask_reload)
        signal.signal(signal.SIGUSR2, self.ask_handover)

    # -- the loop

    def run(self) -> ExitCode:
        """Run until asked to stop. Return DONE, FAILED when something could not be undone,
        or HANDED_OVER. An error that is no VsrtuneError is raised, and the host stays tuned for
        the next daemon, which systemd starts. This one puts the host back first after a stop was
        requested, because no daemon follows, and before a pass has shown the guard what to watch,
        because the next daemon may fail in the same way."""
        self._reconciler.recover()
        try:
            self._work()
        except Exception:
            if not self._stop_requested:
                if self._reconciler.state.snapshot is None:
                    LOGGER.error(
                        "the first pass failed: what an earlier run left tuned is put back, "
                        "because nobody guards it"
                    )
                    self._reconciler.stop()
                raise
            LOGGER.exception("a pass failed while the daemon was told to stop; it stops")
        return self._end()

    def put_back(self) -> ExitCode:
        """Put back what an earlier run has left, as a stop does, in place of ``run``. Return DONE,
        or FAILED when something could not be undone."""
        self.ask_stop()
        self._reconciler.recover()
        return self._end()

    def _work(self) -> None:
        """Run passes until asked to stop."""
        self._pass(FULL)
        self._notifier.ready()
        LOGGER.info("ready: %s", self._status())
        while not self._stop_requested:
            scope = self._sleep()
            if self._stop_requested:
                break
            if self._reload_requested:
                self._reload()
            elif self._steps:
                self._step_down()
            elif self._files_changed:
                self._follow_files()
            else:
                self._pass(scope)

    def _pass(self, scope: Scope, *, anew: bool = False) -> None:
        """Run one pass over ``scope`` and over what events marked dirty. ``anew``: the policies
        were loaded again."""
        self._hear_changes()
        while self._dirty and not scope.hurried:
            scope = scope.merge(self._dirty.popleft())
        begin = self._clock()
        if self._attachments is not None:
            self._attachments.update(self._reconciler.policies, anew=anew)
        wrote = self._reconciler.run(scope)
        end = self._clock()
        if wrote:
            self._wrote = begin, end
        # Neither kind of pass keeps the other from its turn.
        if scope.hurried:
            # Whoever calls the kernel in a loop gets a fifth of the daemon's time.
            self._hurry_from = end + max(self._timing.gap, 4 * (end - begin))
        else:
            self._from = end + self._timing.gap
        if scope.host or scope.unannounced:
            self._turn = self._clock() + self._timing.interval
        # One more pass follows a pass that wrote: the state then shows what is, not what
        # was. None follows that one, or two rivals would keep each other busy.
        self._confirm = wrote and not self._confirm
        self._tell()
        self._notifier.ping()

    def _hear_changes(self) -> None:
        """Tell the reconciler who changed what. What libvirt changes while a pass writes, the pass
        has asked for, or the pass that follows it finds."""
        begin, end = self._wrote
        while self._changes:
            change = self._changes.popleft()
            if not (begin <= change.culprit.when <= end and change.culprit.unit in LIBVIRT):
                self._reconciler.blame(change.place, change.culprit)
                self._hurried = self._hurried.merge(_hurried(change))

    def _tell(self) -> None:
        self._told, self._groups_told = self._starved, self._groups
        state = self._reconciler.state
        self._publish(
            replace(
                state,
                reload_success=self._reload_success,
                starved=self._told,
                groups=self._groups_told,
            )
        )
        self._notifier.status(self._status())

    def _status(self) -> str:
        state = self._reconciler.state
        extra = []
        if not self._reload_success:
            extra.append("the last reload failed, older policies are kept")
        elif not state.policies:
            extra.append("no policy")
        down = sum(g.step is not None for g in state.guests)
        if down:
            extra.append(f"{down} stepped down")
        if state.failure:
            extra.append("the last pass failed, the log says why")
        return tables.status_line(state.tuned, state.drift, extra)

    def _step_down(self) -> None:
        scope = NOTHING
        while self._steps:
            guest, why, seen = self._steps.popleft()
            self._reconciler.step_down(guest, why, seen)
            scope = scope.merge(FULL if guest.startswith(WITHOUT_LIBVIRT) else Scope.of(guest))
        self._pass(scope)

    def _reload(self) -> None:
        self._reload_requested = False
        self._files_changed = False
        self._notifier.reloading()
        LOGGER.info("reading the policies again")
        policies = self._read()
        if policies is not None:
            # Policies that are wrong overrule nothing.
            self._reconciler.reload(policies)
            self._reconciler.forget_steps()
        self._pass(FULL, anew=policies is not None)
        self._notifier.ready()

    def _follow_files(self) -> None:
        """Read changed policy files as a reload does. Files that say what is in force already, as
        after a reload by hand or with a new comment, only give messages their names and lines."""
        self._files_changed = False
        policies = self._read()
        if policies is None:
            self._tell()
            return
        if frozenset(policies) == frozenset(self._reconciler.policies):
            self._reconciler.policies = policies
            self._pass(FULL)
            return
        LOGGER.info("policy files have changed")
        self._notifier.reloading()
        self._reconciler.reload(policies)
        self._pass(FULL, anew=True)
        self._notifier.ready()

    def _read(self) -> tuple[Policy, ...] | None:
        """Read the policies from the files. Log the errors and return None when one is wrong."""
        try:
            policies = self._load()
        except (VsrtuneError, OSError) as error:
            self._reload_success = False
            log_each(error)
            LOGGER.error("the policies were not reloaded; the older ones stay in force")
            return None
        finally:
            # Reading YAML leaves much garbage in cycles, which would stay for days.
            gc.collect()
        self._reload_success = True
        return policies

    def _sleep(self) -> Scope:
        """Sleep until a flag, the interval or a retry, and ping the watchdog meanwhile. Return
        the scope of the next pass beyond what events marked dirty."""
        begin = self._clock()
        latest = self._turn
        retry = self._reconciler.next_try()
        if retry is not None:
            latest = min(latest, begin + retry)
        if self._confirm:
            latest = min(latest, begin + self._timing.gap)
        if retry is not None or self._confirm:
            # Passes for events, however many, put nothing off.
            latest = min(latest, self._put_off)
        self._put_off = latest
        slice_ = (self._notifier.watchdog_seconds or 90.0) / 3
        while not self._urgent:
            if self._files_changed:
                self._settle_burst(self._timing.policy_pause)
                return NOTHING
            now = self._clock()
            self._hear_changes()
            due = self._from if self._dirty else max(self._from, latest)
            if self._hurried and now >= self._hurry_from:
                scope, self._hurried = self._hurried, NOTHING
                return scope
            if now >= due:
                scope = NOTHING
                if now >= latest:
                    scope, self._put_off = self._reconciler.again(), math.inf
                return scope.merge(UNANNOUNCED) if now >= self._turn else scope
            if self._starved is not self._told or self._groups is not self._groups_told:
                self._tell()
            if self._hurried:
                due = min(due, self._hurry_from)
            woken = self._wake.wait(min(due - now, slice_))
            self._notifier.ping()
            if woken:
                self._settle_burst()
        return NOTHING

    @property
    def _urgent(self) -> bool:
        """Whether something is due that waits for no pause."""
        return self._stop_requested or self._reload_requested or bool(self._steps)

    def _settle_burst(self, pause: float | None = None) -> None:
        """Wait until events pause for ``pause`` seconds, at most ten times as long; by default as
        long as what is marked dirty asks for."""
        for _ in range(10):
            self._hear_changes()
            asked = HURRY if self._hurried else self._timing.debounce if self._dirty else 0.0
            if self._urgent or not self._wake.wait(asked if pause is None else pause):
                return

    def _end(self) -> ExitCode:
        self._notifier.stopping()
        if self._attachments is not None and (self._keep or not self._restore):
            self._attachments.finish(forget=self._restore)
        if not self._restore:
            LOGGER.info("handing over: the host stays tuned for the next daemon")
            return ExitCode.HANDED_OVER
        if self._keep:
            LOGGER.info("stopping; the host stays tuned, `vsrtune undo` puts it back")
            # The operator who starts the daemon again asks for the policies.
            self._reconciler.forget_steps()
            return ExitCode.DONE
        LOGGER.info("stopping: putting the host back")
        clean = self._switched_back()
        clean = self._reconciler.stop() and clean
        if not clean:
            LOGGER.error("not everything could be put back; `vsrtune undo` tries again")
        return ExitCode.DONE if clean else ExitCode.FAILED

    def _switched_back(self) -> bool:
        """Switch guests back; True when all are. Log any error: the settings come back too."""
        try:
            return self._attachments is None or self._attachments.stop()
        except Exception:
            LOGGER.exception(
                "guests may still be on the attachment of a policy; the settings are put back "
                "even so, and `vsrtune undo` tries the guests again"
            )
            return False


def _hurried(change: Change) -> Scope:
    # What else libvirt does with a pin, it does before the event that it then sends.
    return replace(change.scope, hurried=True, places=frozenset([change.place]))


class Wakeup:
    """``set`` from anywhere makes the current or next ``wait`` return."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def fd(self) -> int:
        """The end to write to, for signal.set_wakeup_fd."""
        return self._write

    def set(self) -> None:
        """Wake the waiter; safe in signal handlers and threads."""
        # In a full pipe of unread wake-ups one is enough.
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b"\0")

    def wait(self, seconds: float) -> bool:
        """Sleep at most ``seconds``; True when woken. Forget all earlier wake-ups."""
        ready, _, _ = select.select([self._read], [], [], max(0.0, seconds))
        if not ready:
            return False
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass
        return True
