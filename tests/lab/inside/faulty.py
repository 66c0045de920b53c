"""vsrtune, as its command runs it, with a fault at one of its changes of the host.

    python3 faulty.py FAULT WORDS...

FAULT is one of these; n counts from 1.

    fail:n          the nth change of a switch fails before it is made
    kill:n          SIGKILL right after the nth change of a switch
    command:n:TEXT  the shell command TEXT runs right before the nth change of a switch
    crash:n         SIGKILL right after the nth setting written (a file, mkdir, rmdir, system
                    call or libvirt pin each)
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import subprocess
import sys
from typing import Any

from vsrtune.attach.host import LiveHost
from vsrtune.attach.libvirt_hotplug import RefusedError
from vsrtune.execute.syscalls import LiveCalls

# The methods that change the host, and those of them that ask libvirt to.
LIBVIRT = ("request_unplug", "plug", "define", "undefine_guest", "start_guest", "stop_guest")
SWITCH = (
    *("make", "remove", "set_up", "set_queue", "set_mtu", "set_flag", "make_file", "remove_file"),
    *LIBVIRT,
)
WRITES = ("write", "mkdir", "rmdir", "set_affinity", "set_sched", "pin")


class Fault:
    """One fault of this process, at its nth change."""

    def __init__(self, text: str) -> None:
        self.kind, _, rest = text.partition(":")
        number, _, self.command = rest.partition(":")
        self._nth = int(number)
        self._made = 0
        self._met = False

    def arm(self) -> None:
        """Have the changes of this process meet it."""
        owner, names = (LiveCalls, WRITES) if self.kind == "crash" else (LiveHost, SWITCH)
        for name in names:
            setattr(owner, name, self._meeting(name, getattr(owner, name)))

    def _meeting(self, name: str, method: Any) -> Any:
        @functools.wraps(method)
        def changed(*words: Any) -> Any:
            self._before(name)
            found = method(*words)
            self._after()
            return found

        return changed

    def _before(self, name: str) -> None:
        if self.kind not in ("fail", "command") or self._met or self._made != self._nth - 1:
            return
        self._met = True
        if self.kind == "command":
            subprocess.run(["sh", "-c", self.command], check=True)
        elif name in LIBVIRT:
            raise RefusedError("refused, as the test asks", where="faulty.py")
        else:
            raise OSError(errno.EIO, "refused, as the test asks")

    def _after(self) -> None:
        self._made += 1
        if self.kind in ("kill", "crash") and self._made == self._nth:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """The command, armed."""
    from vsrtune.cli import main as cli

    Fault(sys.argv[1]).arm()
    sys.argv[1:] = sys.argv[2:]
    cli.main()


if __name__ == "__main__":
    main()
