# SPDX-License-Identifier: GPL-2.0-or-later
"""libvirt domains: reads their XML, plugs and unplugs interfaces, changes definitions."""

from __future__ import annotations

import contextlib
import glob
import importlib
import json
import os
import re
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from vsrtune.attach.plan.model import GuestNics
from vsrtune.core.errors import VanishedError, WriteError
from vsrtune.core.exit_codes import ExitCode
from vsrtune.host import netlink
from vsrtune.host.filesystem import LiveRoot
from vsrtune.host.libvirt import Connection, library, vanished
from vsrtune.model.domain_xml import DomainNic, nics
from vsrtune.observe.trust import Judge

# A guest acknowledges an unplug within a second; a guest that boots may take longer.
RELEASE_SECONDS = 30.0
# libvirt itself gives up after 30 s when another request for the guest is under way, and waits
# without end for a QEMU that does not answer.
GUEST_SECONDS = 40.0
# A guest whose memory is huge takes minutes to start.
START_SECONDS = 600.0
_PAUSE = 0.05
_NET_ALIAS = re.compile(r"net\d+")
# A back end that libvirt made, in the human monitor's `info network`.
_BACK_END = re.compile(r"\bhost(net\d+): index=")

T = TypeVar("T")


class AwayError(WriteError):
    """libvirt does not answer: it is unknown whether it carried out the request."""

    exit_code = ExitCode.UNREAD


class SilentError(WriteError):
    """libvirt answers, but waits for a guest's QEMU: it is unknown whether the request will be
    carried out."""


class RefusedError(WriteError):
    """libvirt refused the request, and has done nothing."""


# A definition leaves nothing of itself behind; libvirt does not remove its disks.
_ALL_OF_IT = (
    "VIR_DOMAIN_UNDEFINE_MANAGED_SAVE", "VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA",
    "VIR_DOMAIN_UNDEFINE_CHECKPOINTS_METADATA", "VIR_DOMAIN_UNDEFINE_NVRAM",
)  # fmt: skip


class LiveDomains:
    """One connection to libvirt, opened at first need and again after it broke. Methods raise
    VanishedError when the domain does not run (any more), AwayError when libvirt does not answer,
    SilentError when it answers and does not come to an end with a guest, and WriteError for any
    other refusal by libvirt."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._kept = Connection(uri, AwayError)
        self._seconds = GUEST_SECONDS

    def nics(self, uuid: str) -> tuple[DomainNic, ...]:
        """The interfaces that the running domain has now."""

        def read(domain: Any) -> tuple[DomainNic, ...]:
            if not domain.isActive():
                raise VanishedError("the guest does not run", where=f"domain {uuid}")
            return nics(domain.XMLDesc(0))

        return self._ask(uuid, read, runs=True)

    def run(self, uuid: str) -> int:
        """libvirt's number for the domain from this start to its end."""
        return self._ask(uuid, lambda domain: int(domain.ID()), runs=True)

    def guests(self) -> tuple[GuestNics, ...]:
        """Every libvirt guest."""
        libvirt = library()

        def read(connection: Any) -> tuple[GuestNics, ...]:
            found = []
            for domain in connection.listAllDomains(0):
                try:
                    live = nics(domain.XMLDesc(0)) if domain.isActive() else None
                    kept = libvirt.VIR_DOMAIN_XML_INACTIVE
                    config = nics(domain.XMLDesc(kept)) if domain.isPersistent() else None
                    saved = self._saved(domain) if live is None else None
                    found.append(GuestNics(domain.name(), domain.UUIDString(), live, config, saved))
                except libvirt.libvirtError as error:
                    if error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN:
                        raise
            return tuple(found)

        return self._call(read, self._kept.uri)

    def _saved(self, domain: Any) -> tuple[DomainNic, ...] | None:
        """The interfaces of a domain whose memory libvirt keeps, None when it keeps none."""
        libvirt = library()
        if not domain.hasManagedSaveImage():
            return None
        try:
            return nics(domain.managedSaveGetXMLDesc())
        except libvirt.libvirtError as error:
            # The image is damaged, or somebody removed the file: libvirt restores nothing from it.
            lost = (libvirt.VIR_ERR_OPERATION_FAILED, libvirt.VIR_ERR_SYSTEM_ERROR)
            if error.get_error_code() not in lost or not self._kept.alive():
                raise
            return ()

    def definition(self, uuid: str) -> str:
        """The persistent definition, secrets included. Raises VanishedError without one."""
        libvirt = library()
        flags = libvirt.VIR_DOMAIN_XML_INACTIVE | libvirt.VIR_DOMAIN_XML_SECURE

        def read(domain: Any) -> str:
            if not domain.isPersistent():
                raise VanishedError("the guest has no persistent definition", where=uuid)
            return str(domain.XMLDesc(flags))

        return self._ask(uuid, read)

    def start_ended(self, uuid: str) -> bool:
        """Start the guest if libvirt itself has ended it. Returns whether it had. A libvirtd that
        comes back and cannot take a running guest over ends the guest (qemuProcessReconnect), for
        example when libvirtd died right after QEMU had removed a device."""
        libvirt = library()
        ended = [libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_SHUTOFF_DAEMON]

        def start(domain: Any) -> bool:
            found = list(domain.state()) == ended
            if found:
                domain.create()
            return found

        return self._ask(uuid, start, seconds=START_SECONDS)

    def define(self, xml: str, where: str) -> None:
        """Replace the persistent definition of the guest that the XML names, or define a new
        one."""
        self._call(lambda connection: connection.defineXML(xml), where)

    def request_unplug(self, uuid: str, found: DomainNic) -> None:
        """Ask the guest to release the interface. It is no error if the guest was asked already,
        or has released it."""
        libvirt = library()

        def request(domain: Any) -> None:
            try:
                domain.detachDeviceFlags(found.xml, libvirt.VIR_DOMAIN_AFFECT_LIVE)
            except libvirt.libvirtError as error:
                if error.get_error_code() == libvirt.VIR_ERR_DEVICE_MISSING:
                    return
                if "unplug" not in str(error) and "not found" not in str(error):
                    raise

        self._ask(uuid, request, f"domain {uuid} interface {found.mac}", runs=True)

    def plug(self, uuid: str, xml: str, mac: str) -> None:
        """Give a running guest an interface. If libvirt refuses, clear the remains that a killed
        libvirtd has forgotten in QEMU or on the host, and try again."""
        where = f"domain {uuid} interface {mac}"
        try:
            self._attach(uuid, xml, where)
        except RefusedError as error:
            orphans = self.drop_orphans(uuid)
            known = {nic.device for guest in self.guests() for nic in guest.live or ()}
            try:
                macvtaps = drop_macvtaps(mac, known, self.run(uuid))
            except OSError as failed:
                raise error from failed
            if not orphans and not macvtaps:
                raise
            self._attach(uuid, xml, where)

    def _attach(self, uuid: str, xml: str, where: str) -> None:
        live = library().VIR_DOMAIN_AFFECT_LIVE
        self._ask(uuid, lambda domain: domain.attachDeviceFlags(xml, live), where, runs=True)

    def drop_orphans(self, uuid: str) -> tuple[str, ...]:
        """Remove interfaces that QEMU has and libvirt does not know because libvirtd died while
        it plugged them in, including back ends without a device (which hold a macvtap open).
        Returns their names when they are gone."""
        self.nics(uuid)  # a guest that does not run has no QEMU to ask
        orphans = self._unknown(uuid, self._plugged(uuid))
        for name in orphans:
            self._monitor(uuid, "device_del", {"id": name})
        end = time.monotonic() + RELEASE_SECONDS
        while orphans and set(orphans) & set(self._plugged(uuid)):
            if time.monotonic() > end:
                raise WriteError(
                    f"the guest did not release {', '.join(orphans)}, which libvirt lost",
                    where=f"domain {uuid}",
                    hint="its kernel must support PCI hotplug; a guest started anew is well",
                )
            time.sleep(_PAUSE)
        # QMP itself has no list of back ends.
        command = {"command-line": "info network"}
        told = self._monitor(uuid, "human-monitor-command", command)
        found = sorted(set(_BACK_END.findall(told if isinstance(told, str) else "")))
        lone = self._unknown(uuid, found)
        for name in lone:
            self._monitor(uuid, "netdev_del", {"id": f"host{name}"})
        return tuple(sorted({*orphans, *lone}))

    def _unknown(self, uuid: str, names: Sequence[str]) -> list[str]:
        """Those of the ``names`` that QEMU has told which libvirt does not know. QEMU tells when
        libvirt has no other job on the guest, so one that an operator was plugging in is known by
        now, and was not before QEMU was asked."""
        known = {nic.alias for nic in self.nics(uuid)}
        return [name for name in names if name not in known]

    def _plugged(self, uuid: str) -> list[str]:
        """The network devices that QEMU itself lists and libvirt may have made: their ids are its
        aliases, and their back ends have its names. Others are of <qemu:commandline>."""
        found = self._monitor(uuid, "qom-list", {"path": "/machine/peripheral"})
        if not isinstance(found, list):
            return []
        names = (str(entry.get("name", "")) for entry in found if isinstance(entry, dict))
        return [name for name in names if _NET_ALIAS.fullmatch(name) and self._libvirts(uuid, name)]

    def _libvirts(self, uuid: str, name: str) -> bool:
        place = {"path": f"/machine/peripheral/{name}", "property": "netdev"}
        return bool(self._monitor(uuid, "qom-get", place) == f"host{name}")

    def _monitor(self, uuid: str, command: str, arguments: dict[str, str]) -> Any:
        """Send one QMP command through libvirt. An error of QEMU is no error here, because the
        device to remove may be gone."""
        qemu = importlib.import_module("libvirt_qemu")
        text = json.dumps({"execute": command, "arguments": arguments})
        where = f"domain {uuid}: {command}"
        told = self._ask(
            uuid, lambda domain: qemu.qemuMonitorCommand(domain, text, 0), where, runs=True
        )
        return json.loads(told).get("return")

    def start_guest(self, uuid: str) -> None:
        """Start the guest, unless it runs; returns when it runs. Raises WriteError when it ended at
        once."""

        def start(domain: Any) -> None:
            if not domain.isActive():
                domain.create()
            if not domain.isActive():
                raise WriteError(
                    "the guest ended at once", where=domain.name(),
                    hint=f"see: /var/log/libvirt/qemu/{domain.name()}.log",
                )  # fmt: skip

        self._ask(uuid, start, seconds=START_SECONDS)

    def stop_guest(self, uuid: str) -> None:
        """End the guest at once, if it is there and runs."""

        def stop(domain: Any) -> None:
            if domain.isActive():
                domain.destroy()

        with contextlib.suppress(VanishedError):
            self._ask(uuid, stop)

    def undefine_guest(self, uuid: str) -> None:
        """Remove the guest's definition, if there is one; the guest does not run."""
        libvirt = library()
        flags = sum(getattr(libvirt, name) for name in _ALL_OF_IT)

        def undefine(domain: Any) -> None:
            if domain.isPersistent():
                domain.undefineFlags(flags)

        with contextlib.suppress(VanishedError):
            self._ask(uuid, undefine)

    def saved(self, uuid: str) -> bool:
        """Whether libvirt keeps the memory of the guest, which does not run."""
        return self._ask(uuid, lambda domain: bool(domain.hasManagedSaveImage()))

    def close(self) -> None:
        """Close the connection."""
        self._kept.close()

    def _ask(
        self,
        uuid: str,
        request: Callable[[Any], T],
        where: str = "",
        *,
        runs: bool = False,
        seconds: float | None = None,
    ) -> T:
        """The result of a request to libvirt about the domain. ``runs``: it works on running
        domains only."""
        libvirt, where = library(), where or f"domain {uuid}"

        def ask(connection: Any) -> T:
            domain = None
            try:
                domain = connection.lookupByUUIDString(uuid)
                return request(domain)
            except libvirt.libvirtError as error:
                if not vanished(error, domain if runs else None):
                    raise
                text = error.get_error_message()
                raise VanishedError(
                    f"the guest is gone or does not run: {text}", where=where
                ) from error

        return self._call(ask, where, seconds)

    def _call(self, request: Callable[[Any], T], where: str, seconds: float | None = None) -> T:
        """The result of a request on the connection. Turns an error of libvirt into ours."""
        seconds = seconds or self._seconds
        # A libvirt that is silent itself is noticed before it is asked for anything.
        self._kept.open()
        try:
            return self._kept.call(request, seconds)
        except TimeoutError as error:
            self._kept.open()
            raise SilentError(
                f"libvirt answers, but has not done this in {seconds:g} s: QEMU is silent",
                where=where,
                hint="see: virsh domjobinfo DOMAIN; virsh destroy ends a guest whose QEMU hangs",
            ) from error
        except library().libvirtError as error:
            text = error.get_error_message()
            if not self._kept.alive():
                self.close()
                raise self._kept.away(text, "libvirt went away", where) from error
            hint = "see: journalctl -u libvirtd -u virtqemud"
            raise RefusedError(f"libvirt refused: {text}", where=where, hint=hint) from error


def drop_macvtaps(mac: str, known: Collection[str], number: int) -> bool:
    """Remove the macvtaps of that MAC that are none of ``known`` (device names) and that no
    process outside the scope of the domain with this id holds open: its QEMU may have got a
    descriptor from a libvirtd that died before it made a back end of it, which nothing lists.
    Returns whether there were any. A lower device takes no second macvtap of the same MAC. Raises
    OSError."""
    left_over = [
        link.index
        for link in netlink.links()
        if link.kind == "macvtap"
        and link.mac == mac
        and link.name not in known
        and not _held(f"/dev/tap{link.index}", number)
    ]
    for index in left_over:
        netlink.request("del", index=index)
    return bool(left_over)


def _held(path: str, number: int) -> bool:
    """Whether any process has that file open, but those in the scope of the domain with this id."""
    judge = Judge(LiveRoot())
    for descriptor in glob.iglob("/proc/[0-9]*/fd/*"):
        try:
            held = os.readlink(descriptor) == path
        except OSError:
            continue  # it is gone by now
        if held and not judge.in_scope(int(descriptor.split("/")[2]), number):
            return True
    return False
