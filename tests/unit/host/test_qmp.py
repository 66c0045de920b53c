"""vcpu threads through QMP, against a monitor that speaks it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket as listening
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import pytest

from vsrtune.core.errors import Lasting, ObserveError
from vsrtune.host import qmp
from vsrtune.host.qmp import parse_cpus, query_vcpus

GREETING = {"QMP": {"version": {"qemu": {"major": 7, "minor": 2, "micro": 0}}, "capabilities": []}}
CPUS = [
    {"cpu-index": 1, "thread-id": 4712, "target": "x86_64", "qom-path": "/m/1"},
    {"cpu-index": 0, "thread-id": 4711, "target": "x86_64", "qom-path": "/m/0"},
]


class Monitor:
    """A QMP server in a thread. ``busy`` accepts and says nothing; ``answer`` is the
    reply to query-cpus-fast."""

    def __init__(self, path: Path, *, busy: bool = False, answer: object = None) -> None:
        self.path = path
        self.busy = busy
        self.answer = answer if answer is not None else {"return": CPUS}
        self.disconnected = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(5)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_unix_server(self._serve, self.path))
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.busy:
            self._send(writer, GREETING)
        # Clients need not end a command with a newline; ours sends one at a time.
        while text := await reader.read(4096):
            if self.busy:
                continue
            command = json.loads(text)
            reply: dict[str, object] = {"return": {}}
            if command["execute"] == "query-cpus-fast":
                assert isinstance(self.answer, dict)
                reply = dict(self.answer)
            same_id = {"id": command["id"]} if "id" in command else {}
            self._send(writer, reply | same_id)
        self.disconnected.set()
        writer.close()

    @staticmethod
    def _send(writer: asyncio.StreamWriter, message: object) -> None:
        writer.write(json.dumps(message).encode() + b"\r\n")


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    pytest.importorskip("qemu.qmp")
    return tmp_path / "s.qmp"


def test_asks_and_leaves(socket: Path) -> None:
    with Monitor(socket) as monitor:
        assert query_vcpus(str(socket), os.getpid(), 5.0) == {0: 4711, 1: 4712}
        assert monitor.disconnected.wait(5)


def test_a_busy_monitor(socket: Path) -> None:
    with Monitor(socket, busy=True), pytest.raises(ObserveError, match="another client") as caught:
        query_vcpus(str(socket), os.getpid(), 0.2)
    assert caught.value.lasting is Lasting.TRANSIENT


def test_a_monitor_that_refuses(socket: Path) -> None:
    error = {"error": {"class": "GenericError", "desc": "not now"}}
    with Monitor(socket, answer=error), pytest.raises(ObserveError, match="not now"):
        query_vcpus(str(socket), os.getpid(), 5.0)


def test_an_answer_of_another_shape(socket: Path) -> None:
    with (
        Monitor(socket, answer={"return": [{"x": 1}]}),
        pytest.raises(ObserveError, match="QMP failed"),
    ):
        query_vcpus(str(socket), os.getpid(), 5.0)


def test_no_monitor(socket: Path) -> None:
    with pytest.raises(ObserveError, match="QMP failed"):
        query_vcpus(str(socket), os.getpid(), 5.0)


def test_vcpus_that_share_a_thread() -> None:
    one = [{"cpu-index": n, "thread-id": 9} for n in (1, 0, 2)]
    assert parse_cpus(one) == {0: 9}


def test_nothing_is_said_to_another_process(socket: Path) -> None:
    """The path of a socket is the process's own choice: it may lead to any other's."""
    heard = b""
    with listening.socket(listening.AF_UNIX) as server:
        server.bind(str(socket))
        server.listen()
        with pytest.raises(ObserveError, match=f"process {os.getpid()} listens there") as caught:
            query_vcpus(str(socket), 1, 5.0)
        with server.accept()[0] as client:
            client.settimeout(5)
            heard = client.recv(4096)
    assert heard == b""
    assert "a socket of its own" in caught.value.hint


@contextlib.contextmanager
def served(path: Path, serve: Callable[[listening.socket], None]) -> Iterator[None]:
    """A monitor that serves its first client so, and is done with it afterwards."""

    def first() -> None:
        with server.accept()[0] as client, contextlib.suppress(OSError):
            serve(client)

    with listening.socket(listening.AF_UNIX) as server, ThreadPoolExecutor(1) as pool:
        server.bind(str(path))
        server.listen()
        serving = pool.submit(first)
        yield
        serving.result(10)


def test_a_monitor_that_says_a_word_now_and_then_has_no_more_time(socket: Path) -> None:
    """The time is for all of it, not for each answer."""

    def drip(client: listening.socket) -> None:
        for byte in RAW_GREETING * 100:
            client.sendall(bytes([byte]))
            time.sleep(0.02)

    begin = time.monotonic()
    with served(socket, drip):
        with pytest.raises(ObserveError, match="no answer to QMP"):
            query_vcpus(str(socket), os.getpid(), 0.5)
        assert time.monotonic() - begin < 2


RAW_GREETING = b'{"QMP": {"version": {"qemu": {"major": 8}}, "capabilities": []}}\r\n'


@pytest.mark.parametrize(
    "said",
    [
        b"[" * 50_000 + b"\r\n",
        b"x" * 70_000 + b"\r\n",
        RAW_GREETING + b'{"return": ' + b"[" * 50_000 + b"\r\n",
        RAW_GREETING
        + b'{"return": {}}\r\n{"return": [{"cpu-index": Infinity, "thread-id": 1}]}\r\n',
        RAW_GREETING + b"\xff\xfe\r\n",
        b"",
    ],
)
def test_a_monitor_that_means_harm(socket: Path, said: bytes) -> None:
    """Anybody may name a socket of his own on the command line of a QEMU."""

    def answer(client: listening.socket) -> None:
        client.settimeout(5)
        client.sendall(said)
        client.shutdown(listening.SHUT_WR)
        while client.recv(4096):
            pass

    with served(socket, answer), pytest.raises(ObserveError):
        query_vcpus(str(socket), os.getpid(), 2.0)


@pytest.mark.parametrize("answer", [7, None, [None], [[]], [{"cpu-index": None, "thread-id": 1}]])
def test_no_answer_at_all(answer: Any) -> None:
    with pytest.raises(ValueError):
        parse_cpus(answer)


def qemu_modules() -> dict[str, ModuleType]:
    return {n: m for n, m in sys.modules.items() if n == "qemu" or n.startswith("qemu.")}


@pytest.fixture
def clean() -> Iterator[None]:
    """No QMP library imported, before and after."""
    before = qemu_modules()
    for name in before:
        del sys.modules[name]
    yield
    for name in qemu_modules():
        del sys.modules[name]
    sys.modules.update(before)


def library(directory: Path, origin: str) -> Path:
    package = directory / "qemu/qmp"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"ORIGIN = {origin!r}\n")
    return directory


@pytest.mark.usefixtures("clean")
def test_the_systems_library_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = library(tmp_path / "system", "system")
    monkeypatch.setattr(sys, "path", [str(system)])
    monkeypatch.setattr(qmp, "DIRECTORY", str(library(tmp_path / "vendor", "vendor")))
    assert qmp.qemu_qmp().ORIGIN == "system"
    assert sys.path == [str(system)]


@pytest.mark.usefixtures("clean")
def test_else_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(qmp, "DIRECTORY", str(library(tmp_path / "vendor", "vendor")))
    assert qmp.qemu_qmp().ORIGIN == "vendor"


def test_a_monitor_that_tells_of_more_cpus_than_there_are() -> None:
    """Its answer may have 10 MiB: what is made of it takes a time that follows its size."""
    begin = time.monotonic()
    many = [{"cpu-index": n, "thread-id": n + 1} for n in range(100_000)]
    assert len(parse_cpus(many)) == len(many)
    assert time.monotonic() - begin < 5
