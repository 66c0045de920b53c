"""tables.py and cli/render.py: what is said, and plain text that tools can cut."""

from __future__ import annotations

from dataclasses import replace

import golden
import shell_samples as samples
from top_samples import GOLDEN

from vsrtune.cli import render
from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import Sched, SchedClass, ThreadKey
from vsrtune.model.plan import Action, Drift, DriftRule, Plan, Refusal, Skipped
from vsrtune.model.snapshot import Stranger
from vsrtune.model.targets import HOST_REF, IrqAffinity, Pin, QueueCpus, TxQueueLen, VcpuPin
from vsrtune.views import layout
from vsrtune.views import tables as report


def text(tables: list[report.Table]) -> str:
    return "\n".join("\n".join(layout.lines(t)) + "\n" for t in tables)


def test_a_host_as_show_tells_it() -> None:
    """One guest of class deadline, which is throttled, one on a device of our module, and
    problems."""
    budget = Sched(
        SchedClass.DEADLINE, runtime_ns=2_000_000, deadline_ns=5_000_000, period_ns=10_000_000
    )
    plain = samples.guest("vr1", 200)
    emulator, vcpu, worker = plain.threads
    vcpu = replace(vcpu, sched=budget, load=(0.25, 0.75))
    plain = replace(plain, threads=(emulator, vcpu, worker), problems=("no MAC",))
    module = replace(samples.napi_guest(), name="vr2")
    host = replace(
        samples.snapshot(plain, module),
        strangers=(Stranger(7, 1, 1000, "its domain is not known"),),
    )
    golden.matches(GOLDEN / "show.txt", text(report.snapshot_tables(host, {vcpu.key: 0.98})))


def test_a_limit_that_could_not_be_read() -> None:
    unread = replace(samples.snapshot().host, sched_rt_runtime_us=0, sched_rt_period_us=0)
    assert report.throttling(unread) == "limit not known"


def test_cgroup_is_shown_below_the_scope() -> None:
    assert report.short_cgroup(f"/{samples.SCOPE}/vcpu0") == "libvirt/vcpu0"
    assert report.short_cgroup("/user.slice/x") == "/user.slice/x"


def test_a_plan_as_it_is_printed() -> None:
    queue = TxQueueLen("vr1", "macvtap0", 9)
    plan = Plan(
        actions=(
            Action(
                VcpuPin("vr1", "u", 0, ThreadKey(100, 101, 5101)),
                Pin(CpuSet(range(4)), ""),
                Pin(CpuSet([1]), "1"),
                "away from interrupts",
            ),
        ),
        skipped=(
            Skipped("vr1", "vcpu 0", "already set"),
            Skipped("vr1", "emulator", "set by hand", held=True),
        ),
        refusals=(Refusal("vr2", "p.yaml", "there is no CPU 9", "choose from 0-3"),),
        warnings=("a warning",),
        notes=("a note",),
        drift=(Drift(queue, "queue.macvtap", DriftRule.REPORT, "300", "77", "", "reported"),),
    )
    shown = text(report.plan_tables(plan)), text(report.plan_tables(plan, verbose=True))
    golden.matches(GOLDEN / "plan.txt", "\nWith -v:\n\n".join(shown))


def test_doing_nothing_is_said_with_its_reason() -> None:
    plan = Plan(skipped=(Skipped("vr1", "vcpu 0", "already set"),))
    shown = text(report.plan_tables(plan, verbose=True))
    assert shown.startswith("Nothing to change")
    assert "already set" in shown
    refused = Plan(refusals=(Refusal("vr2", "p.yaml", "there is no CPU 9", "choose from 0-3"),))
    assert text(report.plan_tables(refused)).startswith("Nothing can be changed")


def test_drift_names_changes_and_what_is_held() -> None:
    lines = report.drift_lines(
        [Action(TxQueueLen("vr1", "macvtap0", 9), 500, 100, "policy")],
        [Skipped("vr1", "vcpu 0 pin", "set by hand", held=True), Skipped("vr1", "x", "same")],
    )
    assert lines == [
        "vr1: macvtap0 txqueuelen: is 500, should be 100 (policy)",
        "vr1: vcpu 0 pin: set by hand",
    ]


def test_status_line_counts_in_words() -> None:
    assert report.status_line(2, 1) == "2 guests tuned, 1 drift"
    assert report.status_line(1, 0, ["no policy"]) == "1 guest tuned, 0 drift, no policy"


def test_plain_text_keeps_rows_whole_and_names_literal() -> None:
    table = report.Table("T", ("a", "b"), [("vr [bold]1[/].ü", "x" * 300), ("s", "y")])
    lines = layout.lines(table)
    assert len(lines) == 4
    assert "vr [bold]1[/].ü" in lines[2]
    assert lines[2].endswith("x" * 300)
    assert lines[2].index("x") == lines[3].index("y")


def test_terminal_output_treats_markup_in_names_as_text(capsys, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    render.show([report.Table("T [red]", ("a",), [("[/nonsense]",)]), report.Table("none", ())])
    out = capsys.readouterr().out
    assert "[/nonsense]" in out
    assert "T [red]" in out


def test_queues_and_interrupts_of_the_host_as_an_operator_reads_them() -> None:
    change = Action(QueueCpus(HOST_REF, "p0", 2, "rx-0"), CpuSet(), CpuSet([0]), "why")
    assert report.action_line(change) == "host/: p0 rx-0 rps_cpus: off -> CPUs 0"
    moved = Action(IrqAffinity(HOST_REF, 41, "p0-rx-0"), CpuSet([1, 2]), CpuSet([0]), "why")
    assert report.action_line(moved) == "host/: irq 41 (p0-rx-0) affinity: CPUs 1-2 -> CPUs 0"
