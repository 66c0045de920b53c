# SPDX-License-Identifier: GPL-2.0-or-later
"""What an action has to wait for: another one that failed, room on the disk, or libvirt.

libvirt keeps a pin waiting for half a minute while somebody holds the domain's job. Every pin of
every guest may then wait as long, and systemd waits 60 s for a sign of life, and 120 s for a
daemon that starts or stops. The executor therefore waits once: afterwards no pin is tried any
more in the same pass or undo.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vsrtune.core.errors import (
    BusyError,
    Lasting,
    LateError,
    SilentJobError,
    UntriedError,
    VanishedError,
    VsrtuneError,
    WriteError,
)
from vsrtune.execute.host_writer import LiveSysOps
from vsrtune.model.cpuset_tree import at_or_below
from vsrtune.model.deadline import is_deadline
from vsrtune.model.guest import TIMED, Sched, SchedClass, level
from vsrtune.model.plan import Action
from vsrtune.model.root_domains import is_partition
from vsrtune.model.targets import (
    HOST_REF,
    CgroupDir,
    CpusetFile,
    EmulatorPin,
    Partition,
    Target,
    ThreadAffinity,
    ThreadCgroup,
    ThreadlessTarget,
    ThreadSched,
    Value,
    VcpuPin,
)
from vsrtune.plan.phases import lowers, moves_work

# Inverse actions that failed.
Failed = Iterable[tuple[Action, VsrtuneError]]


class BlockedError(WriteError):
    """An inverse action that waits for another one."""


def check(back: Action, failed: Failed, ops: LiveSysOps, stays: Iterable[Action] = ()) -> None:
    """Raise BlockedError when the inverse action has to wait for one of ``failed``, or would take a
    thread into a slice that ``stays`` as it is now; BusyError when libvirt would only keep it
    waiting (``check_busy``)."""
    failed = tuple(failed)
    obstacle = _blocked(back, failed, ops)
    why, hint = "which could not be put back", "undo again once that is solved"
    if obstacle is None:
        obstacle = next((a.target for a in stays if _confines(a.target, back)), None)
        why, hint = "which stays for now", "`vsrtune undo` puts back both"
    if obstacle is not None:
        raise BlockedError(
            f"waits for {obstacle}, {why}",
            where=str(back.target),
            hint=hint,
            lasting=Lasting.TRANSIENT,
        )
    check_busy(back.target, failed)


def check_busy(target: Target, failed: Failed) -> None:
    """Raise BusyError for a pin of a guest if libvirt was busy at another of its pins a moment
    ago, UntriedError if libvirt kept the pin of another guest waiting. One guest of whose job
    libvirt says nothing has a QEMU that is silent; of a second it is libvirt."""
    if not isinstance(target, VcpuPin | EmulatorPin):
        return
    failed = tuple(failed)
    silent = {action.target.guest for action, error in failed if _is(error, SilentJobError)}
    enough = len(silent) > 1 and target.guest not in silent
    for action, error in failed:
        if _is(error, BusyError) and action.target.guest == target.guest:
            raise BusyError(
                f"waits for {action.target}, for which libvirt was busy",
                where=str(target),
                hint="tried again with it",
                lasting=Lasting.TRANSIENT,
            )
        if _is(error, LateError) or (enough and _is(error, SilentJobError)):
            raise UntriedError(
                f"not tried, because libvirt has kept {action.target} waiting",
                where=str(target),
                hint=f"tried again next time; what is busy there: virsh domjobinfo "
                f"{action.target.guest}",
                lasting=Lasting.TRANSIENT,
            )


def starving(target: Target, unmoved: Target) -> WriteError:
    """The error of a thread that waits because ``unmoved`` has failed, and with it the moves of the
    work of lower devices."""
    return WriteError(
        f"waits for {unmoved}, which failed: interrupts stay where they are, and realtime threads "
        "may starve them there",
        where=str(target),
        hint="solve that, or write class: batch; tried again",
        lasting=Lasting.TRANSIENT,
    )


def relieving(actions: Sequence[Action]) -> tuple[Action, ...]:
    """What of a plan is carried out on a disk without room for all of it, because the room was
    claimed when its targets were first written, and the host may starve until it is done: threads
    become less urgent, and guests that get nothing else are released. What the host itself releases
    may be in the way of what others keep, so it waits unless the whole plan is of that kind."""
    others = {a.target.guest for a in actions if not (a.release or _eases(a))}
    if others:
        others.add(HOST_REF)
    return tuple(a for a in actions if _eases(a) or a.target.guest not in others)


def _eases(action: Action) -> bool:
    """Whether a thread becomes less urgent, has a smaller budget or none, or takes turns with its
    equals, as each step down has it."""
    before, after = action.before, action.after
    if not isinstance(before, Sched) or not isinstance(after, Sched):
        return False
    gives_up = before.cls is SchedClass.DEADLINE and not urgent(after)
    turns = (before.cls, after.cls) == (SchedClass.FIFO, SchedClass.RR)
    takes_turns = turns and level(after) <= level(before)
    return lowers(before, after) or gives_up or takes_turns


def urgent(sched: Value) -> bool:
    """Whether that is a realtime class or a budget."""
    return isinstance(sched, Sched) and sched.cls in TIMED


def raises(action: Action) -> bool:
    """Whether the action gives a thread a realtime class or a budget, and not a lower one."""
    return urgent(action.after) and not _eases(action)


def pins_urgent(target: Target, ops: LiveSysOps) -> bool:
    """Whether that is the CPUs of a guest's thread that has such a class now."""
    if not isinstance(target, ThreadAffinity | VcpuPin) or moves_work(target):
        return False
    return urgent(ops.read(ThreadSched(target.guest, target.thread, "")))


def put_off(failed: Failed) -> set[Target]:
    """What of ``failed`` may succeed now: the kernel may have refused a CPU list while the lists
    beside it were not restored, and what else failed may have failed because of it. libvirt is not
    asked again while it is busy."""
    failed = tuple(failed)
    lists = (e for a, e in failed if isinstance(a.target, CpusetFile))
    if all(isinstance(error, BlockedError) for error in lists):
        return set()
    return {a.target for a, error in failed if not _is(error, BusyError)}


def _is(error: VsrtuneError, kind: type[VsrtuneError]) -> bool:
    """Whether that is the error, or the one that could not be taken back."""
    return isinstance(error, kind) or isinstance(error.__cause__, kind)


def _blocked(back: Action, failed: Failed, ops: LiveSysOps) -> Target | None:
    """The failed target for which ``back`` has to wait: a thread that is still realtime or DEADLINE
    keeps what it relies on (``_keeps``), a partition the lists of its CPUs, a slice that is narrow
    the threads outside (``_confines``). A worker goes back into the emulator's cgroup only after
    that is wide again. While a thread is in a partition's cgroup, it keeps the CPUs of that, and
    the cgroup its list; a cgroup is removed only after its threads have left."""
    target = back.target
    for action, _ in failed:
        other = action.target
        waits = _confines(other, back)
        if isinstance(other, ThreadSched):
            waits = _keeps(other, target, ops)
        elif isinstance(other, Partition) and isinstance(target, CpusetFile):
            waits = at_or_below(other.path, target.path)
        elif isinstance(other, EmulatorPin) and isinstance(target, ThreadCgroup):
            waits |= other.guest == target.guest
        elif isinstance(other, ThreadCgroup):
            waits = _holds(other, action, target)
        if waits:
            return other
    return None


def _holds(thread: ThreadCgroup, move: Action, target: Target) -> bool:
    """Whether ``target`` waits for a thread whose move back has failed."""
    ends = (move.before, move.after)
    if isinstance(target, CgroupDir | CpusetFile):
        ours = isinstance(target, CgroupDir) or is_partition(target.path)
        return ours and target.path in ends
    own = isinstance(target, ThreadAffinity) and target.thread == thread.thread
    return own and is_partition(str(move.before))


def _confines(other: Target, back: Action) -> bool:
    """Whether a move back would take a thread into a slice whose list or partition is ``other``. As
    long as that is not put back, the slice has other CPUs than when the thread left it, and the
    thread would lose its mask."""
    if not isinstance(other, Partition | CpusetFile) or not isinstance(back.target, ThreadCgroup):
        return False
    leaves, enters = (at_or_below(str(p), other.path) for p in (back.before, back.after))
    return other.guest == HOST_REF and enters and not leaves


def _keeps(thread: ThreadSched, target: Target, ops: LiveSysOps) -> bool:
    """Whether a thread whose class could not be taken back needs ``target`` as it is. One that is
    realtime keeps its CPUs, and the host's interrupts, lists and threads stay as they are planned
    around it. A DEADLINE thread keeps its root domain, that is, everything of its guest too. A
    thread that is gone, or has no such class any more, keeps nothing."""
    of_host = target.guest == HOST_REF
    if of_host:
        concerns = thread.guest != HOST_REF
    else:
        concerns = thread.guest == target.guest and isinstance(
            target, ThreadCgroup | ThreadAffinity | VcpuPin | CpusetFile | Partition
        )
    if not concerns:
        return False
    try:
        now = ops.read(thread)
    except VanishedError:
        return False
    own = not isinstance(target, ThreadlessTarget) and target.thread == thread.thread
    return urgent(now) if of_host or own else is_deadline(now)
