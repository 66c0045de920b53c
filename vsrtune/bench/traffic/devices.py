# SPDX-License-Identifier: GPL-2.0-or-later
"""Refuses devices to which a bench must not send: those through which the machine is reached.

A flood on the device that carries the default route or the administrator's own
connection would cut the machine off. Such devices are refused, as are all devices below them
(the ports of a bridge, the parent of a VLAN).
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import psutil

from vsrtune.bench.setup.commands import run
from vsrtune.core.errors import VsrtuneError

Link = Mapping[str, Any]


def check(devices: Collection[str], ssh_connection: str = "") -> dict[str, dict[str, str]]:
    """The driver and settings of devices of this namespace. Raises VsrtuneError for one that must
    not be used. ``ssh_connection`` is sshd's SSH_CONNECTION, when this process has one."""
    links = json.loads(run(["ip", "-j", "-d", "address", "show"]))
    routes = [
        route
        for family in ("-4", "-6")
        for route in json.loads(run(["ip", "-j", family, "route", "show", "default"]) or "[]")
    ]
    sockets = psutil.net_connections(kind="tcp")
    local = [s.laddr for s in sockets if s.status == psutil.CONN_ESTABLISHED and s.laddr]
    own = own_addresses(local, ssh_connection)
    for device in devices:
        what = refusal(device, links, routes, own)
        if what is not None:
            raise VsrtuneError(f"refused: {what}", where=device)
    return {link["ifname"]: _described(link) for link in links if link["ifname"] in devices}


def _described(link: Link) -> dict[str, str]:
    driver = _kind(link)
    if not driver:
        with contextlib.suppress(VsrtuneError):
            told = run(["ethtool", "-i", link["ifname"]])
            driver = told.partition("driver: ")[2].partition("\n")[0]
    return {"driver": driver, "mtu": str(link["mtu"]), "txqueuelen": str(link.get("txqlen", ""))}


def refusal(
    device: str, links: Sequence[Link], routes: Sequence[Mapping[str, Any]], ssh: Iterable[str]
) -> str | None:
    """Why a bench must not use the device; None when it may.

    ``links`` and ``routes`` are what `ip -j -d` prints, ``ssh`` the own addresses of ssh
    connections.
    """
    by_name = {link["ifname"]: link for link in links}
    if device not in by_name:
        return "there is no such device"
    flags = by_name[device].get("flags", ())
    if "LOOPBACK" in flags:
        return "it is the loopback device"
    if "UP" not in flags:
        return "it is not up"
    if "LOWER_UP" not in flags:
        return "it has no carrier"
    hops = [hop for route in routes for hop in (route, *route.get("nexthops", ()))]
    for names, why in (
        ({hop["dev"] for hop in hops if "dev" in hop}, "the default route"),
        (_holders(links, ssh), "an ssh connection to this machine"),
    ):
        if device in _with_lowers(names, links):
            return f"it carries {why}"
    return None


def own_addresses(local: Iterable[tuple[str, int]], ssh_connection: str) -> frozenset[str]:
    """This machine's addresses of ssh connections: those with sshd's port among the ``local``
    ends (address, port) of connections, and that of SSH_CONNECTION, whatever its port."""
    words = ssh_connection.split()
    found = {_address(words[2])} if len(words) == 4 else set()
    return frozenset(found | {_address(address) for address, port in local if port == 22})


def _address(text: str) -> str:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def _holders(links: Sequence[Link], addresses: Iterable[str]) -> set[str]:
    wanted = set(addresses)
    return {
        link["ifname"]
        for link in links
        for entry in link.get("addr_info", ())
        if entry.get("local") in wanted and "LOOPBACK" not in link.get("flags", ())
    }


def _with_lowers(names: Iterable[str], links: Sequence[Link]) -> set[str]:
    """The devices and all devices below them."""
    found = set(names)
    while True:
        ports = {link["ifname"] for link in links if link.get("master") in found}
        # A veth's link is its peer, which is beside the veth, not below it.
        parents = {
            str(link["link"])
            for link in links
            if link["ifname"] in found and "link" in link and _kind(link) != "veth"
        }
        if ports | parents <= found:
            return found
        found |= ports | parents


def _kind(link: Link) -> str:
    return str(link.get("linkinfo", {}).get("info_kind", ""))
