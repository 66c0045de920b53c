# SPDX-License-Identifier: GPL-2.0-or-later
"""A QEMU command line: the guest's name, its monitors and its network back ends."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vsrtune.core.errors import VsrtuneError
from vsrtune.core.untrusted import json_value

# Every option that is read here takes a value; the key that its first part may leave out.
_IMPLIED = {
    "name": "guest", "uuid": "", "smp": "cpus", "netdev": "type", "nic": "type",
    "device": "driver", "qmp": "", "chardev": "backend", "mon": "chardev", "machine": "type",
    "M": "type", "object": "qom-type",
}  # fmt: skip

# Anybody may run a QEMU with any text on its command line. A descriptor is a C int.
_FD_DIGITS = 10
_VCPU_DIGITS = 5
# Characters of the name of an option within others, at most.
_LONGEST = 100
# Escapes of JSON make texts that no file, device or domain is named by, and that no call takes.
_IMPOSSIBLE = re.compile("[\0\ud800-\udfff]")

# Net back ends that have a tap or macvtap device on the host.
_TAP_TYPES = frozenset(("tap", "bridge"))


@dataclass(frozen=True, slots=True)
class Netdev:
    """One tap back end, in command line order.

    ``fds`` are the queues' descriptors when the starter opened them (libvirt); otherwise QEMU
    opened ``ifname`` itself ("" when the kernel chose the name).
    """

    id: str
    fds: tuple[int, ...]
    ifname: str
    vhost: bool
    mac: str = ""
    model: str = ""
    device: str = ""


@dataclass(frozen=True, slots=True)
class QemuArgs:
    """The relevant parts of one QEMU command line.

    ``libvirt`` marks a QEMU started by libvirt, whether or not libvirt answers. ``qmp`` are the
    UNIX sockets on which it listens as a QMP server. ``vcpus`` is the most vcpus that it can have
    (``-smp``). ``guest`` is False for runs without a machine (libvirt's capability probes).
    """

    name: str
    uuid: str
    libvirt: bool
    guest: bool
    qmp: tuple[str, ...]
    netdevs: tuple[Netdev, ...]
    vcpus: int = 1


def split_options(text: str, implied: str = "") -> dict[str, str]:
    """Read ``key=value,key=value`` as QEMU's QemuOpts do: ``,,`` is a comma, a
    first part without ``=`` is the value of ``implied``, other bare keys are ``on``.
    Also reads the JSON form; its booleans become ``on`` and ``off``, and texts that nothing can be
    named by are left out."""
    if text.lstrip().startswith("{"):
        return _json_options(text)
    options: dict[str, str] = {}
    parts = [p.replace("\0", ",") for p in text.replace(",,", "\0").split(",")]
    for position, part in enumerate(parts):
        key, equals, value = part.partition("=")
        if equals:
            options[key] = value
        elif position == 0 and implied:
            options[implied] = part
        elif part:
            options[key] = "on"
    return options


def _json_options(text: str) -> dict[str, str]:
    try:
        data = json_value(text)
    except ValueError:
        return {}
    options: dict[str, str] = {}
    _flatten("", data, options)
    return options


def _flatten(prefix: str, data: Any, options: dict[str, str]) -> None:
    # A name that many parts share would be kept once for each of them.
    if len(prefix) > _LONGEST:
        return
    if isinstance(data, dict):
        for key, value in data.items():
            _flatten(f"{prefix}.{key}" if prefix else str(key), value, options)
    elif isinstance(data, bool):
        options[prefix] = "on" if data else "off"
    elif not isinstance(data, list) and not _IMPOSSIBLE.search(str(data)):
        options[prefix] = str(data)


def parse(argv: Sequence[str]) -> QemuArgs:
    """Read a command line. Unknown options are ignored; only an empty list is an error
    (VsrtuneError)."""
    if not argv:
        raise VsrtuneError("empty QEMU command line")
    options = [(name, value, split_options(value, _IMPLIED[name])) for name, value in _pairs(argv)]

    def of(*names: str) -> list[dict[str, str]]:
        return [parts for name, _, parts in options if name in names]

    smp = of("smp")
    uuids = [value for name, value, _ in options if name == "uuid"]
    # The first device of a back end is its own.
    devices = {parts["netdev"]: parts for parts in reversed(of("device")) if "netdev" in parts}
    chardevs = {parts.get("id", ""): parts for parts in of("chardev")}
    sockets = [_qmp_socket(value) for name, value, _ in options if name == "qmp"]
    sockets += [
        _server_path(chardevs.get(parts.get("chardev", ""), {}))
        for parts in of("mon")
        if parts.get("mode") == "control"
    ]
    secrets = {parts.get("id") for parts in of("object")}
    return QemuArgs(
        name=next((parts["guest"] for parts in reversed(of("name")) if "guest" in parts), ""),
        uuid=uuids[-1].lower() if uuids else "",
        libvirt="charmonitor" in chardevs or "masterKey0" in secrets,
        guest=all(parts.get("type") != "none" for parts in of("machine", "M")),
        qmp=tuple(filter(None, sockets)),
        netdevs=tuple(
            _netdev(parts, name, devices)
            for name, _, parts in options
            if name in ("netdev", "nic") and parts.get("type") in _TAP_TYPES
        ),
        vcpus=_most_vcpus(smp[-1]) if smp else 1,
    )


def essential(argv: Sequence[str]) -> list[str]:
    """A command line that ``parse`` reads in the same way, without the parts that it does not use:
    disks, secrets, kernel command lines, SMBIOS strings."""
    kept = list(argv[:1])
    options = [(name, value, split_options(value, _IMPLIED[name])) for name, value in _pairs(argv)]
    monitors = {parts.get("chardev") for name, _, parts in options if name == "mon"}
    for option, text, parts in options:
        match option:
            case "name":
                value = _join(parts, ("guest",))
            case "machine" | "M":
                value = parts.get("type", "")
            case "netdev" | "nic" if parts.get("type") in _TAP_TYPES:
                value = text
            case "device" if "netdev" in parts:
                value = _join(parts, ("driver", "netdev", "id", "mac"))
            case "chardev" if parts.get("id") in monitors | {"charmonitor"}:
                value = _join(parts, ("backend", "id", "path", "server"))
            case "object" if parts.get("id") == "masterKey0":
                value = "secret,id=masterKey0"
            case "uuid" | "smp" | "qmp" | "mon":
                value = text
            case _:
                continue
        kept += [f"-{option}", value]
    return kept


def _join(parts: dict[str, str], keys: Sequence[str]) -> str:
    kept = [f"{key}={parts[key].replace(',', ',,')}" for key in keys if key in parts]
    return ",".join(kept)


def _pairs(argv: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    position = 1
    while position < len(argv) - 1:
        option = argv[position]
        bare = option.removeprefix("-").removeprefix("-")
        if option.startswith("-") and bare in _IMPLIED:
            pairs.append((bare, argv[position + 1]))
            position += 1
        position += 1
    return pairs


def _most_vcpus(parts: dict[str, str]) -> int:
    """``maxcpus``, or the number that the other keys give when it is not written
    (machine_parse_smp_config)."""

    def number(key: str, default: int) -> int:
        text = parts.get(key, "")
        return int(text) if text.isdecimal() and len(text) <= _VCPU_DIGITS else default

    levels = ("drawers", "books", "sockets", "dies", "clusters", "modules", "cores", "threads")
    shape = math.prod(max(1, number(level, 1)) for level in levels)
    return max(1, number("maxcpus", max(number("cpus", 1), shape)))


def _qmp_socket(value: str) -> str:
    kind, _, rest = value.partition(":")
    if kind != "unix":
        return ""
    options = split_options(rest, "path")
    # -qmp unix:PATH without "server" is a client, which nobody can connect to.
    return options.get("path", "") if options.get("server", "off") == "on" else ""


def _server_path(chardev: dict[str, str]) -> str:
    if "backend" not in chardev or not chardev["backend"].startswith("socket"):
        return ""
    return chardev.get("path", "") if chardev.get("server", "off") == "on" else ""


def _netdev(parts: dict[str, str], option: str, devices: dict[str, dict[str, str]]) -> Netdev:
    fds = parts.get("fds", parts.get("fd", ""))
    own = {"driver": parts.get("model", ""), "mac": parts.get("mac", "")}
    device = own if option == "nic" else devices.get(parts.get("id", ""), {})
    vhost = parts.get("vhost")
    if vhost is None:
        # net_init_tap: a vhost descriptor or vhostforce asks for vhost as well.
        forced = parts.get("vhostforce", "off") == "on"
        vhost = "on" if forced or "vhostfd" in parts or "vhostfds" in parts else "off"
    return Netdev(
        id=parts.get("id", ""),
        fds=tuple(int(fd) for fd in fds.split(":") if fd.isdecimal() and len(fd) <= _FD_DIGITS),
        ifname=parts.get("ifname", ""),
        vhost=vhost == "on",
        mac=device.get("mac", "").lower(),
        model=_model(device.get("driver", "")),
        device=device.get("id", ""),
    )


def _model(driver: str) -> str:
    return "virtio" if driver.startswith("virtio-net") else driver
