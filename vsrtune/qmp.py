"""Ask a plain QEMU which thread runs which vcpu."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vsrtune._vendor import qemu_qmp
from vsrtune.errors import Lasting, ObserveError

# A QMP socket serves one client: while another is connected, ours waits in the
# listen queue and hears nothing. This long is waited for each answer.
TIMEOUT_SECONDS = 1.0


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


def query_vcpus(socket: str, timeout: float = TIMEOUT_SECONDS) -> dict[int, int]:
    """Connect to a QMP UNIX socket, ask, and disconnect at once.

    Raises ObserveError: transient when the socket is busy or gone, permanent
    when the QMP library is missing.
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
            where=socket,
            hint="install it, or start QEMU with -name NAME,debug-threads=on",
        ) from None

    async def ask() -> dict[int, int]:
        client = library.QMPClient("vsrtune")
        try:
            await asyncio.wait_for(client.connect(socket), timeout)
            return parse_cpus(await asyncio.wait_for(client.execute("query-cpus-fast"), timeout))
        finally:
            # Here it raises once more what broke the connection.
            with contextlib.suppress(Exception):
                await asyncio.wait_for(client.disconnect(), timeout)

    try:
        return asyncio.run(ask())
    except TimeoutError:
        raise ObserveError(
            "no answer to QMP: another client is connected",
            where=socket,
            hint="give vsrtune a second -qmp socket, or use -name NAME,debug-threads=on",
            lasting=Lasting.TRANSIENT,
        ) from None
    except Exception as error:  # the library asserts what a monitor that means harm breaks
        raise ObserveError(
            f"QMP failed: {str(error) or type(error).__name__}",
            where=socket,
            lasting=Lasting.TRANSIENT,
        ) from error
