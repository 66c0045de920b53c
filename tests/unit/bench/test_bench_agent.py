"""The agent process and its line of requests, without any traffic."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from vsrtune.bench.children import AgentProcess, command
from vsrtune.core.errors import VsrtuneError


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


def test_another_host_is_reached_by_ssh_without_questions() -> None:
    words = command("box")
    assert words[0] == "ssh"
    assert "BatchMode=yes" in words
    assert words[words.index("--") + 1] == "box"
    # What looks like an option is a host for ssh, too: `--` comes before it.
    option = "-oProxyCommand=anything"
    assert command(option)[-3:-1] == ["--", option]
