"""`lab pair`: two linked labs, and a command of this machine that reaches both by SSH."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import progress, ssh
from .errors import LabError
from .image import Image
from .linked import HOST_KEY, HOSTS, KEY

_LAB = Path(__file__).resolve().parent.parent / "lab"
# Both boot at once, each perhaps twice.
_READY_TIMEOUT = 1000
_END_TIMEOUT = 30
_PAUSE = 0.5
_TAIL = 60
_READY, _OVER = "ready", "over"


def run(
    options: Sequence[str], image: Image, package: Path, timeout: int, command: Sequence[str]
) -> int:
    """Boot both with these options of `lab run`, run the command, return its status.

    The command finds in LAB_PAIR_DIR a directory with ssh_config, whose hosts are lab1 and lab2, and
    with their shares 1 and 2; in LAB_DEB the package of the tree, which no lab has installed.
    """
    with tempfile.TemporaryDirectory(prefix="vsrtune-pair-") as name:
        place = Path(name)
        for file in (KEY, HOST_KEY):
            ssh.key(place / file)
        shutil.copytree(ssh.packages(image), place / "debs")
        ports = _free_ports()
        (place / "ssh_config").write_text(_ssh_config(place, ports))
        with _booted(place, ports, options, timeout) as labs:
            progress.step("running " + " ".join(command))
            environment = {**os.environ, "LAB_PAIR_DIR": name, "LAB_DEB": str(package)}
            with subprocess.Popen(command, env=environment) as process:
                return _until_it_ends(process, labs, timeout)


def _until_it_ends(
    process: subprocess.Popen[bytes], labs: dict[int, subprocess.Popen[bytes]], timeout: int
) -> int:
    """The status of the command, or of the lab that ended before it did."""
    end = time.monotonic() + timeout
    try:
        while (status := process.poll()) is None:
            for number, lab in labs.items():
                if lab.poll() is not None:
                    progress.error(f"lab {number} ended before the command, {lab.returncode}")
                    return lab.returncode or 1
            if time.monotonic() > end:
                progress.error(f"the command was stopped after {timeout} s")
                return 124
            time.sleep(_PAUSE)
        return status
    finally:
        process.terminate()


@contextlib.contextmanager
def _booted(
    place: Path, ports: Sequence[int], options: Sequence[str], timeout: int
) -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    """Both labs, each by a tool of its own, so that they boot at the same time."""
    labs = {}
    wait = f"touch /mnt/share/{_READY}; until [ -e /mnt/share/{_OVER} ]; do sleep 0.5; done"
    done = False
    try:
        for number, port in enumerate(ports, 1):
            share = place / str(number)
            share.mkdir()
            with (place / f"{number}.log").open("wb") as log:
                labs[number] = subprocess.Popen(
                    [
                        sys.executable, "-B", str(_LAB), "run", *options, "--no-install",
                        "--member", f"{number}:{port}:{place}", "--share", str(share),
                        "--timeout", str(timeout + _READY_TIMEOUT), "--", "sh", "-c", wait,
                    ],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )  # fmt: skip
        progress.step("booting both labs")
        _wait_for(place, labs)
        yield labs
        done = True
    finally:
        for number, lab in labs.items():
            (place / str(number) / _OVER).touch()
            with contextlib.suppress(subprocess.TimeoutExpired):
                lab.wait(_END_TIMEOUT if done else 0)
            lab.terminate()
            lab.wait()
            if lab.returncode not in (0, 130) or not done:
                log = (place / f"{number}.log").read_text(errors="replace")
                progress.block(f"lab {number}", log.splitlines()[-_TAIL:])


def _wait_for(place: Path, labs: dict[int, subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + _READY_TIMEOUT
    while waited := [n for n in labs if not (place / str(n) / _READY).exists()]:
        for number in waited:
            if labs[number].poll() is not None:
                raise LabError(f"lab {number} did not come up")
        if time.monotonic() > end:
            raise LabError(f"labs {waited} were not ready after {_READY_TIMEOUT} s")
        time.sleep(_PAUSE)
    progress.step("both labs are up")


def _free_ports() -> list[int]:
    """Ports of loopback that nobody has now: QEMU takes one by number only."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(HOSTS)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _ssh_config(place: Path, ports: Sequence[int]) -> str:
    host_key = (place / f"{HOST_KEY}.pub").read_text().strip()
    known = place / "known_hosts"
    known.write_text("".join(f"[127.0.0.1]:{port} {host_key}\n" for port in ports))
    hosts = "".join(f"Host lab{number}\n  Port {port}\n" for number, port in enumerate(ports, 1))
    return f"""{hosts}Host *
  HostName 127.0.0.1
  User root
  IdentityFile {place / KEY}
  IdentitiesOnly yes
  UserKnownHostsFile {known}
  ConnectTimeout 30
"""
