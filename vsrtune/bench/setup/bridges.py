# SPDX-License-Identifier: GPL-2.0-or-later
"""Bridges of the bench's own, of Linux or Open vSwitch, with one lower device as port.

A bridge is named after the number of its lower device, so that a guard can remove it by the
ledger alone. It learns, floods and does nothing else: no spanning tree, no multicast snooping,
no addresses.
"""

from __future__ import annotations

import ipaddress
import shutil
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path

import psutil

from vsrtune.attach.plan.model import STACKED, AttachHostState
from vsrtune.bench.setup.commands import run
from vsrtune.bench.spec.model import BenchAttachment
from vsrtune.core.errors import WriteError

NET = Path("/sys/class/net")
OVS_SOCKET = Path("/run/openvswitch/db.sock")

# Of the names of the bench's bridges.
PREFIXES = {BenchAttachment.BRIDGE: "vsrb", BenchAttachment.OPENVSWITCH: "vsro"}

_OVS = ("ovs-vsctl", "--timeout=20")
# libvirt removes a macvtap an instant after it forgets the interface.
_BUSY_SECONDS = 5.0
_PAUSE = 0.1


def name_for(attachment: BenchAttachment, lower: str) -> str:
    """The name of the bench's bridge of that kind on ``lower``; "" for other kinds.
    Raises WriteError."""
    prefix = PREFIXES.get(attachment)
    try:
        return f"{prefix}{socket.if_nametoindex(lower)}" if prefix else ""
    except OSError as error:
        raise WriteError("there is no such device", where=lower) from error


def obstacle(lower: str, own: Collection[str], host: AttachHostState) -> tuple[str, str] | None:
    """Why ``lower`` cannot be a bridge's port, and what to do; None when it can. ``own`` are
    devices on it that will be gone by then. Raises WriteError when there is no such device."""
    link = host.links.get(lower)
    if link is None:
        raise WriteError("there is no such device", where=lower)
    for other in host.links.values():
        if other.lower == link.index and other.kind in STACKED and other.name not in own:
            return (
                f"the {other.kind} {other.name} is on {lower}, which cannot be a bridge's port too",
                "add its guest to the routers, or stop it",
            )
    if link.master:
        master = host.by_index.get(link.master)
        name = master.name if master is not None else "another device"
        return f"{lower} is a port of {name} already", "take it out of there"
    for found in psutil.net_if_addrs().get(lower, ()):
        if found.family not in (socket.AF_INET, socket.AF_INET6):
            continue
        address = found.address.partition("%")[0]
        if not ipaddress.ip_address(address).is_link_local:
            return (
                f"{lower} has the address {address}, which would be cut off in a bridge",
                "use a device that this host itself does not need",
            )
    return None


def ovs_obstacle() -> tuple[str, str] | None:
    """Why there can be no Open vSwitch bridge, and what to do; None when there can."""
    if shutil.which("ovs-vsctl") is None:
        return "Open vSwitch is not installed", "apt install openvswitch-switch"
    if not OVS_SOCKET.exists():
        return "Open vSwitch does not run", "systemctl start openvswitch-switch"
    return None


def create(attachment: BenchAttachment, lower: str) -> None:
    """Make the bridge with ``lower`` in it. Raises WriteError."""
    name = name_for(attachment, lower)
    if attachment is BenchAttachment.OPENVSWITCH:
        _retry(lambda: _create_ovs(name, lower))
    else:
        bridge = ["bridge", "stp_state", "0", "forward_delay", "0", "mcast_snooping", "0"]
        run(["ip", "link", "add", "name", name, "type", *bridge])
        _quiet(name)
        _retry(lambda: run(["ip", "link", "set", "dev", lower, "master", name]))
        run(["ip", "link", "set", "dev", name, "up"])


def existing(names: Collection[str]) -> list[str]:
    """Those of the bridges that exist."""
    return [name for name in names if (NET / name).exists() or _in_ovs(name)]


def remove(names: Collection[str]) -> None:
    """Remove those of the bridges that exist. Raises WriteError."""
    for name in existing(names):
        if (NET / name / "bridge").exists():
            run(["ip", "link", "delete", "dev", name, "type", "bridge"])
        else:
            run([*_OVS, "--if-exists", "del-br", name])


def _in_ovs(name: str) -> bool:
    """Whether the database has the bridge, which has no device once Open vSwitch was stopped.
    False when the database does not answer."""
    if not OVS_SOCKET.exists():
        return False
    try:
        return name in run([*_OVS, "list-br"]).split()
    except WriteError:
        return False


def _create_ovs(name: str, lower: str) -> None:
    setup = f"--may-exist add-br {name} -- set-fail-mode {name} standalone"
    setup += f" -- --may-exist add-port {name} {lower}"
    run([*_OVS, "--", *setup.split()])
    # A port that could not be opened is no failure to ovs-vsctl.
    if run([*_OVS, "get", "Interface", lower, "ofport"]) == "-1":
        reason = run([*_OVS, "get", "Interface", lower, "error"])
        run([*_OVS, "--if-exists", "del-br", name])
        raise WriteError(f"Open vSwitch cannot use {lower}: {reason}", where=name)
    _quiet(name)
    run(["ip", "link", "set", "dev", name, "up"])


def _quiet(name: str) -> None:
    """Prevent router solicitations and the like, which would be counted as traffic."""
    switch = Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6")
    if switch.exists():
        switch.write_text("1\n")


def _retry(attempt: Callable[[], object]) -> None:
    end = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            attempt()
            return
        except WriteError as error:
            if "busy" not in str(error).lower() or time.monotonic() > end:
                raise
        time.sleep(_PAUSE)
