# SPDX-License-Identifier: GPL-2.0-or-later
"""Ask a plain QEMU which thread runs which vcpu."""

from __future__ import annotations

import importlib
import socket
import struct
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from vsrtune.core.errors import Lasting, ObserveError

DIRECTORY = "/usr/lib/vsrtune/vendor"


def qemu_qmp() -> Any:
    """The module ``qemu.qmp``: the system's, otherwise the one shipped with vsrtune."""
    try:
        return importlib.import_module("qemu.qmp")
    except ImportError:
        if DIRECTORY not in sys.path:
            sys.path.append(DIRECTORY)
        importlib.invalidate_caches()
        return importlib.import_module("qemu.qmp")


# Seconds to wait for a disconnect. A QMP socket serves one client: while another is connected, our
# connection waits in the listen queue without an answer.
_LEAVING_SECONDS = 0.1


def parse_cpus(answer: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """vcpu number to tid, from the answer of ``query-cpus-fast``.

    Under single-threaded TCG all vcpus share one thread: the lowest number has it. Raises
    ValueError for any other answer.
    """
    try:
        found = sorted((int(cpu["cpu-index"]), int(cpu["thread-id"])) for cpu in answer)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError("this is no answer to query-cpus-fast") from error
    first: dict[int, int] = {}
    for index, tid in found:
        first.setdefault(tid, index)
    return {index: tid for tid, index in first.items()}


def query_vcpus(path: str, pid: int, timeout: float) -> dict[int, int]:
    """Connect to a QMP UNIX socket, ask, and disconnect at once, within ``timeout`` seconds.

    The process chooses where the path leads, so nothing is sent unless process ``pid`` listens
    there (SO_PEERCRED). Raises ObserveError: always transient.
    """
    import asyncio
    import contextlib
    import logging

    # The library logs each failure, which the error raised here reports already.
    logging.getLogger("qemu.qmp").setLevel(logging.CRITICAL + 1)
    library = qemu_qmp()
    end = time.monotonic() + timeout

    async def ask(connected: socket.socket) -> dict[int, int]:
        client = library.QMPClient("vsrtune")
        try:
            async with asyncio.timeout(max(0.0, end - time.monotonic())):
                await client.connect(connected)
                return parse_cpus(await client.execute("query-cpus-fast"))
        finally:
            # disconnect raises once more the error that broke the connection.
            with contextlib.suppress(Exception):
                await asyncio.wait_for(client.disconnect(), _LEAVING_SECONDS)

    try:
        with socket.socket(socket.AF_UNIX) as connected:
            connected.settimeout(timeout)
            connected.connect(path)
            if peer(connected) != pid:
                raise ObserveError(
                    f"process {peer(connected)} listens there, and not QEMU itself: not asked",
                    where=path,
                    hint="give it a socket of its own, -qmp unix:PATH,server=on,wait=off",
                    lasting=Lasting.TRANSIENT,
                )
            connected.setblocking(False)
            return asyncio.run(ask(connected))
    except TimeoutError:
        raise ObserveError(
            "no answer to QMP: another client is connected",
            where=path,
            hint="give vsrtune a second -qmp socket, or use -name NAME,debug-threads=on",
            lasting=Lasting.TRANSIENT,
        ) from None
    except ObserveError:
        raise
    except Exception as error:  # a hostile monitor can break the library's asserts
        raise ObserveError(
            f"QMP failed: {str(error) or type(error).__name__}",
            where=path,
            lasting=Lasting.TRANSIENT,
        ) from error


def peer(connected: socket.socket) -> int:
    """The process that listens at the other end of a UNIX socket (the one that called
    listen(2), unix(7))."""
    size = struct.calcsize("3i")
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("3i", credentials)[0])
