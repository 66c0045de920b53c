"""Results written as JSON read back the same, and broken ones are told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import bench_samples as samples
import pytest
from bench_router import FakeRouter, spec

from vsrtune.bench.methods import methods
from vsrtune.bench.methods.methods import run
from vsrtune.bench.report.files import outcome_from_json, outcome_to_json
from vsrtune.bench.report.tables import outcome_tables
from vsrtune.bench.spec.model import Latency, Method, Outcome
from vsrtune.core.errors import VsrtuneError


@pytest.mark.parametrize("method", ["sweep", "compare"])
def test_round_trip(method: str) -> None:
    outcome = samples.outcome(method)
    text = outcome_to_json(outcome)
    assert outcome_from_json(text) == outcome
    assert text.endswith("}\n")
    assert json.loads(text)["format"] == "vsrtune-bench/1"


def test_round_trip_of_a_measured_search() -> None:
    of = spec(Method("ndr", high=50_000, latency=True), routers=2)
    summary, trials = run(methods.start(of), FakeRouter(10_000).trial)
    outcome = Outcome(of, "ndr", (of.configuration,), tuple(trials), summary, {}, 3, "now", "1")
    assert outcome_from_json(outcome_to_json(outcome)) == outcome


def test_no_probe_heard_is_not_a_lost_result() -> None:
    mute = Latency(100, 100, None, None, None)
    trial = replace(samples.trial("untuned", 8000, 8000), latency=mute)
    outcome = replace(samples.outcome(), trials=(trial,))
    assert outcome_from_json(outcome_to_json(outcome)) == outcome


def test_what_an_earlier_version_stored_is_shown() -> None:
    place = Path(__file__).resolve().parents[3] / "docs" / "results" / "raw" / "seed002"
    outcome = outcome_from_json((place / "native-1x64.json").read_text())
    assert "Sweep" in [table.title for table in outcome_tables(outcome)]


def broken(**change: object) -> str:
    return json.dumps({**json.loads(outcome_to_json(samples.outcome())), **change})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "r.json: the file is not JSON; name a file that vsrtune bench wrote with --json"),
        ("[1]", "r.json: the file is not a bench result; name a file that vsrtune bench wrote with --json"),
        ("[" * 100_000, "r.json: the file is not JSON; name a file that vsrtune bench wrote with --json"),
        (broken(format="vsrtune-bench/9"), "r.json: the result has another version's format; this one reads vsrtune-bench/1"),
        (broken(trials=[3]), "r.json: $.trials[0]: expected Trial, found int; name a file that vsrtune bench wrote with --json"),
        (broken(trials=[{"latency": {"p50": None}}]), "r.json: $.trials[0].configuration: missing; name a file that vsrtune bench wrote with --json"),
        (broken(more=1), "r.json: $: unknown field 'more'; name a file that vsrtune bench wrote with --json"),
    ],
    ids=["json", "list", "deep", "format", "number", "missing", "unknown"],
)  # fmt: skip
def test_broken(text: str, message: str) -> None:
    with pytest.raises(VsrtuneError) as caught:
        outcome_from_json(text, "r.json")
    assert str(caught.value) == message
