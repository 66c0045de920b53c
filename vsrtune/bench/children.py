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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vsrtune
from vsrtune.core.closing import Closing
from vsrtune.core.errors import VsrtuneError


def module(name: str, *words: str) -> list[str]:
    """The argument list that runs a module. -P: never import a package from the current
    directory."""
    return [sys.executable, "-P", "-m", name, *words]


def send(descriptor: int, message: Any) -> None:
    """Write a message. Raises OSError."""
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


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
        """The next message. Raises EOFError at the end, TimeoutError after ``seconds``."""
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
        return json.loads(line)
