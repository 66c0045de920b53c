"""Network and mount namespaces of the test's own, left again when it ends.

namespace of the test                    this machine: untouched
v1 ---- v0 = mv0 (macvtap, bridge mode)
        t0 (tap)
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from nethelp import ip

CLONE_NEWNS = 0x00020000
CLONE_NEWNET = 0x40000000
MS_REC, MS_PRIVATE = 0x4000, 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args: object) -> None:
    if getattr(_libc, name)(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


@pytest.fixture
def namespace() -> Iterator[None]:
    """The test process is in a new network namespace, with a /sys that shows it."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make namespaces")
    kinds = {"mnt": CLONE_NEWNS, "net": CLONE_NEWNET}
    home = {kind: os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in kinds}
    directory = os.getcwd()
    try:
        _call("unshare", CLONE_NEWNS | CLONE_NEWNET)
    except OSError as error:
        pytest.skip(f"this machine allows no namespaces: {error}")
    try:
        _call("mount", None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)
        _call("mount", b"sysfs", b"/sys", b"sysfs", ctypes.c_ulong(0), None)
        yield
    finally:
        for kind, flag in kinds.items():
            _call("setns", home[kind], flag)
            os.close(home[kind])
        os.chdir(directory)


@pytest.fixture
def macvtap(namespace: None) -> str:
    """A macvtap on a veth, both ends up."""
    ip("link", "add", "v0", "type", "veth", "peer", "name", "v1")
    ip("link", "add", "link", "v0", "name", "mv0", "type", "macvtap", "mode", "bridge")
    for device in ("v0", "v1", "mv0"):
        Path(f"/proc/sys/net/ipv6/conf/{device}/disable_ipv6").write_text("1")
        ip("link", "set", device, "up")
    return "mv0"
