"""Programs in guests, by an agent that does what QEMU's does, and by others."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vsrtune.core.errors import VsrtuneError, WriteError
from vsrtune.daemon import guest_agent
from vsrtune.daemon.guest_agent import GuestAgent
from vsrtune.host.libvirt import Connection

pytest.importorskip("libvirt")
# The one guest of libvirt's test driver.
URI, UUID = "test:///default", "6695eb01-f6a4-8304-79aa-97f2502e193f"

Answer = Callable[[str, dict[str, Any]], Any]


class Agent:
    """Answers in the place of libvirt's virDomainQemuAgentCommand. It really runs programs, which
    have ended when it is asked for the second time."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._left: dict[int, tuple[int, subprocess.CompletedProcess[bytes]]] = {}

    def __call__(self, command: str, arguments: dict[str, Any]) -> Any:
        self.asked.append(command)
        return {
            "guest-network-get-interfaces": self._interfaces,
            "guest-exec": self._start,
            "guest-exec-status": self._status,
        }[command](**{key.replace("-", "_"): value for key, value in arguments.items()})

    def _interfaces(self) -> list[dict[str, Any]]:
        loopback = {"name": "lo", "hardware-address": "00:00:00:00:00:00", "ip-addresses": []}
        return [
            loopback,
            {"name": "enp1s0", "hardware-address": "02:00:00:00:0A:01"},
            {"name": "x"},
        ]

    def _start(
        self, path: str, arg: list[str], capture_output: bool, input_data: str = ""
    ) -> dict[str, int]:
        given = base64.b64decode(input_data)
        done = subprocess.run([path, *arg], input=given, capture_output=capture_output, check=False)
        self._left[7] = 1, done
        return {"pid": 7}

    def _status(self, pid: int) -> dict[str, Any]:
        left, done = self._left[pid]
        self._left[pid] = left - 1, done
        if left:
            return {"exited": False}
        out, err = (base64.b64encode(data).decode() for data in (done.stdout, done.stderr))
        found: dict[str, Any] = {"exited": True, "exitcode": done.returncode}
        return found | {"out-data": out} | ({"err-data": err} if err else {})


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answer], GuestAgent]]:
    """Puts an agent into the guest; its answers are values, or text as it is."""
    connection = Connection(URI, WriteError)

    def put(answer: Answer) -> GuestAgent:
        def command(domain: Any, text: str, timeout: int, flags: int) -> str:
            assert (domain.UUIDString(), timeout, flags) == (UUID, guest_agent.ANSWER, 0)
            question = json.loads(text)
            found = answer(question["execute"], question["arguments"])
            return found if isinstance(found, str) else json.dumps({"return": found})

        module = types.ModuleType("libvirt_qemu")
        module.qemuAgentCommand = command  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "libvirt_qemu", module)
        return GuestAgent(connection, UUID, "lb1")

    yield put
    connection.close()


def test_a_program_gets_its_input_and_gives_its_output(
    ask: Callable[[Answer], GuestAgent],
) -> None:
    agent = Agent()
    assert ask(agent).run(("tr", "a-z", "A-Z"), "äbc\n") == "äBC\n"
    assert agent.asked == ["guest-exec", "guest-exec-status", "guest-exec-status"]
    assert ask(agent).interfaces()["02:00:00:00:0a:01"] == "enp1s0"


def test_a_program_that_fails_says_why(ask: Callable[[Answer], GuestAgent]) -> None:
    with pytest.raises(VsrtuneError) as raised:
        ask(Agent()).run(("sh", "-c", "printf 'no\\033[2J way' >&2; exit 3"))
    assert str(raised.value) == "lb1: the guest agent: sh failed (3): no\\x1b[2J way"


DEEP = "[" * 100_000
STRANGE: list[Any] = [
    "", "nonsense", DEEP, '{"return": NaN}', "[]", '"x"', '{"error": {}}', "x" * (2 << 20),
    None, [], 7, {"pid": "7"}, {"pid": True}, {"pid": 7.5}, {"pid": None},
]  # fmt: skip


@pytest.mark.parametrize("answer", STRANGE, ids=lambda a: repr(a)[:20])
def test_an_answer_that_no_agent_gives_is_an_error_and_nothing_else(
    ask: Callable[[Answer], GuestAgent], answer: Any
) -> None:
    with pytest.raises(VsrtuneError, match="lb1: the guest agent: it does not answer as"):
        ask(lambda _command, _arguments: answer).run(("true",))


@pytest.mark.parametrize(
    "status",
    [
        [], {"exited": "yes"}, {"exited": 1}, {"exited": True}, {"exited": True, "exitcode": "0"},
        {"exited": True, "exitcode": {"a": "b" * 9999}}, {"exited": True, "exitcode": False},
        {"exited": True, "exitcode": 0, "out-data": 7},
        {"exited": True, "exitcode": 0, "out-data": "a"},
        {"exited": True, "signal": 9},
    ],
    ids=lambda s: repr(s)[:30],
)  # fmt: skip
def test_a_status_that_proves_no_success_is_an_error(
    ask: Callable[[Answer], GuestAgent], status: Any
) -> None:
    answers = {"guest-exec": {"pid": 7}, "guest-exec-status": status}
    with pytest.raises(VsrtuneError, match="lb1: the guest agent: ") as raised:
        ask(lambda command, _: answers[command]).run(("true",))
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize("answer", [7, {}, [7], [{"hardware-address": 7}], [{"name": []}]])
def test_interfaces_that_are_none(ask: Callable[[Answer], GuestAgent], answer: Any) -> None:
    with pytest.raises(VsrtuneError, match="it does not answer as a guest agent does"):
        ask(lambda _command, _arguments: answer).interfaces()


def test_a_program_that_does_not_end_is_given_up(
    ask: Callable[[Answer], GuestAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_agent, "PROGRAM", 0.2)
    answers = {"guest-exec": {"pid": 7}, "guest-exec-status": {"exited": False}}
    begin = time.monotonic()
    with pytest.raises(VsrtuneError, match="lb1: the guest agent: sleep has not ended"):
        ask(lambda command, _: answers[command]).run(("sleep", "9"))
    assert time.monotonic() - begin < 5


def test_a_libvirt_that_refuses_is_quoted(ask: Callable[[Answer], GuestAgent]) -> None:
    import libvirt

    def refuse(_command: str, _arguments: Any) -> Any:
        raise libvirt.libvirtError("argument unsupported: QEMU guest agent is not configured")

    with pytest.raises(VsrtuneError, match="QEMU guest agent is not conf"):
        ask(refuse).run(("true",))
