"""The agent process and its line of requests, without any traffic."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import bench_samples as samples
import pytest

from vsrtune.bench.children import AgentProcess, command
from vsrtune.bench.cleanup.cleaners import BenchLedger
from vsrtune.bench.measure import tester
from vsrtune.bench.traffic import pktgen
from vsrtune.bench.traffic.agent import Agent
from vsrtune.core.errors import VsrtuneError
from vsrtune.model.snapshot import Snapshot


def test_answers_errors_and_ends_with_its_input() -> None:
    with AgentProcess() as agent:
        with pytest.raises(VsrtuneError, match="does not know 'nonsense'"):
            agent.call("nonsense")
        with pytest.raises(VsrtuneError, match="TypeError"):
            agent.call("clean", surprise=1)
        with pytest.raises(VsrtuneError, match=r"there is no network namespace 'nowhere'.*"):
            agent.call("open", namespace="nowhere", names=["x"])
        assert agent.call("clean", namespace="nowhere", names=[]) is None
        pid = agent.pid
    assert not Path(f"/proc/{pid}").exists()


def test_an_answer_that_nobody_waited_for_is_not_taken_for_the_next() -> None:
    with AgentProcess() as agent:
        agent.begin("counters")
        assert agent.call("clean", namespace="nowhere", names=[]) is None
        assert set(agent.call("counters")) == {"counted", "refused", "backlog"}


def test_it_never_sends_to_what_was_not_named() -> None:
    with AgentProcess() as agent:
        for operation, arguments in (
            ("probe", {"device": "lo", "legs": [], "run": 1, "count": 1, "rate": 1.0}),
            ("sink", {"counted": {"lo": []}}),
            ("run", {"streams": [{"device": "lo"}], "seconds": 1.0, "probes": None}),
        ):
            with pytest.raises(VsrtuneError, match="lo: refused: it is not a device of this"):
                agent.call(operation, **arguments)


def test_a_killed_agent_is_an_error_that_says_so() -> None:
    with AgentProcess() as agent:
        os.kill(agent.pid, signal.SIGKILL)
        with pytest.raises(VsrtuneError, match="the agent ended"):
            agent.call("counters")


class KilledAgent(AgentProcess):
    """Is killed by the kernel as it begins, as if memory had run out."""

    def call(self, operation: str, timeout: float = 60.0, **arguments: Any) -> Any:
        os.kill(self.pid, signal.SIGKILL)
        return super().call(operation, timeout, **arguments)


@pytest.mark.parametrize(
    ("agent", "left"), [(AgentProcess, []), (KilledAgent, [samples.SPEC.left.namespace])]
)
def test_what_an_agent_left_is_owed_unless_it_ended_in_order(
    agent: type[AgentProcess], left: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tester, "AgentProcess", agent)

    def observe() -> Snapshot:
        raise AssertionError("it never came that far")

    with BenchLedger.open(tmp_path / "ledger") as ledger:
        with pytest.raises(VsrtuneError):
            tester.Tester(samples.SPEC, ledger, observe).__enter__()
        # The other agent ended with its input.
        assert [entry.data["namespace"] for entry in ledger.pending()] == left


def test_an_agent_ends_in_order_where_another_unloaded_the_generator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pktgen, "DIRECTORY", str(tmp_path / "pktgen"))
    (tmp_path / "pktgen").mkdir()
    agent = Agent(0)
    agent._generator = pktgen.Pktgen(["g0"])
    (tmp_path / "pktgen").rmdir()
    agent.close()


def test_an_agent_that_does_not_answer_is_ended() -> None:
    with AgentProcess() as agent:
        os.kill(agent.pid, signal.SIGSTOP)
        with pytest.raises(VsrtuneError, match=r"did not answer within 0.2 s"):
            agent.call("counters", timeout=0.2)
        with pytest.raises(VsrtuneError, match="the agent ended"):
            agent.call("counters")


def test_a_package_in_the_working_directory_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vsrtune").mkdir()
    (tmp_path / "vsrtune" / "__init__.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    with AgentProcess() as agent:
        assert agent.call("clean", namespace="nowhere", names=[]) is None


@pytest.mark.parametrize(
    ("line", "quoted"),
    [
        (b"Welcome\x1b[31m to box\xff" + b"!" * 200, r"'Welcome\\x1b\[31m to box\ufffd!{60}'"),
        (b"7", "int"),
    ],
)
def test_a_line_of_a_remote_shell_is_quoted(
    line: bytes, quoted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "ssh"
    program.write_text(f"#!{sys.executable}\nimport os\nos.write(1, {line!r} + b'\\n')\ninput()\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with (
        AgentProcess("box") as agent,
        pytest.raises(VsrtuneError, match=rf"^box: no answer of the agent: .*{quoted}") as told,
    ):
        agent.call("counters")
    assert "bashrc" in told.value.hint


def test_another_host_is_reached_by_ssh_without_questions() -> None:
    words = command("box")
    assert words[0] == "ssh"
    assert "BatchMode=yes" in words
    assert words[words.index("--") + 1] == "box"
    # What looks like an option is a host for ssh, too: `--` comes before it.
    option = "-oProxyCommand=anything"
    assert command(option)[-3:-1] == ["--", option]
