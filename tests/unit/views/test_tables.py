"""tables.py and cli/render.py: what is said, and plain text that tools can cut."""

from __future__ import annotations

import shell_samples as samples

from vsrtune.cli import render
from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import ThreadKey
from vsrtune.model.plan import Action, Plan, Refusal, Skipped
from vsrtune.model.targets import HOST_REF, IrqAffinity, Pin, QueueCpus, TxQueueLen, VcpuPin
from vsrtune.views import tables as report


def text(tables: list[report.Table]) -> str:
    return "\n".join(render.plain(t) for t in tables)


def rows_of(tables: list[report.Table], title: str) -> list[dict[str, str]]:
    table = next(t for t in tables if t.title.startswith(title))
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


PIN = VcpuPin("vr1", "u", 0, ThreadKey(100, 101, 5101))
WIDE, NARROW = Pin(CpuSet(range(4)), ""), Pin(CpuSet([1]), "1")


class TestShow:
    tables = report.snapshot_tables(samples.snapshot())

    def test_every_thread_has_a_row_with_its_role(self) -> None:
        rows = rows_of(self.tables, "Guest vr1")
        assert [r["thread"] for r in rows] == ["vcpu 0", "vhost macvtap100/0", "emulator"]
        assert [r["tid"] for r in rows] == ["101", "102", "100"]
        assert rows[1]["mapped"] == "order"
        assert rows[0]["mapped"] == report.NOTHING

    def test_interface_names_its_chain_and_losses(self) -> None:
        (row,) = rows_of(self.tables, "Interfaces of vr1")
        assert row["lower"] == "p0"
        assert row["ring drops"] == "7"
        assert row["txqueuelen"] == "500"

    def test_a_device_of_the_module_shows_its_thread_and_where_frames_died(self) -> None:
        tables = report.snapshot_tables(samples.snapshot(samples.napi_guest()))
        threads = rows_of(tables, "Guest vr1")
        assert [r["thread"] for r in threads][-2:] == ["napi macvtap100", "emulator"]
        assert threads[-2]["mapped"] == "exact"
        assert rows_of(tables, "Interfaces of vr1")[0]["kind"] == "napi_macvtap"
        (row,) = rows_of(tables, "Frames of vr1")
        assert row["threaded NAPI"] == "yes"
        assert row["dropped"] == "ring_full 4, queue_full 2"
        assert (row["own queue, most"], row["rings, most"]) == ("31", "500/-")

    def test_interrupts_tell_where_they_really_arrive(self) -> None:
        rows = rows_of(self.tables, "NICs")
        assert rows[0]["CPUs allowed"] == "0-3"
        assert rows[0]["CPU used"] == "0"
        assert rows[1]["name"] == "no interrupt of its own"

    def test_neighbours_and_problems_are_not_lost(self) -> None:
        assert "irqbalance" in text(self.tables)
        assert "tracefs is not mounted" in text(self.tables)

    def test_cgroup_is_shown_below_the_scope(self) -> None:
        assert report.short_cgroup(f"/{samples.SCOPE}/vcpu0") == "libvirt/vcpu0"
        assert report.short_cgroup("/user.slice/x") == "/user.slice/x"


class TestPlan:
    def test_change_shows_before_after_and_reason(self) -> None:
        plan = Plan(actions=(Action(PIN, WIDE, NARROW, "away from interrupts"),))
        (row,) = rows_of(report.plan_tables(plan), "1 change")
        assert row["setting"] == "vcpu 0 pin"
        assert (row["now"], row["then"]) == ("CPUs 0-3", "CPUs 1")
        assert row["because"] == "away from interrupts"

    def test_doing_nothing_is_said_with_its_reason(self) -> None:
        shown = text(report.plan_tables(Plan(skipped=(Skipped("vr1", "vcpu 0", "is so already"),))))
        assert shown.startswith("Nothing to change")
        assert "is so already" in shown

    def test_refusals_say_what_to_do_instead(self) -> None:
        shown = text(report.plan_tables(Plan(refusals=(Refusal("vr1", "p.yaml", "why", "do"),))))
        assert "Refused" in shown
        assert "why" in shown
        assert "do" in shown
        assert "Nothing to change" not in shown


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
    lines = render.plain(table).splitlines()
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
