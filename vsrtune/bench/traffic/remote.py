# SPDX-License-Identifier: GPL-2.0-or-later
"""The bench's side of agents: processes here, or on another host over ssh."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping
from typing import Any

from vsrtune.bench import children
from vsrtune.core.errors import Lasting, VsrtuneError

# Time for an answer beyond that of traffic; a remote login, or a host under load, is slow.
ANSWER_SECONDS = 60.0
CLOSE_SECONDS = 15.0

_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "--")
_REMOTE = "python3 -P -m vsrtune.bench.traffic.agent"


def command(host: str | None) -> list[str]:
    """The argument list that starts an agent."""
    if host is None:
        return children.module("vsrtune.bench.traffic.agent")
    root = f'if [ "$(id -u)" = 0 ]; then exec {_REMOTE}; else exec sudo -n {_REMOTE}; fi'
    return [*_SSH, host, root]


class AgentProcess(children.Child):
    """One agent. Use as a context manager, or ``close``."""

    def __init__(self, host: str | None = None) -> None:
        """Start the agent. Raises VsrtuneError when the program cannot be run."""
        super().__init__(command(host), "the agent", stderr=subprocess.PIPE)
        self.where = host or "agent"
        self._asked = 0

    def call(self, operation: str, timeout: float = ANSWER_SECONDS, **arguments: Any) -> Any:
        """Request one operation, and return its result. Raises VsrtuneError."""
        self.begin(operation, **arguments)
        return self.finish(timeout)

    def begin(self, operation: str, **arguments: Any) -> None:
        """Send a request without waiting for the answer. The request ends traffic that flows."""
        self._asked += 1
        request = {"id": self._asked, "op": operation, **arguments}
        try:
            children.send(self.stdin.fileno(), request)
        except OSError:
            raise self._ended() from None

    def finish(self, timeout: float = ANSWER_SECONDS) -> Any:
        """The answer to the last request. Raises VsrtuneError."""
        answer = self._answer(timeout)
        # Earlier answers belong to requests whose sender was interrupted.
        while answer["id"] != self._asked:
            answer = self._answer(timeout)
        if "error" in answer:
            error = answer["error"]
            where = error["where"]
            if self.where != "agent":
                where = f"{self.where}: {where}" if where else self.where
            raise VsrtuneError(error["what"], where=where, hint=error["hint"])
        return answer["result"]

    def close(self) -> None:
        """End the agent; kill it when it does not end."""
        self.end_input()
        self.reap(CLOSE_SECONDS)

    def _answer(self, timeout: float) -> Mapping[str, Any]:
        try:
            answer: Mapping[str, Any] = self.messages.next(timeout)
        except EOFError:
            raise self._ended() from None
        except TimeoutError:
            # A late answer would be taken for the answer to the next request.
            self.process.kill()
            raise VsrtuneError(
                f"the agent did not answer within {timeout:g} s",
                where=self.where,
                lasting=Lasting.TRANSIENT,
            ) from None
        return answer

    def _ended(self) -> VsrtuneError:
        assert self.process.stderr is not None
        said = ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2.0)
            said = self.process.stderr.read().decode(errors="replace").strip()
        last = said.splitlines()[-1] if said else "it said nothing"
        return VsrtuneError(
            f"the agent ended: {last}",
            where=self.where,
            hint="vsrtune must be installed there, and root or `sudo -n` be allowed"
            if self.where != "agent"
            else "",
        )
