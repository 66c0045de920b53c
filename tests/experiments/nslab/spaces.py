"""Network namespaces, and commands in batches: a process costs much in an emulated host."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence

PREFIX = "nb-"
GENERATOR = "nb-gen"
HOST = "host"

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
_OPEN: dict[str, int] = {}
_SYSFS = "/run/nslab"


class Failure(Exception):
    """What could not be done, with what the command said."""


def command(*words: str, stdin: str | None = None) -> str:
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()
        raise Failure(f"{' '.join(words)}: {said or f'status {done.returncode}'}")
    return done.stdout


def batch(lines: Sequence[str], space: str = HOST) -> None:
    """Lines of `ip -batch` in a namespace; the first that fails ends it."""
    if lines:
        where = () if space == HOST else ("-n", space)
        command("ip", *where, "-batch", "-", stdin="\n".join(lines) + "\n")


def remember_host() -> None:
    """To be called before any ``inside``: where to come back to."""
    _OPEN[HOST] = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


@contextlib.contextmanager
def inside(space: str) -> Iterator[None]:
    """The calling process is in that namespace, as are files of /proc/net and
    /proc/sys/net that it opens, and what it starts."""
    _enter(space)
    try:
        yield
    finally:
        _enter(HOST)


def _enter(space: str) -> None:
    if space not in _OPEN:
        _OPEN[space] = os.open(f"/run/netns/{space}", os.O_RDONLY | os.O_CLOEXEC)
    if _LIBC.setns(ctypes.c_int(_OPEN[space]), ctypes.c_int(_CLONE_NEWNET)) != 0:
        raise Failure(f"cannot enter {space}: {os.strerror(ctypes.get_errno())}")


def add(names: Sequence[str]) -> None:
    """Namespaces that forward what they have a route for, and say nothing by themselves."""
    batch([f"netns add {name}" for name in names])
    for name in names:
        # Without any address there would be no table that tells a next hop from a broadcast.
        batch(["link set lo up"], name)
        with inside(name):
            write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1")
            write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1")
            write("/proc/sys/net/ipv4/ip_forward", "1")
            write("/proc/sys/net/ipv4/conf/all/rp_filter", "0")
            write("/proc/sys/net/ipv4/conf/default/rp_filter", "0")
            write("/proc/sys/net/ipv4/conf/all/send_redirects", "0")
            write("/proc/sys/net/ipv4/conf/default/send_redirects", "0")


def clean() -> None:
    """Take away every device and namespace of ours, also those of a run that failed."""
    for name in [name for name in _OPEN if name != HOST]:
        os.close(_OPEN.pop(name))
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(_SYSFS):
            command("umount", f"{_SYSFS}/{name}")
            os.rmdir(f"{_SYSFS}/{name}")
    # Lower devices first: what stands on them goes with them.
    batch([f"link del {name}" for name in os.listdir("/sys/class/net") if name.startswith("nb")])
    names = [line.split()[0] for line in command("ip", "netns", "list").splitlines()]
    batch([f"netns delete {name}" for name in names if name.startswith(PREFIX)])


def attribute(space: str, device: str, name: str) -> str:
    """The path of a device's attribute. What /sys/class/net shows is that of the namespace
    in which sysfs was mounted, so every namespace gets a mount."""
    if space == HOST:
        return f"/sys/class/net/{device}/{name}"
    place = f"{_SYSFS}/{space}"
    if not os.path.ismount(place):
        os.makedirs(place, exist_ok=True)
        with inside(space):
            command("mount", "-t", "sysfs", "sysfs", place)
    return f"{place}/class/net/{device}/{name}"


def write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write(text + "\n")
    except OSError as error:
        raise Failure(f"{path}: {text!r}: {error.strerror}") from error


def read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()
