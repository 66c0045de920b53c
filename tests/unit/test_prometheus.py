"""docs/monitoring with a real Prometheus server: it scrapes a recorded host as the daemon serves
it, takes the rules, and answers what the Grafana dashboard asks."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from monitored_state import state
from prometheus_tools import program

from vsrtune import web
from vsrtune.metrics import Metrics

MONITORING = Path(__file__).resolve().parents[2] / "docs/monitoring"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Api:
    """Prometheus's HTTP API."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"

    def get(self, path: str, **query: str) -> Any:
        """The data of an answer; fails when it is an error."""
        text = urllib.parse.urlencode({k.replace("match", "match[]"): v for k, v in query.items()})
        try:
            with urllib.request.urlopen(f"{self.base}{path}?{text}", timeout=10) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{query}: {error.read().decode()}") from None
        assert found["status"] == "success", found
        return found["data"]

    def ready(self) -> bool:
        """Whether it answers queries by now."""
        try:
            with urllib.request.urlopen(f"{self.base}/-/ready", timeout=10):
                return True
        except OSError:  # nobody listens yet, or it says 503
            return False

    def query(self, expression: str) -> list[Any]:
        """The series that an expression gives now."""
        found: list[Any] = self.get("/api/v1/query", query=expression)["result"]
        return found


def wait_for(what: str, condition: Callable[[], Any], log: Path) -> None:
    end = time.monotonic() + 60
    while True:
        if condition():
            return
        assert time.monotonic() < end, f"{what}\n{log.read_text()}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Prometheus has scraped the recorded host a few times, and evaluated the rules."""
    server = program("prometheus")
    place = tmp_path_factory.mktemp("prometheus")
    metrics = Metrics()
    metrics.update(state())
    port, own = free_port(), free_port()
    web.serve(metrics, "127.0.0.1", port)
    # As docs/monitoring/README.md says, but for the times. JSON is YAML.
    config = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(MONITORING / "alerts.yaml")],
        "scrape_configs": [
            {"job_name": "vsrtune", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
        ],
    }
    (place / "prometheus.yml").write_text(json.dumps(config))
    log = place / "log"
    with log.open("wb") as out:
        running = subprocess.Popen(
            [
                server,
                f"--config.file={place}/prometheus.yml",
                f"--storage.tsdb.path={place}/data",
                f"--web.listen-address=127.0.0.1:{own}",
            ],
            cwd=place,
            stdout=out,
            stderr=out,
        )
    asked = Api(own)
    try:
        wait_for("it is ready", asked.ready, log)
        scraped = "count_over_time(vsrtune_policies[1m]) >= 3"
        wait_for("it scrapes", lambda: asked.query(scraped), log)
        wait_for(
            "it evaluates",
            lambda: all(r["health"] != "unknown" for r in rules(asked)),
            log,
        )
        yield asked
    finally:
        running.terminate()
        running.wait(20)


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


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text("utf-8"))
    return found


def expressions() -> list[str]:
    panels = dashboard()["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


@pytest.mark.parametrize("expression", expressions())
def test_the_dashboard_is_answered_with_data(api: Api, expression: str) -> None:
    """With what Grafana puts in the place of its variables, "All" guests chosen."""
    (domain,) = [v for v in dashboard()["templating"]["list"] if v["name"] == "domain"]
    asked = expression.replace("$domain", domain["allValue"]).replace("$__rate_interval", "1m")
    assert "$" not in asked
    assert api.query(asked), "no data"


def test_the_dashboards_list_of_guests(api: Api) -> None:
    (variable,) = [v for v in dashboard()["templating"]["list"] if v["name"] == "domain"]
    assert variable["query"]["query"] == "label_values(vsrtune_guest_tuned, domain)"
    assert api.get("/api/v1/label/domain/values", match="vsrtune_guest_tuned") == ["vr1"]


def test_alerts_that_are_pending_are_those_of_this_host(api: Api) -> None:
    """The queue that somebody has set is held, and no other rule sees anything."""
    alerts = api.get("/api/v1/alerts")["alerts"]
    assert {a["labels"]["alertname"] for a in alerts} == {"VsrtuneGuestHeld"}
