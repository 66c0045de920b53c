"""Network namespaces with a name (`ip netns`)."""

from __future__ import annotations

import ctypes
import os
import re

from vsrtune.core.errors import VsrtuneError

DIRECTORY = "/run/netns"

_CLONE_NEWNET = 0x40000000
_NAME = re.compile(r"[^/\s]+")


def exists(name: str) -> bool:
    """Whether there is a namespace of that name."""
    return os.path.exists(f"{DIRECTORY}/{name}")


def enter(name: str) -> None:
    """Move the calling thread, and the threads and processes it then starts, there.

    /proc/net of a process is its first thread's, so a program enters before it does
    anything else, in its main thread. /sys stays as it was. Raises VsrtuneError.
    """
    if _NAME.fullmatch(name) is None or name in (".", ".."):
        raise VsrtuneError(f"{name!r} is no name of a network namespace")
    try:
        descriptor = os.open(f"{DIRECTORY}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise VsrtuneError(
            f"there is no network namespace {name!r}",
            where=f"{DIRECTORY}/{name}",
            hint="`ip netns list` shows those there are",
        ) from error
    try:
        # os.setns came with Python 3.12.
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(ctypes.c_int(descriptor), ctypes.c_int(_CLONE_NEWNET)) != 0:
            what = os.strerror(ctypes.get_errno())
            raise VsrtuneError(f"cannot enter the network namespace: {what}", where=name)
    finally:
        os.close(descriptor)
