"""``vsrtune bench`` as far as it goes without a host: reading, refusing, reporting."""

from __future__ import annotations

import sys
from pathlib import Path

import bench_samples as samples
import pytest

from vsrtune.bench.cli import check_outputs, deliver, read_spec, short_spec
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

    def test_a_result_that_cannot_be_stored_is_shown(
        self, result: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        nowhere = Path("/proc/result.json")
        with pytest.raises(VsrtuneError, match="no file can be written there"):
            check_outputs(nowhere, None)
        with pytest.raises(OSError):
            deliver(samples.outcome("compare"), nowhere, None)
        assert "40,000" in capsys.readouterr().out
        check_outputs(result, None)
        check_outputs(Path("-"), None)
        assert list(result.parent.iterdir()) == [result]

    def test_as_html(self, result: Path, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        page = tmp_path / "report.html"
        assert main.run(["bench", "report", str(result), "--html", str(page)]) == 0
        assert "<svg" in page.read_text()

    def test_without_matplotlib_the_package_is_named(
        self, result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        page = tmp_path / "report.html"
        assert main.run(["bench", "report", str(result), "--html", str(page)]) == 1
        assert "python3-matplotlib" in capsys.readouterr().err
        assert not page.exists()


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


class TestShortForm:
    def test_stands_for_a_specification(self) -> None:
        spec = short_spec({**SHORT, "rates": "1000,8000", "seconds": 1.0, "size": "imix"})
        assert (spec.name, str(spec.left), str(spec.right)) == ("vr1", "gen/g0", "root@box:eth1")
        assert spec.method.rates == (1000, 8000)
        assert spec.traffic.size == "imix"
        assert spec.routers[0].forth.mac == ""
