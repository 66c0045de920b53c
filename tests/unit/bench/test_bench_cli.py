"""``vsrtune bench`` as far as it goes without a host: reading, refusing, reporting."""

from __future__ import annotations

import sys
from pathlib import Path

import bench_samples as samples
import pytest

from vsrtune.bench.cli import read_spec, short_spec
from vsrtune.bench.report.files import outcome_to_json
from vsrtune.bench.spec.model import Tuning
from vsrtune.cli import main
from vsrtune.core.errors import VsrtuneError

SPEC = """\
left: {device: g0, namespace: gen}
right: {device: s0, namespace: sink}
routers:
  - guest: vr1
    forth: {source: 10.10.1.2, destination: 10.20.1.100}
method: {kind: sweep, rates: [4000], seconds: 1}
"""
SHORT = {
    "guest": "vr1", "left": "g0@gen", "right": "root@box:eth1", "source": "10.10.1.2",
    "destination": "10.20.1.100",
}  # fmt: skip


@pytest.fixture
def result(tmp_path: Path) -> Path:
    path = tmp_path / "result.json"
    path.write_text(outcome_to_json(samples.outcome("compare")))
    return path


class TestReport:
    def test_a_stored_result_as_tables(
        self, result: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main.run(["bench", "report", str(result)]) == 0
        out = capsys.readouterr().out
        assert "one machine, veth and pktgen" in out
        assert "40,000" in out

    def test_as_html(self, result: Path, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        page = tmp_path / "report.html"
        assert main.run(["bench", "report", str(result), "--html", str(page)]) == 0
        assert "<svg" in page.read_text()

    def test_what_is_no_result(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "x.json"
        path.write_text("{}")
        assert main.run(["bench", "report", str(path)]) == 2
        assert str(path) in capsys.readouterr().err

    def test_without_matplotlib_the_package_is_named(
        self, result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        page = tmp_path / "report.html"
        assert main.run(["bench", "report", str(result), "--html", str(page)]) == 1
        assert "python3-matplotlib" in capsys.readouterr().err
        assert not page.exists()

    def test_a_directory_that_is_not_there_is_named_at_once(
        self, result: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        page = tmp_path / "no" / "report.html"
        assert main.run(["bench", "report", str(result), "--html", str(page)]) == 2
        assert str(page.parent) in capsys.readouterr().err


class TestSpecFiles:
    def test_the_policy_is_read_from_beside_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "tuned.yaml").write_text(samples.POLICY)
        path = tmp_path / "spec.yaml"
        path.write_text(SPEC + "configuration: {tuning: policy, policy: tuned.yaml}\n")
        found = read_spec(path).configuration
        assert (found.tuning, found.policy) == (Tuning.POLICY, samples.POLICY)

    def test_a_policy_that_is_not_there(self, tmp_path: Path) -> None:
        path = tmp_path / "spec.yaml"
        path.write_text(SPEC + "configuration: {tuning: policy, policy: gone.yaml}\n")
        with pytest.raises(VsrtuneError, match=r"gone\.yaml:1: the file cannot be read"):
            read_spec(path)

    def test_a_later_file_needs_only_its_configuration(self, tmp_path: Path) -> None:
        first = tmp_path / "a.yaml"
        first.write_text(SPEC)
        second = tmp_path / "b.yaml"
        second.write_text("configuration: {tuning: libvirt-pins, cpus: 1}\n")
        base = read_spec(first)
        found = read_spec(second, base)
        assert (found.name, found.method) == ("b", base.method)

    def test_errors_end_with_status_2(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "spec.yaml"
        path.write_text(SPEC + "colour: red\n")
        assert main.run(["bench", "run", str(path)]) == 2
        assert f"{path}:7" in capsys.readouterr().err


class TestShortForm:
    def test_stands_for_a_specification(self) -> None:
        spec = short_spec({**SHORT, "rates": "1000,8000", "seconds": 1.0, "size": "imix"})
        assert (spec.name, str(spec.left), str(spec.right)) == ("vr1", "gen/g0", "root@box:eth1")
        assert spec.method.rates == (1000, 8000)
        assert spec.traffic.size == "imix"
        assert spec.routers[0].forth.mac == ""

    def test_native_needs_a_mac(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["--native", "--left", "a", "--right", "b", "--source", "1.2.3.4"]
        assert main.run(["bench", "run", *words, "--destination", "1.2.4.4"]) == 2
        assert "--mac" in capsys.readouterr().err

    def test_what_is_missing_is_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.run(["bench", "run", "--guest", "vr1"]) == 2
        assert "--left" in capsys.readouterr().err

    def test_not_beside_a_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "spec.yaml"
        path.write_text(SPEC)
        assert main.run(["bench", "run", str(path), "--rates", "1"]) == 2
        assert "--rates" in capsys.readouterr().err

    @pytest.mark.parametrize("text", ["", "a@b@c", "@gen"])
    def test_bad_endpoints(self, text: str, capsys: pytest.CaptureFixture[str]) -> None:
        words = [word for name, value in {**SHORT, "left": text}.items()
                 for word in (f"--{name}", value)]  # fmt: skip
        assert main.run(["bench", "run", *words]) == 2
        assert "g0@gen" in capsys.readouterr().err


def test_comparing_needs_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    assert main.run(["bench", "compare", str(path)]) == 2
    assert "two files" in capsys.readouterr().err
