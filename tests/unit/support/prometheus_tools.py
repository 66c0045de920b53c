"""The programs of Debian's package prometheus, which tests/promtool puts into the cache, a
server that runs, and what Grafana would ask it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

MONITORING = Path(__file__).resolve().parents[3] / "docs/monitoring"


def program(name: str) -> str:
    """Where ``promtool`` or ``prometheus`` is; skips where it is not to be had."""
    found = shutil.which(name) or os.environ.get(name.upper(), "")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vsrtune" / name
    if not found and cache.exists():
        found = str(cache)
    if not found:
        pytest.skip(f"{name} is not there (Debian's package prometheus; `make setup` fetches it)")
    return found


def free_port(family: int = socket.AF_INET, host: str = "127.0.0.1") -> int:
    with socket.socket(family) as probe:
        probe.bind((host, 0))
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


@contextmanager
def running(place: Path, config: Mapping[str, Any]) -> Iterator[tuple[Api, Path]]:
    """A server that answers, with its data in ``place``/data, and its log."""
    (place / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    port, log = free_port(), place / "log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={place}/prometheus.yml",
                f"--storage.tsdb.path={place}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            cwd=place,
            stdout=out,
            stderr=out,
        )
    api = Api(port)
    try:
        wait_for("it is ready", api.ready, log)
        yield api, log
    finally:
        server.terminate()
        server.wait(20)


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text("utf-8"))
    return found


def asked(expression: str) -> str:
    """With what Grafana puts in the place of its variables, "All" guests chosen."""
    (domain,) = [v for v in dashboard()["templating"]["list"] if v["name"] == "domain"]
    every: str = domain["allValue"]
    return expression.replace("$domain", every).replace("$__rate_interval", "1m")
