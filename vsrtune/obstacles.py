"""What is not tried on the way back, because of what could not be put back before it."""

from __future__ import annotations

from collections.abc import Iterable

from vsrtune.core.errors import BusyError, Lasting, VsrtuneError, WriteError
from vsrtune.model.guest import Sched, SchedClass
from vsrtune.model.plan import Action
from vsrtune.model.targets import (
    CgroupDir,
    CpusetFile,
    EmulatorPin,
    Partition,
    Target,
    ThreadAffinity,
    ThreadCgroup,
    ThreadSched,
    VcpuPin,
)

# Inverse actions that failed.
Failed = Iterable[tuple[Action, VsrtuneError]]


def check(target: Target, failed: Failed) -> None:
    """Raise WriteError when the target has to wait for one of ``failed``, BusyError when
    libvirt would only let it wait (``check_busy``)."""
    failed = tuple(failed)
    obstacle = _blocked(target, failed)
    if obstacle is not None:
        raise WriteError(
            f"waits for {obstacle}, which could not be put back",
            where=str(target),
            hint="undo again once that is solved",
            lasting=Lasting.TRANSIENT,
        )
    check_busy(target, failed)


def check_busy(target: Target, failed: Failed) -> None:
    """Raise BusyError for a pin of a guest of which libvirt took none a moment ago. It may
    have waited for half a minute, and would for each of the others: longer than systemd waits
    for a daemon that stops."""
    if not isinstance(target, VcpuPin | EmulatorPin):
        return
    for action, error in failed:
        if isinstance(error, BusyError) and action.target.guest == target.guest:
            raise BusyError(
                f"waits for {action.target}, for which libvirt was busy",
                where=str(target),
                hint="tried again with it",
                lasting=Lasting.TRANSIENT,
            )


def _blocked(target: Target, failed: Failed) -> Target | None:
    """The failed target that ``target`` has to wait for in its guest: a worker goes
    back into the emulator's cgroup only once that is wide again, and a cgroup is removed
    only once its threads are out."""
    for action, _ in failed:
        other = action.target
        if other.guest != target.guest:
            continue
        if isinstance(target, ThreadCgroup) and isinstance(other, EmulatorPin):
            return other
        # No root domain is taken away from a thread that is still DEADLINE.
        left = action.before
        still = isinstance(left, Sched) and left.cls is SchedClass.DEADLINE
        if (
            still
            and isinstance(other, ThreadSched)
            and isinstance(target, ThreadCgroup | ThreadAffinity | VcpuPin | CpusetFile | Partition)
        ):
            return other
        if (
            isinstance(target, CgroupDir)
            and isinstance(other, ThreadCgroup)
            and target.path in (action.before, action.after)
        ):
            return other
    return None
