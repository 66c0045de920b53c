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
    ("operation", "number", "lasting", "told"),
    [
        (
            Operation.DEADLINE, errno.EPERM, Lasting.TRANSIENT,
            ("vr1: sched_setattr to DEADLINE of 'x' failed with EPERM because the thread has not "
            "run since it was given its CPUs, so the kernel still counts it in its old root "
            "domain; or its mask is not a whole root domain; retried once the guest has traffic"),
        ),
        (
            Operation.DEADLINE, errno.EBUSY, Lasting.PERMANENT,
            ("vr1: sched_setattr to DEADLINE of 'x' failed with EBUSY because admission control: "
            "the CPUs have too little deadline bandwidth left; lower runtime/period, or free "
            "bandwidth held by other DEADLINE threads"),
        ),
        (Operation.AFFINITY, errno.EBUSY, Lasting.PERMANENT, "DEADLINE"),
        (Operation.AFFINITY, errno.EROFS, Lasting.PERMANENT, "read-only"),
    ],
)  # fmt: skip
def test_what_operators_read(
    operation: Operation, number: int, lasting: Lasting, told: str
) -> None:
    error = write_error(operation, OSError(number, ""), "vr1", "x")
    assert type(error) is WriteError
    assert error.lasting is lasting
    assert told in str(error)
    assert name(number) in str(error)
    assert error.hint


def test_an_errno_without_a_row_is_permanent_and_named() -> None:
    error = write_error(Operation.CPUSET, OSError(errno.EXDEV, ""), "vr1")
    assert error.lasting is Lasting.PERMANENT
    assert "EXDEV" in str(error)
