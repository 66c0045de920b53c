"""libvirt domains come and go: started, ended, undefined."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from vsrtune.core.errors import VanishedError, WriteError
from vsrtune.live_domains import LiveDomains

# A definition leaves nothing of itself behind; what disks it had is not libvirt's to remove.
_ALL_OF_IT = (
    "VIR_DOMAIN_UNDEFINE_MANAGED_SAVE", "VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA",
    "VIR_DOMAIN_UNDEFINE_CHECKPOINTS_METADATA", "VIR_DOMAIN_UNDEFINE_NVRAM",
)  # fmt: skip


class DomainLife(LiveDomains):
    """All of this may be asked for again: what is so already is no error."""

    def start(self, uuid: str) -> None:
        """Start the guest; returns when it runs. Raises WriteError when it ended at once."""

        def begin(domain: Any) -> None:
            if not domain.isActive():
                domain.create()
            if not domain.isActive():
                raise WriteError(
                    "the guest ended at once", where=domain.name(),
                    hint=f"see: /var/log/libvirt/qemu/{domain.name()}.log",
                )  # fmt: skip

        self._with(uuid, begin)

    def stop(self, uuid: str) -> None:
        """End the guest at once, if it runs."""

        def end(domain: Any) -> None:
            if domain.isActive():
                domain.destroy()

        self._with(uuid, end, gone=True)

    def undefine(self, uuid: str) -> None:
        """Remove the guest's definition, if there is one; it does not run."""
        libvirt = importlib.import_module("libvirt")
        flags = sum(getattr(libvirt, name) for name in _ALL_OF_IT)

        def undefine(domain: Any) -> None:
            if domain.isPersistent():
                domain.undefineFlags(flags)

        self._with(uuid, undefine, gone=True)

    def saved(self, uuid: str) -> bool:
        """Whether libvirt keeps the memory of the guest, which does not run."""
        found: list[bool] = []
        self._with(uuid, lambda domain: found.append(bool(domain.hasManagedSaveImage())))
        return any(found)

    def _with(self, uuid: str, work: Callable[[Any], None], *, gone: bool = False) -> None:
        """Do it with the domain; with ``gone``, one that is not there needs nothing."""
        libvirt = importlib.import_module("libvirt")
        try:
            domain = self._domain(uuid)
            try:
                work(domain)
            except libvirt.libvirtError as error:
                self._refused(error, f"domain {uuid}")
        except VanishedError:
            if not gone:
                raise
