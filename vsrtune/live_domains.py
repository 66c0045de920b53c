"""Running libvirt domains: their XML, and interfaces detached and attached, live only.

The persistent definition of a domain is never touched, so a guest that restarts, or a
host that boots, has what its operator gave it.
"""

from __future__ import annotations

import importlib
import time
from typing import Any, NoReturn

from vsrtune.interface_xml import Nic, nics
from vsrtune.errors import Lasting, VanishedError, WriteError

# A guest acknowledges an unplug within a second; one that boots may take longer.
RELEASE_SECONDS = 30.0
_PAUSE = 0.1
# The request is lost when the guest's kernel does not listen yet.
_ASK_AGAIN = 10.0


class LiveDomains:
    """One connection to libvirt, opened when first needed. VanishedError means that the
    domain does not run (any more), WriteError anything else that libvirt refused."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._connection: Any = None

    def uuid(self, name: str) -> str:
        """Of the running domain of that name (or UUID)."""
        libvirt = _library()
        connection = self._open()
        try:
            domain = connection.lookupByName(name)
        except libvirt.libvirtError:
            try:
                domain = connection.lookupByUUIDString(name)
            except libvirt.libvirtError as error:
                raise VanishedError(
                    "there is no such libvirt guest", where=name, hint="see: virsh list --all"
                ) from error
        if not domain.isActive():
            raise VanishedError("the guest does not run", where=name, hint=f"virsh start {name}")
        return str(domain.UUIDString())

    def nics(self, uuid: str) -> tuple[Nic, ...]:
        """The interfaces that the running domain has now."""
        libvirt = _library()
        try:
            return nics(self._domain(uuid).XMLDesc(0))
        except libvirt.libvirtError as error:
            _refused(error, uuid)

    def detach(self, uuid: str, mac: str) -> None:
        """Unplug the interface of that MAC, if there is one, and return when the guest
        has released it."""
        libvirt = _library()
        where = f"domain {uuid} interface {mac}"
        end = time.monotonic() + RELEASE_SECONDS
        asked = float("-inf")
        while found := [nic for nic in self.nics(uuid) if nic.mac == mac]:
            now = time.monotonic()
            if now > end:
                raise WriteError(
                    f"the guest did not release the interface in {RELEASE_SECONDS:g} s",
                    where=where,
                    hint="its kernel must support PCI hotplug",
                )
            if now - asked >= _ASK_AGAIN:
                asked = now
                try:
                    self._domain(uuid).detachDeviceFlags(
                        found[0].xml, libvirt.VIR_DOMAIN_AFFECT_LIVE
                    )
                except libvirt.libvirtError as error:
                    self._tolerate(error, uuid, where)
            time.sleep(_PAUSE)

    def attach(self, uuid: str, xml: str, mac: str) -> None:
        """Plug an interface in."""
        libvirt = _library()
        try:
            self._domain(uuid).attachDeviceFlags(xml, libvirt.VIR_DOMAIN_AFFECT_LIVE)
        except libvirt.libvirtError as error:
            _refused(error, f"domain {uuid} interface {mac}")

    def close(self) -> None:
        """Give the connection back."""
        connection, self._connection = self._connection, None
        if connection is not None:
            libvirt = _library()
            try:
                connection.close()
            except libvirt.libvirtError:
                return  # it was broken already

    def _open(self) -> Any:
        libvirt = _library()
        if self._connection is None:
            # Otherwise the library writes every error to stderr as well.
            libvirt.registerErrorHandler(lambda _context, _error: None, None)
            try:
                self._connection = libvirt.open(self._uri)
            except libvirt.libvirtError as error:
                raise WriteError(
                    f"libvirt does not answer: {error.get_error_message()}",
                    where=self._uri,
                    hint="see: systemctl status libvirtd virtqemud",
                    lasting=Lasting.TRANSIENT,
                ) from error
        return self._connection

    def _domain(self, uuid: str) -> Any:
        libvirt = _library()
        try:
            return self._open().lookupByUUIDString(uuid)
        except libvirt.libvirtError as error:
            raise VanishedError("the guest is gone", where=f"domain {uuid}") from error

    def _tolerate(self, error: Any, uuid: str, where: str) -> None:
        """An unplug that was refused because an earlier one is under way, or is done."""
        if "unplug" in str(error) or "not found" in str(error):
            return
        libvirt = _library()
        if error.get_error_code() == libvirt.VIR_ERR_DEVICE_MISSING:
            return
        if not self._domain(uuid).isActive():
            raise VanishedError("the guest does not run", where=f"domain {uuid}") from error
        _refused(error, where)


def _library() -> Any:
    try:
        return importlib.import_module("libvirt")
    except ImportError as error:
        raise WriteError(
            "the Python library libvirt is not installed", hint="install python3-libvirt"
        ) from error


def _refused(error: Any, where: str) -> NoReturn:
    libvirt = _library()
    code = error.get_error_code()
    text = error.get_error_message()
    if code in (libvirt.VIR_ERR_NO_DOMAIN, libvirt.VIR_ERR_OPERATION_INVALID):
        raise VanishedError(f"the guest is gone or does not run: {text}", where=where) from error
    hint = "see: journalctl -u libvirtd -u virtqemud"
    raise WriteError(f"libvirt refused: {text}", where=where, hint=hint) from error
