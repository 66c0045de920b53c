"""Counting with hist triggers: the text, the decisions, and cleaning up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vsrtune.core.cpuset import CpuSet
from vsrtune.core.errors import ObserveError
from vsrtune.observe.tracing import (
    PREFIX,
    Tracer,
    count_by,
    parse_hist,
    rx_cpus,
    sender_device,
)

HIST = """\
# event histogram
#
# trigger info: hist:keys=name,common_pid:vals=hitcount:sort=hitcount:size=4096 if name == "macvtap0" [active]
#

{ name: macvtap0                                          , common_pid:       1234 } hitcount:         12
{ name: p0, common_pid: 1235 } hitcount: 2

Totals:
    Hits: 14
    Entries: 2
    Dropped: 0

# event histogram
#
# trigger info: hist:keys=name,common_cpu:vals=hitcount:sort=hitcount:size=4096 [active]
#

{ name: p0                                                , common_cpu:          1 } hitcount:        700
{ name: p,{0                                              , common_cpu:          2 } hitcount:          3

Totals:
    Hits: 703
"""


def test_hist_text() -> None:
    assert parse_hist(HIST) == [
        ({"name": "macvtap0", "common_pid": "1234"}, 12),
        ({"name": "p0", "common_pid": "1235"}, 2),
        ({"name": "p0", "common_cpu": "1"}, 700),
        ({"name": "p,{0", "common_cpu": "2"}, 3),
    ]
    assert parse_hist("") == []


def test_counts_of_one_key() -> None:
    assert count_by(HIST, "common_pid") == {("macvtap0", 1234): 12, ("p0", 1235): 2}
    assert count_by(HIST, "common_cpu") == {("p0", 1): 700, ("p,{0", 2): 3}


def test_rx_cpus_need_a_tenth_of_fifty() -> None:
    received = {("p0", 0): 90, ("p0", 1): 10, ("p0", 2): 9, ("p1", 3): 49}
    assert rx_cpus(received, "p0") == CpuSet([0])
    assert rx_cpus({**received, ("p0", 2): 0}, "p0") == CpuSet([0, 1])
    assert rx_cpus(received, "p1") is None
    assert rx_cpus({}, "p0") is None


def test_sender_is_where_most_frames_went_out() -> None:
    sent = {("a", 5): 3, ("b", 5): 9, ("c", 5): 99, ("a", 6): 1}
    assert sender_device(sent, 5, ["a", "b"]) == "b"
    assert sender_device(sent, 7, ["a", "b"]) is None


def test_without_tracefs_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ObserveError, match="tracing is unavailable"):
        Tracer(str(tmp_path / "none")).trace((["macvtap0"], [], []), 0.1)


class FakeKernel:
    """An instances directory that fills new instances as the kernel does."""

    real_mkdir = staticmethod(os.mkdir)
    real_rmdir = staticmethod(os.rmdir)

    def __init__(self, root: Path, answers: dict[str, str]) -> None:
        self.instances = root / "instances"
        self.instances.mkdir()
        self.answers = answers

    def mkdir(self, path: str) -> None:
        for directory in ("", "/events", "/events/net"):
            self.real_mkdir(path + directory)
        for event in ("net_dev_queue", "netif_receive_skb"):
            directory = f"{path}/events/net/{event}"
            self.real_mkdir(directory)
            Path(directory, "trigger").write_text("")
            Path(directory, "hist").write_text(self.answers.get(event, ""))
        Path(path, "buffer_size_kb").write_text("1408")

    def rmdir(self, path: str) -> None:
        for directory, _, files in os.walk(path, topdown=False):
            for file in files:
                os.unlink(os.path.join(directory, file))
            self.real_rmdir(directory)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    fake = FakeKernel(tmp_path, {"net_dev_queue": HIST, "netif_receive_skb": HIST})
    monkeypatch.setattr("vsrtune.observe.tracing.os.mkdir", fake.mkdir)
    monkeypatch.setattr("vsrtune.observe.tracing.os.rmdir", fake.rmdir)
    return fake


def test_a_trace_counts_and_leaves_nothing(tmp_path: Path, kernel: FakeKernel) -> None:
    waited: list[float] = []
    kernel.mkdir(f"{kernel.instances}/{PREFIX}{2**22}")  # left by a process that is gone
    kernel.mkdir(f"{kernel.instances}/somebody")
    tracer = Tracer(str(tmp_path), waited.append)
    sent, received = tracer.trace((["macvtap0"], [], ["p0"]), 0.5)
    assert waited == [0.5]
    assert sent[("macvtap0", 1234)] == 12
    assert received[("p0", 1)] == 700
    assert os.listdir(kernel.instances) == ["somebody"]


def test_a_trace_that_is_interrupted_leaves_nothing(tmp_path: Path, kernel: FakeKernel) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Tracer(str(tmp_path), interrupt).trace((["macvtap0"], [], []), 1)
    assert os.listdir(kernel.instances) == []


def test_a_kernel_that_refuses_is_reported_and_left_clean(
    tmp_path: Path, kernel: FakeKernel
) -> None:
    def lose_files(_seconds: float) -> None:
        for file in kernel.instances.glob("*/events/net/*/hist"):
            file.unlink()

    with pytest.raises(ObserveError, match=r"tracing failed: .*; see: dmesg; until"):
        Tracer(str(tmp_path), lose_files).trace((["macvtap0"], [], []), 1)
    assert os.listdir(kernel.instances) == []
