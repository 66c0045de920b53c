"""The NAPI threads of a guest's devices: kernel threads that serve the devices' own queues.

A napi_macvtap with threaded NAPI hands frames from other guests, broadcast and
multicast to its guest in a kernel thread ``napi/<device>-<id>``. Our module tells its
tid. A module that does not leaves the name, which is not unique: a device keeps its
thread's name when it is renamed, and another network namespace may have a device of
the same name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vsrtune.host.filesystem import HostRoot
from vsrtune.host.procfs import RawThread, napi_device, read_thread
from vsrtune.model.guest import Confidence, Interface
from vsrtune.model.host import NicThread


@dataclass(frozen=True, slots=True)
class NapiThread:
    """The thread of one device. Confidence ORDER: by its name, which no other has."""

    thread: RawThread
    device: str
    confidence: Confidence


def read_nic_threads(root: HostRoot, tids: Iterable[int]) -> tuple[NicThread, ...]:
    """The NAPI threads of a lower device, by the tids that the device's name gave."""
    found = []
    for tid in tids:
        thread = read_thread(root, tid, tid)
        if thread is not None and thread.kthread and napi_device(thread.name) is not None:
            found.append(NicThread(thread.key, thread.name, thread.affinity))
    return tuple(found)


def read_napi_threads(
    root: HostRoot, interfaces: Iterable[Interface], named: Mapping[str, Sequence[int]]
) -> tuple[list[NapiThread], list[str]]:
    """The threads of those interfaces that are threaded, and why some are not known.

    ``named`` gives the NAPI kernel threads by the device in their name. A device whose
    NAPI is not threaded has none, though on kernels before 6.17 one may sleep on.
    """
    found: list[NapiThread] = []
    problems: list[str] = []
    for interface in interfaces:
        if not interface.threaded:
            continue
        tid, confidence, problem = _tid(interface, named.get(interface.target, ()))
        thread = read_thread(root, tid, tid) if tid else None
        if thread is not None and thread.kthread and napi_device(thread.name) is not None:
            found.append(NapiThread(thread, interface.target, confidence))
        else:
            gone = f"thread {tid} is no NAPI thread now"
            problems.append(f"{interface.target}: its NAPI is threaded, but {problem or gone}")
    return found, problems


def _tid(interface: Interface, named: Sequence[int]) -> tuple[int, Confidence, str]:
    told = interface.counters.napi_thread_tid if interface.counters is not None else None
    if told is not None:
        return told, Confidence.EXACT, "" if told else "the module says it has no thread"
    if len(named) == 1:
        return named[0], Confidence.ORDER, ""
    listed = ", ".join(map(str, named))
    return (
        0,
        Confidence.NONE,
        f"threads {listed} all have its name: which is its own is not known"
        if named
        else "no thread has its name",
    )
