"""The errno table: every row has a reason, and the ones that matter say the right thing."""

from __future__ import annotations

import errno

import pytest

from vsrtune.core.errors import Lasting, VanishedError, WriteError
from vsrtune.execute.errno_table import _COMMON, _TABLE, Operation, classify, name, write_error


@pytest.mark.parametrize("operation", Operation)
def test_every_errno_has_a_verdict_with_a_reason(operation: Operation) -> None:
    for number in errno.errorcode:
        verdict = classify(operation, number)
        assert verdict.reason
        assert isinstance(verdict.lasting, Lasting)


def test_rows_are_sentences_that_can_be_put_after_because() -> None:
    for verdict in [*_TABLE.values(), *_COMMON.values()]:
        assert verdict.reason[0].islower() or verdict.reason.startswith(("CPU", "DEADLINE"))
        assert not verdict.reason.endswith(".")
        assert not verdict.hint.endswith(".")


@pytest.mark.parametrize("operation", [Operation.AFFINITY, Operation.SCHED, Operation.THREADS])
def test_esrch_is_a_vanished_thread(operation: Operation) -> None:
    error = write_error(operation, OSError(errno.ESRCH, ""), "vr1: vcpu 0")
    assert isinstance(error, VanishedError)
    assert error.where == "vr1: vcpu 0"


@pytest.mark.parametrize(
    ("operation", "number", "lasting", "word"),
    [
        (Operation.SCHED, errno.EPERM, Lasting.PERMANENT, "RT_GROUP_SCHED"),
        (Operation.DEADLINE, errno.EPERM, Lasting.TRANSIENT, "has not run"),
        (Operation.DEADLINE, errno.EBUSY, Lasting.PERMANENT, "bandwidth"),
        (Operation.AFFINITY, errno.EINVAL, Lasting.PERMANENT, "cpuset"),
        (Operation.AFFINITY, errno.EBUSY, Lasting.PERMANENT, "DEADLINE"),
        (Operation.THREADS, errno.EOPNOTSUPP, Lasting.PERMANENT, "threaded"),
        (Operation.RMDIR, errno.EBUSY, Lasting.TRANSIENT, "still in it"),
        (Operation.TXQUEUELEN, errno.ENOMEM, Lasting.TRANSIENT, "memory"),
    ],
)
def test_what_operators_read(
    operation: Operation, number: int, lasting: Lasting, word: str
) -> None:
    error = write_error(operation, OSError(number, ""), "vr1", "value")
    assert type(error) is WriteError
    assert error.lasting is lasting
    assert word in str(error)
    assert name(number) in str(error)
    assert error.hint


def test_an_errno_without_a_row_is_permanent_and_named() -> None:
    error = write_error(Operation.CPUSET, OSError(errno.EXDEV, ""), "vr1")
    assert error.lasting is Lasting.PERMANENT
    assert "EXDEV" in str(error)


@pytest.mark.parametrize(
    ("operation", "number", "told"),
    [
        (
            Operation.DEADLINE,
            errno.EPERM,
            (
                "vr1: vcpu 0: sched_setattr to DEADLINE of 'x' failed with EPERM because the thread "
                "has not run since it was given its CPUs, so the kernel still counts it in its old "
                "root domain; or its mask is not a whole root domain; retried once the guest has "
                "traffic"
            ),
        ),
        (
            Operation.DEADLINE,
            errno.EBUSY,
            (
                "vr1: vcpu 0: sched_setattr to DEADLINE of 'x' failed with EBUSY because admission "
                "control: the CPUs have too little deadline bandwidth left; lower runtime/period, or "
                "free bandwidth held by other DEADLINE threads"
            ),
        ),
        (
            Operation.SCHED,
            errno.EPERM,
            (
                "vr1: vcpu 0: sched_setattr of 'x' failed with EPERM because real-time classes are "
                "forbidden here: CAP_SYS_NICE is missing, or the kernel has RT_GROUP_SCHED and the "
                "thread's cpu cgroup has no real-time budget; run as root; under RT_GROUP_SCHED give "
                "the cgroup cpu.rt_runtime_us (v1) or disable the cpu controller for the guests' "
                "cgroups (v2)"
            ),
        ),
        (
            Operation.EXCLUSIVE,
            errno.EINVAL,
            (
                "vr1: vcpu 0: write to cpuset.cpus.exclusive of 'x' failed with EINVAL because a "
                "cgroup beside it, or a partition, has one of these CPUs for itself; look at "
                "cpuset.cpus and cpuset.cpus.exclusive of the cgroups beside it"
            ),
        ),
    ],
)
def test_what_the_kernel_refuses_is_told_in_full(
    operation: Operation, number: int, told: str
) -> None:
    assert str(write_error(operation, OSError(number, ""), "vr1: vcpu 0", "x")) == told
