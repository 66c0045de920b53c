# SPDX-License-Identifier: GPL-2.0-or-later
"""Applies the configurations of a bench to the routers under test, and puts them back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from vsrtune.bench.cleanup import cleaners
from vsrtune.bench.cleanup.cleaners import BenchLedger
from vsrtune.bench.setup.attachments import Attachments
from vsrtune.bench.setup.commands import run
from vsrtune.bench.setup.scaling import Members
from vsrtune.bench.setup.tuning import Tuner
from vsrtune.bench.spec.model import Configuration, Spec, Tuning
from vsrtune.core.closing import Closing
from vsrtune.core.errors import VsrtuneError
from vsrtune.execute.journal import DEFAULT_PATH, Journal
from vsrtune.host.filesystem import boot_id
from vsrtune.host.libvirt import DEFAULT_URI

# Rounds of traffic for threads that have to run before they can be class deadline.
_SETTLING = 10

# The kinds of changes, in the order in which they are made.
_ORDER = (Attachments.kind, Members.kind, cleaners.TUNING, cleaners.COMMAND)


@dataclass(slots=True)
class _Change:
    """A change that the ledger holds: the ``entry`` and its ``data``; of a layer also its
    ``state``, which equals no other during a switch and after one that failed."""

    entry: int
    data: dict[str, Any]
    state: object = field(default_factory=object)


class Configurator(Closing):
    """The routers of ``spec`` in one configuration at a time. A context manager.

    Entering takes the journal of vsrtune for the whole run, so no daemon, `apply` or
    other bench tunes meanwhile; leaving restores the host. ``ready`` is called after
    interfaces of guests or members of groups were plugged in again, and to let threads run.
    It returns when every router forwards again, and raises VsrtuneError when one does not in
    time. ``say`` gets a configuration's name, and notes on what others changed during it.

    A layer is a part of the routers that configurations change, whatever their tuning. ``check``
    refuses what this host cannot have, ``state`` is comparable and None for how the part was at
    first, ``record`` is the data with which the cleaner of its ``kind`` puts it back to that, and
    ``switch`` changes it. The ledger has an entry for each layer from before its first change
    until it is as it was at first, and after these one for the present tuning and one for a
    command beside it. They are taken back latest first, so the threads are untuned before they
    go with their interfaces.
    """

    def __init__(
        self,
        spec: Spec,
        ledger: BenchLedger,
        *,
        ready: Callable[[], None] = lambda: None,
        say: Callable[[str, Sequence[str]], None] = lambda *_: None,
        uri: str = DEFAULT_URI,
        journal: Path = DEFAULT_PATH,
    ) -> None:
        self._spec = spec
        self._ledger = ledger
        self._ready = ready
        self._say = say
        self._uri = uri
        self._path = journal
        # From below: a group's members stand on interfaces.
        self._layers = (Attachments(spec.routers, uri), Members(uri))
        self._changes: dict[str, _Change] = {}
        self._present: Configuration | None = None
        self._notes: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        """Raises VsrtuneError when the daemon runs, when another process holds the journal, or when
        it has entries or is another version's: the host must be untuned to begin with."""
        journal = Journal.open(self._path, boot_id())
        entries = journal.entries()
        if entries or journal.foreign is not None:
            journal.close()
            raise journal.foreign or VsrtuneError(
                f"vsrtune has tuned this host already ({len(entries)} settings, "
                f"{entries[0].target} for one)",
                where=str(self._path),
                hint="vsrtune undo",
            )
        self._journal = journal
        guests = [name for router in self._spec.routers for name in router.guests]
        self._tuner = Tuner(journal, guests, self._uri)
        return self

    def close(self) -> None:
        """Restore the host, and release the journal."""
        try:
            self.restore()
        finally:
            self._journal.close()

    def check(self, configurations: Sequence[Configuration]) -> None:
        """Refuse what this host cannot do, before anything is changed. Raises VsrtuneError."""
        for configuration in configurations:
            for part in (*self._layers, self._tuner):
                part.check(configuration)

    def apply(self, configuration: Configuration) -> tuple[str, ...]:
        """Take back the present tuning and apply ``configuration`` to the routers.

        Returns notes for the operator (such as what a policy could not do). When the
        configuration is the present one, does nothing and returns the same notes again.
        Raises VsrtuneError; the tuning is then taken back, and ``restore`` does the rest.
        """
        if configuration == self._present:
            return self._notes
        self._present = None
        self._untune()
        for layer in self._layers:
            self._change(layer, configuration)
        self._notes = self._tune(configuration)
        self._present = configuration
        return self._notes

    def restore(self) -> None:
        """Restore everything as it was on entry. May be called again after it raised."""
        self._present = None
        with contextlib.ExitStack() as stack:
            for kind in _ORDER:
                stack.callback(self._take_back, kind)

    def _change(self, layer: Attachments | Members, wanted: Configuration) -> None:
        state = layer.state(wanted)
        change = self._changes.get(layer.kind)
        if state == (None if change is None else change.state):
            return
        if state is None:
            self._take_back(layer.kind)
        else:
            change = change or self._begin(layer.kind, layer.record())
            change.state = object()
            layer.switch(wanted)
            change.state = state
        self._ready()

    def _tune(self, configuration: Configuration) -> tuple[str, ...]:
        notes: tuple[str, ...] = ()
        try:
            if configuration.tuning in (Tuning.POLICY, Tuning.LIBVIRT_PINS):
                data = {"name": configuration.name, "journal": str(self._path), "uri": self._uri}
                self._begin(cleaners.TUNING, data)
                notes = self._settled(self._tuner.apply(configuration))
            if configuration.apply:
                self._begin(cleaners.COMMAND, {"revert": list(configuration.revert)})
                run(configuration.apply)
        except VsrtuneError:
            # The first error says more than one while putting back; `restore` meets the
            # latter again.
            with contextlib.suppress(VsrtuneError):
                self._untune()
            raise
        return notes

    def _settled(self, notes: tuple[str, ...]) -> tuple[str, ...]:
        """Let threads run, by traffic, until no setting waits for one."""
        for _ in range(_SETTLING):
            if not self._tuner.waits:
                break
            self._ready()
            notes = self._tuner.again()
        if self._tuner.waits:
            raise VsrtuneError(
                "threads that are to be class deadline have not run on their new CPUs, though "
                "traffic was sent through the routers",
                where="; ".join(notes),
                hint="see `vsrtune plan`; a vcpu that does not forward cannot be measured",
            )
        return notes

    def _begin(self, kind: str, data: dict[str, Any]) -> _Change:
        """Record a change in the ledger before it is made."""
        self._changes[kind] = _Change(self._ledger.add(kind, data), data)
        return self._changes[kind]

    def _take_back(self, kind: str) -> None:
        change = self._changes.get(kind)
        if change is None:
            return
        change.state = object()
        if kind == cleaners.TUNING:
            # The tuner holds the journal that the cleaner would open.
            self._say(change.data["name"], self._tuner.undo())
        else:
            cleaners.CLEANERS[kind](change.data)
        self._ledger.done(change.entry)
        del self._changes[kind]

    def _untune(self) -> None:
        self._take_back(cleaners.COMMAND)
        self._take_back(cleaners.TUNING)
