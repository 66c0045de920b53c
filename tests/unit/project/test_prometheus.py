"""docs/monitoring with a real Prometheus server: it scrapes a recorded host as the daemon serves
it, takes the rules, and answers what the Grafana dashboard asks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from monitored_state import state
from prometheus_tools import MONITORING, Api, asked, dashboard, free_port, running, wait_for

from vsrtune.daemon import http
from vsrtune.daemon.http import Metrics

# Tid of the recorded guest's vcpu.
VCPU = "422"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Prometheus has scraped the recorded host a few times, and evaluated the rules."""
    place = tmp_path_factory.mktemp("prometheus")
    metrics = Metrics()
    metrics.update(state())
    port = free_port()
    http.serve(metrics, "127.0.0.1", port)
    # As docs/monitoring/README.md says, but for the times. JSON is YAML.
    config = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(MONITORING / "alerts.yaml")],
        "scrape_configs": [
            {"job_name": "vsrtune", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
        ],
    }
    with running(place, config) as (asked, log):
        scraped = "count_over_time(vsrtune_policies[1m]) >= 3"
        wait_for("it scrapes", lambda: asked.query(scraped), log)
        wait_for(
            "it evaluates",
            lambda: all(r["health"] != "unknown" for r in rules(asked)),
            log,
        )
        yield asked


def rules(api: Api) -> list[dict[str, Any]]:
    return [r for group in api.get("/api/v1/rules")["groups"] for r in group["rules"]]


def test_the_daemon_is_a_target_that_is_up(api: Api) -> None:
    (target,) = api.get("/api/v1/targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    (up,) = api.query('up{job="vsrtune"}')
    assert up["value"][1] == "1"


def test_every_rule_is_loaded_and_healthy(api: Api) -> None:
    loaded = rules(api)
    written = (MONITORING / "alerts.yaml").read_text("utf-8")
    assert {r["name"] for r in loaded} == {
        line.split()[-1] for line in written.splitlines() if "- alert:" in line
    }
    assert {(r["name"], r.get("lastError", "")) for r in loaded if r["health"] != "ok"} == set()


def expressions() -> list[str]:
    panels = dashboard()["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


@pytest.mark.parametrize("expression", expressions())
def test_the_dashboard_is_answered_with_data(api: Api, expression: str) -> None:
    """With what Grafana puts in the place of its variables, "All" guests chosen."""
    text = asked(expression)
    assert "$" not in text
    assert api.query(text), "no data"


def test_the_questions_of_the_document_can_be_asked(api: Api) -> None:
    text = (MONITORING / "README.md").read_text("utf-8").partition("\n## Questions")[2]
    questions = re.findall(r"(?:^    .+\n)+", text.partition("\n## ")[0], re.MULTILINE)
    assert len(questions) >= 9
    for question in questions:
        api.query(question)
    (joined,) = [q for q in questions if "group_left (tid)" in q]
    assert {s["metric"]["tid"] for s in api.query(joined)} == {VCPU}


def test_the_dashboards_list_of_guests(api: Api) -> None:
    (variable,) = [v for v in dashboard()["templating"]["list"] if v["name"] == "domain"]
    assert variable["query"]["query"] == "label_values(vsrtune_guest_tuned, domain)"
    assert api.get("/api/v1/label/domain/values", match="vsrtune_guest_tuned") == ["vr1"]


def test_alerts_that_are_pending_are_those_of_this_host(api: Api) -> None:
    """The queue that somebody has set is held, and no other rule sees anything."""
    alerts = api.get("/api/v1/alerts")["alerts"]
    assert {a["labels"]["alertname"] for a in alerts} == {"VsrtuneGuestHeld"}
