"""pass_result.py: which changes a pass leaves unmade, and why."""

from __future__ import annotations

from vsrtune.core.errors import WriteError
from vsrtune.daemon.pass_result import WAITING, WITH_ANOTHER, unmade
from vsrtune.execute.executor import Result
from vsrtune.model.daemon_state import PlanState, Unmade
from vsrtune.model.guest import Sched, SchedClass, ThreadKey
from vsrtune.model.plan import Action, Plan, Refusal, Skipped
from vsrtune.model.targets import ThreadSched, TxQueueLen

FIFO = Sched(SchedClass.FIFO, 5)


def queue(guest: str, ifindex: int = 1) -> Action:
    return Action(TxQueueLen(guest, "macvtap0", ifindex), 500, 300, "queue")


def sched(guest: str, tid: int = 7) -> Action:
    return Action(ThreadSched(guest, ThreadKey(1, tid, 1), f"vcpu {tid}"), Sched(), FIFO, "class")


def whys(plan: Plan, result: Result) -> list[str]:
    return [u.why for u in unmade(plan, result)]


def test_what_was_done_is_not_unmade() -> None:
    plan = Plan((queue("a"), sched("a")))
    assert unmade(plan, Result(done=plan.actions)) == ()
    assert unmade(plan, Result(done=plan.actions[:1])) == (Unmade(sched("a"), WAITING),)


def test_a_failure_takes_back_the_others_of_its_guest() -> None:
    plan = Plan((queue("a"), sched("a"), sched("a", 8), queue("b", 2)))
    error = WriteError("not permitted")
    result = Result(
        done=plan.actions[3:], failed=((plan.actions[1], error),), skipped=(plan.actions[2],)
    )
    assert whys(plan, result) == [WITH_ANOTHER, f"failed: {error}", WITH_ANOTHER]


def test_what_the_kernel_puts_off_or_refuses_and_what_is_gone() -> None:
    plan = Plan((sched("a"), queue("a"), sched("a", 9)))
    later, never = WriteError("sleeps"), WriteError("managed")
    result = Result(
        pending=((plan.actions[0], later),),
        fixed=((plan.actions[1], never),),
        vanished=(plan.actions[2].target,),
    )
    assert whys(plan, result) == [f"pending: {later}", f"the kernel refuses it: {never}"]


def test_nothing_was_tried() -> None:
    assert whys(Plan((queue("a"),)), Result()) == [WAITING]


def test_a_pass_over_some_guests_renews_theirs_alone() -> None:
    def told(*guests: str, reason: str) -> PlanState:
        skipped = tuple(Skipped(g, "emulator CPUs", reason) for g in guests)
        refusals = tuple(Refusal(g, "a.yaml:1", reason, "") for g in guests)
        unmade = tuple(Unmade(queue(g), reason) for g in guests)
        return PlanState.after(Plan((), skipped, refusals, (reason,)), unmade)

    whole = told("a", "b", "gone", reason="first")
    later = whole.updated(told("b", reason="second"), frozenset({"b", "gone"}))
    assert [(u.action.target.guest, u.why) for u in later.unmade] == [
        ("a", "first"),
        ("b", "second"),
    ]
    assert [(s.guest, s.reason) for s in later.skipped] == [("a", "first"), ("b", "second")]
    assert [(r.guest, r.reason) for r in later.refusals] == [("a", "first"), ("b", "second")]
    assert later.warnings == ("first",)
