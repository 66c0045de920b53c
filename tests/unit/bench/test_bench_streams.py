"""What is sent for a load, and how the sink tells it apart."""

from __future__ import annotations

import os
import threading
from math import gcd, lcm
from pathlib import Path

import pytest

from vsrtune.bench.spec.model import Endpoint, Leg, Load, Router, Spec, Traffic
from vsrtune.bench.spec.streams import (
    PORT_BLOCK,
    SOURCE_PORTS,
    circles,
    counted,
    streams,
)
from vsrtune.bench.traffic import pktgen
from vsrtune.bench.traffic.agent import element, parse_elements, ruleset
from vsrtune.bench.traffic.pktgen import commands, parse_result, parse_thread
from vsrtune.core.errors import VsrtuneError

FORTH = Leg("52:54:00:00:00:01", "10.10.1.2", "10.20.1.100")
BACK = Leg("52:54:00:00:00:02", "10.20.1.2", "10.10.1.100")


def spec(**traffic: object) -> Spec:
    return Spec(
        name="t",
        left=Endpoint("g0", "gen"),
        right=Endpoint("s0", "sink", cpu=1),
        routers=(
            Router("vr1", FORTH, BACK),
            Router("vr2", Leg("52:54:00:00:00:03", "10.10.2.2", "10.20.2.100")),
        ),
        traffic=Traffic(**traffic),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("flows", [1, 2, 16, 17, 1000, SOURCE_PORTS])
def test_few_flows_are_exact_and_use_source_ports_alone(flows: int) -> None:
    assert circles(flows) == (flows, 1)


@pytest.mark.parametrize("flows", [SOURCE_PORTS + 1, 65537, 100_000, 524_287, 999_983, 1_000_000])
def test_many_flows_are_all_different_and_about_as_many(flows: int) -> None:
    first, second = circles(flows)
    assert gcd(first, second) == 1  # so that they meet in first * second ways
    assert first <= SOURCE_PORTS
    assert second <= PORT_BLOCK
    assert flows <= first * second <= flows * 1.001


def test_a_million_flows_are_exact() -> None:
    first, second = circles(1_000_000)
    assert first * second == 1_000_000


def test_a_load_may_have_a_size_of_its_own() -> None:
    sizes = [
        streams(spec(size=60), Load({"vr1": 10.0}, 1.0, size=size))[0].size
        for size in (None, 1496, "imix")
    ]
    assert sizes == [60, 1496, 0]


def test_destinations_that_divide_the_flows_make_no_more_of_them() -> None:
    (stream,) = streams(spec(flows=1000, destinations=100), Load({"vr1": 10.0}, 1.0))
    assert stream.last_destination == "10.20.1.199"
    assert lcm(stream.source_ports, stream.destinations) == 1000


def test_one_direction_sends_from_the_left_alone() -> None:
    every = streams(spec(), Load({"vr1": 1000.0, "vr2": 500.0}, 2.0))
    assert [(s.key, s.device, s.cpu, s.pps, s.frames) for s in every] == [
        ("vr1/forth", "g0", 0, 1000.0, 2000),
        ("vr2/forth", "g0", 0, 500.0, 1000),
    ]


def test_a_router_with_a_way_back_shares_its_rate() -> None:
    every = streams(spec(bidirectional=True), Load({"vr1": 1000.0, "vr2": 500.0}, 2.0))
    assert [(s.key, s.device, s.cpu, s.pps, s.frames) for s in every] == [
        ("vr1/forth", "g0", 0, 500.0, 1000),
        ("vr1/back", "s0", 1, 500.0, 1000),
        ("vr2/forth", "g0", 0, 500.0, 1000),
    ]


def test_a_router_without_a_rate_gets_nothing() -> None:
    assert [s.key for s in streams(spec(), Load({"vr2": 5.0}, 1.0))] == ["vr2/forth"]


def test_rounding_loses_no_frame() -> None:
    every = streams(spec(bidirectional=True), Load({"vr1": 1.0, "vr2": 1.0}, 1.0))
    assert sum(s.frames for s in every) == 2
    every = streams(spec(bidirectional=True), Load({"vr1": 1000.0, "vr2": 1.0}, 0.007))
    assert sum(s.frames for s in every) == 7


def test_the_sink_knows_every_stream_by_its_ports() -> None:
    for flows in (1, 4, 16, 17, 100_000):
        every = counted(spec(flows=flows, bidirectional=True))
        assert {c.key for c in every["forth"]} == {"vr1/forth", "vr2/forth"}
        assert {c.key for c in every["back"]} == {"vr1/back"}
        both = [element(c) for each in every.values() for c in each]
        assert len(set(both)) == len(both)
        ports = {
            s.destination_port: s.key
            for s in streams(
                spec(flows=flows, bidirectional=True), Load({"vr1": 10.0, "vr2": 5.0}, 1.0)
            )
        }
        for one in (*every["forth"], *every["back"]):
            block = max(port for port in ports if port <= one.destination_port)
            assert ports[block] == one.key


def test_flows_are_told_apart_while_they_are_few() -> None:
    assert [c.flow for c in counted(spec(flows=1))["forth"]] == [0, 0]
    assert [c.flow for c in counted(spec(flows=3))["forth"]] == [0, 1, 2, 0, 1, 2]
    assert {c.flow for c in counted(spec(flows=17))["forth"]} == {None}


def test_pktgen_is_bounded_and_told_everything() -> None:
    (stream,) = streams(spec(flows=4, size=1514), Load({"vr1": 8000.0}, 2.0))
    told = dict(line.split(" ", 1) for line in commands(stream))
    assert told["count"] == "16000"
    assert told["delay"] == "125000"
    assert told["pkt_size"] == "1514"
    assert told["dst_mac"] == FORTH.mac
    assert (told["dst_min"], told["dst_max"]) == ("10.20.1.100", "10.20.1.100")
    # pktgen does not use the upper ends themselves.
    assert (told["udp_src_min"], told["udp_src_max"]) == ("1024", "1028")
    assert (told["udp_dst_min"], told["udp_dst_max"]) == ("20000", "20001")


def test_imix_replaces_the_size() -> None:
    (stream,) = streams(spec(size="imix"), Load({"vr1": 8000.0}, 2.0))
    assert "imix_weights 60,7 566,4 1514,1" in commands(stream)
    assert not any(line.startswith("pkt_size") for line in commands(stream))


def test_a_group_address_is_never_flooded() -> None:
    wrong = Spec(
        "t",
        Endpoint("g0"),
        Endpoint("s0"),
        (Router("vr1", Leg("ff:ff:ff:ff:ff:ff", "10.10.1.2", "10.20.1.100")),),
    )
    (stream,) = streams(wrong, Load({"vr1": 8000.0}, 2.0))
    with pytest.raises(VsrtuneError, match="group address"):
        commands(stream)


PKTGEN_AFTER_A_RUN = """\
Params: count 4000  min_pkt_size: 60  max_pkt_size: 60
     frags: 0  delay: 125000  clone_skb: 0  ifname: g0@0
Current:
     pkts-sofar: 3990  errors: 10
     started: 7000000us  stopped: 7500123us idle: 17us
Result: OK: 500123(c482123+d18000) usec, 4000 (60byte,0frags)
  7998pps 3Mb/sec (3839040bps) errors: 10
"""


def test_refused_frames_were_offered() -> None:
    sent = parse_result("vr1/forth", PKTGEN_AFTER_A_RUN)
    assert (sent.frames, sent.seconds) == (4000, 0.500123)


def test_what_is_written_after_a_stream_ended_hides_nothing() -> None:
    """pktgen answers each later command with a result of its own."""
    head = PKTGEN_AFTER_A_RUN.partition("Result:")[0]
    sent = parse_result("vr1/forth", f"{head}Result: OK: delay=20000000\n")
    assert (sent.frames, sent.seconds) == (4000, 0.500123)


@pytest.mark.parametrize("times", ["", "started: 0us  stopped: 0us", "started: 5us  stopped: 0us"])
def test_a_generator_that_did_not_run_is_an_error(times: str) -> None:
    text = f"Params: count 1\nCurrent:\n  pkts-sofar: 0  errors: 0\n{times}\nResult: Idle\n"
    with pytest.raises(VsrtuneError, match="did not run"):
        parse_result("vr1/forth", text)


def test_devices_of_a_pktgen_thread() -> None:
    text = "Running: g0@2 \nStopped: g0@0 g0@1 \nResult: NA\n"
    assert parse_thread(text) == ["g0@2", "g0@0", "g0@1"]
    assert parse_thread(text, "Running") == ["g0@2"]


def test_the_table_dies_with_its_owner_and_touches_the_named_device_alone() -> None:
    text = ruleset({"s0": counted(spec(flows=2))["forth"]})
    assert "flags owner" in text.splitlines()[0]
    assert text.count("hook ingress") == 1
    assert 'device "s0"' in text
    assert "10.10.1.2 . 20000 . 1025 counter" in text


def test_elements_are_read_back() -> None:
    listing = {
        "nftables": [
            {"metainfo": {}},
            {
                "set": {
                    "name": "frames_0",
                    "elem": [
                        {
                            "elem": {
                                "val": {"concat": ["10.10.1.2", 20000]},
                                "counter": {"packets": 7, "bytes": 1},
                            }
                        },
                    ],
                }
            },
        ]
    }
    assert dict(parse_elements(listing)) == {("10.10.1.2", 20000): 7}


class Ending(pktgen.Pktgen):
    """A generator whose threads have ended when they are looked at, with these results."""

    def __init__(self, directory: Path, frames: dict[str, tuple[int, int]]) -> None:
        self._streams = {}
        for name, stream in zip(frames, streams(spec(bidirectional=True), LOAD), strict=True):
            self._streams[name] = stream
            sent, microseconds = frames[name]
            times = f"started: 1000000us  stopped: {1000000 + microseconds}us"
            (directory / name).write_text(f"pkts-sofar: {sent}  errors: 0\n{times}\n")


LOAD = Load({"vr1": 2000.0, "vr2": 1000.0}, 1.0)


@pytest.mark.parametrize(
    ("second", "running", "stopped"),
    [
        ((1000, 999_000), "", False),
        ((700, 1_000_000), "s0@0", False),  # a slow generator
        ((5, 10_000), "s0@0", False),  # a thread that began late
        ((0, -1), "", False),  # one that has not begun
        ((30, 30_000), "", True),
        ((700, 700_000), "", True),
    ],
)
def test_a_device_that_stops_the_generator_is_an_error(
    generator: Path, second: tuple[int, int], running: str, stopped: bool
) -> None:
    (generator.parent / "pgctrl").write_text("")
    files = {"g0@0": (1000, 999_000), "s0@0": second, "g0@1": (1000, 999_000)}
    thread = generator.parent / "kpktgend_1"
    thread.write_text(f"Running: {running}\nStopped:\n")
    made = Ending(generator.parent, files)
    (silent, wanted), (over, closed) = os.pipe(), os.pipe()
    os.close(closed)

    def end() -> None:
        thread.write_text("Running:\nStopped:\n")
        Ending(generator.parent, files | {"s0@0": (second[0], max(second[1], 1))})

    late = threading.Timer(0.35, end)
    late.start()
    try:
        if stopped:
            with pytest.raises(VsrtuneError, match=r"s0: .* stopped after 0\.\d+ of 0\.1 s"):
                made.run(0.1, silent)
        else:
            assert [one.frames for one in made.run(0.1, silent)] == [1000, second[0], 1000]
        # Whoever asks it to end early knows.
        assert len(made.run(0.1, over)) == 3
    finally:
        late.join()
        for descriptor in (silent, wanted, over):
            os.close(descriptor)


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The files of a pktgen whose thread does nothing by itself."""
    monkeypatch.setattr(pktgen, "DIRECTORY", str(tmp_path))
    monkeypatch.setattr(pktgen, "STOP_SECONDS", 0.5)
    monkeypatch.setattr(pktgen, "_LATE", 0.0)
    (tmp_path / "kpktgend_0").write_text("Running:\nStopped:\n")
    return tmp_path / "kpktgend_0"


def test_a_thread_that_removes_late_is_waited_for(generator: Path) -> None:
    made = pktgen.Pktgen(["g0"])
    generator.write_text(" " * 40 + "\nStopped: g0@0\n")
    late = threading.Timer(0.2, lambda: generator.write_text("Running:\nStopped:\n"))
    late.start()
    # Nothing to send: it is only told of the devices of the trial before.
    made.configure([])
    assert "g0@0" not in generator.read_text()
    late.join()


def test_a_thread_that_never_runs_is_said(generator: Path) -> None:
    made = pktgen.Pktgen(["g0"])
    # What is written goes over the beginning of this file, the list stays.
    generator.write_text(" " * 40 + "\nStopped: g0@0\n")
    with pytest.raises(VsrtuneError, match=r"kpktgend_0: .* found no CPU for 0\.5 s"):
        made.configure([])
