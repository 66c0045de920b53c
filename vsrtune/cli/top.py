# SPDX-License-Identifier: GPL-2.0-or-later
"""``vsrtune top``: the host, live."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from vsrtune.cli.options import (
    Duration,
    chosen,
    curious_filter,
    look_options,
    options,
    readable,
    readable_policies,
    uri_option,
)
from vsrtune.cli.render import print_json, show
from vsrtune.core.exit_codes import ExitCode
from vsrtune.host.filesystem import HostRoot, LiveRoot
from vsrtune.host.recorded import load
from vsrtune.model.load import HostSample
from vsrtune.model.snapshot import Snapshot
from vsrtune.observe import samples
from vsrtune.observe.load import with_loads
from vsrtune.observe.observer import Observer, live_observer
from vsrtune.views import top_tables
from vsrtune.views.top_frame import Frame, make_frame

# Guests that each frame is sure to re-read: more do not fit on a terminal.
_SHOWN = 16


@click.command()
@options(
    click.option(
        "--interval",
        type=Duration(0.1, 3600),
        default="2s",
        show_default=True,
        metavar="TIME",
        help="Time between two frames; loads and rates are over this time.",
    ),
    click.option("--once", is_flag=True, help="Show one frame, after one interval, and end."),
    click.option("--count", type=click.IntRange(1), metavar="N", help="End after so many frames."),
)
@look_options
@options(uri_option)
def top(
    interval: float,
    once: bool,
    count: int | None,
    guests: tuple[str, ...],
    as_json: bool,
    wide: bool,
    policy_dirs: tuple[Path, ...],
    root: Path | None,
    uri: str,
) -> int:
    """Watch CPUs, threads, drops and budgets, live.

    Shows what sits on each CPU, and which of them serve interrupts; for each thread that
    handles frames the CPU it is on, its load, and how long it waited for a CPU; where
    frames are dropped; how much of their budgets DEADLINE threads use. It changes nothing.

    The busiest guests come first. q or Ctrl-C ends it. On anything but a terminal frames
    are plain text, and nothing is left out, as with --wide; --json prints one frame. With
    --guest, threads and drops are those of these guests.

    \b
    Exit codes: 0 shown, 1 no such guest, 4 the host could not be read.
    """
    single = once or as_json
    host = TopHost(root, uri, policy_dirs)
    only = frozenset(guests)
    try:
        if single or wide or not _is_screen():
            frames = _frames(host, only, interval, Keys())
            _print(frames, 1 if single else count, as_json, wide)
        else:
            return _watch(host, only, interval, count)
    except KeyboardInterrupt:
        # Ctrl-C is how to end the live view; of a single frame, the frame is missing.
        return ExitCode.INTERRUPTED if single else ExitCode.DONE
    return ExitCode.DONE


class TopHost:
    """The host that is shown. ``root`` is the file of a recorded one, None for this host."""

    def __init__(self, root: Path | None, uri: str, policy_dirs: tuple[Path, ...]) -> None:
        self._root = root
        self._files: HostRoot
        seen = curious_filter(readable_policies(policy_dirs))
        if root is None:
            self._files, self._observer = LiveRoot(), live_observer(uri, lambda: seen)
        else:
            recording = load(root)
            self._files = recording.root()
            self._observer = Observer(self._files, recording.virt(), qemu_filter=lambda: seen)

    def sample(self, names: frozenset[str] = frozenset()) -> HostSample:
        """The host now. With many guests, only the libvirt guests of these ``names`` are sure
        to be re-read (Observer.observe_unannounced); the counters of all are read. Raises
        ObserveError."""
        snapshot = readable(self._observer.observe_unannounced(names).snapshot, self._root)
        if self._root is None:
            snapshot = with_loads(snapshot)
        return samples.take(self._files, snapshot)


def _is_screen() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def _frames(
    host: TopHost, only: frozenset[str], interval: float, keys: Keys, *, first: bool = False
) -> Iterator[Frame]:
    """Yield a frame every ``interval`` seconds until the operator quits; with ``first``, one
    without loads at once. Raises VsrtuneError when a guest of ``only`` does not run."""
    before, taken = host.sample(), time.monotonic()
    if only:
        only = frozenset(guest.ref for guest in chosen(before.snapshot, only).guests)
    if first:
        yield make_frame(before, before, only)
    names = _libvirt_names(before.snapshot, sorted(only))
    while not keys.wait(taken + interval - time.monotonic()):
        after, taken = host.sample(names), time.monotonic()
        frame = make_frame(before, after, only)
        names = _libvirt_names(after.snapshot, frame.guests[:_SHOWN])
        yield frame
        before = after


def _libvirt_names(snapshot: Snapshot, refs: Sequence[str]) -> frozenset[str]:
    """The names of those among ``refs`` that can be re-read by name."""
    wanted = frozenset(refs)
    return frozenset(g.name for g in snapshot.guests if g.source == "libvirt" and g.ref in wanted)


def _print(frames: Iterator[Frame], count: int | None, as_json: bool, wide: bool) -> None:
    """Print frames one after the other, as tables or JSON."""
    for number, frame in enumerate(frames, 1):
        if as_json:
            print_json(top_tables.data(frame))
        else:
            show(top_tables.tables(frame), wide=wide)
            sys.stdout.write("" if number == count else "\n")
            sys.stdout.flush()
        if number == count:
            return


def _watch(host: TopHost, only: frozenset[str], interval: float, count: int | None) -> int:
    """Show frames on the whole terminal, until a key, SIGTERM or ``count`` frames end it. Return
    the exit code."""
    from rich.console import Console
    from rich.live import Live

    from vsrtune.cli.top_view import view

    # The terminal is restored before the end. The signal is waited for as keys are: the handler
    # runs between two instructions of Python, and one that raised would not run before the end of
    # a select() that begins after the signal came.
    came: list[int] = []
    signals, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    console = Console(highlight=False)
    screen = Live(console=console, screen=True, auto_refresh=False)
    with listening(signals) as keys, screen as live:
        for number, frame in enumerate(_frames(host, only, interval, keys, first=True)):
            live.update(view(frame, *console.size), refresh=True)
            if number == count:
                break
    return 128 + came[0] if came else ExitCode.DONE


# Keys that quit; the last is Ctrl-C.
_QUIT = frozenset(b"qQ\x03")
# Index of the local modes in the list of tcgetattr().
_LOCAL = 3


class Keys:
    """The keys typed on ``terminal``; None: nobody is there to type. ``signals`` can be read from
    once a signal ends the view."""

    def __init__(self, terminal: int | None = None, signals: int | None = None) -> None:
        self._sources = [source for source in (signals, terminal) if source is not None]
        self._signals = signals

    def wait(self, seconds: float) -> bool:
        """Wait for ``seconds``; True at once when the operator quits, a signal ends the view, or
        the terminal is gone. What came before counts, also where there is no time to wait."""
        end = time.monotonic() + seconds
        while True:
            left = max(0.0, end - time.monotonic())
            ready, _, _ = select.select(self._sources, [], [], left)
            if not ready:
                return False
            if ready[0] == self._signals:
                return True
            typed = os.read(ready[0], 64)
            if not typed or _QUIT.intersection(typed):
                return True


@contextlib.contextmanager
def listening(signals: int | None = None) -> Iterator[Keys]:
    """The keys of standard input, unbuffered and not echoed meanwhile; silent keys when
    standard input is no terminal. ``signals`` is as in ``Keys``."""
    if not sys.stdin.isatty():
        yield Keys(None, signals)
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        # Keys typed earlier count: a q before the first frame quits as well.
        tty.setcbreak(descriptor, termios.TCSADRAIN)
        # Ctrl-C is a key as well: an exception in the middle of drawing can get lost.
        mode = termios.tcgetattr(descriptor)
        mode[_LOCAL] &= ~termios.ISIG
        termios.tcsetattr(descriptor, termios.TCSADRAIN, mode)
        yield Keys(descriptor, signals)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
