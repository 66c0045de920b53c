"""Every promise of docs/reliability.md has a test that make runs, and every test that it and
docs/hardening.md name exists."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[3]
sys.path.append(str(TREE / "docs"))

from generate import promises  # noqa: E402

PROMISES = promises.promises()
PROMISED = [test for promise in PROMISES for test in promise.tests]


def named(document: str) -> Iterator[str]:
    """Files and tests; one without a file is in that of the one before."""
    last = ""
    for file, name in re.findall(
        r"`([\w/]+\.py)?::(test_\w+)`", (TREE / "docs" / document).read_text()
    ):
        last = file or last
        yield f"{last}::{name}"


def test_there_are_promises() -> None:
    assert len(PROMISES) > 50
    assert [promise.text for promise in PROMISES if not promise.tests] == []


NAMED = dict.fromkeys([*PROMISED, *named("hardening.md"), *named("reliability.md")])


@pytest.mark.parametrize("test", NAMED)
def test_make_runs_the_test(test: str) -> None:
    assert promises.runs_in(test), "there is no such test, or no lab in which it runs"


def test_each_manager_has_a_test_a_result_or_a_reason_in_each_column() -> None:
    text = (TREE / "docs/reliability.md").read_text()
    lines = text.partition("| run by |")[2].partition("\n\n")[0].splitlines()
    heads, rows = lines[0], [line.split("|")[2:-1] for line in lines[2:]]
    assert len(rows) == 7
    assert {len(cells) for cells in rows} == {len(heads.split("|")) - 1}
    known = re.compile(r" (`[\w/.]*::test_\w+`|- \w+ \w+|\[[\w-]+\]\(results/)")
    assert [cell for cells in rows for cell in cells if not known.match(cell)] == []


# -- what the tables are made from


@pytest.mark.parametrize(
    ("test", "runs"),
    [
        ("tests/unit/project/test_docs_reliability.py::test_there_are_promises", "`make test`"),
        ("test_tune.py::test_no_such_test", ""),
        ("test_writes.py::test_every_kind_goes_and_comes_back", "`make test`: bookworm-veth, trixie-veth"),
        ("test_pins.py::test_an_operators_pin_is_held_then_reasserted", "`make test`: bookworm-veth"),
        ("test_faults.py::test_var_full", "`make test-all`: trixie-veth"),
        ("test_guard.py::test_a_paused_router_keeps_its_tuning", "`make test-all`: bookworm-shared-cpu, trixie-shared-cpu"),
        ("test_deadline.py::test_two_guests_share_a_cpu", "`make test-all`: trixie-e1000e, trixie-bench"),
        ("test_churn.py::test_soak", "`make soak`"),
    ],
)  # fmt: skip
def test_what_runs_a_test(test: str, runs: str) -> None:
    assert promises._said(promises.runs_in(test)) == runs


REPORT = """\
<testsuites><testsuite name="{name}" timestamp="2026-11-24T10:02:17.5">
<testcase classname="test_a" name="test_one[x.y]"/>
<testcase classname="test_a" name="test_one[z]"><skipped/></testcase>
<testcase classname="test_a" name="test_two[1]"/>
<testcase classname="test_a" name="test_two[2]"><failure/></testcase>
<testcase classname="test_a" name="test_three"><skipped/></testcase>
<testcase classname="tests.unit.b.test_c" name="test_four"/>
</testsuite></testsuites>
"""


@pytest.mark.parametrize(
    ("name", "directory"), [("trixie-veth", "x"), ("trixie", "."), ("pytest", "trixie-kmod")]
)
def test_what_a_report_says(tmp_path: Path, name: str, directory: str) -> None:
    (tmp_path / directory).mkdir(exist_ok=True)
    report = tmp_path / directory / "junit.xml"
    report.write_text(REPORT.format(name=name))
    report.with_name("passed").write_text("test_a.py::test_five[a b]\ntest_a.py::test_two[3]\n")
    assert promises.read_report(report) == (
        "trixie",
        "2026-11-24",
        {"test_a.py::test_one", "test_a.py::test_five", "tests/unit/b/test_c.py::test_four"},
    )


def test_a_report_of_no_release_is_refused(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(REPORT.format(name="pytest"))
    with pytest.raises(ValueError, match="named by a release"):
        promises.read_report(tmp_path / "junit.xml")


def test_the_last_green_day_of_each_release_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promises, "GREEN", tmp_path / "green.json")
    monkeypatch.setattr(promises, "PROMISES", tmp_path / "promises.yaml")
    promises.PROMISES.write_text(
        "A: [{promise: x, tests: ['test_a.py::test_one', 'test_a.py::test_two']}]"
    )
    promises.GREEN.write_text(
        json.dumps(
            {
                "test_a.py::test_one": {"bookworm": "2026-12-01", "trixie": "2026-11-01"},
                "test_a.py::test_two": {"trixie": "2026-11-01"},
                "test_a.py::test_of_old": {"trixie": "2026-11-01"},
            }
        )
    )
    report = tmp_path / "junit.xml"
    report.write_text(REPORT.format(name="trixie-veth"))
    assert promises.take([report]) == ["test_a.py::test_one"]
    assert promises.record() == {
        "test_a.py::test_one": {"bookworm": "2026-12-01", "trixie": "2026-11-24"},
        "test_a.py::test_two": {"trixie": "2026-11-01"},
    }
    assert promises.take([report]) == []
