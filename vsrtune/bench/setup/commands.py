# SPDX-License-Identifier: GPL-2.0-or-later
"""Runs the host's own programs: `ip`, `ovs-vsctl`, and the commands that a spec names."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Sequence

from vsrtune.core.errors import WriteError

SECONDS = 120.0
_TAIL = 400


def run(argv: Sequence[str], seconds: float = SECONDS) -> str:
    """Run a program to its end, and return what it printed.

    Raises WriteError, with the end of the output, when the program failed, is missing, or took
    longer than ``seconds`` (it is then killed, with everything that it started).
    """
    where = shlex.join(argv)
    # A file and not a pipe: a daemon that the program starts would hold the pipe open.
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                # A program that runs on after a kill would undo what the guard puts back.
                ["setpriv", "--pdeathsig", "KILL", "--", *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LC_ALL": "C.UTF-8"},
                start_new_session=True,
            )
        except OSError as error:
            raise WriteError(
                f"cannot be run: {error.strerror}", where=where, hint="install util-linux"
            ) from error
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace").strip()
    if status is None:
        raise WriteError(f"took longer than {seconds:g} s: {text[-_TAIL:]}", where=where)
    if status != 0:
        raise WriteError(f"failed with status {status}: {text[-_TAIL:]}", where=where)
    return text
