"""Applies the configurations of a bench to the routers under test, and puts them back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from vsrtune.bench.cleanup import cleaners
from vsrtune.bench.cleanup.ledger import BenchLedger
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


class Layer(Protocol):
    """A part of the routers that configurations change, whatever their tuning. Methods may
    raise VsrtuneError; ``switch`` is called when the ledger holds ``record``."""

    kind: str

    def check(self, configurations: Sequence[Configuration]) -> None:
        """Refuse what this host cannot have, before anything is changed."""
        ...

    def differs(self, wanted: Configuration) -> bool:
        """Whether ``switch`` would do anything."""
        ...

    def original(self, wanted: Configuration) -> bool:
        """Whether ``wanted`` is how this part was at first."""
        ...

    def record(self) -> dict[str, Any]:
        """The data with which the kind's cleaner puts this part back."""
        ...

    def switch(self, wanted: Configuration) -> None:
        """Change this part to what ``wanted`` says."""
        ...

    def put_back(self, data: Mapping[str, Any]) -> None:
        """Put this part back to how it was at first."""
        ...


class Configurator(Closing):
    """The routers of ``spec`` in one configuration at a time. A context manager.

    Entering takes the journal of vsrtune for the whole run, so no daemon, `apply` or
    other bench tunes meanwhile; leaving restores the host. ``ready`` is called after
    interfaces of guests or members of groups were plugged in again, and to let threads run.
    It returns when every router forwards again, and raises VsrtuneError when one does not in
    time.

    The ledger has an entry for each layer from before its first change until it is as it was
    at first, and after these one for the present tuning and one for a command beside it. They
    are taken back latest first, so the threads are untuned before they go with their
    interfaces.
    """

    def __init__(
        self,
        spec: Spec,
        ledger: BenchLedger,
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
        # From below: a group's members stand on interfaces.
        self._layers: tuple[Layer, ...] = (Attachments(spec.routers, uri), Members(uri))
        # By kind of layer: the ledger's entry, and its data.
        self._changed: dict[str, tuple[int, dict[str, Any]]] = {}
        self._journal: Journal | None = None
        self._tuner: Tuner | None = None
        self._present: Configuration | None = None
        self._notes: tuple[str, ...] = ()
        # Of the present tuning: the ledger's entries, and the functions that take them back.
        self._tuned: list[tuple[int, Callable[[], object]]] = []

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
            if self._journal is not None:
                self._journal.close()
                self._journal = self._tuner = None

    def check(self, configurations: Sequence[Configuration]) -> None:
        """Refuse what this host cannot do, before anything is changed. Raises VsrtuneError."""
        for layer in self._layers:
            layer.check(configurations)
        for configuration in configurations:
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
        for layer in self._layers:
            self._change(layer, configuration)
        self._notes = self._tune(configuration)
        self._present = configuration
        return self._notes

    def restore(self) -> None:
        """Restore everything as it was on entry. May be called again after it raised."""
        self._present = None
        with contextlib.ExitStack() as stack:
            for layer in self._layers:
                stack.callback(self._put_back, layer)
            self._untune()

    def _change(self, layer: Layer, wanted: Configuration) -> None:
        if not layer.differs(wanted):
            return
        if layer.original(wanted):
            self._put_back(layer)
        else:
            if layer.kind not in self._changed:
                data = layer.record()
                self._changed[layer.kind] = (self._ledger.add(layer.kind, data), data)
            layer.switch(wanted)
        if self._ready is not None:
            self._ready()

    def _put_back(self, layer: Layer) -> None:
        if layer.kind in self._changed:
            entry, data = self._changed[layer.kind]
            layer.put_back(data)
            self._ledger.done(entry)
            del self._changed[layer.kind]

    def _tune(self, configuration: Configuration) -> tuple[str, ...]:
        tuner = self._entered()
        notes: tuple[str, ...] = ()
        try:
            if configuration.tuning in (Tuning.POLICY, Tuning.LIBVIRT_PINS):
                data: dict[str, Any] = {"journal": str(self._path), "uri": self._uri}
                self._begin(cleaners.TUNING, data, tuner.undo)
                notes = self._settled(tuner, tuner.apply(configuration))
            if configuration.apply:
                data = {"revert": list(configuration.revert)}
                self._begin(cleaners.COMMAND, data, partial(cleaners.revert_command, data))
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
