"""Ask a plain QEMU which thread runs which vcpu."""

from __future__ import annotations

import importlib
import socket
import struct
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from vsrtune.core.errors import Lasting, ObserveError

DIRECTORY = "/usr/lib/vsrtune/vendor"


def qemu_qmp() -> Any:
    """The module ``qemu.qmp``: the system's, else the one shipped with vsrtune.

    Raises ImportError when there is neither.
    """
    try:
        return importlib.import_module("qemu.qmp")
    except ImportError:
        if DIRECTORY not in sys.path:
            sys.path.append(DIRECTORY)
        importlib.invalidate_caches()
        return importlib.import_module("qemu.qmp")


# A QMP socket serves one client: while another is connected, ours waits in the
# listen queue and hears nothing. This long is waited for it to let us go.
_LEAVING_SECONDS = 0.1


def parse_cpus(answer: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """vcpu number to tid, from the answer of ``query-cpus-fast``.

    Under single-threaded TCG all vcpus share one thread: the lowest number has it.
    Raises ValueError for what is no such answer.
    """
    try:
        found = sorted((int(cpu["cpu-index"]), int(cpu["thread-id"])) for cpu in answer)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError("this is no answer to query-cpus-fast") from error
    vcpus: dict[int, int] = {}
    for index, tid in found:
        if tid not in vcpus.values():
            vcpus[index] = tid
    return vcpus


def query_vcpus(path: str, pid: int, timeout: float) -> dict[int, int]:
    """Connect to a QMP UNIX socket, ask, and disconnect at once; ``timeout`` is in seconds, for
    all of it.

    The path leads where the process likes, so nothing is said to anybody but process ``pid``
    (SO_PEERCRED: who listens there). Raises ObserveError: transient when the socket is busy or
    gone, permanent when the QMP library is missing.
    """
    import asyncio
    import contextlib
    import logging

    # It logs each failure, which is reported by the error raised here.
    logging.getLogger("qemu.qmp").setLevel(logging.CRITICAL + 1)
    try:
        library = qemu_qmp()
    except ImportError:
        raise ObserveError(
            "the Python library qemu.qmp is not installed",
            where=path,
            hint="install it, or start QEMU with -name NAME,debug-threads=on",
        ) from None

    async def ask(connected: socket.socket) -> dict[int, int]:
        client = library.QMPClient("vsrtune")
        try:
            async with asyncio.timeout(timeout):
                await client.connect(connected)
                return parse_cpus(await client.execute("query-cpus-fast"))
        finally:
            # Here it raises once more what broke the connection.
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
    except Exception as error:  # the library asserts what a monitor that means harm breaks
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
