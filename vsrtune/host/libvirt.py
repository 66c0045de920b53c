# SPDX-License-Identifier: GPL-2.0-or-later
"""libvirt: which domains run, their XML, and libvirt's own view of the pins."""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from vsrtune.core.closing import Closing
from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import Lasting, ObserveError, VsrtuneError, WriteError

T = TypeVar("T")

DEFAULT_URI = "qemu:///system"

_DOWN = "see: systemctl status libvirtd virtqemud"


@dataclass(frozen=True, slots=True)
class DomainText:
    """One running domain as libvirt describes it. ``vcpu_pins`` are by number, ``emulator_pin`` is
    None when libvirt does not report it. ``busy``: libvirt starts, restores, saves or migrates it,
    and accepts no pins."""

    name: str
    uuid: str
    live_xml: str
    vcpu_pins: tuple[CpuSet, ...] = ()
    emulator_pin: CpuSet | None = None
    busy: bool = False


class VirtSource(Protocol):
    """Where running domains come from."""

    def domains(self) -> tuple[DomainText, ...]:
        """All running domains. Raises ObserveError when libvirt does not answer."""

    def domain(self, name: str) -> DomainText | None:
        """The running domain of that name; None when none runs. Raises ObserveError when
        libvirt does not answer."""


class LibvirtSource:
    """A read-only connection to libvirt, opened on first use and reopened after it broke."""

    def __init__(self, uri: str = DEFAULT_URI) -> None:
        self.uri = uri
        self._kept = Connection(uri, ObserveError, read_only=True)

    def domains(self) -> tuple[DomainText, ...]:
        def read(libvirt: Any, connection: Any) -> tuple[DomainText, ...]:
            active = connection.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE)
            texts = [_domain_text(libvirt, domain) for domain in active]
            return tuple(text for text in texts if text is not None)

        return self._ask(read)

    def domain(self, name: str) -> DomainText | None:
        def read(libvirt: Any, connection: Any) -> DomainText | None:
            try:
                found = connection.lookupByName(name)
            except libvirt.libvirtError as error:
                if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
                    return None
                raise
            return _domain_text(libvirt, found) if found.isActive() else None

        return self._ask(read)

    def _ask(self, read: Callable[[Any, Any], T]) -> T:
        libvirt, kept = library(), self._kept.opened
        try:
            return self._kept.ask(lambda connection: read(libvirt, connection))
        except libvirt.libvirtError as error:
            self.close()
            if kept:
                # It may have died since an earlier pass.
                return self._ask(read)
            raise self._kept.away(error) from error

    def close(self) -> None:
        """Drop the connection; the next call opens a new one."""
        self._kept.close()


def _ignore(_context: Any, _error: Any) -> None:
    return None


def _domain_text(libvirt: Any, domain: Any) -> DomainText | None:
    try:
        return DomainText(
            name=domain.name(),
            uuid=domain.UUIDString().lower(),
            live_xml=domain.XMLDesc(0),
            vcpu_pins=tuple(map(_cpus, domain.vcpuPinInfo(libvirt.VIR_DOMAIN_AFFECT_LIVE))),
            emulator_pin=_emulator_pin(libvirt, domain),
            busy=_busy(libvirt, domain),
        )
    except libvirt.libvirtError as error:
        if vanished(error, domain):
            return None  # it ended after libvirt listed it
        raise


def _busy(libvirt: Any, domain: Any) -> bool:
    state, reason = domain.state()
    if state == libvirt.VIR_DOMAIN_RUNNING:
        # The domain runs here, and the rest of its memory is still coming.
        return bool(reason == libvirt.VIR_DOMAIN_RUNNING_POSTCOPY)
    jobs = ("STARTING_UP", "MIGRATION", "POSTCOPY", "SAVE", "DUMP")
    busy = {getattr(libvirt, f"VIR_DOMAIN_PAUSED_{job}") for job in jobs}
    return state == libvirt.VIR_DOMAIN_PAUSED and reason in busy


def _emulator_pin(libvirt: Any, domain: Any) -> CpuSet | None:
    row = domain.emulatorPinInfo(libvirt.VIR_DOMAIN_AFFECT_LIVE)
    return _cpus(row) if isinstance(row, (tuple, list)) else None


def _cpus(row: Sequence[bool]) -> CpuSet:
    return CpuSet(cpu for cpu, used in enumerate(row) if used)


# Seconds. A pass waits for libvirt at most this long, and only once: while that question is
# pending, later ones fail at once. libvirt answers in milliseconds; a thousand guests take some
# seconds, and so does a libvirtd that is starting. The watchdog is at 60 s.
LIBVIRT_SECONDS = 15.0
# Python handles a signal that comes right before a wait only after it.
_TURN = 1.0


class Patience:
    """Asks in a thread, and abandons the thread when no answer comes. At most one question is
    pending: until it is answered, all others fail at once."""

    def __init__(self, seconds: float = LIBVIRT_SECONDS) -> None:
        self._seconds = seconds
        # Set with the answer to the last question. (In Python 3.11 a thread whose ``join`` Ctrl-C
        # interrupts counts as ended.)
        self._answered = threading.Event()
        self._answered.set()

    @property
    def silent(self) -> bool:
        """Whether the last question is still unanswered."""
        return not self._answered.is_set()

    def ask(self, question: Callable[[], T], seconds: float | None = None) -> T:
        """The answer, for which ``seconds`` replace the usual time. Raises the exception of the
        question, or TimeoutError without an answer."""
        seconds = self._seconds if seconds is None else seconds
        if self.silent:
            raise TimeoutError("an earlier question was not answered yet")
        answers: list[T] = []
        errors: list[BaseException] = []
        answered = threading.Event()

        def run() -> None:
            try:
                answers.append(question())
            except BaseException as error:  # raised below
                errors.append(error)
            answered.set()

        # Ctrl-C may come from here on.
        self._answered, end = answered, time.monotonic() + seconds
        try:
            threading.Thread(target=run, name="question", daemon=True).start()
        except RuntimeError:
            answered.set()  # the system has no thread left, and nothing was asked
            raise
        while not answered.wait(max(0.0, min(_TURN, end - time.monotonic()))):
            if time.monotonic() >= end:
                raise TimeoutError(f"no answer in {seconds:g} s")
        if errors:
            raise errors[0]
        return answers[0]


class Connection(Closing):
    """One connection to libvirt, opened at first need and again after it broke. ``away`` is the
    class of the error for a libvirt that does not answer."""

    def __init__(self, uri: str, away: type[VsrtuneError], *, read_only: bool = False) -> None:
        self.uri = uri
        self._away = away
        self._read_only = read_only
        self._connection: Any = None
        self._patience = Patience()

    @property
    def opened(self) -> bool:
        """Whether there is a connection from before."""
        return self._connection is not None

    def ask(self, question: Callable[[Any], T]) -> T:
        """The answer to a question that is asked on the connection. Raises libvirtError, and the
        error ``away`` when no answer comes in time."""
        try:
            return self._patience.ask(lambda: question(self._reached()))
        except TimeoutError as error:
            # The pending question keeps the connection.
            raise self.away(error) from error

    def call(self, request: Callable[[Any], T], seconds: float) -> T:
        """The result of a request that may take ``seconds``, because a guest has its part in it.
        Raises libvirtError, and TimeoutError when the request takes longer; it is then left to
        itself, as after Ctrl-C, and what follows goes over another connection."""
        try:
            return self._patience.ask(lambda: request(self._reached()), seconds)
        finally:
            if self._patience.silent:
                # A guest that is silent says nothing about libvirt. The pending request keeps its
                # connection, which is closed with its end.
                self._connection, self._patience = None, Patience()

    def open(self) -> Any:
        """The connection, on which libvirt has just answered: a silent libvirt does not keep the
        next call waiting. Raises the error ``away``, WriteError without the library."""
        libvirt = library()
        try:
            return self.ask(_answering)
        except libvirt.libvirtError as error:
            raise self.away(error) from error

    def away(
        self, why: object, what: str = "libvirt does not answer", where: str = ""
    ) -> VsrtuneError:
        """The error for a libvirt that is away."""
        return self._away(
            f"{what}: {why}", where=where or self.uri, hint=_DOWN, lasting=Lasting.TRANSIENT
        )

    def alive(self) -> bool:
        """Whether the connection is there and not broken."""
        import libvirt

        try:
            return self._connection is not None and bool(self._connection.isAlive())
        except libvirt.libvirtError:
            return False

    def close(self) -> None:
        """Drop the connection; the next use opens a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            import libvirt

            # A dead connection cannot be closed properly, and need not be.
            with contextlib.suppress(libvirt.libvirtError):
                connection.close()

    def _reached(self) -> Any:
        import libvirt

        if not self.alive():
            self.close()
            # Without this the library writes every error to stderr as well.
            libvirt.registerErrorHandler(_ignore, None)
            opens = libvirt.openReadOnly if self._read_only else libvirt.open
            self._connection = opens(self.uri)
        return self._connection


def _answering(connection: Any) -> Any:
    import libvirt

    # The caller's own call reports any fault of the connection.
    with contextlib.suppress(libvirt.libvirtError):
        connection.getLibVersion()
    return connection


def library() -> Any:
    """The module libvirt, imported late. Raises WriteError when it is not installed."""
    try:
        return importlib.import_module("libvirt")
    except ImportError as error:
        raise WriteError(
            "the Python library libvirt is not installed", hint="install python3-libvirt"
        ) from error


def vanished(error: Any, domain: Any = None) -> bool:
    """Whether an error of libvirt says that the domain is gone or does not run.

    OPERATION_INVALID says that, or that the operation does not suit the domain. libvirt's text
    tells (virDomainObjCheckActive). Where libvirt may speak another language, the state tells:
    give ``domain`` for an operation that works on running domains only."""
    import libvirt

    code = error.get_error_code()
    if code != libvirt.VIR_ERR_OPERATION_INVALID:
        return bool(code == libvirt.VIR_ERR_NO_DOMAIN)
    if "not running" in error.get_error_message():
        return True
    try:
        return domain is not None and not domain.isActive()
    except libvirt.libvirtError as missing:
        return bool(missing.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN)
