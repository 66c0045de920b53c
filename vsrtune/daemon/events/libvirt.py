# SPDX-License-Identifier: GPL-2.0-or-later
"""libvirt's events as one flag: something about the guests may have changed.

The thread here never reads the host and never changes it. It calls
``dirty(reason, guest)`` and keeps the connection alive; the daemon's next pass does
the work. Lost events are therefore harmless: the periodic rescan finds the same changes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from vsrtune.daemon.events.thread import Background
from vsrtune.daemon.systemd import LOGGER
from vsrtune.host.libvirt import library

# Seconds between attempts to reach a libvirt daemon that is away.
RETRY = 5.0
# Keep-alive probes notice a peer that vanished without closing (virConnectSetKeepAlive).
KEEPALIVE_INTERVAL, KEEPALIVE_COUNT = 5, 3

# Events that may change a guest's threads, devices or pins (libvirt-domain.h). Suspend,
# resume, save, restore, migration and a crash are lifecycle events. There is no event for
# vcpu hotplug; the rescan covers it.
EVENTS = (
    "VIR_DOMAIN_EVENT_ID_LIFECYCLE",
    "VIR_DOMAIN_EVENT_ID_DEVICE_ADDED",
    "VIR_DOMAIN_EVENT_ID_DEVICE_REMOVED",
    "VIR_DOMAIN_EVENT_ID_TUNABLE",
    "VIR_DOMAIN_EVENT_ID_REBOOT",
)


class Dirty(Protocol):
    """``Daemon.mark_dirty``; callable from any thread."""

    def __call__(self, reason: str, guest: str | None = None) -> None: ...


def register() -> None:
    """Make this process able to receive events. Must come before the first connection of the
    process (virEventRegisterDefaultImpl). Raises WriteError without the library."""
    libvirt = library()
    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    libvirt.virEventRegisterDefaultImpl()


class LibvirtEvents(Background):
    """Listens on ``uri`` from ``start`` to ``stop``; needs ``register`` first.

    ``dirty`` is called from this thread.
    """

    def __init__(self, uri: str, dirty: Dirty) -> None:
        super().__init__("libvirt-events")
        self._uri = uri
        self._dirty = dirty
        self._closed = threading.Event()

    def run(self) -> None:
        """Connect, listen, and start again when the connection is lost."""
        import libvirt

        # The timer bounds one turn of the loop, so that it notices stop and a lost connection.
        libvirt.virEventAddTimeout(1000, lambda _timer, _opaque: None, None)
        away = False
        while not self._stopping.is_set():
            try:
                connection, callbacks = self._connect(libvirt)
            except libvirt.libvirtError as error:
                if not away:
                    LOGGER.info("no events from libvirt at %s: %s", self._uri, error)
                away = True
                self._await_retry(libvirt)
                continue
            if away:
                LOGGER.info("listening to libvirt at %s again", self._uri)
            away = False
            self._dirty("libvirt connected")
            while not (self._stopping.is_set() or self._closed.is_set()):
                self._turn(libvirt)
            away = not self._stopping.is_set()
            if away:
                LOGGER.info("libvirt at %s closed the connection", self._uri)
                self._dirty("libvirt disconnected")
            self._release(libvirt, connection, callbacks)

    def _turn(self, libvirt: Any) -> None:
        try:
            libvirt.virEventRunDefaultImpl()
        except libvirt.libvirtError as error:
            LOGGER.warning("libvirt's event loop: %s", error)
            self._stopping.wait(1.0)

    def _await_retry(self, libvirt: Any) -> None:
        """Keep the loop turning: other connections of this process rely on it."""
        for _ in range(max(1, round(RETRY))):
            if not self._stopping.is_set():
                self._turn(libvirt)

    def _connect(self, libvirt: Any) -> tuple[Any, list[int]]:
        connection = libvirt.openReadOnly(self._uri)
        self._closed.clear()
        # Drivers without a daemon have no connection to lose or to keep alive.
        with contextlib.suppress(libvirt.libvirtError):
            connection.registerCloseCallback(lambda *_: self._closed.set(), None)
            connection.setKeepAlive(KEEPALIVE_INTERVAL, KEEPALIVE_COUNT)
        callbacks: list[int] = []
        try:
            for name in EVENTS:
                event, told = getattr(libvirt, name), self._callback(name)
                callbacks.append(connection.domainEventRegisterAny(None, event, told, None))
        except libvirt.libvirtError:
            self._release(libvirt, connection, callbacks)
            raise
        return connection, callbacks

    def _release(self, libvirt: Any, connection: Any, callbacks: Iterable[int]) -> None:
        # Each callback holds the connection: with one left, closing frees nothing, and every
        # restart of libvirtd leaks descriptors (virObjectEventCallbackListAddID).
        releases = [
            *(partial(connection.domainEventDeregisterAny, number) for number in callbacks),
            connection.unregisterCloseCallback,
            connection.close,
        ]
        for release in releases:
            with contextlib.suppress(libvirt.libvirtError):
                release()  # fails when the connection is gone with its daemon

    def _callback(self, name: str) -> Callable[..., None]:
        short = name.removeprefix("VIR_DOMAIN_EVENT_ID_").lower().replace("_", "-")

        def changed(_connection: Any, domain: Any, *_: Any) -> None:
            name = domain.name()
            self._dirty(f"{short} of {name}", name)

        return changed
