# SPDX-License-Identifier: GPL-2.0-or-later
"""The agent of a bench in one network namespace, of this machine or another.

`python3 -m vsrtune.bench.traffic.agent` reads one JSON request a line from stdin and answers
each with a line on stdout; a request that comes while traffic flows ends the traffic.
When stdin ends, for whatever reason, the agent ends the traffic and removes everything that it
set up; when the agent is killed, the kernel does this: its netlink socket owns the nftables table
that counts and drops the frames that came through, before IP has them (for pktgen see there).
An `open` comes first and names the devices; frames go to no other device.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import psutil

from vsrtune import __version__
from vsrtune.bench import children
from vsrtune.bench.setup.commands import run
from vsrtune.bench.spec.model import Leg
from vsrtune.bench.spec.streams import Counted, Stream
from vsrtune.bench.traffic import pktgen, probe
from vsrtune.bench.traffic.probe import ProbeSocket
from vsrtune.core.codec import decode
from vsrtune.core.errors import VsrtuneError
from vsrtune.host.filesystem import LiveRoot, boot_id
from vsrtune.host.netdev import parse_softnet

TABLE = "vsrtune_bench"
# Before every other hook at this place.
_PRIORITY = -400

# linux/if_ether.h: a packet socket of it gets frames before the sink drops them.
ETH_P_ALL = 3
# net/core/pktgen.c: 42 bytes of headers, the magic number, the number of the frame in its stream,
# and when it was made, in seconds and microseconds.
_MAGIC = bytes.fromhex("be9be955")
_HEAD = 58


class Sink:
    """The counters of one namespace, by device. Raises VsrtuneError without nftables."""

    def __init__(self, devices: Mapping[str, Sequence[Counted]]) -> None:
        try:
            import nftables
        except ImportError as error:
            raise VsrtuneError(
                "the Python binding of nftables is missing",
                hint="install python3-nftables",
            ) from error
        self._nft = nftables.Nftables()
        self.devices = {name: tuple(counted) for name, counted in devices.items() if counted}
        self._run(ruleset(self.devices))

    def read(self) -> list[tuple[str, int | None, int]]:
        """Streams, flows, and their frames so far. Raises VsrtuneError."""
        self._nft.set_json_output(True)
        found: list[tuple[str, int | None, int]] = []
        for number, counted in enumerate(self.devices.values()):
            listing = json.loads(self._run(f"list set netdev {TABLE} {_set(number)}"))
            frames = dict(parse_elements(listing))
            found += [(one.key, one.flow, frames[element(one)]) for one in counted]
        return found

    def _run(self, command: str) -> str:
        (status, output, error) = self._nft.cmd(command)
        if status != 0:
            taken = "permitted" in error or "busy" in error
            hint = "a table of that name belongs to a bench that still runs" if taken else ""
            what = f"nftables refuses: {error.strip()}"
            raise VsrtuneError(what, where=f"table netdev {TABLE}", hint=hint)
        return str(output)


def ruleset(devices: Mapping[str, Sequence[Counted]]) -> str:
    """The table in the syntax of nft(8)."""
    parts = [f"create table netdev {TABLE} {{ flags owner; }}"]
    for number, (device, counted) in enumerate(devices.items()):
        by_flow = counted[0].source_port is not None
        kinds = "ipv4_addr . inet_service" + (" . inet_service" if by_flow else "")
        fields = "ip saddr . udp dport" + (" . udp sport" if by_flow else "")
        elements = ", ".join(" . ".join(map(str, element(one))) + " counter" for one in counted)
        hook = f'type filter hook ingress device "{device}" priority {_PRIORITY};'
        parts += [
            f"add set netdev {TABLE} {_set(number)} {{ type {kinds}; counter; }}",
            f"add element netdev {TABLE} {_set(number)} {{ {elements} }}",
            f"add chain netdev {TABLE} in_{number} {{ {hook} }}",
            f"add rule netdev {TABLE} in_{number} {fields} @{_set(number)} drop",
        ]
    return "\n".join(parts)


def element(counted: Counted) -> tuple[str | int, ...]:
    """The set element that counts ``counted``."""
    if counted.source_port is None:
        return counted.source, counted.destination_port
    return counted.source, counted.destination_port, counted.source_port


def parse_elements(listing: Any) -> Iterator[tuple[tuple[str | int, ...], int]]:
    """Elements of the set in nft's JSON, and their frames."""
    for item in listing["nftables"]:
        for entry in item.get("set", {}).get("elem", []):
            yield tuple(entry["elem"]["val"]["concat"]), int(entry["elem"]["counter"]["packets"])


def _set(number: int) -> str:
    return f"frames_{number}"


def order(socket: ProbeSocket) -> tuple[int, int]:
    """How many of the generator's frames a socket of ETH_P_ALL got, and how many of them came
    after a frame of their flow that was sent later: the reordered singletons of RFC 4737."""
    highest: dict[bytes, bytes] = {}
    count = late = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            head = socket.socket.recv(_HEAD)
            # From the source address to the destination port.
            flow, sent = head[26:38], head[50:] + head[46:50]
            if head[42:46] == _MAGIC:
                # Numbers begin anew with every run, and frames of the warm-up may still come.
                last = highest.get(flow, b"")
                highest[flow] = max(sent, last)
                count += 1
                late += sent < last
    return count, late


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
    # Addresses are on internal ports of Open vSwitch, its other ports' master is the datapath.
    switches = {link["ifname"] for link in links if _kind(link) == "openvswitch"}
    while True:
        masters = found | switches if found & switches else found
        ports = {link["ifname"] for link in links if link.get("master") in masters}
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


_OPERATIONS = ("open", "bind", "sink", "run", "counters", "probe", "probed", "order", "clean")


class Agent:
    """Answers requests; each operation is the method of that name."""

    def __init__(self, stdin: int) -> None:
        self._stdin = stdin
        self._devices: tuple[str, ...] = ()
        self._generator: pktgen.Pktgen | None = None
        self._sink: Sink | None = None
        self._receivers: dict[str, probe.ProbeSocket] = {}
        self._samples: list[probe.ProbeSocket] = []
        self._loaded = False

    def answer(self, request: Mapping[str, Any]) -> Any:
        """The result of one request. Raises VsrtuneError."""
        arguments = dict(request)
        operation = arguments.pop("op", "")
        if operation not in _OPERATIONS:
            raise VsrtuneError(f"the agent ({__version__}) does not know {operation!r}")
        return getattr(self, operation)(**arguments)

    def open(self, namespace: str | None, names: list[str]) -> dict[str, Any]:
        """Enter the namespace, check the devices, make the generator."""
        pktgen.enter(namespace)
        described = check(names, os.environ.get("SSH_CONNECTION", ""))
        self._loaded = pktgen.load_module()
        self._generator = pktgen.Pktgen(names)
        self._devices = tuple(names)
        self._receivers = {name: probe.ProbeSocket(name) for name in names}
        return {"boot": boot_id(), "devices": described}

    def bind(self) -> None:
        """Have the generator's threads on their own CPUs alone. Before Linux 6.2 a partition lets
        them run beside what is measured (update_tasks_cpumask), and only new ones are bound."""
        found = pktgen.adrift()
        if found and self._loaded:
            pktgen.unload_module()
            pktgen.load_module()
            found = pktgen.adrift()
        if found:
            names = " ".join(sorted(set(found)))
            why = "could not load pktgen anew" if self._loaded else "did not load pktgen"
            what = f"{names} may run on other CPUs, and this bench {why}"
            raise VsrtuneError(what, where=pktgen.DIRECTORY, hint="modprobe -r pktgen")

    def sink(self, counted: dict[str, list[dict[str, Any]]]) -> None:
        """Count these frames, by the device where they arrive."""
        self._check(counted)
        wanted = {name: [Counted(**one) for one in each] for name, each in counted.items()}
        if any(wanted.values()):
            self._sink = Sink(wanted)

    def run(
        self, streams: list[dict[str, Any]], seconds: float, probes: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Send the streams, with probes beside them, and return what was sent."""
        self._check([stream["device"] for stream in streams])
        assert self._generator is not None, "open comes first"
        self._generator.configure([decode(Stream, stream) for stream in streams])
        stop = threading.Event()
        with ThreadPoolExecutor() as pool:
            probing = None
            if probes is not None:
                probes |= {"stop": stop, "delay": pktgen.START_DELAY}
                probing = pool.submit(self.probe, **probes)
            try:
                sent = self._generator.run(seconds, self._stdin)
            finally:
                stop.set()
            times = probing.result() if probing is not None else []
        return {"sent": [asdict(one) for one in sent], "probes": times}

    def counters(self) -> dict[str, Any]:
        """Frames counted at the sink, and frames refused or lost on this machine."""
        table = psutil.net_io_counters(pernic=True, nowrap=False)
        backlogs = parse_softnet(LiveRoot().read("/proc/net/softnet_stat"))
        return {
            "counted": self._sink.read() if self._sink is not None else [],
            "refused": sum(table[name].dropout for name in self._devices),
            "backlog": sum(lost for _, lost in backlogs),
        }

    def probe(self, device: str, legs: list[dict[str, str]], **how: Any) -> list[tuple[int, int]]:
        """Send probes now, and return their numbers and times."""
        self._check([device])
        return sorted(probe.send_at_rate(device, [Leg(**leg) for leg in legs], **how).items())

    def probed(self, device: str, run: int, count: int, wait: float) -> list[tuple[int, int]]:
        """The probes of a run that arrived, once there are ``count`` or after ``wait``."""
        receiver = self._receivers[device]
        end = time.monotonic() + wait
        found = receiver.stamps(run)
        while len(found) < count and (left := end - time.monotonic()) > 0:
            select.select([receiver.socket], [], [], left)
            found.update(receiver.stamps(run))
        return sorted(found.items())

    def order(self, begin: bool) -> list[tuple[int, int]]:
        """Frames kept so far, and those of them that came out of order, by device. ``begin`` to
        keep what arrives where it is counted, as much as a socket's buffer holds."""
        with contextlib.ExitStack() as stack:
            found = [order(stack.enter_context(one)) for one in self._samples]
        devices = self._sink.devices if begin and self._sink is not None else ()
        self._samples = [probe.ProbeSocket(name, ETH_P_ALL) for name in devices]
        return found

    def clean(self, namespace: str | None, names: list[str]) -> None:
        """Remove what a killed agent left."""
        if pktgen.enter(namespace, must_exist=False) and os.path.isdir(pktgen.DIRECTORY):
            pktgen.Pktgen(names).close()

    def close(self) -> None:
        """Remove what does not end with this process, as its sockets and the sink's table do."""
        # Another agent of this bench may have unloaded the module.
        if self._generator is not None and os.path.isdir(pktgen.DIRECTORY):
            self._generator.close()
        if self._loaded:
            pktgen.unload_module()

    def _check(self, names: Any) -> None:
        for name in names:
            if name not in self._devices:
                raise VsrtuneError("refused: it is not a device of this bench", where=name)


def serve(stdin: int, stdout: int) -> None:
    """Answer requests until stdin ends."""
    requests = children.Messages(stdin)
    with contextlib.closing(Agent(stdin)) as agent, contextlib.suppress(EOFError):
        while True:
            children.send(stdout, _answer(agent, requests.next()))


def _answer(agent: Agent, request: dict[str, Any]) -> dict[str, Any]:
    number = request.pop("id")
    try:
        return {"id": number, "result": agent.answer(request)}
    except VsrtuneError as error:
        (what, where, hint) = (error.what, error.where, error.hint)
    except Exception as error:  # the other end must learn of any error
        (what, where, hint) = (f"{type(error).__name__}: {error}", "", "")
    return {"id": number, "error": {"what": what, "where": where, "hint": hint}}


def main() -> int:
    """Serve on stdin and stdout. Signals of the terminal are for the bench, whose end
    is the end of stdin; SIGTERM ends the agent in order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        serve(0, 1)
    except BrokenPipeError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
