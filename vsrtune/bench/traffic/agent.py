# SPDX-License-Identifier: GPL-2.0-or-later
"""The agent of a bench in one network namespace, of this machine or another.

`python3 -m vsrtune.bench.traffic.agent` reads one JSON request a line from stdin and answers
each with a line on stdout; a request that comes while traffic flows ends the traffic.
When stdin ends, for whatever reason, the agent ends the traffic and removes everything that it
set up; when the agent is killed, the kernel does this (see pktgen and sink).
An `open` comes first and names the devices; frames go to no other device.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import psutil

from vsrtune import __version__
from vsrtune.bench import children
from vsrtune.bench.spec.model import Leg
from vsrtune.bench.spec.streams import Counted, Stream
from vsrtune.bench.traffic import devices, pktgen, probe
from vsrtune.bench.traffic.sink import ETH_P_ALL, Sink, order
from vsrtune.core.codec import decode
from vsrtune.core.errors import VsrtuneError
from vsrtune.host.filesystem import LiveRoot, boot_id
from vsrtune.host.netdev import parse_softnet

_OPERATIONS = ("open", "sink", "run", "counters", "probe", "probed", "order", "clean")


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
        described = devices.check(names, os.environ.get("SSH_CONNECTION", ""))
        self._loaded = pktgen.load_module()
        self._generator = pktgen.Pktgen(names)
        self._devices = tuple(names)
        self._receivers = {name: probe.ProbeSocket(name) for name in names}
        return {"boot": boot_id(), "devices": described}

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
        if self._generator is not None:
            self._generator.close()
        if self._loaded:
            pktgen.unload_module()

    def _check(self, names: Any) -> None:
        for name in names:
            if name not in self._devices:
                raise VsrtuneError("refused: it is not a device of this bench", where=name)


def serve(stdin: int, stdout: int) -> None:
    """Answer requests until stdin ends."""
    agent = Agent(stdin)
    requests = children.Messages(stdin)
    try:
        while True:
            children.send(stdout, _answer(agent, requests.next()))
    except EOFError:
        return
    finally:
        agent.close()


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
