"""A QEMU command line: the guest's name, its monitors and its network back ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vsrtune.core.errors import VsrtuneError
from vsrtune.core.untrusted import json_value

# Every option read here takes a value.
_WANTED = frozenset(
    (
        "name", "uuid", "smp", "netdev", "nic", "device", "qmp", "chardev", "mon", "machine", "M",
        "object",
    )
)  # fmt: skip

# Anybody may run a QEMU with any text on its command line. A descriptor is a C int.
_FD_DIGITS = 10
_VCPU_DIGITS = 5

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
    debug_threads: bool
    libvirt: bool
    guest: bool
    qmp: tuple[str, ...]
    netdevs: tuple[Netdev, ...]
    vcpus: int = 1


def split_options(text: str, implied: str = "") -> dict[str, str]:
    """Read ``key=value,key=value`` as QEMU's QemuOpts do: ``,,`` is a comma, a
    first part without ``=`` is the value of ``implied``, other bare keys are ``on``.
    Also reads the JSON form; its booleans become ``on`` and ``off``."""
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
    if isinstance(data, dict):
        for key, value in data.items():
            _flatten(f"{prefix}.{key}" if prefix else str(key), value, options)
    elif isinstance(data, bool):
        options[prefix] = "on" if data else "off"
    elif not isinstance(data, list):
        options[prefix] = str(data)


def parse(argv: Sequence[str]) -> QemuArgs:  # noqa: C901 (one case an option)
    """Read a command line. Unknown options are ignored; only an empty list is an error
    (VsrtuneError)."""
    if not argv:
        raise VsrtuneError("empty QEMU command line")
    name = uuid = ""
    debug_threads = libvirt = False
    guest = True
    vcpus = 1
    devices: dict[str, dict[str, str]] = {}
    netdevs: list[tuple[dict[str, str], str]] = []
    chardevs: dict[str, dict[str, str]] = {}
    monitors: list[str] = []
    qmp: list[str] = []
    for option, value in _pairs(argv):
        match option:
            case "name":
                parts = split_options(value, "guest")
                name = parts.get("guest", name)
                debug_threads = parts.get("debug-threads", "off") == "on"
            case "uuid":
                uuid = value.lower()
            case "machine" | "M":
                parts = split_options(value, "type")
                guest = guest and parts.get("type") != "none"
            case "netdev" | "nic":
                netdevs.append((split_options(value, "type"), option))
            case "device":
                parts = split_options(value, "driver")
                if "netdev" in parts:
                    devices.setdefault(parts["netdev"], parts)
            case "chardev":
                parts = split_options(value, "backend")
                chardevs[parts.get("id", "")] = parts
                libvirt = libvirt or parts.get("id") == "charmonitor"
            case "mon":
                parts = split_options(value, "chardev")
                if parts.get("mode") == "control":
                    monitors.append(parts.get("chardev", ""))
            case "smp":
                vcpus = _most_vcpus(split_options(value, "cpus"))
            case "qmp":
                socket = _qmp_socket(value)
                if socket:
                    qmp.append(socket)
            case "object":
                libvirt = libvirt or split_options(value, "qom-type").get("id") == "masterKey0"
    for monitor in monitors:
        socket = _server_path(chardevs.get(monitor, {}))
        if socket:
            qmp.append(socket)
    taps = [
        _netdev(parts, option, devices)
        for parts, option in netdevs
        if parts.get("type") in _TAP_TYPES
    ]
    return QemuArgs(name, uuid, debug_threads, libvirt, guest, tuple(qmp), tuple(taps), vcpus)


def essential(argv: Sequence[str]) -> list[str]:
    """A command line that ``parse`` reads in the same way, without the parts that it does not use:
    disks, secrets, kernel command lines, SMBIOS strings."""
    kept = [argv[0]] if argv else []
    monitors = {
        split_options(value, "chardev").get("chardev")
        for option, value in _pairs(argv)
        if option == "mon"
    }
    for option, value in _pairs(argv):
        match option:
            case "name":
                parts = split_options(value, "guest")
                value = _join(parts, ("guest", "debug-threads"))
            case "machine" | "M":
                value = split_options(value, "type").get("type", "")
            case "netdev" | "nic":
                if split_options(value, "type").get("type") not in _TAP_TYPES:
                    continue
            case "device":
                parts = split_options(value, "driver")
                if "netdev" not in parts:
                    continue
                value = _join(parts, ("driver", "netdev", "id", "mac"))
            case "chardev":
                parts = split_options(value, "backend")
                if parts.get("id") not in monitors | {"charmonitor"}:
                    continue
                value = _join(parts, ("backend", "id", "path", "server"))
            case "object":
                if split_options(value, "qom-type").get("id") != "masterKey0":
                    continue
                value = "secret,id=masterKey0"
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
        if option.startswith("-") and bare in _WANTED:
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
