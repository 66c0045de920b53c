"""What the journal has of threads, devices and cgroups that exist no more."""

from __future__ import annotations

from vsrtune.core.errors import VanishedError, VsrtuneError
from vsrtune.execute.host_writer import SysOps
from vsrtune.execute.journal import Journal
from vsrtune.log import LOGGER, fields
from vsrtune.model.nic_settings import nic_settings
from vsrtune.model.snapshot import SnapshotSlice
from vsrtune.model.targets import CgroupTarget, DeviceTarget, NicTarget, RrTimeslice


def forget(part: SnapshotSlice, ops: SysOps, journal: Journal) -> None:
    """Drop the entries of the guests of ``part`` that nothing is left of.

    A guest missing from the snapshot is no proof, because its reader may have
    failed: the target itself is asked.
    """
    guests = part.guests
    alive = {t.key for g in guests for t in g.threads}
    alive |= {t.key for n in part.snapshot.host.nics for t in n.napi}
    below = nic_settings(part.snapshot.host)
    devices = {i.ifindex for g in guests for i in g.interfaces}
    for entry in journal.entries(part.names):
        target = entry.target
        if isinstance(target, NicTarget):
            if target in below:
                continue
        elif isinstance(target, DeviceTarget):
            if target.ifindex in devices:
                continue
        elif isinstance(target, RrTimeslice):
            continue  # a kernel has it for as long as it runs
        elif not isinstance(target, CgroupTarget) and target.thread in alive:
            continue
        try:
            gone = ops.read(target) is False
        except VanishedError:
            gone = True
        except VsrtuneError:
            gone = False
        if gone:
            journal.drop(target, "gone")
            LOGGER.info("forgot %s: it no longer exists", target, extra=fields(guest=target.guest))
