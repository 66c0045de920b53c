# SPDX-License-Identifier: GPL-2.0-or-later
"""Child processes of the bench, agents and the guard: modules of vsrtune that talk in lines of
JSON."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import vsrtune
from vsrtune.core.closing import Closing
from vsrtune.core.errors import Lasting, VsrtuneError
from vsrtune.host.state_files import write_all

# Time for an answer beyond that of traffic; a remote login, or a host under load, is slow.
ANSWER_SECONDS = 60.0
CLOSE_SECONDS = 15.0

_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "--")
_REMOTE = "python3 -P -m vsrtune.bench.traffic.agent"


def module(name: str, *words: str) -> list[str]:
    """The argument list that runs a module. -P: never import a package from the current
    directory."""
    return [sys.executable, "-P", "-m", name, *words]


def send(descriptor: int, message: Any) -> None:
    """Write a message. Raises OSError."""
    write_all(descriptor, json.dumps(message).encode() + b"\n")


class Child(Closing):
    """A running child process. Raises VsrtuneError, which calls the child ``what``, when it
    cannot be started; ``more`` are arguments of Popen."""

    def __init__(self, argv: Sequence[str], what: str, **more: Any) -> None:
        try:
            # A session of its own: Ctrl-C is for the bench, which then ends the child.
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(Path(vsrtune.__file__).parents[1])},
                start_new_session=True,
                bufsize=0,
                **more,
            )
        except OSError as error:
            raise VsrtuneError(f"cannot start {what}: {error.strerror}") from error
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin = self.process.stdin
        self.messages = Messages(self.process.stdout.fileno())

    @property
    def pid(self) -> int:
        return self.process.pid

    def end_input(self) -> None:
        """Close the child's input, at whose end it ends."""
        with contextlib.suppress(OSError):
            self.stdin.close()

    def reap(self, seconds: float) -> None:
        """Wait for the child's end, and kill it when it does not come in time."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


class Messages:
    """The messages that can be read from a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pending = b""

    def next(self, seconds: float | None = None) -> Any:
        """The next message. Raises EOFError, TimeoutError (after ``seconds``) or ValueError."""
        end = None if seconds is None else time.monotonic() + seconds
        while b"\n" not in self._pending:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self._descriptor], [], [], left)[0]:
                raise TimeoutError
            data = os.read(self._descriptor, 1 << 16)
            if not data:
                raise EOFError
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line.decode(errors="replace"))


def command(host: str | None) -> list[str]:
    """The argument list that starts an agent."""
    if host is None:
        return module("vsrtune.bench.traffic.agent")
    root = f'if [ "$(id -u)" = 0 ]; then exec {_REMOTE}; else exec sudo -n {_REMOTE}; fi'
    return [*_SSH, host, root]


class AgentProcess(Child):
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
            send(self.stdin.fileno(), request)
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
            return dict(self.messages.next(timeout))
        except EOFError:
            raise self._ended() from None
        except TimeoutError:
            # A late answer would be taken for the answer to the next request.
            self.process.kill()
            what = f"the agent did not answer within {timeout:g} s"
            raise VsrtuneError(what, where=self.where, lasting=Lasting.TRANSIENT) from None
        except (ValueError, TypeError) as error:
            what = f"no answer of the agent: {str(getattr(error, 'doc', error))[:80]!r}"
            hint = "let no start file of the shell there (~/.bashrc) print anything"
            raise VsrtuneError(what, where=self.where, hint=hint) from None

    def _ended(self) -> VsrtuneError:
        assert self.process.stderr is not None
        said = ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2.0)
            said = self.process.stderr.read().decode(errors="replace").strip()
        last = said.splitlines()[-1] if said else "it said nothing"
        hint = "vsrtune must be installed there, and root or `sudo -n` be allowed"
        remote = self.where != "agent"
        return VsrtuneError(
            f"the agent ended: {last}", where=self.where, hint=hint if remote else ""
        )
