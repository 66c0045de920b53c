"""Applies the configurations of a bench to the routers under test, and puts them back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from vsrtune.bench.cleanup import put_back
from vsrtune.bench.setup import attachments, scaling
from vsrtune.bench.setup.attachments import Attachments, Wanted
from vsrtune.bench.setup.commands import run
from vsrtune.bench.setup.tuning import Tuner
from vsrtune.bench.spec.model import Configuration, Spec, Tuning
from vsrtune.core.closing import Closing
from vsrtune.core.errors import VsrtuneError
from vsrtune.execute.journal import DEFAULT_PATH, Journal
from vsrtune.host.filesystem import boot_id
from vsrtune.host.libvirt import DEFAULT_URI

# Rounds of traffic for threads that have to run before they can be class deadline.
_SETTLING = 10


class Records(Protocol):
    """The interface of the ledger that a Configurator uses."""

    def add(self, kind: str, data: Mapping[str, Any]) -> Any:
        """Record durably what is about to be changed, and return the entry's id."""
        ...

    def done(self, entry: Any) -> None:
        """Record that the change is taken back."""
        ...


class Configurator(Closing):
    """The routers of ``spec`` in one configuration at a time. A context manager.

    Entering takes the journal of vsrtune for the whole run, so no daemon, `apply` or
    other bench tunes meanwhile; leaving restores the host. ``ready`` is called after
    interfaces of guests or members of groups were plugged in again, and to let threads run.
    It returns when every router forwards again, and raises VsrtuneError when one does not in
    time.

    The ledger has an entry for the attachments from before the first move until the
    originals are back, likewise for the members of groups, and after these one for the
    present tuning and one for a command beside it. They are taken back latest first, so the
    threads are untuned before they go with their interfaces.
    """

    def __init__(
        self,
        spec: Spec,
        ledger: Records,
        *,
        ready: Callable[[], None] | None = None,
        uri: str = DEFAULT_URI,
        journal: Path = DEFAULT_PATH,
    ) -> None:
        self._spec = spec
        self._ledger = ledger
        self._ready = ready
        self._uri = uri
        self._path = journal
        self._attachments = Attachments(spec.routers, uri)
        self._journal: Journal | None = None
        self._tuner: Tuner | None = None
        self._present: Configuration | None = None
        self._notes: tuple[str, ...] = ()
        # Entries of the ledger: id, and for a tuning the function that takes it back.
        self._attached: Any = None
        self._original: dict[str, Any] = {}
        self._scaled: Any = None
        # Members of groups plugged in on entry, and now.
        self._before: dict[str, int] = {}
        self._members: dict[str, int] = {}
        self._tuned: list[tuple[Any, Callable[[], object]]] = []

    def __enter__(self) -> Self:
        """Raises VsrtuneError when the daemon runs, when another process holds the
        journal, or when it has entries: the host must be untuned to begin with."""
        journal = Journal.open(self._path, boot_id())
        entries = journal.entries()
        if entries:
            journal.close()
            raise VsrtuneError(
                f"vsrtune has tuned this host already ({len(entries)} settings, "
                f"{entries[0].target} for one)",
                where=str(self._path),
                hint="vsrtune undo",
            )
        self._journal = journal
        self._tuner = self._make_tuner(journal)
        return self

    def close(self) -> None:
        """Restore the host, and release the journal."""
        try:
            self.restore()
        finally:
            self._attachments.close()
            if self._journal is not None:
                self._journal.close()
                self._journal = self._tuner = None

    def check(self, configurations: Sequence[Configuration]) -> None:
        """Refuse what this host cannot do, before anything is changed. Raises VsrtuneError."""
        groups = {name: count for c in configurations for name, count in c.scale.items()}
        if groups:
            self._before = self._members = scaling.present(groups, self._uri)
        for configuration in configurations:
            self._attachments.check(Wanted.of(configuration))
            scaling.check(configuration.scale, self._uri)
            self._entered().check(configuration)

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
        self._attach(Wanted.of(configuration))
        self._scale(configuration.scale)
        self._notes = self._tune(configuration)
        self._present = configuration
        return self._notes

    def restore(self) -> None:
        """Restore everything as it was on entry. May be called again after it raised."""
        self._present = None
        with contextlib.ExitStack() as stack:
            stack.callback(self._detach)
            stack.callback(self._unscale)
            self._untune()

    def _attach(self, wanted: Wanted) -> None:
        if not self._attachments.differ(wanted):
            return
        if self._attachments.original(wanted):
            self._detach()
        else:
            if self._attached is None:
                self._original = self._attachments.record()
                self._attached = self._ledger.add(attachments.KIND, self._original)
            self._attachments.switch(wanted)
        if self._ready is not None:
            self._ready()

    def _detach(self) -> None:
        if self._attached is None:
            return
        attachments.put_back(self._original)
        self._attachments.back_to_original()
        self._ledger.done(self._attached)
        self._attached = None

    def _scale(self, counts: Mapping[str, int]) -> None:
        """Scale groups. Those that the configuration does not name are as on entry."""
        wanted = {**self._before, **counts}
        if wanted == self._members:
            return
        if self._scaled is None:
            data = {"uri": self._uri, "members": self._before}
            self._scaled = self._ledger.add(scaling.KIND, data)
        self._members = {}
        scaling.scale(wanted, self._uri)
        self._members = wanted
        if self._ready is not None:
            self._ready()

    def _unscale(self) -> None:
        if self._scaled is None:
            return
        scaling.put_back({"uri": self._uri, "members": self._before})
        self._members = self._before
        self._ledger.done(self._scaled)
        self._scaled = None

    def _tune(self, configuration: Configuration) -> tuple[str, ...]:
        tuner = self._entered()
        notes: tuple[str, ...] = ()
        try:
            if configuration.tuning in (Tuning.POLICY, Tuning.LIBVIRT_PINS):
                data: dict[str, Any] = {"journal": str(self._path), "uri": self._uri}
                self._begin(put_back.TUNING, data, tuner.undo)
                notes = self._settled(tuner, tuner.apply(configuration))
            if configuration.apply:
                data = {"revert": list(configuration.revert)}
                self._begin(put_back.COMMAND, data, partial(put_back.revert_command, data))
                run(configuration.apply)
        except VsrtuneError:
            # The first error says more than one while putting back; `restore` meets the
            # latter again.
            with contextlib.suppress(VsrtuneError):
                self._untune()
            raise
        return notes

    def _settled(self, tuner: Tuner, notes: tuple[str, ...]) -> tuple[str, ...]:
        """Let threads run, by traffic, until no setting waits for one."""
        for _ in range(_SETTLING):
            if not tuner.waits or self._ready is None:
                break
            self._ready()
            notes = tuner.again()
        if tuner.waits:
            raise VsrtuneError(
                "threads that are to be class deadline have not run on their new CPUs, though "
                "traffic was sent through the routers",
                where="; ".join(notes),
                hint="see `vsrtune plan`; a vcpu that does not forward cannot be measured",
            )
        return notes

    def _begin(self, kind: str, data: dict[str, Any], undo: Callable[[], object]) -> None:
        """Record a change in the ledger before it is made."""
        self._tuned.append((self._ledger.add(kind, data), undo))

    def _untune(self) -> None:
        while self._tuned:
            entry, undo = self._tuned[-1]
            undo()
            self._ledger.done(entry)
            self._tuned.pop()

    def _entered(self) -> Tuner:
        if self._tuner is None:
            raise VsrtuneError("the configurator is used outside of its context")
        return self._tuner

    def _make_tuner(self, journal: Journal) -> Tuner:
        left = self._spec.left
        guests = [name for router in self._spec.routers for name in router.guests]
        return Tuner(journal, guests, left.cpu if left.host is None else None, self._uri)
